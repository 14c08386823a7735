"""What a newcomer meets first: a wrong name, few images, a plugin that fails, a checkpoint of another tool."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from huggingface_hub import constants
from recipe_runs import TINY, make_pictures
from refusals import refusal
from safetensors.torch import load_file
from timm.models import save_for_hf

from livt_hf.classifiers import load_classifier
from livt_hf.cli.options import CONFIGS
from livt_hf.cli.training_settings import FinetuneSettings, PretrainSettings
from livt_hf.constants import SMALL_BACKBONE
from livt_hf.data.spec import DataSpec
from livt_hf.errors import Interrupted
from livt_hf.plugins import load_plugin
from livt_hf.pretrained import load_backbone, read_config
from livt_hf.recipes import eval as evaluate
from livt_hf.recipes import finetune, train
from livt_hf.runs import Run
from livt_hf.training.autotune import describe_few_epochs

TINY_RESNET = {"layers": [1, 1, 1, 1], "channels": [8, 8, 8, 8], "stem_width": 8}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("first") / "pictures")


@pytest.fixture(autouse=True)
def _folders(pictures, tmp_path, monkeypatch):
    monkeypatch.chdir(pictures.parent)
    monkeypatch.setenv("LIVT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize(
    ("command", "words", "argument", "value"),
    [
        (finetune, "./nosuchfolder", "dataset", "nosuchfolder does not exist"),
        (finetune, "nosuchfolder", "dataset", "no folder nosuchfolder"),
        (finetune, "picture", "dataset", "Did you mean pictures?"),
        (finetune, "pictures --pretrained none --model_size huge", "model_size", "'huge'"),
        (finetune, "pictures --pretrained none --batch_size 100", None, "100"),
        (finetune, "pictures --pretrained resnet18", None, "timm/resnet18.a1_in1k"),
        (evaluate, "nosuchrun", "model", "nosuchrun"),
        (evaluate, "owner/nosuchmodel", "model", "--dataset"),
    ],
)
def test_a_first_command_rejects(monkeypatch, command, words, argument, value):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between the client's retries
    with refusal(argument, value):
        command.main(words.split())


@pytest.mark.parametrize(
    ("cls", "words", "num_images", "batch_size"),
    [
        (FinetuneSettings, [], 5000, 1024),
        (FinetuneSettings, [], 300, 16),
        (FinetuneSettings, ["--batch_size", "1000"], 300, 1000),  # explicit, which raises an error later
        (FinetuneSettings, ["--tune", "head"], 10, 8),
        (PretrainSettings, [], 3000, 32),
    ],
)
def test_a_default_batch_is_what_the_images_fill(cls, words, num_images, batch_size):
    settings = cls.parse(["pictures", *words], CONFIGS)
    assert settings.reduce_batch_size(num_images).optimization.batch_size == batch_size


BROKEN = {
    "error": ("def register():\n    return 1 / 0\n\nregister()\n", ["line 4", "line 2", "ZeroDivisionError"]),
    "syntax": ("def register(:\n", ["line 1", "SyntaxError"]),
    "import": ("import no_such_package\n", ["line 1", "ModuleNotFoundError: No module named 'no_such_package'"]),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plugin_prints_its_own_frames_and_its_error_and_is_imported_again(tmp_path, kind):
    code, printed = BROKEN[kind]
    plugin = tmp_path / "mine.py"
    plugin.write_text(code)
    with refusal("plugin", plugin, *printed) as error:
        load_plugin(str(plugin))
    frames = {line.split('"')[1] for line in str(error.value).splitlines() if line.startswith('  File "')}
    assert frames == {str(plugin)}
    plugin.write_text("raise KeyError('still wrong')")
    with refusal("plugin", "still wrong"):
        load_plugin(str(plugin))


def test_a_module_of_a_broken_package_prints_the_frames_of_the_package(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine_broken").mkdir()
    (tmp_path / "mine_broken" / "__init__.py").write_text("1 / 0\n")
    with refusal("plugin", "mine_broken.losses", "ZeroDivisionError") as error:
        load_plugin("mine_broken.losses")
    frames = [line.split('"')[1] for line in str(error.value).splitlines() if line.startswith('  File "')]
    assert frames == [str(tmp_path / "mine_broken" / "__init__.py")]


@pytest.fixture
def saved_by_timm(tmp_path) -> Path:
    """A checkpoint as `save_for_hf` of timm 1.0.31 writes it, whatever version is installed."""
    model = timm.create_model("resnet18", num_classes=3, **TINY_RESNET)
    save_for_hf(model, tmp_path / "timm", model_args=TINY_RESNET, safe_serialization=True)
    path = tmp_path / "timm" / "config.json"
    config = json.loads(path.read_text())
    config["model_args"] = config.get("model_args", {}) | {"num_classes": 3}
    path.write_text(json.dumps(config))
    return path.parent


def test_a_checkpoint_of_timm_that_repeats_the_arguments_of_the_wrapper_is_loaded(saved_by_timm):
    weights = load_file(saved_by_timm / "model.safetensors")
    for model in (load_classifier(str(saved_by_timm)), load_backbone(str(saved_by_timm))):
        assert model.config.num_labels == 3
        assert torch.equal(model.timm_model.fc.weight, weights["fc.weight"])


def test_weights_that_are_a_pickle_come_with_a_command_that_converts_them(saved_by_timm):
    weights = load_file(saved_by_timm / "model.safetensors")
    torch.save(weights, saved_by_timm / "pytorch_model.bin")
    (saved_by_timm / "model.safetensors").unlink()
    with refusal(None, "pytorch_model.bin") as error:
        load_classifier(str(saved_by_timm))
    words = shlex.split(str(error.value).splitlines()[-1])
    subprocess.run([sys.executable, *words[1:]], check=True)
    assert torch.equal(load_classifier(str(saved_by_timm)).timm_model.fc.weight, weights["fc.weight"])


@pytest.mark.parametrize("name", ["resnet18", "vit_base_patch16_224"])
def test_a_bare_name_of_timm_is_answered_with_its_weights(name):
    with refusal(None, timm.get_pretrained_cfg(name).hf_hub_id):
        read_config(name)


# What `livt train` starts from, and how long


@pytest.fixture
def cached_backbone(saved_by_timm, tmp_path, monkeypatch) -> Path:
    """The default backbone in a cache of the Hub; without its weights until a test puts them there."""
    cache = tmp_path / "cache"
    repository = cache / f"models--{SMALL_BACKBONE.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    shutil.copy(saved_by_timm / "config.json", snapshot)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return snapshot


@pytest.mark.parametrize(
    ("dataset", "num_images", "start"),
    [
        ("pictures", 64, SMALL_BACKBONE),
        ("pictures", 49_999, SMALL_BACKBONE),
        ("pictures", 50_000, "none"),
        ("glyphs", 64, "none"),
        ("cifar100-lt", 64, "none"),
    ],
)
def test_few_images_of_ones_own_start_from_the_small_backbone(
    cached_backbone, saved_by_timm, dataset, num_images, start
):
    shutil.copy(saved_by_timm / "model.safetensors", cached_backbone)
    assert train.choose_start(DataSpec(dataset=dataset), num_images) == start


def test_without_the_small_backbone_train_says_how_to_get_one_and_computes_nothing(cached_backbone, tmp_path):
    with refusal("pretrained", SMALL_BACKBONE, "--pretrained none"):
        train.main(["pictures"])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("epochs", "hours", "warned"), [(1, 0.1, True), (0.4, 1, True), (2, 1, False), (0, 1, False), (1, None, False)]
)
def test_hours_that_hold_about_one_epoch_are_warned_of(epochs, hours, warned):
    assert describe_few_epochs(epochs, hours).startswith("Warning: ") == warned


# Options that choose images, and resuming


@pytest.fixture
def sites(tmp_path) -> Path:
    """A table of images of two classes in folders of five sites each."""
    files = sorted(make_pictures(tmp_path / "made", train=(40, 30), test=1).glob("train/*/*.png"))
    rows = ["path,label,site"]
    for number, file in enumerate(files):
        path = tmp_path / "sites" / file.parent.name / f"site{number % 5}" / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, path)
        rows.append(f"{path},{file.parent.name},site{number % 5}")
    (tmp_path / "sites.csv").write_text("\n".join(rows))
    return tmp_path / "sites.csv"


def test_a_training_on_chosen_images_resumes(sites, tmp_path):
    kept = [f"site=site{number}" for number in range(1, 5)]
    chosen = ["--group_from", "parent", "--exclude", "*1.png", "--where", *kept, "--batch_size", "8"]
    words = ["--dataset", str(sites), "--pretrained", "none", "--output_dir", str(tmp_path / "run")]
    words += [*TINY, "--epochs", "2", "--validation_fraction", "0.2", *chosen]
    with pytest.raises(Interrupted):
        finetune.main([*words, "--max_hours", "0"])
    run = Run(tmp_path / "run")
    assert not run.finished
    finetune.main(["--resume", str(run.folder), "--max_hours", "1"])
    assert run.finished and (run.arguments["group_from"], run.arguments["exclude"]) == ("parent", ["*1.png"])
    assert run.arguments["where"] == kept
