"""Testers of transformers' common model tests for LiViT, and for stock ViT and ViTMAE as controls.

`test_transformers_common.py` copies this file into transformers' own `tests/models/`, where its relative imports lead.
"""

import unittest

import torch
from transformers import (
    ViTConfig,
    ViTForImageClassification,
    ViTMAEConfig,
    ViTMAEForPreTraining,
    ViTMAEModel,
    ViTModel,
)
from transformers.testing_utils import torch_device

from livt_hf import LiViTConfig, LiViTForImageClassification, LiViTForPreTraining, LiViTModel

from ..test_configuration_common import ConfigTester
from ..test_modeling_common import ModelTesterMixin, floats_tensor

BATCH, CLASSES, PATCHES = 13, 3, 225
SIZES = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37, image_size=30, patch_size=2
)
DECODER = dict(
    decoder_hidden_size=32, decoder_num_hidden_layers=2, decoder_num_attention_heads=4, decoder_intermediate_size=37
)


class Tester:
    """What the common tests ask of a model: sizes, configs and inputs."""

    batch_size, is_training, image_size, num_labels = BATCH, True, 30, CLASSES
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4

    def __init__(self, kind: type, seq_length: int, **settings):
        self.kind, self.seq_length, self.settings = kind, seq_length, settings

    def get_config(self):
        return self.kind(**SIZES, **self.settings)

    def prepare_config_and_inputs_for_common(self):
        return self.get_config(), {"pixel_values": floats_tensor([BATCH, 3, 30, 30])}


class Common(ModelTesterMixin):
    """The common tests with the settings that transformers uses for its ViT."""

    test_resize_embeddings = False
    config_class: type
    settings: dict = {}
    seq_length = PATCHES + 1

    def setUp(self):
        self.model_tester = Tester(self.config_class, self.seq_length, **self.settings)
        self.config_tester = ConfigTester(
            self, config_class=self.config_class, has_text_modality=False, hidden_size=36, image_size=30, patch_size=2
        )

    def test_config(self):
        self.config_tester.run_common_tests()

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels=return_labels)
        if return_labels and model_class is LiViTForImageClassification:
            inputs["labels"] = torch.arange(BATCH, device=torch_device) % CLASSES
        return inputs

    @unittest.skip(reason="a ViT embeds pixels, not tokens")
    def test_inputs_embeds(self):
        pass

    @unittest.skip(reason="a ViT has no input embeddings of tokens")
    def test_model_get_set_embeddings(self):
        pass


class StockViTTest(Common, unittest.TestCase):
    all_model_classes = (ViTModel, ViTForImageClassification)
    config_class, settings = ViTConfig, dict(num_labels=CLASSES)
    pipeline_model_mapping = {"image-classification": ViTForImageClassification}


class LiViT(Common):
    config_class: type = LiViTConfig

    @unittest.skip(reason="decision: a checkpoint without the weights of its model is refused, naming what it lacks")
    def test_model_weights_reload_no_missing_tied_weights(self):
        pass


class LiViTModelTest(LiViT, unittest.TestCase):
    all_model_classes = (LiViTModel,)

    def setUp(self):
        super().setUp()
        self.model_tester.is_training = False  # an encoder has no loss; stock ViTModel is left out by its name


class LiViTClassifierTest(LiViT, unittest.TestCase):
    all_model_classes = (LiViTForImageClassification,)
    settings = dict(num_labels=CLASSES, loss="ce")

    @unittest.skip(
        reason="decision: a long-tailed head is a classifier; regression and 1 label are refused in a sentence"
    )
    def test_problem_types(self):
        pass


class LiViTClassifierWithCountsTest(LiViTClassifierTest):
    settings = dict(class_counts=[60, 30, 10])


class MAE(Common):
    test_resize_position_embeddings = False
    config_class, settings = ViTMAEConfig, DECODER
    seq_length = int(0.25 * PATCHES) + 1

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels=return_labels)
        noise = torch.rand(len(inputs["pixel_values"]), PATCHES, generator=torch.Generator().manual_seed(0))
        return inputs | {"noise": noise.to(torch_device)}


class StockViTMAETest(MAE, unittest.TestCase):
    all_model_classes = (ViTMAEModel, ViTMAEForPreTraining)


class LiViTForPreTrainingTest(MAE, unittest.TestCase):
    all_model_classes = (LiViTForPreTraining,)
