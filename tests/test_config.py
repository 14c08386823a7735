"""What `LiViTConfig` accepts, refuses and writes."""

import copy
import json
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from refusals import refusal
from transformers import AutoConfig

from livt_hf import LiViTConfig, LongTailConfig, pretraining_config
from livt_hf.configuration_livit import PRESETS
from livt_hf.errors import LiVTError

MULTI = dict(problem_type="multi_label_classification", test_prior=None)
COUNTS_OF = (np.array, torch.tensor, tuple)


@pytest.mark.parametrize(
    ("fields", "argument", "value"),
    [
        (dict(tau=float("nan")), "tau", "nan"),
        (dict(tau=-1), "tau", "-1"),
        (dict(loss="hinge"), "loss", "hinge"),
        (dict(label_smoothing=1.0), "label_smoothing", "1.0"),
        (dict(normalised_classifier=True), "normalised_classifier", "bal_bce"),
        (dict(loss="lade", label_smoothing=0.1), "label_smoothing", "0.1"),
        (dict(nt_lambda=0), "nt_lambda", "0"),
        (dict(focal_gamma=-1), "focal_gamma", "-1"),
        (dict(focal_gamma=float("inf")), "focal_gamma", "inf"),
        (dict(nt_lambda=float("nan")), "nt_lambda", "nan"),
        (dict(cb_beta=1.0), "cb_beta", "1.0"),
        (dict(ib_warmup=2), "ib_warmup", "2"),
        (dict(num_labels=1), "num_labels", "1"),
        (dict(class_counts=[5, 4], num_labels=3), "class_counts", "2 entries for 3"),
        (dict(class_counts=[5, 4], seen_counts=[9]), "seen_counts", "1 entries for 2"),
        (dict(class_counts=[5, 4], seen_counts=[5, 5]), "seen_counts", "10"),
        (dict(class_counts=[5, 4], class_weights=[1, -1]), "class_weights", "-1"),
        (dict(class_counts=[5, 0, 2, 0]), "class_counts", r"\[1, 3\]"),
        (dict(class_counts=[0] * 20), "class_counts", r"8, 9, ...\]"),
        (dict(class_counts=[5, 2.5]), "class_counts", "2.5"),
        (dict(class_counts=[5, 4], num_train_images=8), "num_train_images", "8 but class_counts sum to 9"),
        (dict(num_labels=2, test_prior=[1.0, 0.0]), "test_prior", "test_prior"),
        (dict(loss="ce", drw_start=1.5), "drw_start", "1.5"),
        (dict(loss="cb_ce", drw_start=0.5), "drw_start", "cb_ce"),
        (dict(loss="lade", drw_start=0.5), "drw_start", "lade"),
        (MULTI | dict(test_prior="uniform"), "test_prior", "uniform"),
        (MULTI | dict(loss="ce"), "loss", "ce"),
        (MULTI | dict(loss="cb_bce"), "loss", "cb_bce"),
        (MULTI | dict(loss="bce", drw_start=0.5), "drw_start", "0.5"),
        (MULTI | dict(bias="ce"), "bias", "ce"),
        (MULTI | dict(label_smoothing=0.1), "label_smoothing", "0.1"),
        (MULTI | dict(class_counts=[5, 4]), "num_train_images", "num_train_images"),
        (MULTI | dict(class_counts=[5, 4], num_train_images=5), "num_train_images", "class 0 has 5 of 5"),
        (dict(image_size=30, patch_size=4), "image_size", "30.* 4; 28"),
        (dict(hidden_size=30, num_attention_heads=4), "num_attention_heads", "30 .* 4"),
        (dict(patch_size=0), "patch_size", "patch_size is 0"),
        (dict(drop_path_rate=1.0), "drop_path_rate", "drop_path_rate 1.0"),
        (dict(pooling="max"), "pooling", "pooling .*'max'"),
        (dict(bias="bal"), "bias", "bias .*'bal'"),
        (dict(head_start="pi"), "head_start", "head_start .*'pi'"),
        (dict(num_labels=3, id2label={0: "cat", 1: "dog"}), None, "2 .*3"),
        (dict(num_labels=2, test_prior="tail"), None, "test_prior='tail'"),
        (dict(num_labels=2, test_prior=[0.5, 0.6]), None, "test_prior .*1.1"),
        (dict(num_labels=2, test_prior=[0.2, 0.3, 0.5]), None, r"test_prior .*\(3,\)"),
        (MULTI | dict(num_labels=2, test_prior=[0.5, 1.5]), None, "test_prior .*1.5"),
        (dict(long_tail={"temper": 3}), None, "temper"),
        (
            dict(class_counts=Counter({1: 90, 0: 10})),
            "class_counts",
            "Counter",
        ),  # whose order is not that of the classes
    ],
)
def test_nonsense_is_refused_when_the_config_is_built(fields, argument, value):
    with pytest.raises(LiVTError, match=value) as error:
        LiViTConfig(**fields)
    assert error.value.argument == argument


def test_the_defaults_are_the_paper_s_vit_b():
    config = LiViTConfig()
    assert LiViTConfig.preset("base").to_dict() == config.to_dict()
    assert (config.hidden_size, config.num_hidden_layers, config.patch_size, config.image_size) == (768, 12, 16, 224)
    head = config.long_tail
    assert (config.pooling, head.loss, head.test_prior, head.tau) == ("mean", "bal_bce", "uniform", 1.0)
    assert (head.bias, head.head_start, head.label_smoothing, config.layer_norm_eps) == ("bce", "prior", 0, 1e-6)


@pytest.mark.parametrize(
    ("size", "encoder", "decoder"),
    [
        ("micro", (128, 6, 4, 512, 32, 4), (96, 2, 4, 384)),
        ("tiny", (192, 12, 3, 768, 224, 16), (512, 8, 16, 2048)),
        ("small", (384, 12, 6, 1536, 224, 16), (512, 8, 16, 2048)),
        ("base", (768, 12, 12, 3072, 224, 16), (512, 8, 16, 2048)),
        ("large", (1024, 24, 16, 4096, 224, 16), (512, 8, 16, 2048)),
    ],
)
def test_presets_have_the_sizes_of_the_design(size, encoder, decoder):
    with refusal("model_size", "'huge'", ", ".join(PRESETS)):
        LiViTConfig.preset("huge")
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    for config in (LiViTConfig.preset(size), pretraining_config(size)):
        assert tuple(getattr(config, name) for name in (*names, "image_size", "patch_size")) == encoder
    assert tuple(getattr(config, f"decoder_{name}") for name in names) == decoder
    assert config.norm_pix_loss and config.layer_norm_eps == 1e-6


@pytest.mark.parametrize(
    "fields",
    [
        dict(),
        dict(test_prior=None),
        dict(num_labels=2),
        dict(class_counts=[3, 1]),
        MULTI | dict(class_counts=[5, 4], num_train_images=20),
        dict(class_counts=[3, 2], num_train_images=np.int64(5), tau=np.float32(0.5)),
        *(dict(class_counts=counts([7, 2, 1]), test_prior=np.array([0.2, 0.3, 0.5])) for counts in COUNTS_OF),
    ],
)
def test_configs_round_trip_also_from_numbers_of_numpy_and_torch(tmp_path, fields):
    config = LiViTConfig(**fields)
    config.save_pretrained(tmp_path)
    loaded = LiViTConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict()
    head = loaded.long_tail
    if "class_counts" in fields:
        assert head.class_counts == list(fields["class_counts"]) and head.tau == fields.get("tau", 1)
        assert all(type(count) is int for count in config.long_tail.class_counts)
        assert head.num_images == fields.get("num_train_images", sum(head.class_counts))
    if "test_prior" in fields:
        assert head.test_prior == (None if fields["test_prior"] is None else [0.2, 0.3, 0.5])


def test_config_json_round_trips_exactly_with_8142_classes(tmp_path):
    generator = np.random.default_rng(0)
    counts = generator.integers(2, 1000, 8142)
    prior = generator.dirichlet(np.ones(8142)).clip(1e-9)
    config = LiViTConfig.preset(
        "small",
        class_counts=counts,
        test_prior=prior / prior.sum(),
        id2label={i: f"species {i}" for i in range(8142)},
        label2id={f"species {i}": i for i in range(8142)},
        tau=1.05,
        drop_path_rate=0.1,
        head_start="zero",
        label_smoothing=0.1,
    )
    config.save_pretrained(tmp_path / "first")
    loaded = LiViTConfig.from_pretrained(tmp_path / "first")
    assert loaded.to_dict() == config.to_dict()
    assert loaded.long_tail == config.long_tail and loaded.long_tail.class_counts == counts.tolist()
    loaded.save_pretrained(tmp_path / "second")
    first, second = ((tmp_path / name / "config.json").read_bytes() for name in ("first", "second"))
    assert first == second
    assert AutoConfig.from_pretrained(tmp_path / "first").to_json_string() == config.to_json_string()


def test_the_settings_of_the_head_are_attributes_and_a_plain_dictionary_in_the_file(tmp_path):
    config = LiViTConfig(class_counts=[3, 1], tau=0.5)
    assert isinstance(config.long_tail, LongTailConfig) and config.long_tail.tau == config.long_tail["tau"] == 0.5
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "tau" not in saved and LongTailConfig(**saved["long_tail"]) == config.long_tail
    assert copy.deepcopy(config).long_tail.class_counts == [3, 1]
    with pytest.raises(AttributeError):
        config.long_tail.tau = 2.0


def test_the_settings_of_the_head_cannot_be_changed_behind_its_back():
    def change(settings):
        settings |= {"tau": 2}

    settings = LongTailConfig(class_counts=[3, 1], tau=0.5)
    ways = [lambda s: s.__setitem__("tau", 2), lambda s: s.update(tau=2), lambda s: s.update({"tau": 2}), change]
    for way in (*ways, lambda s: s.__delitem__("tau"), lambda s: s.setdefault("tau", 2), lambda s: s.clear()):
        with pytest.raises(LiVTError) as error:
            way(settings)
        assert error.value.argument in ("tau", None) and "balance(model, tau=2)" in str(error.value)
    assert settings.tau == settings["tau"] == 0.5
    for copied in (copy.copy(settings), copy.deepcopy(settings), pickle.loads(pickle.dumps(settings))):
        assert type(copied) is LongTailConfig and copied == settings and copied.tau == 0.5


def test_a_config_with_the_settings_of_the_head_beside_the_sizes_is_read_as_before(tmp_path):
    flat = dict(model_type="livit", loss="lade", class_counts=[3, 1], num_train_images=4, tau=1.05, lade_weight=0.2)
    (tmp_path / "config.json").write_text(json.dumps(flat))
    config = LiViTConfig.from_pretrained(tmp_path)
    assert config.long_tail == LongTailConfig(
        loss="lade", class_counts=[3, 1], num_train_images=4, tau=1.05, lade_weight=0.2
    )


@pytest.mark.parametrize("reader", [LiViTConfig, AutoConfig])
def test_settings_given_on_reading_a_config_are_checked_and_replace_the_saved_ones(tmp_path, reader):
    several = dict(problem_type="multi_label_classification", test_prior=None, num_train_images=9)
    LiViTConfig(class_counts=[3, 1], **several).save_pretrained(tmp_path)
    config = reader.from_pretrained(tmp_path, class_counts=[4, 2], num_train_images=11, tau=0.5)
    assert config.long_tail == LongTailConfig(class_counts=[4, 2], num_train_images=11, tau=0.5, test_prior=None)
    with refusal("num_train_images"):
        reader.from_pretrained(tmp_path, class_counts=[4, 2])
