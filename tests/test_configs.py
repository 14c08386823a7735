"""The configs: they parse, say how they are run and what the paper got, agree with it, and run (shrunk)."""

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from recipe_runs import flat, make_pictures

from livt_hf.cli.training_settings import FinetuneSettings, PretrainSettings
from livt_hf.configuration_livit import PRESETS
from livt_hf.hub.paper import paper_table
from livt_hf.long_tail.losses import LOSSES
from livt_hf.recipes import sweep
from livt_hf.recipes.ablations import SWEEPS
from livt_hf.runs import Run
from livt_hf.training.optim import scale_lr

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "recipes" / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
TUNED = sorted(f"tune/{path.stem}" for path in CONFIGS.glob("tune/*.yaml"))  # for any dataset
OF_THE_PAPER = [name for name in NAMES if not re.fullmatch(r"\w+-(glyphs|cifar\d+-lt(-long)?)", name)]
STAGES = {"pretrain": PretrainSettings, "finetune": FinetuneSettings}


def stage_of(name: str) -> str:
    return name.split("-")[0]


def settings(name: str, *argv: str):
    return flat(STAGES[stage_of(name)].parse(["--config", str(CONFIGS / f"{name}.yaml"), *argv]))


def header(name: str) -> list[str]:
    lines = (CONFIGS / f"{name}.yaml").read_text().splitlines()
    return [line.removeprefix("#").removeprefix(" ") for line in lines if line.startswith("#")]


def joined(lines: list[str]) -> list[str]:
    """Lines of text, those that end in a backslash made one with the next."""
    return [" ".join(line.split()) for line in "\n".join(lines).replace("\\\n", " ").splitlines()]


def command(name: str) -> list[str]:
    """The words of the command in a header."""
    (found,) = [line for line in joined(header(name)) if line.startswith("livt ")]
    return shlex.split(found)


def train_images(arguments) -> int:
    sizes = {"imagenet-lt": 115_846, "imagenet-bal": 160_000, "imagenet-1k": 1_281_167, "inat18": 437_513}
    sizes |= {"places-lt": 62_500, "cifar10-lt": 12_406, "cifar100-lt": 10_847}  # 20,431 and 19,573 at a factor of 10
    return 1000 * (arguments.images_per_class or 0) or sizes[arguments.dataset]


# What a config says of itself


@pytest.mark.parametrize("name", NAMES)
def test_a_config_parses_under_its_stage_and_is_named_after_its_dataset(name):
    arguments = settings(name)
    assert name == f"{stage_of(name)}-{arguments.dataset}" or name.startswith(f"{stage_of(name)}-{arguments.dataset}-")
    assert getattr(arguments, "loss", "ce") in LOSSES
    given = yaml.load((CONFIGS / f"{name}.yaml").read_text(), Loader=yaml.BaseLoader)
    assert list(given)[0] == "dataset"


@pytest.mark.parametrize("name", TUNED)
def test_what_is_tuned_has_a_config_whatever_the_dataset(name):
    config = flat(FinetuneSettings.parse(["--config", str(CONFIGS / f"{name}.yaml")]))
    asked = flat(FinetuneSettings.parse(command(name)[2:], CONFIGS))
    assert vars(config) | {"dataset": "FOLDER", "pretrained": "org/any-classifier"} == vars(asked)
    assert name == f"tune/{asked.tune}"


@pytest.mark.parametrize("name", [name for name in NAMES if "glyphs" not in name])
def test_a_header_has_a_command_whose_images_can_be_shared_by_1_8_and_16_processes(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    _, stage, *options = command(name)
    assert stage == stage_of(name)
    assert options[options.index("--config") + 1] == f"recipes/configs/{name}.yaml"
    arguments = flat(STAGES[stage].parse(options))
    for processes in (1, 8, 16) if name in OF_THE_PAPER else (1, 2):
        parts = processes * max(1, arguments.accumulation // processes)  # as README.md says
        assert arguments.batch_size % (2 * parts) == 0  # mixup pairs the images of a micro-batch
    assert any(line.startswith("Needs: ") for line in header(name))
    assert any(line.startswith("Paper") for line in header(name))


def test_accelerate_takes_the_launchers_of_the_readme():
    lines = joined((CONFIGS / "README.md").read_text().splitlines())
    lines = [line for line in lines if line.startswith("accelerate")]
    parsed = [launch_command_parser().parse_args(shlex.split(line.replace("RANK", "0"))[2:]) for line in lines]
    assert [(launch.num_machines or 1, launch.num_processes) for launch in parsed] == [(1, 8), (2, 16)]
    assert all((ROOT / launch.training_script).is_file() for launch in parsed)


@pytest.mark.parametrize("name", OF_THE_PAPER)
def test_the_paper_s_numbers_in_a_header_are_those_of_its_table(name):
    found = [re.fullmatch(r"Paper \(tab:([\w-]+)(?:; (.*))?\): (.*)", line) for line in header(name)]
    found = [match.groups() for match in found if match]
    assert found or stage_of(name) == "pretrain"
    for table, changed, numbers in found:
        changed = dict(change.split(" ", 1) for change in changed.split(", ")) if changed else {}
        options = {key: value for key, value in changed.items() if key not in ("method", "pretrain_dataset")}
        arguments = settings(name, *[word for key, value in options.items() for word in (f"--{key}", value)])
        wanted = vars(arguments) | changed | options
        rows = [row for row in paper_table(table) if all(same(row[key], wanted[key]) for key in row if key in wanted)]
        assert len(rows) == 1, (table, changed, rows)
        for part in numbers.split(", "):
            key, value = part.split(" ")
            assert rows[0]["accuracy" if key == "all" else key] == float(value)


def same(one, other) -> bool:
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other


# The list of the paper's tables and figures


def listed() -> list[str]:
    """Return the sweeps that the list in README.md names for the paper's tables and figures."""
    rows = re.findall(r"^\| [^|]* \| (.*) \| [\d,-]+ \| [^|]* \|$", (CONFIGS / "README.md").read_text(), re.M)
    return [command for code in rows for command in re.findall(r"`(livt sweep .*?)`", code)]


@pytest.fixture
def mae_base(tmp_path, monkeypatch):
    """The checkpoint that the commands name, as far as planning looks at it."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/pretrain-imagenet-1k-base/1")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(PRESETS["base"] | {"model_type": "vit_mae"}))


@pytest.mark.parametrize("command", listed())
def test_a_listed_sweep_prints_commands_that_parse(command, mae_base, capsys):
    sweep.main([*shlex.split(command)[2:], "--dry_run"])
    printed = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    runs = [flat(STAGES[stage].parse(words, CONFIGS)) for _, stage, *words in printed]
    folders = [run.output_dir for run in runs]
    for run in runs:
        start = getattr(run, "pretrained", "none")
        assert start in ("none", "runs/pretrain-imagenet-1k-base/1", *folders[: folders.index(run.output_dir)])
        assert run.source == ("FOLDER" if run.dataset == shlex.split(command)[4] else "IMAGENET")


def test_every_row_of_the_paper_s_tables_stands_beside_a_listed_sweep(mae_base):
    found = []
    for command in listed():
        asked = sweep.SweepSettings.parse(shlex.split(command)[2:])
        asked = asked.replace(model_size=asked.model_size or (asked.pretrained and "base"))
        variants = sweep.select_variants(SWEEPS[asked.sweep], asked.only)
        plan = sweep.Plan(asked, variants)
        found += [row for variant in variants for row in plan.paper_rows(SWEEPS[asked.sweep], variant)]
    tables = yaml.safe_load((ROOT / "livt_hf" / "hub" / "paper.yaml").read_text())
    rows = [row for table in tables for row in paper_table(table)]
    assert sum(len({"accuracy", "many", "medium", "few", "ece", "mce"} & row.keys()) for row in rows) == 226
    assert [row for row in rows if row not in found] == []


# What a config sets

PAPER_SETTINGS = {  # tab:exp_settings, row by row: ImageNet-LT, iNaturalist 2018, Places-LT
    "pretrain": {
        "epochs": (800, 800, 800),
        "warmup_epochs": (40, 40, 40),
        "batch_size": (4096, 4096, 4096),
        "adam_beta2": (0.95, 0.95, 0.95),
        "base_lr": (1.5e-4, 1.5e-4, 1.5e-4),
        "min_lr": (0, 0, 0),
        "weight_decay": (0.05, 0.05, 0.05),
        "mask_ratio": (0.75, 0.75, 0.75),
        "image_size": (224, 128, 224),
    },
    "finetune": {
        "epochs": (100, 100, 30),
        "warmup_epochs": (10, 10, 5),
        "batch_size": (1024, 1024, 1024),
        "adam_beta2": (0.99, 0.99, 0.99),
        "base_lr": (1e-3, 1e-3, 1e-3),
        "min_lr": (1e-6, 1e-6, 1e-6),
        "weight_decay": (0.05, 0.05, 0.05),
        "layer_decay": (0.75, 0.75, 0.75),
        "image_size": (224, 224, 224),
        "drop_path": (0.1, 0.2, 0.1),
        "tau": (1, 1, 1.05),
        # tab:augmentations
        "augmentation": ("rand_augment",) * 3,
        "mixup": (0.8,) * 3,
        "cutmix": (1.0,) * 3,
        "erase": (0.25,) * 3,
        "loss": ("bal_bce",) * 3,
    },
}
# Places-LT is pretrained on ImageNet-1K.
BENCHMARKS = {
    "pretrain": ("imagenet-lt", "inat18", "imagenet-1k"),
    "finetune": ("imagenet-lt", "inat18", "places-lt"),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("column", range(3))
def test_a_dataset_s_own_config_has_the_settings_of_the_appendix(stage, column):
    arguments = flat(STAGES[stage].parse(["--dataset", BENCHMARKS[stage][column]], CONFIGS))
    wanted = {key: values[column] for key, values in PAPER_SETTINGS[stage].items()}
    assert {key: getattr(arguments, key) for key in wanted} == wanted
    assert (arguments.model_size, arguments.flip, arguments.clip_grad) == ("base", True, None)


# What the logs that the authors released say: images per update, peak rate, warm-up, layer decay and drop path.
RELEASED = {
    "pretrain-imagenet-lt-released": (1024, 6e-4, 40, None, None),
    "pretrain-inat18-released": (3072, 1.8e-3, 40, None, None),
    "finetune-imagenet-lt-released": (512, 1e-3, 5, 0.75, 0.1),
    "finetune-imagenet-lt-384-released": (1024, 2e-3, 5, 0.65, 0.1),
    "finetune-inat18-released": (2048, 8e-3, 5, 0.65, 0.1),
    "finetune-inat18-384-released": (1024, 4e-3, 5, 0.65, 0.2),
}


@pytest.mark.parametrize("name", [name for name in NAMES if "released" in name])
def test_a_released_config_has_the_batch_and_the_rates_of_the_authors_log(name):
    batch, peak, warmup, layer_decay, drop_path = RELEASED[name]
    arguments = settings(name)
    assert (arguments.batch_size, arguments.warmup_epochs) == (batch, warmup)
    assert scale_lr(arguments.base_lr, batch) == pytest.approx(peak)
    if stage_of(name) == "finetune":
        assert (arguments.layer_decay, arguments.drop_path) == (layer_decay, drop_path)
        assert (arguments.adam_beta2, arguments.test_prior) == (0.999, "none")  # their loss has no log(C - 1)


@pytest.mark.parametrize(
    ("name", "lr"),
    [
        ("pretrain-imagenet-lt", 2.4e-3),
        ("finetune-imagenet-lt", 4e-3),
        ("finetune-imagenet-lt-vit", 1.6e-3),
        ("finetune-imagenet-lt-deit3", 3e-3),  # as DeiT III states it, for its 2048 images
        ("pretrain-cifar100-lt", 1e-3),
    ],
)
def test_the_rate_an_update_uses_is_the_base_rate_for_256_images(name, lr):
    arguments = settings(name)
    assert scale_lr(arguments.base_lr, arguments.batch_size) == pytest.approx(lr)


@pytest.mark.parametrize("name", [name for name in NAMES if "glyphs" not in name])
def test_a_config_leaves_updates_to_make_after_its_warm_up(name):
    arguments = settings(name)
    assert arguments.batch_size <= train_images(arguments)
    assert arguments.warmup_epochs < arguments.epochs / 4


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("-384")])
def test_a_384_config_differs_from_its_224_one_in_resolution_alone(name):
    plain, larger = settings(name.removesuffix("-384")), settings(name)
    assert vars(plain) | {"image_size": 384} == vars(larger)


def test_the_readme_lists_every_config():
    rows = re.findall(r"\| \[.*\]\(([\w/-]+)\.yaml\) \| .* \| .* \| .* \|", (CONFIGS / "README.md").read_text())
    assert sorted(rows) == NAMES + TUNED


# Three updates of every config, its model and pictures shrunk


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """An image folder of three classes: 6 training and 3 test pictures each, of 40 x 36 pixels."""
    return make_pictures(tmp_path_factory.mktemp("configs") / "pictures", (6, 6, 6), test=3, size=(40, 36))


@pytest.fixture
def shrunk(pictures, monkeypatch):
    """Runs a config once, for three updates, with a model of two layers and patches of 4; 224 pixels become 32."""
    runs = pictures.with_name("runs")
    small = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=4)
    monkeypatch.setitem(PRESETS, "micro", small)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", pictures.with_name("cache"))

    def run(name: str) -> Run:
        arguments, result = settings(name), Run(runs / name)
        if result.finished:
            return result
        size = {None: 32, 128: 16, 224: 32, 384: 56}[arguments.image_size]
        options = f"--dataset {pictures} --imbalance_factor 2 --images_per_class 6 --output_dir {result.folder}"
        options += f" --model_size micro --image_size {size} --batch_size 8 --threads 1 --max_steps 3 --compile false"
        argv = ["--config", str(CONFIGS / f"{name}.yaml"), *options.split()]
        if arguments.stage == "finetune" and arguments.pretrained is None:
            own = f"pretrain-{arguments.dataset}"
            argv += ["--pretrained", str(run(own if own in NAMES else "pretrain-imagenet-1k").folder)]
        importlib.import_module(f"livt_hf.recipes.{stage_of(name)}").main(argv)
        return result

    return run


def one_of_each_kind() -> list[str]:
    """Return a config of every combination of the settings that choose code, not numbers."""
    keys = "loss optimizer augmentation tune ema_decay mixup pretrained test_prior decode_ratio keep_ratio image_size"
    found = {}
    for name in NAMES:
        options = settings(name)
        found.setdefault((options.stage, *(getattr(options, key, None) for key in keys.split())), name)
    return list(found.values())


@pytest.mark.parametrize("name", one_of_each_kind())
def test_three_updates_of_a_config_shrunk_end_with_results(name, shrunk):
    run, wanted = shrunk(name), settings(name)
    assert run.results.updates == 3
    assert run.results.weights == ("model" if wanted.ema_decay is None else "ema")
    for key in ("loss", "optimizer", "augmentation", "mixup", "base_lr"):  # three updates are fewer epochs
        assert run.arguments.get(key) == getattr(wanted, key, None)
    if stage_of(name) == "finetune":
        assert run.results.num_images == 9
        assert 0 <= run.results.metrics["accuracy"] <= 1
