"""Settings: where values come from, how they are written, which raise an error, what is resumed and inherited."""

import dataclasses
import functools
import json
import logging
import re
from pathlib import Path

import pytest
from datasets import ClassLabel, Dataset, Features
from refusals import refusal

from livt_hf import LiViTForPreTraining, LongTailConfig, pretraining_config
from livt_hf.cli.console import format_next_command, render_flags, run_command
from livt_hf.cli.inherit import (
    Resolved,
    find_pretraining,
    inherit_from_checkpoint,
    inherit_from_pretraining,
    resolve_settings,
)
from livt_hf.cli.options import format_words, parse_words, read_config, write_config
from livt_hf.cli.publish import check_publishing
from livt_hf.cli.resume import resolve_training
from livt_hf.cli.settings import (
    COMMANDS,
    CalibrateSettings,
    DemoSettings,
    EvalSettings,
    InspectDataSettings,
    PublishDataSettings,
    PublishSettings,
    settings_class,
)
from livt_hf.cli.training_settings import CompareSettings, FinetuneSettings, PretrainSettings, TrainSettings
from livt_hf.data.spec import DataSpec
from livt_hf.errors import LiVTError
from livt_hf.files import read_values, replacing
from livt_hf.long_tail.loss_table import LOSSES
from livt_hf.plugins import find_module, load_plugin
from livt_hf.predictions.rules import ARGMAX, TEST_PRIOR, UNIFORM
from livt_hf.recipes.train import stage_options
from livt_hf.results import Results
from livt_hf.runs import PLAN, Run, new_run
from livt_hf.specs import REQUIRED, Spec, option, part
from livt_hf.training.results import is_own
from livt_hf.training.start import build_classifier


@pytest.fixture
def configs(tmp_path) -> Path:
    """A folder of configs, with one for glyphs in each stage."""
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "pretrain-glyphs.yaml").write_text("dataset: glyphs\nmodel_size: micro\nepochs: 30\nseed: 5\n")
    (folder / "finetune-glyphs.yaml").write_text("dataset: glyphs\nmodel_size: micro\nepochs: 20\n")
    return folder


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LIVT_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def started(*argv: str) -> Run:
    """Start a pretraining and do not finish it."""
    settings = PretrainSettings.parse(list(argv))
    run = new_run(settings.run_name, settings.output_dir)
    run.begin(settings.to_dict())
    return run


def finished(*argv: str) -> Run:
    run = started(*argv)
    run.write_results(Results(stage="pretrain", dataset="glyphs"))
    return run


def pretrain(*argv: str, configs: Path | None = None) -> PretrainSettings:
    return PretrainSettings.parse(list(argv), configs)


# Where a value comes from


def test_a_value_comes_from_the_command_line_then_the_datasets_config_then_the_defaults(configs, tmp_path):
    values = pretrain("--epochs", "3", configs=configs).to_dict()
    assert [values[name] for name in ("epochs", "seed", "batch_size")] == [3, 5, 4096]
    mine = written(tmp_path / "mine.yaml", "epochs: 7\n")  # a named config replaces the dataset's own
    settings = pretrain("--config", mine, configs=configs)
    assert (settings.optimization.epochs, settings.optimization.seed, settings.model.model_size) == (7, 0, "base")
    assert pretrain("--seed", "1", "--config", mine, "--epochs", "9", configs=configs).optimization.epochs == 9
    assert FinetuneSettings.parse([], configs).optimization.epochs == 20  # which is that of the stage
    settings = FinetuneSettings.parse(["--dataset", "owner/name"], configs)
    assert (settings.optimization.epochs, settings.model.model_size) == (100, "base")


def test_settings_written_and_read_back_are_the_same(tmp_path):
    settings = FinetuneSettings.parse(["--mixed_precision", "no", "--base_lr", "3e-7", "--flip", "false"])
    write_config(settings, tmp_path / "arguments.yaml")
    assert FinetuneSettings.parse(["--config", str(tmp_path / "arguments.yaml")]) == settings
    assert FinetuneSettings.build(**settings.to_dict()) == settings


def test_a_launched_process_reads_the_settings_and_the_run_that_were_resolved(runs):
    run = started("--epochs", "3")
    resolved = Resolved(*resolve_training(PretrainSettings, ["--resume", "--save_steps", "7"]))
    resolved.write(runs / "settings.yaml")
    assert Resolved.read(runs / "settings.yaml") == resolved
    assert resolve_training(PretrainSettings, resolved) == (resolved.settings, run)
    evaluation = Resolved(EvalSettings.build(model="m", dataset="birds", test_imbalance="50", prior="uniform"))
    evaluation.write(runs / "settings.yaml")
    assert resolve_settings(EvalSettings, Resolved.read(runs / "settings.yaml")) == evaluation.settings


def test_a_script_without_arguments_reads_the_command_line_of_its_process(runs, configs, monkeypatch):
    for words, epochs in ([], 30), (["--epochs", "3"], 3):
        monkeypatch.setattr("sys.argv", ["pretrain.py", *words])
        assert resolve_training(PretrainSettings, configs=configs)[0].optimization.epochs == epochs
        assert PretrainSettings.parse(configs=configs).optimization.epochs == epochs


# How a value is written


@pytest.mark.parametrize("words", ["--flip False", "--flip=no", "--flip 0", "--no-flip", "--no_flip"])
def test_a_flag_is_turned_off_by_a_value_or_by_its_negative(words):
    assert pretrain(*words.split()).augmentation.flip is False
    assert pretrain("--compile").optimization.compile is True
    assert pretrain("--compile", "auto").optimization.compile == "auto"


def test_yaml_words_stay_words_numbers_need_no_decimal_point_and_null_is_nothing(tmp_path):
    for number in ("1e-3", "1.0e-3", "0.001", ".001"):
        assert read_config(PretrainSettings, Path(written(tmp_path / "c", f"base_lr: {number}"))) == {"base_lr": 1e-3}
    text = (
        "mixed_precision: no\npretrained: none\nflip: no\ndataset: -odd\nclip_grad: null\nsource: ~\nhub_model_id:\n"
    )
    values = read_config(FinetuneSettings, Path(written(tmp_path / "c.yaml", text)))
    assert values == {"mixed_precision": "no", "pretrained": "none", "flip": False, "dataset": "-odd"}


def test_hyphens_and_underscores_are_the_same_in_names_and_differ_in_values():
    words = ["--group-column", "a-b", "--label_column=c-d"]
    assert parse_words(FinetuneSettings, words) == {"group_column": "a-b", "label_column": "c-d"}
    assert parse_words(EvalSettings, ["--model", "a=1", "--report=a=b"]) == {"model": "a=1", "report": "a=b"}


def test_a_positional_may_be_named_twice_with_the_same_value():
    for words in (["birds"], ["--dataset", "birds"], ["birds", "--dataset", "birds"]):
        assert parse_words(InspectDataSettings, words) == {"dataset": "birds"}


@pytest.mark.parametrize(
    "words", ["--share a b", "a b --share", "--share true a b", "a --share=yes b", "--share --models a b"]
)
def test_a_flag_leaves_positionals_alone(words):
    settings = DemoSettings.parse(words.split())
    assert (settings.models, settings.share) == (["a", "b"], True)


@pytest.mark.parametrize(
    ("words", "imbalance"),
    [
        ("--test_imbalance runs/1", "50,25,10,5,2,-2,-5,-10,-25,-50"),
        ("runs/1 --test_imbalance", "50,25,10,5,2,-2,-5,-10,-25,-50"),
        ("--test_imbalance 50,10 runs/1", "50,10"),
        ("runs/1 --test_imbalance=-50", "-50"),
    ],
)
def test_a_word_that_cannot_be_the_value_of_an_option_is_a_positional(words, imbalance):
    assert parse_words(EvalSettings, words.split()) == {"model": "runs/1", "test_imbalance": imbalance}


def test_options_written_as_words_are_parsed_again():
    settings = TrainSettings.parse(["images", *format_words({"exclude_labels": "-1,-2", "validation_fraction": 0.0})])
    again = FinetuneSettings.parse(format_words(stage_options(settings, "finetune"))).data
    assert (again.dataset, again.exclude_labels, again.validation_fraction) == ("images", "-1,-2", 0.0)
    assert format_words({"launch": "--multi_gpu", "seeds": [0, 1]}) == ["--launch=--multi_gpu", "--seeds", "0", "1"]


def test_the_home_folder_may_be_written_short(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "whole/finetune").mkdir(parents=True)
    (tmp_path / "whole/finetune/config.json").touch()
    last = str(tmp_path / "whole/finetune")
    (tmp_path / "own.yaml").write_text("model: ~/whole\ndataset: ~/birds\n")
    assert EvalSettings.explicit_options(["--config=~/own.yaml"])["model"] == last
    assert EvalSettings.parse(["--config=~/own.yaml"]).data.dataset == str(tmp_path / "birds")
    assert DemoSettings.explicit_options(["~/whole", "~/whole"])["models"] == [last, last]
    assert EvalSettings.build(compare=["~/a", "b"]).compare == [str(tmp_path / "a"), "b"]


@pytest.mark.parametrize(
    "command",
    ["eval {}", "eval --compare {} other", "calibrate {}", "predict {} image.png", "demo {} other"]
    + ["publish {} owner/name", "convert {} out"],
)
def test_the_folder_of_a_whole_training_stands_for_its_fine_tuning(command, tmp_path):
    (tmp_path / "finetune").mkdir()
    (tmp_path / "finetune" / "config.json").write_text("{}")
    name, *words = command.format(tmp_path).split()
    cls = settings_class(name)

    def given() -> str | list[str]:
        [value] = [value for name, value in cls.explicit_options(words).items() if name in cls.names("is_model")]
        return value

    assert given() in (str(tmp_path / "finetune"), [str(tmp_path / "finetune"), "other"])
    (tmp_path / "config.json").write_text("{}")  # a folder that is a model itself
    assert given() in (str(tmp_path), [str(tmp_path), "other"])


# What raises an error


@pytest.mark.parametrize(
    ("cls", "words", "argument", "value"),
    [
        (PretrainSettings, "--epochs ten", "epochs", "ten"),
        (PretrainSettings, "--epochs 1.5", "epochs", "1.5"),
        (PretrainSettings, "--model_size giant", "model_size", "giant"),
        (PretrainSettings, "--flip=perhaps", "flip", "perhaps"),
        (PretrainSettings, "--rule linear", "rule", "linear"),
        (PretrainSettings, "--max_hours=-1", "max_hours", "-1"),
        (PretrainSettings, "--max_hours=nan", "max_hours", "at least 0"),
        (PretrainSettings, "--save_minutes nan", "save_minutes", "nan"),
        (PretrainSettings, "--base_lr inf", "base_lr", "inf"),
        (PretrainSettings, "--seed 9223372036854775808", "seed", "9223372036854775808"),
        (FinetuneSettings, "--epochs 0", "epochs", "0"),
        (FinetuneSettings, "--batch_size 0", "batch_size", "0"),
        (FinetuneSettings, "--accumulation 0", "accumulation", "0"),
        (FinetuneSettings, "--eval_epochs 0", "eval_epochs", "0"),
        (FinetuneSettings, "--max_steps 0", "max_steps", "0"),
        (FinetuneSettings, "--clip_grad 0", "clip_grad", "0.0"),  # would make every gradient zero
        (FinetuneSettings, "--crop_scale 8", "crop_scale", "8.0"),
        (FinetuneSettings, "--crop_scale 0", "crop_scale", "0.0"),
        (FinetuneSettings, "--erase nan", "erase", "nan"),
        (FinetuneSettings, "--erase 25", "erase", "25.0"),
        (FinetuneSettings, "--keep_ratio 0", "keep_ratio", "0.0"),
        (FinetuneSettings, "--keep_ratio 1.5", "keep_ratio", "1.5"),
        (FinetuneSettings, "--hours nan", "hours", "nan"),
        (FinetuneSettings, "--drop_path 1", "drop_path", "1.0"),
        (FinetuneSettings, "--folds 1", "folds", "1"),
        (FinetuneSettings, "--loss hinge", "loss", "hinge"),
        (FinetuneSettings, "--fold 7/5", "fold", "7/5"),
        (FinetuneSettings, "--split_seed=-1", "split_seed", "-1"),
        (InspectDataSettings, "birds --dataset fish", "dataset", "fish"),
        (EvalSettings, "--compare a", "compare", "1"),
        (EvalSettings, "--trained_with bce", "trained_with", "bce"),
        (DemoSettings, "a b --report r", "report", "r"),
        (DemoSettings, "--share", "models", "models"),
        (DemoSettings, "a --port 99999", "port", "65535"),
        (CalibrateSettings, "", "model", "model"),
        (CompareSettings, "birds", "pretrained", "pretrained"),
        (PublishSettings, "run org/name --form timm --space", "form", "timm"),
        (PublishSettings, "run", "repo_id", "repo_id"),
        (PublishDataSettings, "--repo_id org/name", "dataset", "dataset"),
    ],
)
def test_a_wrong_value_is_named_with_its_option(cls, words, argument, value):
    with refusal(argument, value):
        cls.parse(words.split())
    if words.endswith("--folds 1"):
        with refusal(argument):  # also where the pretraining is missing
            resolve_training(FinetuneSettings, words.split())


@pytest.mark.parametrize(
    ("words", "config", "named"),
    [
        ("--epoch 3", "", ["'--epoch'", "--epochs?"]),
        ("--epoch=3", "", ["'--epoch'", "--epochs?"]),
        ("--xyzzy 3", "", ["'--xyzzy'", "--help"]),
        ("--loss ce", "", ["'--loss'"]),  # of the other stage
        ("glyphs fish", "", ["unexpected", "'fish'"]),
        ("--config nowhere.yaml", "", ["nowhere.yaml"]),
        ("--config mine.yaml", "epochs: 3\nbatchsize: 8\n", ["mine.yaml", "did you mean batch_size?"]),
        ("--config mine.yaml", "- epochs\n", ["mine.yaml", "list"]),
        ("--config mine.yaml", "epochs: [1, 2]\n", ["mine.yaml", "epochs"]),
    ],
)
def test_an_option_or_config_that_does_not_exist_is_named_with_the_nearest(
    words, config, named, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "mine.yaml", config)
    with pytest.raises(LiVTError) as error:
        PretrainSettings.parse(words.split())
    assert all(text in str(error.value) for text in named)


@pytest.mark.parametrize(
    ("message", "argument", "rendered"),
    [
        (
            "group_column 'a' is missing; name a group_column.",
            "group_column",
            "--group_column 'a' is missing; name a --group_column.",
        ),
        ("loss is 'x'; the loss must be known.", "loss", "--loss is 'x'; the loss must be known."),
        ("the dataset is empty.", "dataset", "the dataset is empty."),
        ("/data/split_column.csv is empty.", "split_column", "/data/split_column.csv is empty."),
        ("no argument.", None, "no argument."),
    ],
)
def test_the_command_line_shows_the_argument_of_an_error_as_a_flag(message, argument, rendered):
    assert render_flags(LiVTError(message, argument)) == rendered


@pytest.mark.parametrize("words", ["convert ~/model OUT", "data --pretrained=~/model", "predict ~/model IMAGE"])
def test_a_model_may_be_named_below_the_home_folder(words):
    command, *words = words.split()
    assert str(Path.home() / "model") in settings_class(command).parse(words).to_dict().values()


def test_the_command_line_shows_the_options_of_a_warning_as_flags(capsys, monkeypatch):
    monkeypatch.setattr(logging.root, "handlers", [])
    warn = functools.partial(logging.getLogger("livt_hf.data").warning, extra={"arguments": ("exclude", "group_from")})
    run_command(lambda: warn("Leave out b/exclude.png with exclude, or pass group_from %s.", "near_copies"))
    assert capsys.readouterr().err == "Leave out b/exclude.png with --exclude, or pass --group_from near_copies.\n"


def test_what_a_killed_process_left_of_a_folder_is_not_mixed_into_the_next(tmp_path):
    (tmp_path / ".writing-report" / "pictures").mkdir(parents=True)
    with replacing(tmp_path / "report") as writing:
        writing.mkdir()
        (writing / "page.html").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["report", "page.html"]


def test_a_spec_of_parts_is_built_replaced_and_written_by_the_names_of_all_options():
    @dataclasses.dataclass(frozen=True)
    class Inner(Spec):
        size: int = option(1, "a size")

    @dataclasses.dataclass(frozen=True)
    class Outer(Spec):
        name: str = option(REQUIRED, "a name")
        inner: Inner = part(Inner, size=2)

    built = Outer.build(name="x")
    assert (built.inner.size, built.replace(size=5).inner.size, built.inner.size) == (2, 5, 2)
    assert built.replace(size=5).to_dict() == {"name": "x", "size": 5} == Outer.build(name="x", size=5).to_dict()
    assert built.non_defaults("inner") == {} and built.replace(size=1).non_defaults("inner") == {"size": 1}


def test_a_file_of_values_that_does_not_exist_is_answered_with_the_nearest(tmp_path):
    (tmp_path / "values.yaml").write_text("a: 1\n")
    with pytest.raises(LiVTError, match=r"/values.yaml\?$"):
        read_values(tmp_path / "value.yaml")


@pytest.mark.parametrize("name", ["../../etc/passwd", "no_such_package.plugin", ".relative"])
def test_what_is_no_name_of_a_module_is_no_plugin(name):
    with pytest.raises(LiVTError, match=re.escape(name)):
        load_plugin(name)
    assert find_module(name.split(".")[0]) is None


# Run folders and resuming


def test_a_printed_command_can_be_copied_where_the_folder_has_spaces():
    message = format_next_command("To resume", "pretrain", "--resume", Path("runs/pretrain-my birds-micro/1"))
    assert message.splitlines()[-1].endswith(" --resume 'runs/pretrain-my birds-micro/1'")


def test_running_twice_makes_a_second_numbered_run(runs):
    assert started().folder == runs / "pretrain-glyphs-base" / "1"
    assert started().folder == runs / "pretrain-glyphs-base" / "2"
    assert started("--imbalance_factor", "100").folder == runs / "pretrain-glyphs-100-base" / "1"
    assert DataSpec(dataset="birds/") == DataSpec(dataset="birds")  # as the shell completes it


def resumed(*argv: str, cls=PretrainSettings) -> Run | None:
    return resolve_training(cls, list(argv))[1]


def test_a_resumed_run_keeps_the_settings_it_was_started_with(runs, configs, tmp_path):
    first = ["--config", written(tmp_path / "mine.yaml", "epochs: 3\nmodel_size: micro\n"), "--seed", "8"]
    run = started(*first)
    assert resumed(*first, "--resume") == run
    words = [*first[:2], "--dataset", "glyphs"]
    settings = FinetuneSettings.parse(words).replace(pretrained="runs/pretrain-glyphs-micro/1")  # as it was found
    new_run(settings.run_name).begin(settings.to_dict())
    assert resolve_training(FinetuneSettings, [*words, "--resume"])[0].model.pretrained == settings.model.pretrained
    run = started("--epochs", "3", "--seed", "8")
    settings, again = resolve_training(PretrainSettings, ["--resume", str(run.folder)], configs)
    assert (settings.optimization.epochs, settings.optimization.seed, settings.model.model_size) == (3, 8, "base")
    assert again == run


def test_hours_choose_the_epochs_and_the_command_line_names_none(runs, tmp_path):
    config = ["--config", written(tmp_path / "mine.yaml", "epochs: 5\n")]
    settings, _ = resolve_training(PretrainSettings, [*config, "--hours", "2"])
    run = new_run(settings.run_name)
    run.begin(settings.replace(epochs=37).to_dict())  # as many as fit
    resume = ["--resume", str(run.folder)]
    for words in (resume, [*resume, *config]):
        assert resolve_training(PretrainSettings, words)[0].optimization.epochs == 37
    for words in (["--hours", "2", "--epochs", "5"], [*resume, "--epochs", "5"]):
        with refusal("epochs", 5):
            resolve_training(PretrainSettings, words)


def test_a_run_of_an_older_version_is_resumed_without_the_options_that_are_gone(runs):
    run = started("--epochs", "3")
    (run.folder / "arguments.yaml").write_text("hub_private: false\nepochs: 3\ndataset: glyphs\n")
    settings, again = resolve_training(PretrainSettings, ["--resume", str(run.folder)])
    assert (settings.optimization.epochs, again) == (3, run)


def test_resume_means_the_newest_unfinished_run_and_auto_that_or_a_new_one(runs):
    assert resumed("--resume", "auto") is None
    birds = started("--dataset", "birds")
    assert resumed("--resume") == birds  # of any data where none are named
    with refusal("resume", "dataset glyphs"):
        resumed("--resume", "--dataset", "glyphs")
    first, second = started(), started()
    assert resumed("--resume", "auto") == second
    second.write_results(Results(stage="pretrain", dataset="glyphs"))
    assert resumed("--resume") == first


def test_auto_resumes_a_run_of_the_same_command_and_no_other(runs):
    first = started("--dataset", "here/birds", "--seed", "1")
    for other in (["here/birds", "--seed", "2"], ["there/birds", "--seed", "1"]):
        assert resumed("--dataset", *other, "--resume", "auto") is None
    started("--dataset", "here/birds", "--seed", "2")
    assert resumed("--dataset", "here/birds", "--seed", "1", "--save_steps", "7", "--resume", "auto") == first


@pytest.mark.parametrize("resume", [["--resume"], ["--resume", "auto"]])
def test_a_fine_tuning_whose_size_was_inherited_is_found_by_its_command(runs, resume):
    words = ["--dataset", "birds", "--pretrained", str(finished("--model_size", "micro").folder)]
    settings = FinetuneSettings.parse(words, inherit=inherit_from_pretraining)
    run = new_run(settings.run_name)
    run.begin(settings.to_dict())
    assert run.folder.parent.name == "finetune-birds-micro"
    assert resumed(*words, *resume, cls=FinetuneSettings) == run


def test_options_that_may_not_change_on_resume_are_named(runs):
    run = started("--epochs", "3")
    with pytest.raises(LiVTError) as error:
        resumed("--resume", str(run.folder), "--epochs", "5", "--base_lr", "1e-2", "--save_steps", "7")
    text = str(error.value)
    assert "base_lr was 0.00015 and is now 0.01" in text and "epochs was 3 and is now 5" in text
    assert "save_steps" not in text  # it changes nothing that is learned
    harmless = "--save_steps 7 --save_minutes 1 --save_total_limit 9 --num_workers 1".split()
    assert resumed("--resume", str(run.folder), *harmless) == run


def test_what_cannot_be_resumed_is_named(runs, tmp_path):
    done, other = finished(), started()
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / PLAN).write_text("{}")
    for cls, folder, text in (
        (PretrainSettings, tmp_path, "no arguments.yaml"),
        (PretrainSettings, tmp_path / "whole", "livt train --resume"),
        (PretrainSettings, done.folder, "finished"),
        (FinetuneSettings, other.folder, "livt pretrain --resume"),
    ):
        with pytest.raises(LiVTError) as error:
            resumed("--resume", str(folder), cls=cls)
        assert text in str(error.value) and str(folder) in str(error.value)
    with pytest.raises(LiVTError, match="livt pretrain --resume"):
        resumed("--output_dir", str(other.folder), "--resume", "auto", cls=FinetuneSettings)


# What fine-tuning inherits from its pretraining


def inherited(*words: str, configs: Path | None = None) -> dict:
    return FinetuneSettings.parse(list(words), configs, inherit_from_pretraining).to_dict()


def test_fine_tuning_inherits_data_and_size_of_the_newest_pretraining(runs, configs):
    finished("--dataset", "imagenet-bal", "--images_per_class", "116", "--model_size", "tiny", "--split_seed", "3")
    values = inherited(configs=configs)
    expected = {
        "dataset": "imagenet-bal",
        "images_per_class": 116,
        "model_size": "tiny",
        "split_seed": 3,
        "epochs": 100,
    }
    assert expected.items() <= values.items()
    written(configs / "finetune-cifar100-lt.yaml", "dataset: cifar100-lt\nimbalance_factor: 100\nepochs: 12\n")
    finished("--dataset", "cifar100-lt", "--imbalance_factor", "10")  # its tail comes before that of the config
    assert {"imbalance_factor": 10, "epochs": 12}.items() <= inherited(configs=configs).items()


def test_fine_tuning_that_names_its_data_inherits_nothing_unless_it_names_a_pretraining_too(runs):
    run = finished("--dataset", "imagenet-bal", "--model_size", "tiny")
    assert inherit_from_pretraining({"dataset": "glyphs"}) == {}
    values = inherit_from_pretraining({"dataset": "glyphs", "pretrained": str(run.folder)})
    assert values == {"plugin": None, "model_size": "tiny", "patch_size": None}


def test_the_data_of_a_pretraining_are_split_as_it_did_also_where_they_are_named(runs):
    run = finished("--dataset", "birds", "--group_column", "nest", "--split_seed", "3", "--fold", "1/5")
    words = ["--dataset", "birds", "--pretrained", str(run.folder)]
    assert {"group_column": "nest", "split_seed": 3, "fold": "1/5"}.items() <= inherited(*words).items()
    assert inherited(*words, "--split_seed", "4")["split_seed"] == 4
    assert inherited(*words, "--folds", "5")["fold"] is None


def test_fine_tuning_holds_images_out_by_its_own_default_unless_pretraining_did(runs):
    for fraction, expected in (("0", None), ("0.2", 0.2)):
        run = finished("--dataset", "pictures", "--validation_fraction", fraction)
        assert inherited("--pretrained", str(run.folder))["validation_fraction"] == expected


def test_a_checkpoint_that_is_no_run_knows_its_size(tmp_path):
    LiViTForPreTraining(pretraining_config("micro", image_size=8)).save_pretrained(tmp_path)
    explicit = {"dataset": "glyphs", "pretrained": str(tmp_path)}
    assert inherit_from_checkpoint(explicit) == {"model_size": "micro", "patch_size": 4}
    with pytest.raises(LiVTError, match="nowhere"):
        inherit_from_checkpoint({"dataset": "glyphs", "pretrained": str(tmp_path / "nowhere")})


def test_a_fine_tuned_backbone_is_tuned_further_by_the_config_of_backbones(tmp_path):
    run = Run(tmp_path)
    run.begin(FinetuneSettings.build(dataset="pictures", model_size="resnet18", tune="head").to_dict())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "timm_wrapper", "architecture": "resnet18"}))
    for finished in (False, True):
        if finished:
            run.write_results(Results(stage="finetune", dataset="pictures"))
        inherited = inherit_from_checkpoint({"dataset": "glyphs", "pretrained": str(tmp_path), "plugin": None})
        assert inherited == {"model_size": "resnet18", "patch_size": None, "tune": "full"}


def test_fine_tuning_keeps_the_image_size_of_its_checkpoint_unless_another_is_named(tmp_path):
    LiViTForPreTraining(pretraining_config("micro", image_size=8)).save_pretrained(tmp_path)
    train = Dataset.from_dict({"label": [0, 0, 1]}, features=Features(label=ClassLabel(names=["cat", "dog"])))

    def size(*words: str) -> int:
        settings = FinetuneSettings.parse(["--model_size", "micro", *words])
        parts = settings.model, settings.loss, settings.optimization, settings.augmentation
        return build_classifier(train, *parts).config.image_size

    assert size("--pretrained", str(tmp_path)) == 8
    assert size("--pretrained", str(tmp_path), "--image_size", "16") == 16
    assert size("--pretrained", "none") == 32


@pytest.mark.parametrize(
    "option", ["split_seed 3", "test_fraction 0.5", "label_column coarse", "imbalance_factor 10", "dataset others"]
)
def test_fine_tuning_does_not_start_from_another_split_which_may_have_seen_its_test_images(
    runs, tmp_path, monkeypatch, option
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures").mkdir(exist_ok=True)
    name, value = option.split()
    run = finished("--dataset", "pictures", f"--{name}", value)
    with refusal(None, "dataset pictures"):
        find_pretraining(FinetuneSettings.parse(["--dataset", "pictures"]))
    words = ["--dataset", "pictures", f"--{name}", value]
    assert find_pretraining(FinetuneSettings.parse(words)) == str(run.folder)
    if name == "dataset":
        finished("--dataset", "glyphs", "--streaming")  # which may have seen them too
        with refusal(None, "no finished pretraining"):
            find_pretraining(FinetuneSettings.parse(["--dataset", "glyphs"]))
        small = finished("--dataset", "glyphs", "--model_size", "micro")
        with refusal(None, "size micro", small.folder):
            find_pretraining(FinetuneSettings.parse(["--dataset", "glyphs"]))


# Results and publishing


@pytest.mark.parametrize("rule", [ARGMAX, UNIFORM, TEST_PRIOR])
def test_results_show_the_numbers_of_the_default_rule_first_also_of_files_of_0_2(tmp_path, rule):
    """There `metrics` were those of the largest logit whatever the default rule was."""
    blocks = {"metrics": {"accuracy": 0.1}, "posterior": {"accuracy": 0.2}, "own_prior": {"accuracy": 0.3}}
    old = {"stage": "finetune", "dataset": "glyphs", "seed": 4, "gone": 1, "default_rule": rule} | blocks
    results = Results.from_dict(old)
    assert (results.dataset, results.seed) == ("glyphs", 4)  # what both versions have
    expected = {ARGMAX: 0.1, UNIFORM: 0.2, TEST_PRIOR: 0.3}
    assert {name: metrics["accuracy"] for name, metrics in results.rules.items()} == expected
    assert list(results.rules)[0] == rule and results.metrics["accuracy"] == expected[rule]
    (tmp_path / "results.json").write_text(results.to_json())
    assert Results.read(tmp_path / "results.json") == results
    written = json.loads(results.to_json())
    assert written["metrics"] == written["rules"][rule] == next(iter(written["rules"].values()))


def test_a_training_is_own_where_nothing_but_runs_lie_behind_it(tmp_path):
    def run(name: str, **results) -> str:
        (tmp_path / name).mkdir()
        Run(tmp_path / name).write_results(Results(stage="finetune", dataset="glyphs", **results))
        return str(tmp_path / name)

    assert is_own(None) and is_own("none") and is_own(run("first"))
    assert not is_own("org/mae") and not is_own(str(tmp_path))
    assert not is_own(run("second", pretrained="org/mae", pretrained_own=False))


def test_a_run_on_own_images_that_is_to_publish_itself_needs_a_licence_before_it_starts():
    words = ["--dataset", "birds", "--push_to_hub", "--hub_model_id", "org/birds"]
    with pytest.raises(LiVTError, match="birds"):
        check_publishing(PretrainSettings.parse(words))
    check_publishing(PretrainSettings.parse([*words, "--hub_license", "mit"]))
    check_publishing(PretrainSettings.parse(["--push_to_hub", "--hub_model_id", "org/glyphs"]))
    with refusal("hub_model_id"):
        resolve_training(PretrainSettings, ["--push_to_hub"])


# Facts of options


def test_every_list_of_options_comes_from_their_declarations():
    paths = {"source", "lists", "output_dir", "plugin", "pretrained", "test_prior"}
    assert paths <= set(FinetuneSettings.names("is_path")) and "loss" not in FinetuneSettings.names("is_path")
    assert set(DataSpec.split_options()) >= {"dataset", "imbalance_factor", "split_seed", "label_column"}
    assert not set(FinetuneSettings.names("may_change_on_resume")) & {"loss", "seed", "base_lr", "dataset"}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_at_most_a_page_and_help_all_every_option(command, capsys):
    texts = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            parse_words(settings_class(command), [flag])
        texts.append(capsys.readouterr().out)
    common, everything = texts
    options = settings_class(command).options()
    assert len(common.splitlines()) <= 95
    assert all(re.search(rf"--{name}\b", everything) or name.upper() in everything for name in options)
    assert common.count(f"\n  livt {command}") >= 3 or command in ("pretrain", "finetune")
    assert all(declared.facts["help"] for declared in options.values())


def test_help_shows_types_choices_flags_and_defaults(capsys):
    with pytest.raises(SystemExit):
        parse_words(FinetuneSettings, ["--help_all"])
    text = " ".join(capsys.readouterr().out.split())
    for shown in ("--epochs N", "--base_lr FLOAT", "--tune {full,lora,head}", "--flip/--no-flip", "(default: 0.75)"):
        assert shown in text
    assert set(LOSSES) <= set(re.findall(r"\w+", text)) and "(default: )" not in text


def test_every_option_is_read_by_someone():
    root = Path(__file__).parents[1]
    sources = [path for folder in ("livt_hf", "recipes") for path in (root / folder).rglob("*.py")]
    text = "\n".join(path.read_text() for path in sources)
    head = {field.name for field in dataclasses.fields(LongTailConfig)}  # handed over by name
    names = {name for command in COMMANDS for name in settings_class(command).names()} - head
    assert [name for name in sorted(names) if not re.search(rf"\.{name}\b|\(\w*,? ?\"{name}\"", text)] == []


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        (["--tune", "head", "--epochs", "5", "--base_lr", "0.1"], "--epochs 5, --base_lr 0.1"),
        (["--tune", "head", "--epochs", "5", "--solver", "loop"], None),
        (["--tune", "head", "--batch_size", "32", "--loss", "ldam"], None),
        (["--epochs", "5"], None),
        (["--tune", "head"], None),
    ],
)
def test_options_of_gradient_steps_are_said_to_be_ignored_by_an_exact_solution(words, warned, caplog):
    resolve_training(FinetuneSettings, ["glyphs", "--pretrained", "none", *words])
    assert [warned in line for line in caplog.messages] == ([] if warned is None else [True])
