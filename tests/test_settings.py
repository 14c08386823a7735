"""Settings: where they come from, which are refused, and what a resumed run may change."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from datasets import ClassLabel, Dataset, Features

from livt_hf import LiViTForPreTraining, LongTailConfig, pretraining_config
from livt_hf.commands import check_publishing, what_next
from livt_hf.errors import LiVTError
from livt_hf.files import read_values
from livt_hf.long_tail.losses import LOSSES
from livt_hf.options import CommandSettings, command_line, make_parser, save_settings
from livt_hf.plugins import find_module, load_plugin
from livt_hf.recipes.settings import (
    COMMANDS,
    CalibrateSettings,
    DemoSettings,
    LookSettings,
    PublishSettings,
    TrainSettings,
    as_words,
)
from livt_hf.results import Results
from livt_hf.runs import (
    PLAN,
    Run,
    find_pretraining,
    lent_by_pretraining,
    new_run,
    parse_training,
)
from livt_hf.settings import DataSettings, EvalSettings, FinetuneSettings, PretrainSettings
from livt_hf.specs import REQUIRED, option
from livt_hf.training.results import is_own
from livt_hf.training.start import build_classifier, inherit_from_checkpoint


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
    """A run that has been started and not finished."""
    arguments = PretrainSettings.parse(list(argv))
    run = new_run(arguments)
    run.begin(arguments)
    return run


# Where a value comes from


def test_a_value_comes_from_the_command_line_then_the_datasets_config_then_the_defaults(configs):
    arguments = PretrainSettings.parse(["--epochs", "3"], configs)
    assert (arguments.epochs, arguments.seed, arguments.batch_size) == (3, 5, 4096)


def test_a_config_takes_the_place_of_the_datasets_own(configs, tmp_path):
    mine = written(tmp_path / "mine.yaml", "epochs: 7\n")
    arguments = PretrainSettings.parse(["--config", mine], configs)
    assert (arguments.epochs, arguments.seed, arguments.model_size) == (7, 0, "base")
    assert PretrainSettings.parse(["--seed", "1", "--config", mine, "--epochs", "9"], configs).epochs == 9


def test_the_datasets_config_is_that_of_the_stage_and_a_dataset_without_one_gets_the_paper_s_defaults(configs):
    assert FinetuneSettings.parse([], configs).epochs == 20
    arguments = FinetuneSettings.parse(["--dataset", "owner/name"], configs)
    assert (arguments.epochs, arguments.model_size) == (100, "base")


def test_settings_saved_and_read_back_are_the_same(tmp_path):
    arguments = FinetuneSettings.parse(["--mixed_precision", "no", "--base_lr", "3e-7", "--flip", "false"])
    save_settings(arguments, tmp_path / "arguments.yaml")
    assert FinetuneSettings.parse(["--config", str(tmp_path / "arguments.yaml")]) == arguments


# How a value is written


@pytest.mark.parametrize("word", ["False", "false", "0", "no"])
def test_flag_false_is_false(word, tmp_path):
    assert PretrainSettings.parse(["--flip", word]).flip is False
    assert PretrainSettings.parse(["--config", written(tmp_path / "c.yaml", f"flip: {word}\n")]).flip is False


def test_a_value_that_begins_with_a_dash_is_parsed_again():
    said = {"exclude_labels": "-1,-2", "seed": 3}
    settings = TrainSettings.parse(["images", *as_words(said)])
    assert FinetuneSettings.parse(settings.words("finetune")).exclude_labels == said["exclude_labels"]
    assert as_words({"launch": "--multi_gpu", "seeds": [0, 1]}) == ["--launch=--multi_gpu", "--seeds", "0", "1"]


def test_a_flag_without_a_value_is_true():
    assert PretrainSettings.parse(["--compile"]).compile is True


@pytest.mark.parametrize("number", ["1e-3", "1.0e-3", "0.001", ".001"])
def test_yaml_numbers_need_no_decimal_point(number, tmp_path):
    assert PretrainSettings.parse(["--config", written(tmp_path / "c.yaml", f"base_lr: {number}\n")]).base_lr == 1e-3


def test_yaml_words_stay_words_and_null_is_nothing(tmp_path):
    text = "mixed_precision: no\npretrained: none\ntest_prior: none\nclip_grad: null\nsource: ~\nhub_model_id:\n"
    arguments = FinetuneSettings.parse(["--config", written(tmp_path / "c.yaml", text)])
    assert (arguments.mixed_precision, arguments.pretrained, arguments.test_prior) == ("no", "none", "none")
    assert (arguments.clip_grad, arguments.source, arguments.hub_model_id) == (None, None, None)


def test_a_yaml_value_may_start_with_a_dash(tmp_path):
    arguments = PretrainSettings.parse(["--config", written(tmp_path / "c.yaml", "dataset: -odd-name\n")])
    assert arguments.dataset == "-odd-name"


# What is refused


@pytest.mark.parametrize("words", [["--epoch", "3"], ["--epoch=3"]])
def test_an_unknown_option_suggests_the_nearest(words):
    with pytest.raises(LiVTError, match=r"there is no option '--epoch'; did you mean --epochs\?"):
        PretrainSettings.parse(words)


def test_an_option_like_no_other_points_to_the_help():
    with pytest.raises(LiVTError, match="there is no option '--xyzzy'; --help lists them"):
        PretrainSettings.parse(["--xyzzy", "3"])


def test_an_option_of_the_other_stage_is_unknown():
    with pytest.raises(LiVTError, match="there is no option '--mask_ratio'"):
        FinetuneSettings.parse(["--mask_ratio", "0.5"])


def test_an_unknown_yaml_key_names_the_file_and_suggests_the_nearest(tmp_path):
    file = written(tmp_path / "mine.yaml", "epochs: 3\nbatchsize: 8\n")
    with pytest.raises(LiVTError, match=r"mine.yaml: there is no option 'batchsize'; did you mean batch_size\?"):
        PretrainSettings.parse(["--config", file])


@pytest.mark.parametrize(
    ("text", "message"),
    [("- epochs\n", "must hold 'option: value' lines, not a list"), ("epochs: [1, 2]\n", "epochs must be a single")],
)
def test_yaml_of_another_shape_is_refused(text, message, tmp_path):
    with pytest.raises(LiVTError, match=message):
        PretrainSettings.parse(["--config", written(tmp_path / "c.yaml", text)])


def test_a_config_that_does_not_exist_is_named():
    with pytest.raises(LiVTError, match="nowhere.yaml does not exist"):
        PretrainSettings.parse(["--config", "nowhere.yaml"])


@pytest.mark.parametrize(("name", "value"), [("epochs", "ten"), ("model_size", "giant"), ("flip", "perhaps")])
def test_a_value_of_the_wrong_kind_is_refused_with_the_option_s_name_and_the_value(name, value):
    with pytest.raises(LiVTError, match=f"{name} is '{value}'; "):
        PretrainSettings.parse([f"--{name}={value}"])


@pytest.mark.parametrize("name", ["epochs", "batch_size", "accumulation", "eval_epochs", "max_steps"])
def test_a_count_below_one_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} is 0; it must be at least 1"):
        FinetuneSettings.parse([f"--{name}", "0"])


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("clip_grad", "0", "above 0"),  # would make every gradient zero
        ("crop_scale", "8", "at most 1"),
        ("crop_scale", "0", "above 0"),
        ("erase", "nan", "at least 0"),
        ("erase", "25", "at most 1"),
        ("keep_ratio", "0", "above 0"),
        ("keep_ratio", "1.5", "at most 1"),
        ("hours", "nan", "above 0"),
        ("drop_path", "1", "less than 1"),
    ],
)
def test_a_value_outside_its_bounds_is_refused(name, value, bound):
    with pytest.raises(LiVTError, match=rf"{name} is {float(value)}; it must be {bound}"):
        FinetuneSettings.parse([f"--{name}", value])


@pytest.mark.parametrize("cls", [PretrainSettings, FinetuneSettings, EvalSettings])
def test_every_option_is_explained(cls):
    assert all(field.metadata["help"] for field in dataclasses.fields(cls))


# Run folders


def test_a_folder_completed_by_the_shell_is_the_same_dataset():
    assert PretrainSettings.parse(["--dataset", "birds/"]) == PretrainSettings.parse(["--dataset", "birds"])


def test_a_printed_command_can_be_copied_where_the_folder_has_spaces():
    message = what_next("To go on", "pretrain", "--resume", Path("runs/pretrain-my birds-micro/1"))
    assert shlex.split(message.splitlines()[-1])[-2:] == ["--resume", "runs/pretrain-my birds-micro/1"]


def test_running_twice_makes_a_second_numbered_run(runs):
    assert started().folder == runs / "pretrain-glyphs-base" / "1"
    assert started().folder == runs / "pretrain-glyphs-base" / "2"
    assert started("--imbalance_factor", "100").folder == runs / "pretrain-glyphs-100-base" / "1"


def test_a_folder_that_holds_another_run_is_refused_with_the_two_ways_out(tmp_path):
    folder = str(tmp_path / "run")
    started("--output_dir", folder)
    with pytest.raises(ValueError, match=r"holds another run; pass --resume .*run to go on, or a new --output_dir"):
        started("--output_dir", folder)


def test_an_empty_folder_may_be_given(tmp_path):
    assert new_run(PretrainSettings.parse(["--output_dir", str(tmp_path)])).folder == tmp_path


# Going on with a run


def test_a_resumed_run_keeps_the_settings_it_was_started_with(runs, configs):
    run = started("--epochs", "3", "--seed", "8")
    settings, resumed = parse_training(PretrainSettings, ["--resume", str(run.folder)], configs)
    assert (settings.epochs, settings.seed, settings.batch_size, resumed) == (3, 8, 4096, run)


def test_hours_choose_the_epochs_and_no_others_can_be_asked_for(runs, tmp_path):
    complaint = "--hours 2 chooses the epochs; leave --epochs 5 out"
    with pytest.raises(LiVTError, match=complaint):
        parse_training(PretrainSettings, ["--hours", "2", "--epochs", "5"])
    config = ["--config", written(tmp_path / "mine.yaml", "epochs: 5\n")]
    settings, _ = parse_training(PretrainSettings, [*config, "--hours", "2"])
    settings.epochs = 37  # that fit
    run = new_run(settings)
    run.begin(settings)
    resume = ["--resume", str(run.folder)]
    for words in (resume, [*resume, "--epochs", "37"], [*resume, *config]):
        assert parse_training(PretrainSettings, words)[0].epochs == 37
    with pytest.raises(LiVTError, match=complaint):
        parse_training(PretrainSettings, [*resume, "--epochs", "5"])


@pytest.mark.parametrize("value", ["-1", "nan"])
def test_a_time_to_stop_after_is_not_negative(value):
    with pytest.raises(LiVTError, match="it must be at least 0"):
        PretrainSettings.parse([f"--max_hours={value}"])


def test_the_first_command_with_resume_after_it_goes_on(runs, tmp_path):
    first = ["--config", written(tmp_path / "mine.yaml", "epochs: 3\nmodel_size: micro\n"), "--seed", "8"]
    run = started(*first)
    assert parse_training(PretrainSettings, [*first, "--resume"])[1] == run


def test_what_fine_tuning_found_for_itself_survives_resume_with_a_config(runs, tmp_path):
    first = ["--config", written(tmp_path / "mine.yaml", "model_size: micro\n")]
    settings = FinetuneSettings.parse(first)
    settings.pretrained = "runs/pretrain-glyphs-micro/1"
    new_run(settings).begin(settings)
    assert parse_training(FinetuneSettings, [*first, "--resume"])[0].pretrained == settings.pretrained


def test_a_run_of_an_older_version_goes_on_without_the_options_that_are_gone(runs):
    run = started("--epochs", "3")
    (run.folder / "arguments.yaml").write_text("hub_private: false\nepochs: 3\ndataset: glyphs\n")
    settings, resumed = parse_training(PretrainSettings, ["--resume", str(run.folder)])
    assert (settings.epochs, resumed) == (3, run)


def resumed(*argv: str) -> Run | None:
    return parse_training(PretrainSettings, list(argv))[1]


def test_resume_means_the_newest_unfinished_run_and_auto_that_or_a_new_one(runs):
    assert resumed("--resume", "auto") is None
    with pytest.raises(LiVTError, match="there is no unfinished pretrain run under .*; start one without --resume"):
        resumed("--resume")
    birds = started("--dataset", "birds")
    assert resumed("--resume") == birds  # where no data are named, of any
    with pytest.raises(LiVTError, match="there is no unfinished pretrain run with dataset glyphs under .*runs; start"):
        resumed("--resume", "--dataset", "glyphs")
    first, second = started(), started()
    assert resumed("--resume", "auto") == second
    second.write_results(Results(stage="pretrain", dataset="glyphs"))
    assert resumed("--resume") == first


def test_auto_goes_on_with_a_run_of_the_same_command_and_with_no_other(runs):
    first = started("--dataset", "here/birds", "--seed", "1")
    for other in (["here/birds", "--seed", "2"], ["there/birds", "--seed", "1"]):
        assert resumed("--dataset", *other, "--resume", "auto") is None
    started("--dataset", "here/birds", "--seed", "2")
    assert resumed("--dataset", "here/birds", "--seed", "1", "--save_steps", "7", "--resume", "auto") == first


@pytest.mark.parametrize("resume", [["--resume"], ["--resume", "auto"]])
def test_a_fine_tuning_whose_size_was_lent_is_found_by_its_command(runs, resume):
    words = ["--dataset", "birds", "--pretrained", str(finished("--model_size", "micro").folder)]
    settings = FinetuneSettings.parse(words, inherit=lent_by_pretraining)
    run = new_run(settings)
    run.begin(settings)
    assert run.folder.parent.name == "finetune-birds-micro"
    assert parse_training(FinetuneSettings, [*words, *resume], inherit=lent_by_pretraining)[1] == run


def test_resuming_with_other_settings_says_which_differ(runs):
    run = started("--epochs", "3")
    asked = ["--resume", str(run.folder), "--epochs", "5", "--base_lr", "1e-2", "--save_steps", "7"]
    with pytest.raises(LiVTError) as refused:
        parse_training(PretrainSettings, asked)
    assert "base_lr was 0.00015 and is now 0.01" in str(refused.value)
    assert "epochs was 3 and is now 5" in str(refused.value)
    assert "save_steps" not in str(refused.value)  # it changes nothing that is learned


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path):
    with pytest.raises(ValueError, match="is not a run: it has no arguments.yaml"):
        parse_training(PretrainSettings, ["--resume", str(tmp_path)])


# What fine-tuning takes from its pretraining


def finished(*argv: str) -> Run:
    run = started(*argv)
    run.write_results(Results(stage="pretrain", dataset="glyphs"))
    return run


def test_fine_tuning_takes_data_and_size_of_the_newest_pretraining(runs, configs):
    finished("--dataset", "imagenet-bal", "--images_per_class", "116", "--model_size", "tiny", "--split_seed", "3")
    settings = FinetuneSettings.parse([], configs, lent_by_pretraining)
    assert (settings.dataset, settings.images_per_class) == ("imagenet-bal", 116)
    assert (settings.model_size, settings.split_seed, settings.epochs) == ("tiny", 3, 100)


def test_the_tail_of_a_pretraining_counts_more_than_that_of_the_dataset_s_config(runs, configs):
    written(configs / "finetune-cifar100-lt.yaml", "dataset: cifar100-lt\nimbalance_factor: 100\nepochs: 12\n")
    finished("--dataset", "cifar100-lt", "--imbalance_factor", "10")
    settings = FinetuneSettings.parse([], configs, lent_by_pretraining)
    assert (settings.imbalance_factor, settings.epochs) == (10, 12)


def test_fine_tuning_that_names_its_data_takes_nothing_unless_it_names_a_pretraining_too(runs):
    run = finished("--dataset", "imagenet-bal", "--model_size", "tiny")
    assert lent_by_pretraining({"dataset": "glyphs"}) == {}
    lent = lent_by_pretraining({"dataset": "glyphs", "pretrained": str(run.folder)})
    assert lent == {"plugin": None, "model_size": "tiny", "patch_size": None}


def test_the_data_of_a_pretraining_are_divided_as_it_did_also_where_they_are_named(runs):
    run = finished("--dataset", "birds", "--group_column", "nest", "--split_seed", "3", "--fold", "1/5")
    words = ["--dataset", "birds", "--pretrained", str(run.folder)]
    settings = FinetuneSettings.parse(words, inherit=lent_by_pretraining)
    assert (settings.group_column, settings.split_seed, settings.fold) == ("nest", 3, "1/5")
    assert FinetuneSettings.parse([*words, "--split_seed", "4"], inherit=lent_by_pretraining).split_seed == 4
    assert FinetuneSettings.parse([*words, "--folds", "5"], inherit=lent_by_pretraining).fold is None


def test_a_checkpoint_that_is_no_run_knows_its_size(tmp_path):
    LiViTForPreTraining(pretraining_config("micro", image_size=8)).save_pretrained(tmp_path)
    asked = {"dataset": "glyphs", "pretrained": str(tmp_path)}
    assert inherit_from_checkpoint(asked) == {"model_size": "micro", "patch_size": 4}
    with pytest.raises(LiVTError, match="nowhere could not be loaded as a checkpoint folder or from the Hub"):
        inherit_from_checkpoint({"dataset": "glyphs", "pretrained": str(tmp_path / "nowhere")})


def test_fine_tuning_keeps_the_image_size_of_its_checkpoint_unless_told_another(tmp_path):
    LiViTForPreTraining(pretraining_config("micro", image_size=8)).save_pretrained(tmp_path)
    train = Dataset.from_dict({"label": [0, 0, 1]}, features=Features(label=ClassLabel(names=["cat", "dog"])))

    def size(*words: str) -> int:
        arguments = FinetuneSettings.parse(["--model_size", "micro", *words])
        return build_classifier(train, arguments, arguments, arguments, arguments).config.image_size

    assert size("--pretrained", str(tmp_path)) == 8
    assert size("--pretrained", str(tmp_path), "--image_size", "16") == 16
    assert size("--pretrained", "none") == 32


def test_fine_tuning_holds_images_out_by_its_own_default_unless_pretraining_did(runs):
    for fraction, lent in (("0", None), ("0.2", 0.2)):
        run = finished("--dataset", "pictures", "--validation_fraction", fraction)
        words = ["--pretrained", str(run.folder)]
        assert FinetuneSettings.parse(words, inherit=lent_by_pretraining).validation_fraction == lent


def test_a_pretraining_of_another_size_is_named_where_none_fits(runs):
    run = finished("--dataset", "pictures", "--model_size", "micro")
    complaint = "with dataset pictures, model_size base under .* there is one of size micro: pass --pretrained "
    with pytest.raises(LiVTError, match=complaint + re.escape(str(run.folder))):
        find_pretraining(FinetuneSettings.parse(["--dataset", "pictures"]))


def test_a_run_of_the_other_stage_is_not_resumed(runs):
    run = new_run(PretrainSettings())
    run.begin(PretrainSettings())
    for words in (["--resume", str(run.folder)], ["--output_dir", str(run.folder), "--resume", "auto"]):
        with pytest.raises(LiVTError, match="is a pretrain run; go on with: livt pretrain --resume"):
            parse_training(FinetuneSettings, words)


def test_fine_tuning_does_not_start_from_another_tail(runs):
    data = ["--dataset", "cifar100-lt", "--imbalance_factor"]
    run = finished(*data, "100")
    assert find_pretraining(FinetuneSettings.parse([*data, "100"])) == str(run.folder)
    with pytest.raises(LiVTError, match="no finished pretraining with dataset cifar100-lt, .*imbalance_factor 10.0"):
        find_pretraining(FinetuneSettings.parse([*data, "10"]))


@pytest.mark.parametrize("option", [("split_seed", "3"), ("test_fraction", "0.5"), ("label_column", "coarse")])
def test_fine_tuning_does_not_start_from_another_split_which_may_have_seen_its_test_images(runs, option):
    name, value = option
    run = finished("--dataset", "pictures", f"--{name}", value)
    with pytest.raises(LiVTError, match="no finished pretraining with dataset pictures"):
        find_pretraining(FinetuneSettings.parse(["--dataset", "pictures"]))
    assert find_pretraining(FinetuneSettings.parse(["--dataset", "pictures", f"--{name}", value])) == str(run.folder)


def test_a_run_folder_holds_its_settings_and_results_as_plain_files(runs):
    run = finished("--epochs", "3")
    assert yaml.safe_load((run.folder / "arguments.yaml").read_text())["epochs"] == 3
    assert json.loads((run.folder / "results.json").read_text()) == dataclasses.asdict(run.results)


def test_results_of_another_version_are_read_for_what_they_share(tmp_path):
    (tmp_path / "results.json").write_text('{"stage": "finetune", "dataset": "glyphs", "gone": 1, "seed": 4}')
    results = Results.read(tmp_path / "results.json")
    assert (results.dataset, results.seed, results.posterior) == ("glyphs", 4, None)


def test_a_value_may_contain_an_equals_sign():
    words = ["--model", "runs/seed=1", "--report=a=b"]
    assert command_line(EvalSettings, words) == {"model": "runs/seed=1", "report": "a=b"}


@dataclasses.dataclass(kw_only=True)
class WithPositionals(CommandSettings):
    run: str = option(REQUIRED, "a run", positional=True)
    images: list[str] = option(REQUIRED, "images", positional=True)
    public: bool = option(False, "a flag")


@pytest.mark.parametrize("words", ["--public a b c", "a b c --public", "--public true a b c", "a --public=yes b c"])
def test_a_flag_leaves_the_words_that_stand_for_themselves_alone(words):
    settings = WithPositionals.parse(words.split())
    assert (settings.run, settings.images, settings.public) == ("a", ["b", "c"], True)


@pytest.mark.parametrize("words", ["a --public b c", "a b --public true c", "a b c"])
def test_options_may_stand_between_the_words_that_stand_for_themselves(words):
    assert WithPositionals.parse(words.split()).images == ["b", "c"]


def test_what_can_be_said_in_two_ways_is_said_once():
    assert LookSettings.parse(["--dataset", "birds"]).dataset == "birds"
    with pytest.raises(LiVTError, match="dataset is both birds and fish; say it once"):
        LookSettings.parse(["birds", "--dataset", "fish"])


def test_the_home_folder_may_be_written_short_in_a_config(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "own.yaml").write_text("dataset: ~/birds\noutput_dir: ~/run\n")
    settings = PretrainSettings.parse(["--config", str(tmp_path / "own.yaml")])
    assert (settings.dataset, settings.output_dir) == (str(tmp_path / "birds"), str(tmp_path / "run"))


def test_a_space_is_refused_for_another_form_before_anything_is_uploaded():
    with pytest.raises(LiVTError, match="a Space serves the transformers form of a model, not timm"):
        PublishSettings.parse(["run", "org/name", "--form", "timm", "--space"])


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
    with pytest.raises(LiVTError, match="trained on birds, so livt_hf cannot choose the licence"):
        check_publishing(PretrainSettings.parse(words))
    check_publishing(PretrainSettings.parse([*words, "--hub_license", "mit"]))
    check_publishing(PretrainSettings.parse(["--push_to_hub", "--hub_model_id", "org/glyphs"]))


# Facts of options


def test_every_list_of_options_comes_from_their_declarations():
    assert {"source", "lists", "output_dir", "plugin", "pretrained", "test_prior"} <= set(
        FinetuneSettings.names("is_path")
    )
    assert "loss" not in FinetuneSettings.names("is_path")
    assert set(DataSettings.split_options()) >= {"dataset", "imbalance_factor", "split_seed", "label_column"}
    assert not set(FinetuneSettings.names("may_change_on_resume")) & {"loss", "seed", "base_lr", "dataset"}


def test_help_names_the_choices_and_defaults():
    text = " ".join(make_parser(FinetuneSettings).format_help().split())
    assert "one of exponential, pareto, balanced" in text
    assert set(LOSSES) <= set(re.findall(r"\w+", text))
    assert "(default: 0.75)" in text and "(default: )" not in text and "one of true, false, auto" in text


def every_settings_class(cls=CommandSettings):
    return [cls, *(below for child in cls.__subclasses__() for below in every_settings_class(child))]


def test_every_option_is_read_by_someone():
    root = Path(__file__).parents[1]
    sources = [path for folder in ("livt_hf", "recipes") for path in (root / folder).rglob("*.py")]
    text = "\n".join(path.read_text() for path in sources)
    head = {field.name for field in dataclasses.fields(LongTailConfig)}  # handed over by name
    names = {name for cls in every_settings_class() for name in cls.names()} - head
    by_name = r"(settings|self|arguments)\.{0}\b|(getattr\(\w+, |get\()\"{0}\""
    unread = [name for name in sorted(names) if not re.search(by_name.format(name), text)]
    assert unread == []


def test_a_file_of_values_that_contains_itself_is_refused_and_one_that_repeats_a_part_is_not(tmp_path):
    file = tmp_path / "values.yaml"
    file.write_text("a: &a [*a]\n")
    with pytest.raises(LiVTError, match="values.yaml is not readable YAML: .*Circular reference"):
        read_values(file)
    file.write_text("a: &a [1]\nb: *a\n")
    assert read_values(file) == {"a": [1], "b": [1]}


def test_what_is_no_name_of_a_module_is_no_plugin():
    for name in ("../../etc/passwd", "no_such_package.plugin", ".relative"):
        with pytest.raises(LiVTError, match="is not an installed module"):
            load_plugin(name)
        assert find_module(name.split(".")[0]) is None


@pytest.mark.parametrize(
    "command",
    ["eval {}", "eval --compare {} other", "calibrate {}", "predict {} image.png", "demo {} other"]
    + ["publish {} owner/name", "convert {} out"],
)
def test_the_folder_of_a_whole_training_stands_for_its_fine_tuning(command, tmp_path):
    (tmp_path / "finetune").mkdir()
    (tmp_path / "finetune" / "config.json").write_text("{}")
    name, *words = command.format(tmp_path).split()
    settings = COMMANDS[name]
    [given] = [value for name, value in settings.asked(words).items() if name in settings.names("is_model")]
    assert given in (str(tmp_path / "finetune"), [str(tmp_path / "finetune"), "other"])


def test_of_a_file_that_is_not_there_the_one_with_nearly_its_name_is_named(tmp_path):
    (tmp_path / "prior.json").write_text("[1, 2]")
    with pytest.raises(LiVTError, match=r"priors.json does not exist; .* Did you mean .*/prior.json\?$"):
        read_values(tmp_path / "priors.json")
    with pytest.raises(LiVTError, match=r"other.yaml does not exist; correct its name.$"):
        read_values(tmp_path / "other.yaml")


def test_the_folder_of_a_whole_training_is_resumed_by_livt_train(tmp_path):
    (tmp_path / PLAN).write_text("{}")
    with pytest.raises(LiVTError, match=f"livt train --resume {tmp_path}$"):
        resumed("--resume", str(tmp_path))


def test_the_home_folder_is_known_before_a_run_lends_its_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "whole/finetune").mkdir(parents=True)
    (tmp_path / "whole/finetune/config.json").touch()
    last = str(tmp_path / "whole/finetune")
    (tmp_path / "own.yaml").write_text("model: ~/whole\n")
    assert EvalSettings.asked(["--config=~/own.yaml"])["model"] == last
    assert CalibrateSettings.asked(["~/whole"])["model"] == last
    assert DemoSettings.asked(["~/whole", "~/whole"])["models"] == [last, last]
    assert EvalSettings(compare=["~/a", "b"]).compare == [str(tmp_path / "a"), "b"]


@pytest.mark.parametrize(
    ("words", "imbalance"),
    [
        (["--test_imbalance", "runs/1"], "50,25,10,5,2,-2,-5,-10,-25,-50"),
        (["runs/1", "--test_imbalance"], "50,25,10,5,2,-2,-5,-10,-25,-50"),
        (["--test_imbalance", "50,10", "runs/1"], "50,10"),
        (["runs/1", "--test_imbalance=-50"], "-50"),
    ],
)
def test_a_word_that_cannot_be_an_option_s_value_stands_for_itself(words, imbalance):
    asked = EvalSettings.asked(words)
    assert (asked["model"], asked["test_imbalance"]) == ("runs/1", imbalance)
