"""`livt compare`: four ways to train on the same images, at one budget."""

import contextlib
import importlib
import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate.state import AcceleratorState
from recipe_runs import make_pictures
from refusals import refusal
from test_sweep import Runs
from test_tuning import dinov2

from livt_hf.cli.training_settings import FinetuneSettings, PretrainSettings
from livt_hf.recipes import compare as recipe
from livt_hf.recipes import sweep
from livt_hf.results import Results

CONFIGS = Path(recipe.__file__).parent / "configs"


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LIVT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    make_pictures(tmp_path / "pictures", train=(160, 80, 40, 10))
    dinov2(tmp_path / "backbone")
    return tmp_path


def compared(place: Path, *options) -> Path:
    words = [place / "pictures", "--pretrained", place / "backbone", "--minutes", 60, *options]
    recipe.main([str(word) for word in words])
    return place / "runs" / "compare" / "pictures-backbone-60"


def test_each_way_gets_the_same_time_and_both_stages_from_scratch_share_theirs(place, capsys):
    compared(place, "--dry_run", "--min_images", 2, "--image_size", 16)
    printed = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    stages = {"pretrain": PretrainSettings, "finetune": FinetuneSettings}
    first, *backbones, second = [stages[words[1]].parse(words[2:], CONFIGS) for words in printed]
    assert first.optimization.hours + second.optimization.hours == pytest.approx(1)
    assert (second.model.pretrained, second.model.tune) == (first.output_dir, None)
    assert first.model.image_size == second.model.image_size == 32  # as large as the images are
    assert {run.model.tune: run.optimization.hours for run in backbones} == {"head": None, "lora": 1, "full": 1}
    assert {(run.model.pretrained, run.model.image_size) for run in backbones} == {(str(place / "backbone"), 16)}
    assert {run.data.min_images for run in (first, second, *backbones)} == {2}


def test_no_way_mixes_images_where_the_loss_wants_hard_labels(place, capsys):
    compared(place, "--dry_run", "--loss", "lade")
    printed = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    seconds = [FinetuneSettings.parse(words[2:], CONFIGS) for words in printed if words[1] == "finetune"]
    assert len(seconds) == 4 and all(run.augmentation.mixup == run.augmentation.cutmix == 0 for run in seconds)


def test_a_way_that_cannot_be_gone_is_refused_before_any_other_is(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setattr(sweep, "start_command", lambda *_: pytest.fail("was run"))
    with refusal(None, "peft"):
        compared(place)


def test_a_comparison_ends_in_a_table_and_a_picture_and_runs_what_is_done_no_more(place, monkeypatch, capsys):
    runs = Runs()
    monkeypatch.setattr(sweep, "start_command", runs)
    folder = compared(place, "--ways", "scratch", "head", "--seeds", 0, 1)
    assert len(runs.of("pretrain")) == 2 and len(runs.of("finetune")) == 4
    rows = {row["variant"]: row for row in json.loads((folder / "compare.json").read_text())["rows"]}
    assert rows["frozen, head only"]["epochs"] == "60" and rows["from scratch"]["epochs"].count("+") == 1
    assert rows["from scratch"]["minutes"] == pytest.approx(2 * rows["frozen, head only"]["minutes"])
    assert (folder / "plot.png").stat().st_size > 1000
    assert "Best: " in capsys.readouterr().out
    compared(place, "--ways", "scratch", "head", "--seeds", 0, 1)
    assert len(runs.commands) == 6


def test_a_comparison_goes_on_where_few_images_have_lowered_the_batch(place, monkeypatch):
    runs = Runs()
    monkeypatch.setattr(sweep, "start_command", runs)
    (begun,) = compared(place, "--ways", "head").glob("bft/*/arguments.yaml")
    begun.write_text(begun.read_text().replace("batch_size: 256", "batch_size: 16"))
    compared(place, "--ways", "head", "--seeds", 0, 1)
    assert len(runs.commands) == 2
    begun.write_text(begun.read_text().replace("\nepochs: 60", "\nepochs: 61"))
    with refusal("output_dir", "epochs was 61 and is now 60"):
        compared(place, "--ways", "head")


def test_images_with_several_labels_are_refused_before_anything_is_trained(place):
    rows = [f"{path},{'a|b' if n % 2 else 'a'}" for n, path in enumerate(sorted((place / "pictures").rglob("*.png")))]
    (place / "labels.csv").write_text("\n".join(["path,label", *rows]))
    with refusal(None, "several labels"):
        recipe.main([str(place / "labels.csv"), "--label_separator", "|", "--pretrained", str(place / "backbone")])


def test_unknown_ways_and_a_missing_backbone_are_refused(place):
    for words, argument in ((["--ways", "heads", "--pretrained", "x"], "ways"), ([], "pretrained")):
        with refusal(argument):
            recipe.main([str(place / "pictures"), *words])


def in_this_process(words: list[str], _output) -> SimpleNamespace:
    """Stands in for a command of its own: it runs here, where everything is imported already."""
    AcceleratorState._reset_state(reset_partial_state=True)
    importlib.import_module(f"livt_hf.recipes.{words[0]}").main(words[1:])
    return SimpleNamespace(wait=lambda: 0)


class InTurn(contextlib.nullcontext):
    """Stands in for a pool of threads: a training listens to signals, which only the main thread can."""

    map = staticmethod(map)

    def __init__(self, _jobs: int):
        super().__init__(self)


@pytest.mark.slow
def test_a_real_comparison_measures_every_way(place, monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.setattr(sweep, "start_command", in_this_process)
    monkeypatch.setattr(sweep, "ThreadPoolExecutor", InTurn)
    words = [place / "pictures", "--pretrained", place / "backbone", "--minutes", 0.1]
    recipe.main([str(word) for word in words])
    folder = place / "runs" / "compare" / "pictures-backbone-0.1"
    rows = json.loads((folder / "compare.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == ["from scratch", "frozen, head only", "LoRA", "all of it"]
    assert all(row["minutes"] > 0 and row["accuracy"] is not None for row in rows)


def test_ways_are_ranked_and_described_by_the_mean_of_their_seeds():
    def runs(*accuracies: float) -> list[Results]:
        metrics = [{"accuracy": accuracy, "num_images": 1000} for accuracy in accuracies]
        return [Results(stage="finetune", dataset="birds", metrics=one) for one in metrics]

    said = recipe.format_verdict({"full": runs(0.6, 0.5), "head": runs(0.5, 0.7)})
    assert said.startswith("Best: 'head', then 'full'.")
    assert said.index("60.0 %") < said.index("55.0 %")
