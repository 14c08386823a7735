"""Any backbone: where it starts, what is trained of it, and that kept features are those of the whole model."""

import importlib.metadata
import json
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from accelerate import Accelerator
from datasets import ClassLabel, Dataset
from PIL import Image as Pictures
from recipe_runs import RecipeRun, make_pictures
from refusals import refusal
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageClassification,
    BertConfig,
    BertModel,
    ConvNextImageProcessor,
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2Model,
    EfficientNetImageProcessor,
    MobileViTImageProcessor,
    ResNetConfig,
    ResNetForImageClassification,
    TimmWrapperConfig,
    TimmWrapperForImageClassification,
    ViTImageProcessor,
)

from livt_hf import balance
from livt_hf.classifiers import load_model, load_processor
from livt_hf.cli.inherit import inherit_from_checkpoint
from livt_hf.cli.training_settings import FinetuneSettings
from livt_hf.data import Batches, DeviceTransform, FinetuneAugmentation, eval_loader, load_long_tailed
from livt_hf.long_tail.structure import extract_features, get_classifier
from livt_hf.predictions.rules import ARGMAX
from livt_hf.processors import read_input_spec, resize_processor
from livt_hf.recipes import eval as evaluation
from livt_hf.recipes import finetune
from livt_hf.runs import Run
from livt_hf.training.finetune import build_augmentation, compute_metrics
from livt_hf.training.frozen import FeatureCache, FeatureClassifier, FeatureLoader, FrozenBackbone
from livt_hf.training.lora import add_lora, merge_lora
from livt_hf.training.start import build_classifier, build_processor, freeze_unused_parameters

SHORT = "--epochs 3 --warmup_epochs 1 --batch_size 16 --threads 1 --eval_epochs 3 --image_size 16".split()


def resnet(folder: Path) -> Path:
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3)
    ResNetForImageClassification(config).save_pretrained(folder)
    ConvNextImageProcessor(size={"shortest_edge": 32}, crop_pct=1.0).save_pretrained(folder)
    return folder


def dinov2(folder: Path) -> Path:
    config = Dinov2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8, num_labels=3
    )
    Dinov2ForImageClassification(config).save_pretrained(folder)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder)
    return folder


def wrapped_timm(folder: Path, architecture: str = "resnet18", **arguments) -> Path:
    cfg = dict(timm.get_pretrained_cfg(architecture).to_dict()) | {"input_size": (3, 32, 32)}
    arguments = arguments or {"layers": [1, 1, 1, 1], "channels": [8, 8, 16, 16]}
    config = TimmWrapperConfig(architecture=architecture, num_labels=3, pretrained_cfg=cfg, model_args=arguments)
    TimmWrapperForImageClassification(config).save_pretrained(folder)
    return folder


def densenet(folder: Path) -> Path:
    return wrapped_timm(folder, "densenet121", growth_rate=4, block_config=(1, 1, 1, 1))


def timm_vit(folder: Path) -> Path:
    sizes = dict(img_size=32, patch_size=8, embed_dim=16, depth=1, num_heads=2)
    return wrapped_timm(folder, "vit_tiny_patch16_224", **sizes)


FAMILIES = {"resnet": resnet, "dinov2": dinov2, "timm": wrapped_timm}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("tuning") / "pictures")


@pytest.fixture(autouse=True)
def _runs(tmp_path, monkeypatch):
    monkeypatch.setenv("LIVT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")


@pytest.fixture(params=FAMILIES)
def checkpoint(request, tmp_path) -> Path:
    torch.manual_seed(0)
    return FAMILIES[request.param](tmp_path / request.param)


def trained(pictures: Path, checkpoint: Path, folder: Path, *options) -> Run:
    words = ["--dataset", pictures, "--pretrained", checkpoint, "--output_dir", folder, *SHORT, *options]
    finetune.main([str(word) for word in words])
    return Run(folder)


@pytest.mark.parametrize("tune", ["head", "full"])
def test_a_backbone_is_fine_tuned_saved_as_its_own_class_and_measured_as_in_training(
    pictures, checkpoint, tmp_path, tune
):
    run = trained(pictures, checkpoint, tmp_path / "run", "--tune", tune)
    stock = AutoModelForImageClassification.from_pretrained(run.folder)
    assert type(stock) is type(AutoModelForImageClassification.from_pretrained(checkpoint))
    assert stock.config.long_tail["class_counts"] == [30, 18, 10, 6]
    model, processor = load_model(str(run.folder)), load_processor(str(run.folder))
    data = load_long_tailed(str(pictures))["test"]
    (batch,) = eval_loader(data, processor, Batches(64))
    with torch.no_grad():
        accuracy = (model(batch["pixel_values"]).logits.argmax(-1) == batch["labels"]).double().mean().item()
    if tune == "head":  # the backbone is left as it was
        before = AutoModelForImageClassification.from_pretrained(checkpoint).state_dict()
        changed = {name for name, value in stock.state_dict().items() if not torch.equal(before[name], value)}
        assert changed and all("classifier" in name or ".fc." in name for name in changed)
    assert run.results.rules[ARGMAX]["accuracy"] == pytest.approx(accuracy, abs=1e-9)
    assert run.results.image_size == 16 and run.results.num_images == 44
    assert run.results.model_type == stock.config.model_type


@pytest.mark.parametrize("family", [resnet, dinov2])
def test_on_several_processes_what_is_measured_is_what_is_saved(pictures, tmp_path, family):
    """Batch statistics are each process's own, and a mask token gets no gradient to wait for."""
    words = ["--dataset", pictures, "--pretrained", family(tmp_path / "start"), "--tune", "full", *SHORT]
    run = Run(RecipeRun("finetune", tmp_path / "run", *words, processes=2).finish().folder)
    model, processor = load_model(str(run.folder)), load_processor(str(run.folder))
    loader = eval_loader(load_long_tailed(str(pictures))["test"], processor, Batches(64))
    again = compute_metrics(model, loader, Accelerator(), np.array([30, 18, 10, 6]))[ARGMAX]
    assert run.results.rules[ARGMAX]["mean_confidence"] == pytest.approx(again["mean_confidence"], abs=1e-6)


def test_a_batch_is_smaller_than_the_config_of_a_way_says_where_the_images_do_not_fill_it(pictures, tmp_path):
    words = ["--epochs", "2", "--warmup_epochs", "1", "--threads", "1", "--tune", "head", "--max_steps", "2"]
    words = ["--dataset", pictures, "--pretrained", resnet(tmp_path / "resnet"), *words]
    finetune.main([str(word) for word in [*words, "--output_dir", tmp_path / "run"]])  # 64 images; its config says 256
    assert Run(tmp_path / "run").arguments["batch_size"] == 16


def probed(pictures: Path, model: Path, folder: Path, *options) -> dict:
    words = ["--model", model, "--dataset", pictures, "--probe", "--report", folder, "--threads", 1, *options]
    evaluation.main([str(word) for word in words])
    return json.loads((folder / "evaluation.json").read_text())


def test_a_backbone_of_other_classes_is_judged_by_knn_and_a_linear_probe(pictures, checkpoint, tmp_path):
    measured = probed(pictures, checkpoint, tmp_path / "report")
    for name in ("kNN", "linear probe"):
        assert measured[name]["num_images"] == 44 and measured[name]["accuracy"] > 0.4  # chance is 0.25


def test_features_are_measured_with_or_without_a_classifier_and_equal(pictures, tmp_path):
    whole = dinov2(tmp_path / "whole")
    Dinov2Model.from_pretrained(whole).save_pretrained(tmp_path / "bare")
    load_processor(str(whole)).save_pretrained(tmp_path / "bare")
    one, two = (probed(pictures, tmp_path / name, tmp_path / f"{name}-report") for name in ("whole", "bare"))
    assert one["kNN"] == two["kNN"] and one["linear probe"] == two["linear probe"]
    with refusal("test_imbalance"):
        probed(pictures, whole, tmp_path / "refused", "--test_imbalance")


def test_a_checkpoint_of_another_family_lends_its_name_and_the_recipe_for_backbones(tmp_path):
    asked = {"dataset": "glyphs", "pretrained": str(wrapped_timm(tmp_path / "timm"))}
    assert inherit_from_checkpoint(asked) == {"model_size": "resnet18", "patch_size": None, "tune": "full"}
    configs = Path(finetune.__file__).parent / "configs"
    settings = FinetuneSettings.resolve(asked, configs, inherit_from_checkpoint(asked))
    assert (settings.model.tune, settings.optimization.epochs) == ("full", 30)
    head = FinetuneSettings.resolve(asked | {"tune": "head"}, configs, inherit_from_checkpoint(asked))
    values = head.augmentation
    assert (values.mixup, values.cutmix, values.erase) == (0, 0, 0)


def classifier_of(settings: FinetuneSettings, train: Dataset):
    """Return the classifier that a fine-tuning with these settings starts from."""
    return build_classifier(train, settings.model, settings.loss, settings.optimization, settings.augmentation)


@pytest.fixture
def frozen(pictures, tmp_path):
    """A ResNet with its processor, training images and settings, at the start of a fine-tuning of its head."""
    path = resnet(tmp_path / "resnet")
    plain = "--image_size 16 --mixup 0 --cutmix 0 --erase 0".split()
    settings = FinetuneSettings.parse(["--pretrained", str(path), "--dataset", str(pictures), *plain])
    data = load_long_tailed(str(pictures))
    model = classifier_of(settings, data["train"])
    processor = build_processor(model, data["train"], settings.model, settings.data.dataset)
    return settings, data["train"], model, FrozenBackbone(model, processor, Accelerator(cpu=True))


def test_kept_features_are_those_the_classifier_of_the_whole_model_sees(frozen):
    settings, train, model, backbone = frozen
    features = backbone.features(train)
    (batch,) = eval_loader(train, backbone.processor, Batches(64))
    with torch.no_grad():
        expected = extract_features(model.eval(), batch["pixel_values"])
    np.testing.assert_allclose(features[0], expected.flatten(1), atol=1e-6)


def test_a_classifier_trained_on_standardised_features_fits_the_backbone_s_own(frozen):
    settings, train, model, backbone = frozen
    features = backbone.features(train)
    module = FeatureClassifier(model, features)
    torch.nn.init.normal_(module.classifier.weight)
    inputs = torch.from_numpy(np.array(features[0]))
    before = module(inputs).logits
    module.unstandardise()
    torch.testing.assert_close(module(inputs).logits, before, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.nn.functional.linear(inputs, module.classifier.weight, module.classifier.bias),
                               before, atol=1e-4, rtol=1e-4)  # fmt: skip


def test_features_are_standardised_without_a_copy_of_them(frozen):
    noise = np.random.default_rng(0).normal(3, 2, size=(2, 20_000, 16)).astype(np.float32)
    tracemalloc.start()
    module = FeatureClassifier(frozen[2], noise)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < noise.nbytes / 2
    np.testing.assert_allclose(module.mean, noise.mean(axis=(0, 1)), rtol=1e-4)
    np.testing.assert_allclose(module.std, noise.std(axis=(0, 1)), rtol=1e-4)


def test_a_head_is_trained_on_the_device_of_its_backbone(frozen):
    head = FeatureClassifier(frozen[2].to("meta"), np.ones((1, 4, 16), dtype=np.float32))
    assert {tensor.device.type for tensor in (*head.parameters(), *head.buffers())} == {"meta"}
    assert head(torch.ones(4, 16, device="meta"), torch.zeros(4, 4, device="meta")).loss.device.type == "meta"


def test_features_are_computed_once_per_image_and_never_reused_for_other_weights_sizes_or_layers(frozen, monkeypatch):
    settings, train, model, backbone = frozen
    computed = []
    write = FeatureCache.write
    monkeypatch.setattr(FeatureCache, "write", lambda *a: computed.append(len(a[2])) or write(*a))
    whole = backbone.features(train.select(range(60)))
    FrozenBackbone(model, backbone.processor, backbone.accelerator).features(train.select(range(60)))
    assert computed == [60]
    order = [63, 5, 7, 7, 61, 0]  # a split or fold in any order, with two images that are new
    some = backbone.features(train.select(order))
    assert computed == [60, 2]
    np.testing.assert_array_equal(some[:, [1, 2, 3, 5]], whole[:, [5, 7, 7, 0]])
    np.testing.assert_array_equal(backbone.features(train)[:, order], some)
    assert computed == [60, 2, 2]
    FrozenBackbone(model, resize_processor(backbone.processor, 32), backbone.accelerator).features(train)
    next(p for n, p in model.named_parameters() if "embedder" in n).data += 1
    FrozenBackbone(model, backbone.processor, backbone.accelerator).features(train)
    assert computed == [60, 2, 2, 64, 64]
    model.config.id2label = dict(enumerate("abcd"))
    FrozenBackbone(model, backbone.processor, backbone.accelerator).features(train)
    assert computed == [60, 2, 2, 64, 64]
    model.config.hidden_act = "gelu"
    FrozenBackbone(model, backbone.processor, backbone.accelerator).features(train)
    assert computed == [60, 2, 2, 64, 64, 64]
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0" if name == "transformers" else version(name))
    FrozenBackbone(model, backbone.processor, backbone.accelerator).features(train)
    assert computed == [60, 2, 2, 64, 64, 64, 64]
    assert backbone._key("bfloat16") != backbone._key("float32")


def test_a_part_of_kept_features_that_is_damaged_counts_for_nothing(tmp_path):
    kept, digests = FeatureCache(tmp_path / "features"), [bytes([i]) * 32 for i in range(4)]
    kept.write(np.ones((1, 4, 2), np.float32), digests)
    assert kept.missing(digests) == []
    (part,) = kept.folder.iterdir()
    part.write_bytes(part.read_bytes()[:-1])
    assert kept.missing(digests) == [0, 1, 2, 3]


def test_a_process_without_images_computes_nothing(frozen, tmp_path, monkeypatch):
    _, train, _, backbone = frozen
    monkeypatch.setattr("livt_hf.training.frozen.build_eval_batches", lambda *_: Batches(64, rank=0, world_size=2))
    monkeypatch.setenv("LIVT_RUNS", str(tmp_path / "runs"))
    with pytest.raises(FileNotFoundError):  # the other process would have made the folder
        backbone.features(train.select([0]))
    assert not list((tmp_path / "runs").rglob("*.safetensors"))


def test_views_are_the_plain_image_and_augmented_ones_kept_by_images_and_seed_and_epochs_take_turns(
    frozen, monkeypatch
):
    settings, train, model, backbone = frozen
    features = backbone.features(train, build_augmentation(settings.augmentation, backbone.processor), 3)
    assert len(features) == 3 and not np.allclose(features[1], features[2])
    loader = FeatureLoader(features, train, Batches(64))
    for epoch in range(4):
        (batch,) = loader.epoch(epoch)
        np.testing.assert_array_equal(batch["pixel_values"], features[epoch % 3][batch["index"]])
    for batch in loader.in_order():
        np.testing.assert_array_equal(batch["pixel_values"], features[0][batch["index"]])

    computed, write = [], FeatureCache.write
    monkeypatch.setattr(FeatureCache, "write", lambda *a: computed.append(len(a[2])) or write(*a))
    crops, few = FinetuneAugmentation(16), train.select(range(8))
    first = np.array(backbone.features(few, crops, views=2))
    np.testing.assert_array_equal(backbone.features(few, crops, views=2), first)
    assert computed == [8] and first.shape[:2] == (2, 8) and (first[0] != first[1]).any()
    other_seed = FrozenBackbone(model, backbone.processor, backbone.accelerator, seed=1).features(few, crops, views=2)
    np.testing.assert_array_equal(other_seed[0], first[0])  # the plain images
    assert computed == [8, 8] and not np.allclose(other_seed[1], first[1])
    assert backbone.features(few, crops, views=3).shape[0] == 3 and computed == [8, 8, 8]
    backbone.features(few.select(range(7, -1, -1)), crops, views=2)  # crops go by the place among all images
    assert computed == [8] * 4
    backbone.features(few, FinetuneAugmentation(16, flip=False), views=2)
    assert computed == [8] * 5


def test_a_head_goes_on_from_a_trained_one_with_the_answers_that_it_gave(frozen):
    settings, train, model, backbone = frozen
    features = backbone.features(train).copy()
    features[..., 3] = 0  # a feature that no training image has
    classifier = get_classifier(model)
    torch.nn.init.normal_(classifier.weight)
    torch.nn.init.normal_(classifier.bias)
    weight, answers = classifier.weight.clone(), classifier(torch.from_numpy(features[0]))
    head = FeatureClassifier(model, features)
    torch.testing.assert_close(head(torch.from_numpy(features[0])).logits, answers, atol=1e-4, rtol=1e-4)
    head.unstandardise()
    torch.testing.assert_close(classifier.weight, weight, atol=1e-4, rtol=1e-4)  # also of the feature that is missing


@pytest.mark.parametrize("backbone", [dinov2, resnet], ids=["linear layers", "convolutions of single pixels"])
def test_lora_trains_few_parameters_and_merges_to_the_same_logits_in_the_stock_class(tmp_path, backbone):
    lora = pytest.importorskip("peft.tuners.lora")
    model = AutoModelForImageClassification.from_pretrained(backbone(tmp_path / "backbone"))
    model = balance(model, class_counts=[5, 3, 2])
    names = set(model.state_dict())
    add_lora(model, rank=2)
    assert {layer.scaling["default"] for layer in model.modules() if isinstance(layer, lora.LoraLayer)} == {2.0}
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert any("lora_" in name for name in trainable)
    assert all("lora_" in name or name.startswith("classifier") for name in trainable)
    assert {name for name, _ in model.named_parameters() if name.startswith("classifier")} <= trainable
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    pixels = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        before = model.eval()(pixels).logits
        torch.testing.assert_close(merge_lora(model)(pixels).logits, before, atol=1e-4, rtol=1e-4)
    assert set(model.state_dict()) == names


@pytest.mark.parametrize("backbone", [resnet, wrapped_timm])
def test_training_goes_on_from_a_classifier_of_the_same_labels_and_anew_for_others(pictures, tmp_path, backbone):
    run = trained(pictures, backbone(tmp_path / "backbone"), tmp_path / "run", "--tune", "head")
    model = AutoModelForImageClassification.from_pretrained(run.folder)
    head, train = model.state_dict(), load_long_tailed(str(pictures))["train"]
    assert list(model.config.id2label.values()) == train.features["label"].names
    settings = FinetuneSettings.parse(["--dataset", str(pictures), "--pretrained", str(run.folder), "--tune", "full"])
    going_on = classifier_of(settings, train).state_dict()
    assert all(torch.equal(going_on[name], head[name]) for name in head)
    names = [f"other {name}" for name in train.features["label"].names]
    anew = classifier_of(settings, train.cast_column("label", ClassLabel(names=names)))
    assert get_classifier(anew).weight.abs().max() < 1e-3
    assert list(anew.config.id2label.values()) == names
    assert anew.config.long_tail.class_counts == [30, 18, 10, 6]


def test_an_interrupted_head_run_goes_on_to_the_same_weights(pictures, tmp_path):
    path = resnet(tmp_path / "resnet")
    whole = trained(pictures, path, tmp_path / "whole", "--tune", "head")
    cut = ["--tune", "head", "--max_hours", "0"]
    with pytest.raises(Exception) as stopped:
        trained(pictures, path, tmp_path / "cut", *cut)
    assert type(stopped.value).__name__ == "Interrupted"
    finetune.main(["--resume", str(tmp_path / "cut"), "--max_hours", "1"])
    one, two = (
        AutoModelForImageClassification.from_pretrained(f).state_dict() for f in (whole.folder, tmp_path / "cut")
    )
    assert all(torch.equal(one[name], two[name]) for name in one)


# What is refused


def bert(folder: Path) -> Path:
    sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9)
    BertModel(BertConfig(**sizes)).save_pretrained(folder)
    return folder


def without_a_stage(folder: Path) -> Path:
    weights = load_file(resnet(folder) / "model.safetensors")
    save_file({name: t for name, t in weights.items() if "stages.1" not in name}, folder / "model.safetensors")
    return folder


def without_a_processor(folder: Path) -> Path:
    (resnet(folder) / "preprocessor_config.json").unlink()
    return folder


@pytest.mark.parametrize(
    ("backbone", "options", "argument", "value"),
    [
        (dinov2, ["--tune", "head", "--mixup", "0.2"], "mixup", "mixup"),
        (dinov2, ["--tune", "head", "--image_size", "2"], "image_size", "2 pixels"),
        (timm_vit, ["--tune", "head", "--image_size", "64"], "image_size", "64 pixels"),
        (timm_vit, ["--image_size", "32", "--tune", "full", "--crop_size", "16"], "crop_size", "16 pixels"),
        (dinov2, ["--tune", "head", "--normalised_classifier"], "normalised_classifier", "normalised_classifier"),
        (dinov2, ["--tune", "head", "--gradient_checkpointing"], "gradient_checkpointing", "gradient_checkpointing"),
        (resnet, ["--tune", "full", "--gradient_checkpointing"], "gradient_checkpointing", "resnet"),
        (dinov2, ["--tune", "head", "--model_size", "large"], "model_size", "dinov2"),
        (dinov2, ["--tune", "head", "--pooling", "cls"], "pooling", "dinov2"),
        (dinov2, ["--tune", "full", "--mixup", "0.2", "--batch_size", "15"], None, "15"),
        (bert, ["--tune", "head"], None, "'bert'"),
        (without_a_stage, ["--tune", "head"], None, "resnet.encoder.stages.1"),
        (without_a_processor, ["--tune", "head"], None, "image processor"),
    ],
)
def test_options_that_do_not_fit_raise_an_error_before_a_folder_is_made(
    pictures, tmp_path, backbone, options, argument, value
):
    with refusal(argument, value):
        trained(pictures, backbone(tmp_path / "start"), tmp_path / "run", *options)
    assert not (tmp_path / "run").exists()


def test_crops_of_another_size_train_the_network_that_is_served_with_its_own(pictures, tmp_path, monkeypatch):
    sides, forward = [], ResNetForImageClassification.forward

    def seen(self, pixel_values, *args, **kwargs):
        sides.append((self.training, pixel_values.shape[-1]))
        return forward(self, pixel_values, *args, **kwargs)

    monkeypatch.setattr(ResNetForImageClassification, "forward", seen)
    run = trained(pictures, resnet(tmp_path / "resnet"), tmp_path / "run", "--tune", "full", "--crop_size", "8")
    assert {side for training, side in sides if training} == {8} and sides[-1] == (False, 16)
    assert run.results.image_size == 16


@pytest.mark.parametrize("frozen", [False, True])
def test_batch_statistics_are_kept_if_that_is_chosen(pictures, tmp_path, frozen):
    start = resnet(tmp_path / "resnet")
    flag = ["--freeze_batch_norm"] if frozen else []
    run = trained(pictures, start, tmp_path / "run", "--tune", "full", *flag)
    before, after = (AutoModelForImageClassification.from_pretrained(one).state_dict() for one in (start, run.folder))
    means = [name for name in before if name.endswith("running_mean")]
    assert all(torch.equal(before[name], after[name]) == frozen for name in means) and means
    assert not torch.equal(*(one["resnet.embedder.embedder.convolution.weight"] for one in (before, after)))


@pytest.mark.parametrize("backbone", [resnet, densenet, timm_vit])
def test_a_backbone_gets_stochastic_depth_or_goes_without_it_and_says_so_and_is_in_full_precision(
    pictures, tmp_path, caplog, backbone
):
    caplog.set_level("INFO")
    start = backbone(tmp_path / "start")
    AutoModelForImageClassification.from_pretrained(start).to(torch.bfloat16).save_pretrained(start)
    settings = FinetuneSettings.build(dataset=str(pictures), pretrained=str(start), drop_path=0.1, tune="full")
    model = classifier_of(settings, load_long_tailed(pictures)["train"])
    has_it = backbone is timm_vit
    assert ("has no stochastic depth: drop_path 0.1 does nothing" in caplog.text) == (not has_it)
    assert not has_it or model.config.model_args["drop_path_rate"] == 0.1
    for loaded in (model, load_model(str(start))):
        assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}


def test_what_no_logit_depends_on_is_frozen(tmp_path):
    model = AutoModelForImageClassification.from_pretrained(dinov2(tmp_path / "d"))
    freeze_unused_parameters(model, 16)
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["dinov2.embeddings.mask_token"]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_lora_leaves_batch_statistics_alone_and_ends_as_a_stock_model(pictures, tmp_path, monkeypatch):
    """They belong to the frozen weights."""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "peft", None)
        with refusal(None, "pip install 'livt-hf[lora]'"):
            add_lora(torch.nn.Linear(2, 2), 2)
    pytest.importorskip("peft")
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic", num_labels=3)
    with refusal("tune", "ResNetForImageClassification"):  # which has no linear layer besides its classifier
        add_lora(balance(ResNetForImageClassification(config), class_counts=[3, 2, 1]), 2)
    start = resnet(tmp_path / "resnet")
    run = trained(pictures, start, tmp_path / "run", "--tune", "lora")
    folders = (start, run.folder)
    models = [AutoModelForImageClassification.from_pretrained(path) for path in folders]
    assert type(models[1]) is ResNetForImageClassification
    before, after = (model.state_dict() for model in models)
    statistics = [name for name in before if name.endswith(("running_mean", "running_var", "num_batches_tracked"))]
    assert statistics and all(torch.equal(before[name], after[name]) for name in statistics)
    adapted = [name for name in before if name.endswith("convolution.weight")]
    assert any(not torch.equal(before[name], after[name]) for name in adapted)


def test_a_processor_of_another_size_keeps_its_margin_and_one_that_does_more_is_refused():
    processor = ViTImageProcessor(
        size={"shortest_edge": 256}, crop_size={"height": 224, "width": 224}, do_center_crop=True
    )
    smaller = resize_processor(processor, 112)
    assert read_input_spec(smaller).size == 112 and dict(smaller.size)["shortest_edge"] == 128
    for processor, value in (
        *((ViTImageProcessor(size=size), "16") for size in ({"shortest_edge": 16}, {"height": 16, "width": 24})),
        (MobileViTImageProcessor(), "MobileViTImageProcessor"),  # which swaps channels
    ):
        with refusal(None, value):
            read_input_spec(processor)


@pytest.mark.parametrize(
    "processor", [ViTImageProcessor(), EfficientNetImageProcessor(include_top=True), ConvNextImageProcessor()]
)
def test_a_colour_is_in_training_what_it_is_in_serving(processor):
    colour, facts = (200, 100, 0), read_input_spec(processor)
    image = {"pixel_values": torch.tensor(colour, dtype=torch.uint8)[None, :, None, None], "index": torch.tensor([0])}
    trained_on = DeviceTransform(facts.mean, facts.std)(image, epoch=0, update=0)["pixel_values"].flatten()
    served = processor(Pictures.new("RGB", (300, 300), colour), return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(trained_on, served[0, :, 0, 0], atol=1e-4, rtol=1e-4)
    assert facts.size == served.shape[2]
