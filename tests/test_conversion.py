"""The authors' checkpoints, the BEiT and timm forms, and what is never unpickled."""

import argparse
import json
import os
import pickle
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from refusals import refusal
from safetensors.torch import load_file
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    BeitForImageClassification,
    ViTImageProcessorPil,
    ViTMAEForPreTraining,
    pipeline,
)

from livt_hf import LiViTConfig, LiViTForImageClassification, LiViTForPreTraining, LiViTModel
from livt_hf.cli.console import run_command
from livt_hf.conversion import from_official, save_timm, to_beit, to_timm
from livt_hf.losses import LOSSES
from livt_hf.recipes import convert as recipe

ROOT = Path(__file__).parents[1]


def random_weights(module: nn.Module, seed: int = 0) -> nn.Module:
    """Weights large enough for attention to be far from uniform, with every bias in use."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        std = 0.3 if parameter.ndim == 1 else 1.5 / parameter[0].numel() ** 0.5
        parameter.data.normal_(std=std, generator=generator)
    return module.eval()


def official_vit(pooling="mean", image_size=64, classes=5) -> VisionTransformer:
    sizes = dict(img_size=image_size, patch_size=16, embed_dim=128, depth=2, num_heads=2, num_classes=classes)
    return random_weights(VisionTransformer(**sizes, global_pool="avg" if pooling == "mean" else "token"))


def save_official(state: dict, path: Path) -> Path:
    torch.save({"model": state, "epoch": 99, "args": argparse.Namespace(lr=1e-3, output_dir="out")}, path)
    return path


def official_file(folder: Path, **options) -> tuple[Path, VisionTransformer]:
    vit = official_vit(**options)
    return save_official(vit.state_dict(), folder / "checkpoint.pth"), vit


def pixels(image_size: int, images: int = 2) -> torch.Tensor:
    return torch.randn(images, 3, image_size, image_size, generator=torch.Generator().manual_seed(1))


def small_livit(**options) -> LiViTForImageClassification:
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    config = dict(image_size=16, patch_size=4, class_counts=[90, 9, 1]) | sizes | options
    return random_weights(LiViTForImageClassification(LiViTConfig(**config)))


def processor(image_size=64, edge=72) -> ViTImageProcessorPil:
    size = dict(size={"shortest_edge": edge}, do_center_crop=True, crop_size=image_size, resample=3)
    return ViTImageProcessorPil(**size, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.25])


@torch.no_grad()
def logits(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    output = model(images)
    return output if isinstance(output, torch.Tensor) else output.logits


@pytest.mark.parametrize("image_size", [64, 224])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_authors_livit_beit_and_timm_have_equal_logits(tmp_path, pooling, image_size):
    path, vit = official_file(tmp_path, pooling=pooling, image_size=image_size)
    model = from_official(path)
    images = pixels(image_size)
    expected = logits(vit, images)
    assert expected.std() > 0.1
    assert model.config.pooling == pooling and model.config.image_size == image_size
    to_beit(model).save_pretrained(tmp_path / "beit")
    save_timm(model, tmp_path / "timm", processor(image_size))
    served = [
        model,
        AutoModelForImageClassification.from_pretrained(tmp_path / "beit"),
        LiViTForImageClassification.from_pretrained(tmp_path / "beit"),
        to_timm(model),
        timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval(),
        AutoModelForImageClassification.from_pretrained(tmp_path / "timm"),
    ]
    assert isinstance(served[1], BeitForImageClassification)
    for other in served:
        torch.testing.assert_close(logits(other, images), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_livit_and_beit_agree_at_an_interpolated_resolution(tmp_path, pooling):
    model = from_official(official_file(tmp_path, pooling=pooling)[0])
    beit = to_beit(model)
    for shape in [(96, 96), (32, 32), (48, 80)]:
        images = torch.randn(2, 3, *shape)
        torch.testing.assert_close(logits(beit, images), logits(model, images), atol=1e-5, rtol=0)
    beit.save_pretrained(tmp_path / "beit")
    resized = LiViTForImageClassification.from_pretrained(tmp_path / "beit", image_size=96)
    torch.testing.assert_close(logits(resized, pixels(96)), logits(model, pixels(96)), atol=1e-5, rtol=0)


def test_a_vit_b_with_1000_classes_has_86567656_parameters():
    config = LiViTConfig.preset("base", num_labels=1000)
    with torch.device("meta"):
        model = LiViTForImageClassification(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == 86_567_656


class OfficialMAE(nn.Module):
    """MAE in timm's blocks under the authors' names: an independent reading of the same file."""

    def __init__(self, grid=4, patch=16, width=128, depth=2, decoder_width=64, decoder_depth=2):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + grid**2, width))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, patch, patch)})
        self.blocks = nn.ModuleList([Block(width, width // 64, qkv_bias=True) for _ in range(depth)])
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.decoder_embed = nn.Linear(width, decoder_width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, decoder_width))
        self.decoder_pos_embed = nn.Parameter(torch.zeros(1, 1 + grid**2, decoder_width))
        self.decoder_blocks = nn.ModuleList([Block(decoder_width, 16, qkv_bias=True) for _ in range(decoder_depth)])
        self.decoder_norm = nn.LayerNorm(decoder_width, eps=1e-6)
        self.decoder_pred = nn.Linear(decoder_width, patch**2 * 3)

    def forward(self, images, visible: list[int]):
        """Predictions of all patches of one image, of which `visible` are seen. (1, patches, p * p * 3)"""
        x = self.patch_embed["proj"](images).flatten(2).transpose(1, 2) + self.pos_embed[:, 1:]
        x = torch.cat([self.cls_token + self.pos_embed[:, :1], x[:, visible]], dim=1)
        for block in self.blocks:
            x = block(x)
        x = self.decoder_embed(self.norm(x))
        full = self.mask_token.repeat(1, self.pos_embed.shape[1], 1)
        full[:, [0, *(patch + 1 for patch in visible)]] = x
        full = full + self.decoder_pos_embed
        for block in self.decoder_blocks:
            full = block(full)
        return self.decoder_pred(self.decoder_norm(full))[:, 1:]


@torch.no_grad()
def test_a_pretraining_file_becomes_a_vitmae_with_equal_predictions(tmp_path):
    mae = random_weights(OfficialMAE())
    for module in mae.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-6
    stray_head = {"head.weight": torch.zeros(5, 128), "head.bias": torch.zeros(5)}
    path = save_official(mae.state_dict() | stray_head, tmp_path / "mgp.pth")
    model = from_official(path)
    with refusal(None, path, "class_counts"):
        from_official(path, class_counts=[3, 2, 1, 1, 1])
    assert isinstance(model, LiViTForPreTraining)
    assert model.config.image_size == 64 and model.config.norm_pix_loss
    model.save_pretrained(tmp_path / "mgp")
    noise = torch.rand(1, 16, generator=torch.Generator().manual_seed(0))
    visible = noise[0].argsort()[:4].tolist()
    expected = mae(pixels(64, 1), visible)
    assert expected.std() > 0.1
    for vitmae in (model, ViTMAEForPreTraining.from_pretrained(tmp_path / "mgp")):
        torch.testing.assert_close(vitmae(pixels(64, 1), noise=noise).logits, expected, atol=1e-5, rtol=0)


def test_rows_of_an_inat18_head_move_from_lexicographic_to_numeric_order(tmp_path):
    path, vit = official_file(tmp_path, classes=8142)
    permuted, kept = from_official(path), from_official(path, keep_class_order=True)
    rows = vit.head.bias.data
    # Lexicographically 0, 1, 10, 100, 1000, 1001, ...; 9 comes before the 110 classes 90 to 99 and 900 to 999.
    for category, row in {0: 0, 1: 1, 10: 2, 100: 3, 1001: 5, 9: 8142 - 111, 999: 8141}.items():
        assert permuted.classifier.bias[category] == rows[row]
        assert torch.equal(permuted.classifier.weight[category], vit.head.weight[row])
        assert permuted.config.id2label[category] == kept.config.id2label[row] == str(category)
    assert torch.equal(kept.classifier.bias, rows)


def test_official_heads_serve_the_posterior_of_the_released_loss(tmp_path):
    """The released code adds logit(pi) alone, so sigmoid(z + logit(pi)) is the training posterior."""
    counts = [1000, 500, 100, 20, 5]
    path, _ = official_file(tmp_path)
    names = {label: f"class {label}" for label in range(5)}
    model = from_official(path, class_counts=counts, id2label=names)
    prior = torch.tensor(counts) / sum(counts)
    posterior = torch.sigmoid(logits(model, pixels(64)) + torch.logit(prior)) / prior
    expected = posterior / posterior.sum(-1, keepdim=True)
    torch.testing.assert_close(model.probabilities(pixels(64)), expected, atol=1e-5, rtol=1e-4)
    assert model.config.label2id["class 3"] == 3


@pytest.mark.parametrize(
    "options",
    [
        dict(loss="bal_bce", tau=1.05, test_prior=[0.2, 0.3, 0.5], drop_path_rate=0.1, label_smoothing=0.1),
        dict(loss="ldam", pooling="cls", ldam_scale=20.0, test_prior=None),
        dict(bias="ce"),
        dict(
            loss="bal_nt_bce",
            nt_lambda=3.0,
            problem_type="multi_label_classification",
            num_train_images=95,
            test_prior=None,
            head_start="zero",
        ),
    ],
)
def test_the_beit_form_gives_back_an_equal_trainable_model(tmp_path, options):
    model = small_livit(id2label={0: "cat", 1: "dog", 2: "yak"}, label2id={"cat": 0, "dog": 1, "yak": 2}, **options)
    to_beit(model).save_pretrained(tmp_path)
    restored = LiViTForImageClassification.from_pretrained(tmp_path)
    ignored = ("_name_or_path", "architectures", "transformers_version", "dtype")
    before, after = ({k: v for k, v in m.config.to_dict().items() if k not in ignored} for m in (model, restored))
    assert before == after
    for name, parameter in restored.named_parameters():
        expected = model.get_parameter(name)
        assert torch.equal(parameter, torch.zeros_like(expected) if name.endswith("k_proj.bias") else expected), name
    labels = torch.tensor([[1.0, 0, 0], [0, 1, 1]]) if model.head.multi_label else torch.tensor([0, 2])
    losses = [m(pixels(16), labels=labels).loss for m in (model, restored)]
    torch.testing.assert_close(*losses)
    losses[1].backward()


def test_a_beit_form_with_the_settings_of_the_head_beside_the_pooling_is_read_as_before(tmp_path):
    model = small_livit(loss="bal_ce", tau=1.05, test_prior=[0.2, 0.3, 0.5])
    to_beit(model).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["livit"] |= config.pop("long_tail") | {"num_train_images": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    restored = LiViTForImageClassification.from_pretrained(tmp_path)
    labels = torch.tensor([0, 2])
    torch.testing.assert_close(restored(pixels(16), labels=labels).loss, model(pixels(16), labels=labels).loss)
    torch.testing.assert_close(restored.probabilities(pixels(16)), model.probabilities(pixels(16)))


def test_the_beit_form_starts_another_fine_tuning_with_only_a_new_classifier(tmp_path):
    model = small_livit()
    to_beit(model).save_pretrained(tmp_path)
    started = LiViTForImageClassification.from_pretrained(tmp_path, class_counts=[5, 4, 3, 2], image_size=32)
    encoder = LiViTModel.from_pretrained(tmp_path)
    assert started.classifier.weight.shape == (4, 32) and started.classifier.weight.std() < 1e-3
    features = [vit(pixels(32)).pooler_output for vit in (model.vit, started.vit, encoder)]
    torch.testing.assert_close(features[1], features[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(features[2], features[0], atol=1e-5, rtol=0)


def test_the_forms_keep_the_precision_of_the_weights(tmp_path):
    model = small_livit().to(torch.bfloat16)
    to_beit(model).save_pretrained(tmp_path / "beit")
    save_timm(model, tmp_path / "timm", processor(16, 18))
    restored = LiViTForImageClassification.from_pretrained(tmp_path / "beit")
    assert restored.dtype == to_timm(model).head.weight.dtype == torch.bfloat16
    assert torch.equal(restored.classifier.weight, model.classifier.weight)
    assert load_file(tmp_path / "timm" / "model.safetensors")["head.weight"].dtype == torch.bfloat16


def test_a_beit_form_saved_loaded_and_saved_again_is_bit_equal(tmp_path):
    to_beit(small_livit()).save_pretrained(tmp_path / "a")
    to_beit(LiViTForImageClassification.from_pretrained(tmp_path / "a")).save_pretrained(tmp_path / "b")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


class RunsCode:
    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("place", ["args", "model", "everything"])
def test_code_in_a_pth_file_is_not_run(tmp_path, place):
    code = RunsCode(tmp_path / "trace")
    content = code if place == "everything" else {"model": official_vit().state_dict()} | {place: code}
    torch.save(content, tmp_path / "evil.pth")
    with refusal(None, "evil.pth", "mkdir"):
        from_official(tmp_path / "evil.pth")
    assert not (tmp_path / "trace").exists()
    torch.load(tmp_path / "evil.pth", weights_only=False)  # the trap works
    assert (tmp_path / "trace").exists()


def test_truncated_and_foreign_files_are_refused_with_a_sentence(tmp_path):
    path, vit = official_file(tmp_path)
    content = path.read_bytes()
    start = content.index(b"blocks.0.attn.qkv.weight")
    overwritten = content[: start - 20] + bytes(40) + content[start + 20 :]
    cut = content[: len(content) // 2], content[:-50]
    broken = tmp_path / "broken.pth"
    for bytes_ in (b"", *cut, b"<!DOCTYPE html>", pickle.dumps({"model": 1}), overwritten):
        broken.write_bytes(bytes_)
        with refusal(None, broken):
            from_official(broken)
    with refusal(None, "absent.pth"):
        from_official(tmp_path / "absent.pth")
    for foreign in (torch.zeros(3), {"state_dict": vit.state_dict()}, {"model": {"a": 1}}):
        torch.save(foreign, broken)
        with refusal(None, broken, "'model'"):
            from_official(broken)


def changed(**changes) -> dict:
    state = {name.replace(".", "__"): tensor for name, tensor in official_vit().state_dict().items()} | changes
    return {name.replace("__", "."): tensor for name, tensor in state.items() if tensor is not None}


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        (dict(head__weight=None), ["lacks head.weight"]),
        (dict(blocks__1__norm2__bias=None), ["lacks blocks.1.norm2.bias"]),
        (dict(gamma=torch.zeros(3)), ["gamma"]),
        (dict(pos_embed=torch.zeros(1, 16, 128)), ["15 patches"]),
        (dict(cls_token=torch.zeros(1, 1, 64)), ["cls_token", "(1, 1, 64)", "(1, 1, 128)"]),
        (dict(patch_embed__proj__weight=torch.zeros(100, 3, 16, 16)), ["100 wide"]),
    ],
)
def test_files_with_other_tensors_say_which(tmp_path, changes, values):
    with refusal(None, *values):
        from_official(save_official(changed(**changes), tmp_path / "wrong.pth"))


def test_labels_and_counts_must_fit_the_head(tmp_path):
    path, _ = official_file(tmp_path)
    wrong = {"class_counts": ([1, 2, 3, 4], "4 entries for 5"), "class_count": ([1, 2, 3, 4, 5], "LiViTConfig")}
    for name, (value, named) in (wrong | {"id2label": ({0: "a", 1: "b"}, "2 classes")}).items():
        with refusal("class_counts" if name == "class_counts" else None, name, named):
            from_official(path, **{name: value})


def test_forms_that_cannot_say_a_setting_refuse_it():
    cosine = dict(loss="ldam", normalised_classifier=True)
    for convert, settings, value in [
        (to_timm, dict(layer_norm_eps=1e-12), "1e-12"),
        (to_beit, dict(qkv_bias=False), "qkv_bias"),
        (to_beit, cosine, "normalised_classifier=True"),
        (to_timm, cosine, "normalised_classifier=True"),
    ]:
        with refusal(None, value):
            convert(small_livit(**settings))


def mandelbrot(width: int, height: int) -> Image.Image:
    return Image.effect_mandelbrot((width, height), (-2, -1.5, 1, 1.5), 50).convert("RGB")


@pytest.mark.parametrize(
    ("ours", "shape"),
    [
        (processor(edge=72), (120, 90)),
        (processor(edge=64), (120, 90)),
        (ViTImageProcessorPil(do_resize=False, crop_size=64), (64, 64)),
        (ViTImageProcessorPil(size={"height": 64, "width": 64}, resample=3), (120, 90)),
    ],
)
def test_timm_prepares_an_image_as_the_processor_does(tmp_path, ours, shape):
    path, _ = official_file(tmp_path)
    save_timm(from_official(path), tmp_path / "timm", ours)
    assert {file.name for file in (tmp_path / "timm").iterdir()} == {"config.json", "model.safetensors"}
    vit = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(vit))
    expected = ours(mandelbrot(*shape), return_tensors="pt").pixel_values[0]
    torch.testing.assert_close(transform(mandelbrot(*shape)), expected, atol=1e-5, rtol=0)
    assert vit.pretrained_cfg["label_names"] == [f"LABEL_{label}" for label in range(5)]


def convert(*arguments) -> None:
    recipe.main([str(argument) for argument in arguments])


def test_the_command_converts_official_to_livit_to_beit_and_timm(tmp_path):
    path, vit = official_file(tmp_path, classes=365)
    (tmp_path / "counts.json").write_text(json.dumps(list(range(1, 366))))
    (tmp_path / "names.json").write_text(json.dumps([f"place {label}" for label in range(365)]))
    livit, beit, timm_folder = tmp_path / "livit", tmp_path / "beit", tmp_path / "timm"
    convert(path, livit, "--class_counts", tmp_path / "counts.json", "--labels", tmp_path / "names.json")
    convert(livit, beit, "--to", "beit")
    convert(beit, timm_folder, "--to", "timm")
    for source, form in ((path, "livit"), (livit, "beit"), (livit, "timm"), (livit, "onnx")):
        with refusal(None, livit):
            convert(source, livit, "--to", form)
    model = LiViTForImageClassification.from_pretrained(livit)
    assert model.config.long_tail.class_counts == list(range(1, 366))
    prepare = AutoImageProcessor.from_pretrained(beit)
    assert prepare.to_dict() == AutoImageProcessor.from_pretrained(livit).to_dict()
    assert prepare.size.shortest_edge == 73 and prepare.crop_size.height == 64  # 64 / 0.875 = 73.1
    image = prepare(mandelbrot(90, 80), return_tensors="pt").pixel_values
    for other in (vit, timm.create_model(f"local-dir:{timm_folder}", pretrained=True).eval()):
        torch.testing.assert_close(logits(other, image), logits(model, image), atol=1e-5, rtol=0)
    best = pipeline("image-classification", beit)(mandelbrot(90, 80))[0]["label"]
    assert best == f"place {logits(vit, image).argmax()}"


def test_the_command_loads_the_plugin_that_the_run_was_trained_with(tmp_path, monkeypatch):
    monkeypatch.setenv("LIVT_RUNS", str(tmp_path))
    run, plugin = tmp_path / "run", tmp_path / "mine.py"
    (tmp_path / "counts.json").write_text("[50, 40, 30, 20, 10]")
    convert(official_file(tmp_path)[0], run, "--class_counts", tmp_path / "counts.json")
    config = json.loads((run / "config.json").read_text())
    config["long_tail"]["loss"] = "own_ce"
    (run / "config.json").write_text(json.dumps(config))
    with refusal("loss", "'own_ce'", "plugin"):
        convert(run, tmp_path / "beit", "--to", "beit")
    (run / "arguments.yaml").write_text(f"plugin: {plugin}\n")
    plugin.write_text("from livt_hf.losses import LOSSES\nLOSSES['own_ce'] = LOSSES['ce']\n")
    convert(run, tmp_path / "beit", "--to", "beit")
    LOSSES.pop("own_ce")
    assert (tmp_path / "beit" / "config.json").exists()


def test_the_command_names_the_classes_of_imagenet_lt(tmp_path):
    convert(official_file(tmp_path, classes=1000)[0], tmp_path / "livit")
    names = LiViTForImageClassification.from_pretrained(tmp_path / "livit").config.id2label
    assert names[0] == "tench, Tinca tinca" and names[999] == "toilet tissue, toilet paper, bathroom tissue"
    assert len(set(names.values())) == 1000
    convert(official_file(tmp_path)[0], tmp_path / "five", "--dataset", "imagenet-lt")  # of some of its classes
    assert LiViTForImageClassification.from_pretrained(tmp_path / "five").config.id2label[4] == "LABEL_4"


@pytest.mark.parametrize("option", ["--dataset=inat18", "--labels=a", "--keep_class_order"])
@pytest.mark.parametrize("form", ["beit", "timm", "onnx", "torch-export"])
def test_what_an_authors_file_does_not_say_is_told_of_no_other_model(option, form):
    with refusal(None, form, option.partition("=")[0]):
        convert("run", "out", "--to", form, option)


def test_the_command_wants_the_dataset_where_the_head_does_not_tell_it(tmp_path):
    path, out, counts = official_file(tmp_path)[0], tmp_path / "out", tmp_path / "counts.json"
    mgp = save_official(random_weights(OfficialMAE()).state_dict(), tmp_path / "mgp.pth")
    counts.write_text("[50, 40, 30, 20, 10]")  # of a head for own images
    imagenet, inat = (0.485, 0.456, 0.406), (0.466, 0.471, 0.380)
    for source, options, mean in [
        (path, ["--dataset", "inat18"], inat),
        (path, ["--class_counts", counts], imagenet),
        (mgp, ["--dataset", "inat18"], inat),
    ]:
        with refusal(None, source, "--dataset"):
            convert(source, out)
        folder = tmp_path / f"{source.stem}-{options[0]}"
        convert(source, folder, *options)
        assert tuple(AutoImageProcessor.from_pretrained(folder).image_mean) == mean
    with refusal("dataset", "'nonsense'"):
        convert(path, out, "--dataset", "nonsense")
    with refusal(None, mgp, "--class_counts"):
        convert(mgp, out, "--class_counts", counts)
    with refusal(None, folder):  # a pretraining knows no classes
        convert(folder, out, "--to", "beit")


def test_class_counts_by_name_are_told_to_an_authors_file_at_once_or_to_what_it_became(tmp_path):
    path, _ = official_file(tmp_path)
    names, counts, folder = list("abcde"), tmp_path / "counts.yaml", tmp_path / "livit"
    (tmp_path / "names.json").write_text(json.dumps(names))
    counts.write_text("e: 10\nd: 20\nc: 30\nb: 40\na: 50\n")
    told = ["--labels", tmp_path / "names.json", "--dataset", "imagenet-1k"]
    convert(path, folder, *told, "--class_counts", counts)
    convert(path, tmp_path / "unknowing", *told)
    convert(tmp_path / "unknowing", tmp_path / "beit", "--to", "beit", "--class_counts", counts)
    heads = [LiViTForImageClassification.from_pretrained(place).head.settings for place in (folder, tmp_path / "beit")]
    assert heads[0] == heads[1] and heads[0].class_counts == [50, 40, 30, 20, 10]
    assert (heads[0].loss, heads[0].test_prior) == ("bal_bce", None)
    with refusal(None, folder, "--class_counts"):
        convert(folder, tmp_path / "out", "--to", "beit", "--class_counts", counts)
    with refusal(None, "no.json"):
        convert(path, tmp_path / "out", *told, "--class_counts", "no.json")


@pytest.mark.parametrize("words", ["no.pth out", "no.pth out --labels names.json", "./norun out --to beit"])
def test_the_command_says_what_is_wrong_without_a_traceback(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    Path("names.json").write_text("{}")
    with pytest.raises(SystemExit, match=f"^error: {'names.json' if 'names' in words else words.split()[0]}"):
        run_command(lambda: recipe.main(words.split()))
