"""The ablations: what they vary, what they run, and the table they end in."""

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.axes import Axes
from recipe_runs import RECIPES, TINY, flat, make_pictures
from refusals import refusal

from livt_hf.cli.options import write_config
from livt_hf.cli.resume import resolve_training
from livt_hf.cli.training_settings import FinetuneSettings, PretrainSettings
from livt_hf.configuration_livit import PRESETS, LiViTConfig
from livt_hf.errors import Interrupted, LiVTError
from livt_hf.long_tail.loss_table import LOSSES
from livt_hf.predictions.rules import ARGMAX, UNIFORM
from livt_hf.recipes import sweep as recipe
from livt_hf.recipes.ablations import DEIT, MAE, SWEEPS, VIT, Sweep, Variant, summarise, table_rows
from livt_hf.recipes.paper import figures
from livt_hf.results import Results
from livt_hf.runs import Run

CONFIGS = RECIPES / "configs"


def result(
    accuracy: float, few: float | None = 0.1, posterior: float | None = None, seconds: float = 60, **said
) -> Results:
    metrics = {"accuracy": accuracy, "many": 0.5, "medium": None, "few": few, "ece": 0.02, "num_images": 100}
    said = {"stage": "finetune", "dataset": "glyphs"} | said
    rules = {ARGMAX: metrics} | ({} if posterior is None else {UNIFORM: {"accuracy": posterior}})
    return Results(rules=rules, seconds=seconds, **said)


def test_a_row_is_mean_and_sample_deviation_in_percent():
    runs = [result(0.50, 0.1, 0.6, 60), result(0.54, 0.3, 0.7, 180)]
    row, single = summarise(
        {"two": runs, "one": runs[:1]},
        lambda label: {"accuracy": 60.9, "model_size": "base"} if label == "two" else None,
    )
    assert (row["accuracy"], row["accuracy_deviation"]) == pytest.approx((52, 2 * 2**0.5))
    assert (row["few"], row["few_deviation"]) == pytest.approx((20, 200**0.5))
    assert (row["posterior_accuracy"], row["minutes"], row["seeds"]) == pytest.approx((65, 2, 2))
    assert row["medium"] is None and row["medium_deviation"] is None
    assert single["accuracy"] == pytest.approx(50) and single["accuracy_deviation"] is None
    assert [row["variant"], single["variant"]] == ["two", "one"]
    table = table_rows([row, single])
    assert table[0] == {
        "variant": "two", "accuracy": "52.0 ± 2.8", "many": "50.0 ± 0.0", "medium": "-", "few": "20.0 ± 14.1",
        "ece": "2.0 ± 0.0", "posterior rule": "65.0", "seeds": 2, "paper": "60.9 (ViT-B)",
    }  # fmt: skip
    assert (table[1]["accuracy"], table[1]["paper"]) == ("50.0", "-")
    (line,) = table_rows(summarise({"a": [result(0.5)]}))  # without a number of the paper there is no column for it
    assert "paper" not in line and line["posterior rule"] == "-"


def planned(*words: str) -> tuple[Sweep, recipe.Plan]:
    settings = recipe.SweepSettings.parse(list(words))
    return SWEEPS[settings.sweep], recipe.Plan(settings, SWEEPS[settings.sweep].variants)


def variant_of(sweep: Sweep, label: str) -> Variant:
    (found,) = [variant for variant in sweep.variants if variant.label == label]
    return found


@pytest.mark.parametrize(
    ("words", "label", "said"),
    [
        ("losses --dataset imagenet-lt", "bal_bce", (60.9, "base")),
        ("losses --dataset imagenet-lt", "ce", (54.5, "base")),
        ("losses --dataset imagenet-lt --model_size tiny", "ce", (37.0, "tiny")),
        ("losses --dataset imagenet-lt --model_size micro", "ce", (54.5, "base")),  # named as what it is
        ("losses --dataset glyphs", "ce", None),
        ("rebalancing --dataset cifar100-lt", "ldam", (52.56, "base")),
        ("rebalancing --dataset cifar10-lt --imbalance_factor 10", "bal_bce", (91.3, "base")),
        ("rebalancing --dataset cifar10-lt --imbalance_factor 50", "bal_bce", None),
        ("rebalancing --dataset cifar10-lt", "cb_bce", None),
        ("sizes --dataset imagenet-lt", "large, bce", (53.4, "large")),
        ("recipes --dataset imagenet-lt", "DeiT III", (48.4, "base")),
        ("recipes --dataset imagenet-bal", "ViT", (38.7, "base")),
        ("recipes --dataset imagenet-bal", "LiVT", None),
        ("recipes --dataset inat18", "MAE", (69.4, "base")),
        ("recipes --dataset imagenet-lt --model_size small", "ViT", None),  # a recipe is compared with itself alone
        ("recipes --dataset places-lt", "LiVT", None),
        ("places --dataset places-lt", "LiVT", (40.8, "base")),
        ("places --dataset places-lt", "DeiT III", (34.2, "base")),
        ("places --dataset places-lt", "LiVT, 384", (42.6, "base")),
        ("transfer --dataset inat18", "LT, bal_bce", (60.7, "base")),
        ("transfer --dataset inat18", "BAL, ce", (55.9, "base")),
        ("resolution --dataset inat18", "ViT, 384", (56.3, "base")),
        ("resolution --dataset imagenet-lt", "LiVT, 384", (63.8, "base")),
        ("deit_bias --dataset imagenet-lt", "bal_bce", (46.0, "small")),
        ("tau --dataset imagenet-lt", "1", None),
    ],
)
def test_the_paper_s_number_stands_beside_the_paper_s_setting(words, label, said):
    sweep, plan = planned(*words.split())
    row = plan.paper(sweep, variant_of(sweep, label))
    assert (row and (row["accuracy"], row["model_size"])) == said


def test_without_a_word_about_the_size_the_numbers_are_those_of_the_checkpoint_s(sweep, tmp_path, checkpoint):
    printed = sweep("stages", "--pretrained", checkpoint("micro"), "--dry_run").splitlines()
    starts = [flat(FinetuneSettings.parse(shlex.split(line)[2:], CONFIGS)).pretrained for line in printed]
    assert sorted(Path(start).name for start in starts) == ["micro", "micro", "none"]  # from scratch stays so
    printed = sweep("losses", "--dataset", "imagenet-lt", "--pretrained", checkpoint("small"), "--dry_run")
    assert printed.count("finetune-imagenet-lt-small.yaml --model_size small") == 4
    assert str(tmp_path / "sweeps" / "imagenet-lt-small" / "bft") in printed


@pytest.fixture
def checkpoint(tmp_path):
    """Makes a folder that says which size of a ViT it holds, and nothing more."""

    def make(size: str, **other) -> Path:
        (tmp_path / size).mkdir()
        sizes = PRESETS[size] | {"model_type": "vit_mae"} | other
        (tmp_path / size / "config.json").write_text(json.dumps(sizes))
        return tmp_path / size

    return make


@pytest.mark.parametrize("dataset", ["imagenet-lt", "imagenet-bal", "inat18"])
def test_a_recipe_of_the_paper_is_trained_by_its_own_config(dataset):
    sweep, plan = planned("recipes", "--dataset", dataset)
    runs = {label: flat(plan.runs[folders[0]].settings) for label, folders in plan.runs_of.items()}
    assert (runs["ViT"].epochs, runs["ViT"].batch_size, runs["ViT"].pretrained) == (800, 4096, "none")
    assert (runs["DeiT III"].epochs, runs["DeiT III"].optimizer, runs["DeiT III"].pretrained) == (800, "lamb", "none")
    assert {run.dataset for run in runs.values()} == {dataset}
    own = flat(FinetuneSettings.parse(["--dataset", dataset], CONFIGS))
    assert (runs["LiVT"].epochs, runs["LiVT"].layer_decay, runs["LiVT"].loss) == (100, own.layer_decay, "bal_bce")
    assert (runs["MAE"].epochs, runs["MAE"].loss) == (100, "ce")
    assert runs["MAE"].warmup_epochs == (10 if dataset == "inat18" else 5)  # MAE's own where there is a config


@pytest.mark.parametrize("variant", [VIT, DEIT, MAE], ids=lambda variant: variant.label)
def test_the_options_that_stand_for_a_recipe_on_other_data_are_those_of_its_config(variant):
    for config in set(variant.configs.values()):
        settings = flat(FinetuneSettings.parse(["--config", str(CONFIGS / f"{config}.yaml")]))
        assert {name: getattr(settings, name) for name in variant.finetune} == variant.finetune


def test_the_data_of_another_stage_has_a_folder_of_its_own(sweep):
    sources = "--source INAT --imbalance_factor 50 --pretrain".split()
    printed = sweep("transfer", "--dataset", "inat18", *sources, "--source IMAGENET --lists L", "--dry_run")
    first = [line for line in printed.splitlines() if line.startswith("livt pretrain")]
    for line, data in zip(first, ("imagenet-bal", "imagenet-lt"), strict=True):
        settings = flat(PretrainSettings.parse(shlex.split(line)[2:], CONFIGS))
        assert (settings.dataset, settings.source, settings.lists) == (data, "IMAGENET", "L")
        assert (settings.imbalance_factor, settings.epochs) == (None, 800)
        assert settings.images_per_class == {"imagenet-bal": 116, "imagenet-lt": None}[data]
    second = [flat(FinetuneSettings.parse(shlex.split(line)[2:], CONFIGS)) for line in printed.splitlines()[2:]]
    assert {(run.dataset, run.source, run.lists, run.imbalance_factor) for run in second} == {
        ("inat18", "INAT", None, 50)
    }


def test_a_model_that_others_start_from_is_trained_first_and_on_its_own_data(sweep):
    sources = ["--source", "PLACES", "--pretrain", "--source IMAGENET"]
    printed = sweep("places", "--dataset", "places-lt", *sources, "--only", "DeiT III", "--dry_run").splitlines()
    first, second = (flat(FinetuneSettings.parse(shlex.split(line)[2:], CONFIGS)) for line in printed)
    assert (first.dataset, first.source, first.pretrained, first.epochs) == ("imagenet-1k", "IMAGENET", "none", 800)
    assert (second.dataset, second.source, second.epochs, second.pooling) == ("places-lt", "PLACES", 30, "cls")
    assert second.pretrained == first.output_dir


def test_crt_trains_the_classifier_again_on_balanced_draws_of_the_finished_ce_run(runs, sweep, tmp_path):
    sweep("rebalancing", "--only", "ce", "cRT", "--finetune", "--mixup 0.2")
    folder = tmp_path / "sweeps" / "glyphs" / "bft"
    ce, crt = (Run(path).arguments for path in (folder / "loss=ce_seed=0", *folder.glob("after=ce*seed=0")))
    assert (ce["loss"], ce["tune"], ce["sampler"], ce["mixup"]) == ("ce", None, "natural", 0.2)
    assert (crt["loss"], crt["tune"], crt["sampler"], crt["mixup"]) == ("ce", "head", "balanced", 0)
    assert crt["pretrained"] == str(folder / "loss=ce_seed=0")
    assert crt["epochs"] == flat(FinetuneSettings.parse(["--tune", "head"], CONFIGS)).epochs != ce["epochs"]
    assert len(runs.of("finetune")) == 2  # the row of CE is what cRT starts from


@pytest.mark.parametrize("name", SWEEPS)
def test_every_option_of_a_sweep_is_one_its_stage_takes(name):
    labels = [variant.label for variant in SWEEPS[name].variants]
    assert len(set(labels)) == len(labels) > 1
    for variant in SWEEPS[name].variants:
        for options, stage in ((variant.finetune, FinetuneSettings), (variant.pretrain or {}, PretrainSettings)):
            words = [word for option, value in options.items() for word in (f"--{option}", str(value))]
            parsed = flat(stage.parse(words))
            assert {option: getattr(parsed, option) for option in options} == options


class Runs:
    """Stands in for the commands of a sweep: writes what a finished run leaves, or fails."""

    def __init__(self):
        self.commands, self.failing = [], ()

    def __call__(self, command, output):
        options = dict(zip(command, command[1:], strict=False))
        folder = Path(options["--output_dir"])
        self.commands.append(command)
        stage, *words = command
        output.write(f"training {folder.name}\n")
        if any(word in folder.name for word in self.failing):
            output.write("error: what was wrong\n")
            return SimpleNamespace(wait=lambda: 1)
        finetune = stage == "finetune"
        settings, _ = resolve_training(FinetuneSettings if finetune else PretrainSettings, words)
        arguments = flat(settings)
        folder.mkdir()
        write_config(settings, folder / "arguments.yaml")
        LiViTConfig.preset("micro").save_pretrained(folder)
        said = {"model_size": "micro", "num_train_images": 1234, "epochs": arguments.epochs, "seed": arguments.seed}
        accuracy = {"bal_bce": 0.6}.get(arguments.loss, 0.4) + arguments.seed / 10 if finetune else 0
        Run(folder).write_results(result(accuracy, **said))
        return SimpleNamespace(wait=lambda: 0)

    def of(self, stage: str) -> list[list[str]]:
        return [command for command in self.commands if command[0] == stage]


@pytest.fixture
def runs(monkeypatch) -> Runs:
    faked = Runs()
    monkeypatch.setattr(recipe, "start_command", faked)
    return faked


@pytest.fixture
def sweep(monkeypatch, tmp_path, capsys):
    """recipes/sweep.py in this process, its runs under tmp_path; returns what it printed."""
    monkeypatch.setenv("LIVT_RUNS", str(tmp_path))

    def run(*options) -> str:
        recipe.main([str(option) for option in options])
        return capsys.readouterr().out

    return run


def test_variants_share_one_pretraining_a_seed_and_end_in_a_table(runs, sweep, tmp_path):
    printed = sweep("losses", "--seeds", 0, 1, "--pretrain", "--epochs 5", "--finetune", "--epochs 7")
    assert len(runs.of("pretrain")) == 2 and len(runs.of("finetune")) == 8
    for command in runs.of("finetune"):
        options = dict(zip(command, command[1:], strict=False))
        assert options["--pretrained"] == str(tmp_path / "sweeps" / "glyphs" / "mgp" / f"seed={options['--seed']}")
        assert (options["--epochs"], options["--resume"], options["--dataset"]) == ("7", "auto", "glyphs")
    report = tmp_path / "sweeps" / "glyphs" / "losses"
    written = json.loads((report / "sweep.json").read_text())
    assert [row["variant"] for row in written["rows"]] == ["ce", "bal_ce", "bce", "bal_bce"]
    assert written["rows"][3]["accuracy"] == pytest.approx(65)
    assert written["budget"].startswith("micro, 1,234 training images; MGP 5 epochs (1 minutes per run); BFT 7 epo")
    assert written["budget"].endswith("seeds 0, 1")
    assert written["command"] == "livt sweep losses --seeds 0 1 '--pretrain=--epochs 5' '--finetune=--epochs 7'"
    assert "| bal_bce | 65.0 ± 7.1 |" in printed and "| bal_bce | 65.0 ± 7.1 |" in (report / "table.md").read_text()
    assert (report / "plot.png").stat().st_size > 1000
    logs = list((tmp_path / "sweeps" / "glyphs" / "bft").glob("*.out"))
    assert len(logs) == 4 * 2  # every run has one of its own
    assert all(log.read_text() == f"training {log.name.removesuffix('.out')}\n" for log in logs)
    sweep("losses", "--only", "ce", "--imbalance_factor", 10)  # another imbalance has a folder of its own
    assert sorted(path.name for path in (tmp_path / "sweeps").iterdir()) == ["glyphs", "glyphs-10"]


def test_what_is_done_is_skipped_also_by_another_sweep(runs, sweep):
    sweep("losses")
    done = len(runs.commands)
    sweep("losses")
    assert len(runs.commands) == done
    sweep("rebalancing")  # ce, bal_ce and bal_bce are there; the pretraining too
    assert len(runs.of("pretrain")) == 1
    assert len(runs.commands) - done == len(SWEEPS["rebalancing"].variants) - 3
    done = len(runs.commands)
    sweep("stages")  # its first row says nothing where "losses" says bal_bce, the default: the same run
    assert [dict(zip(c, c[1:], strict=False))["--pretrained"] for c in runs.commands[done:]] == ["none"]
    sweep("tau", "--only", "0.5", "1")
    sweep("head_start", "--only", "bal_bce, prior")
    assert len(runs.commands) - done == 2  # tau 0.5 alone is new


def test_where_pretraining_differs_its_time_is_part_of_the_table(runs, sweep):
    printed = sweep("decode_ratio")
    assert "MGP, minutes" in printed and printed.count("| 1.0 |") == len(runs.of("pretrain")) == 3
    assert "MGP, minutes" not in sweep("losses")


def test_the_time_of_pretraining_is_that_of_no_other_start(runs, tmp_path):
    first = Variant("first", {"loss": "ce"})
    variants = [first, Variant("second", {"loss": "ce", "sampler": "balanced"}, start=first)]
    plan = recipe.Plan(recipe.SweepSettings.build(output_dir=str(tmp_path / "sweep")), variants)
    recipe.run_plan(plan)
    assert {label: len(found) for label, found in plan.first_stages().items()} == {"first": 1, "second": 0}


def test_some_of_a_sweep_s_variants(runs, sweep, tmp_path):
    printed = sweep("losses", "--only", "bce", "ce")
    assert len(runs.of("finetune")) == 2
    assert "| ce |" in printed and "| bce |" in printed and "bal_bce" not in printed.split("--- |")[-1]
    with refusal("only", "'bec'", "bal_ce"):
        sweep("losses", "--only", "bec")
    printed = sweep()  # the list of all
    for name, entry in SWEEPS.items():
        assert f"{name:14s} {entry.title}: {'; '.join(variant.label for variant in entry.variants)}" in printed


def test_a_sweep_of_losses_takes_a_loss_of_a_plugin_beside_its_own(runs, sweep, tmp_path, request):
    request.addfinalizer(lambda: LOSSES.pop("my_ce", None))
    plugin = tmp_path / "my_plugin.py"
    plugin.write_text(
        "from livt_hf.losses import register_loss\n"
        "@register_loss('my_ce', activation='softmax', soft_labels=False)\n"
        "def my_ce(batch):\n"
        "    return -(batch.targets * batch.adjusted.log_softmax(-1)).sum(-1)\n"
    )
    words = "losses", "--plugin", plugin, "--only", "my_ce", "bal_bce"
    commands = sweep(*words, "--dry_run").splitlines()  # which are printed, and nothing is started
    assert [shlex.split(line)[:2] for line in commands] == [["livt", "pretrain"]] + [["livt", "finetune"]] * 2
    assert all(f"--plugin {plugin}" in line for line in commands) and runs.commands == []
    printed = sweep(*words)
    assert "| my_ce |" in printed and "| bal_bce |" in printed
    assert {"--mixup 0", "--loss my_ce"} <= {f"{a} {b}" for a, b in itertools.pairwise(runs.of("finetune")[1])}
    with refusal("only", "my_ce"):
        sweep("tau", "--plugin", plugin, "--only", "my_ce")


def test_a_run_under_way_with_other_settings_is_not_gone_on_with(runs, sweep, tmp_path):
    """Nor is a finished one passed off as what is wanted."""
    folder = tmp_path / "sweeps" / "glyphs" / "bft" / "loss=ce_seed=0"
    sweep("losses", "--only", "ce", "--finetune", "--epochs 7 --threads 7")
    assert Run(folder).arguments["threads"] == 7
    with refusal("output_dir", "mask_ratio was 0.75 and is now 0.5"):
        sweep("losses", "--only", "ce", "--pretrain", "--mask_ratio 0.5", "--finetune", "--epochs 7")
    for results in (folder / "results.json", folder / "log.jsonl"):
        with refusal("output_dir", "epochs was 7 and is now 8"):
            sweep("losses", "--only", "ce", "--finetune", "--epochs 8")
        results.unlink(missing_ok=True)  # as if killed
    done = len(runs.commands)
    with pytest.raises(FileExistsError):  # the stand-in makes its folder anew: it was asked to go on
        sweep("losses", "--only", "ce", "--finetune", "--epochs 7")
    assert len(runs.commands) == done + 1 and "--resume" in runs.commands[-1]


def test_a_failed_run_is_reported_with_its_command_and_log_and_tried_again(runs, sweep, tmp_path, monkeypatch):
    runs.failing = ("loss=bce",)
    with pytest.raises(LiVTError) as stopped:
        sweep("losses")
    said = str(stopped.value)
    log = tmp_path / "sweeps" / "glyphs" / "bft" / "loss=bce_seed=0.out"
    assert f"failed; see {log}" in said and "\nlivt finetune --threads" in said and "--loss bce" in said
    assert (
        said.startswith("what was wrong\n") and log.read_text() == "training loss=bce_seed=0\nerror: what was wrong\n"
    )
    assert runs.commands[-1] == runs.of("finetune")[-1] and "bal_bce" not in runs.commands[-1]  # nothing after it
    assert not (tmp_path / "sweeps" / "glyphs" / "losses").exists()
    with monkeypatch.context() as patch:  # what was wrong with this try is not said of the next
        patch.setattr(recipe, "start_command", lambda *_: SimpleNamespace(wait=lambda: 1))
        with pytest.raises(LiVTError, match="^livt finetune "):
            sweep("losses")
    runs.failing = ()
    done = len(runs.commands)
    sweep("losses")
    again = {dict(zip(c, c[1:], strict=False))["--loss"] for c in runs.commands[done:]}
    assert again == {"bce", "bal_bce"}


def test_a_sweep_that_is_told_to_stop_stops_its_runs_and_begins_no_more(sweep, monkeypatch):
    begun = []

    def sleeper(_words, _output):
        begun.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return begun[-1]

    monkeypatch.setattr(recipe, "start_command", sleeper)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted):
        sweep("losses", "--pretrained", "none")
    assert [command.returncode for command in begun] == [-signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_sweep_over_a_folder_keeps_its_runs_out_of_that_folder(runs, sweep, tmp_path):
    pictures = tmp_path / "data" / "pictures"
    pictures.mkdir(parents=True)
    options = "--model_size micro --batch_size 16"
    sweep("stages", "--dataset", pictures, "--pretrain", options, "--finetune", options)
    assert list(pictures.iterdir()) == []
    assert (tmp_path / "sweeps" / "pictures" / "stages" / "table.md").exists()


def test_the_recorded_command_names_no_path_of_this_machine(monkeypatch, tmp_path):
    (tmp_path / "data" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    said = ["tau", "--dataset", "data/here", "--source", str(tmp_path), f"--output_dir={tmp_path}"]
    said += ["--finetune", f"--epochs 3 --lists '{tmp_path}/my lists' --base_lr=1e-3", "--imbalance_factor", "100"]
    printed = recipe.command(recipe.SweepSettings.parse(said))
    assert str(tmp_path) not in printed and printed.count("FOLDER") == 4
    again = recipe.SweepSettings.parse(shlex.split(printed)[2:])
    assert (again.sweep, again.imbalance_factor, again.finetune) == (
        "tau",
        100,
        "--epochs 3 --lists FOLDER --base_lr=1e-3",
    )
    printed = recipe.command(recipe.SweepSettings.parse(["losses", "--dataset", "org/name", "--seeds", "0", "1"]))
    assert printed == "livt sweep losses --dataset org/name --seeds 0 1"


def test_the_recorded_command_of_a_sweep_from_any_checkpoint_is_one_that_runs(sweep, checkpoint, monkeypatch):
    asked = []
    monkeypatch.setattr(recipe, "run_plan", lambda plan: asked.append(plan.settings))
    sweep("tau", "--dataset", "cifar100-lt", "--pretrained", checkpoint("base", hidden_size=24), "--dry_run")
    assert recipe.SweepSettings.parse(shlex.split(recipe.command(asked[0]))[2:]).sweep == "tau"


def test_a_sweep_may_start_from_a_checkpoint_that_exists(runs, sweep, checkpoint):
    folder = checkpoint("base")
    printed = sweep("tau", "--dataset", "cifar100-lt", "--pretrained", folder, "--dry_run").splitlines()
    for line in printed:
        command, stage, *words = shlex.split(line)
        settings = flat(FinetuneSettings.parse(words, CONFIGS))
        assert (command, stage, settings.pretrained) == ("livt", "finetune", str(folder))
        # Its size has a config of its own; the dataset's is for a micro ViT at 32 pixels.
        assert (settings.model_size, settings.image_size, settings.batch_size) == ("base", 224, 1024)


@pytest.mark.slow
def test_a_real_sweep_trains_and_compares_its_variants(sweep, tmp_path, monkeypatch):
    two = Sweep("Two losses", [Variant(name, {"loss": name}) for name in ("ce", "bal_bce")], "loss")
    monkeypatch.setitem(SWEEPS, "losses", two)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    pictures = make_pictures(tmp_path / "pictures")
    stage = shlex.join(TINY[: TINY.index("--threads")])
    sweep("losses", "--dataset", pictures, "--pretrain", stage, "--finetune", stage, "--jobs", 2)
    folder = tmp_path / "sweeps" / "pictures"
    rows = json.loads((folder / "losses" / "sweep.json").read_text())["rows"]
    names = {"ce": "loss=ce_seed=0", "bal_bce": "seed=0"}
    results = [json.loads((folder / "bft" / names[row["variant"]] / "results.json").read_text()) for row in rows]
    assert [row["accuracy"] for row in rows] == [100 * result["metrics"]["accuracy"] for result in results]
    assert {result["pretrained"] for result in results} == {str(folder / "mgp" / "seed=0")}
    modified = [path.stat().st_mtime_ns for path in sorted(folder.glob("*/*/results.json"))]
    sweep("losses", "--dataset", pictures, "--pretrain", stage, "--finetune", stage)
    assert [path.stat().st_mtime_ns for path in sorted(folder.glob("*/*/results.json"))] == modified


def test_the_picture_of_sizes_has_a_line_for_each_loss_and_start(tmp_path, monkeypatch):
    drawn, plot = [], Axes.plot

    def noted(ax, x, y, **look):
        drawn.append((look["label"], x, y))
        return plot(ax, x, y, **look)

    monkeypatch.setattr(Axes, "plot", noted)
    for number, (loss, start, size, accuracy) in enumerate(
        [("bal_bce", "mgp", 86, 0.6), ("bal_bce", "mgp", 22, 0.5), ("ce", "mgp", 86, 0.4), ("ce", "none", 86, 0.3)]
    ):
        (tmp_path / str(number)).mkdir()
        said = result(accuracy, loss=loss, pretrained=start, parameters=size * 10**6)
        Run(tmp_path / str(number)).write_results(said)
    figures.main(["sizes", str(tmp_path / "sizes.png"), *(str(tmp_path / str(number)) for number in range(4))])
    assert (tmp_path / "sizes.png").exists()
    assert drawn == [("bal_bce", (22, 86), (50, 60)), ("ce", (86,), (40,)), ("ce, from scratch", (86,), (30,))]
    Run(tmp_path / "0").write_results(Results(stage="pretrain", dataset="glyphs", metrics={"loss": 0.5}))
    for figure, number in {"sizes": "0", "reconstructions": "1"}.items():
        with pytest.raises(LiVTError, match=f"{figure} needs .* runs; .*/{number} is of the other stage"):
            figures.main([figure, str(tmp_path / "x.png"), str(tmp_path / number)])
