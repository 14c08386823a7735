"""Settings: where they come from, which are refused, and what a resumed run may change."""

import dataclasses
import json
import shlex
from pathlib import Path

import pytest
import yaml
from datasets import ClassLabel, Dataset, Features

from livt_hf import LiViTForPreTraining, pretraining_config
from livt_hf.commands import resume_message
from livt_hf.finetuning import build_classifier, inherited_options, resolve_pretrained
from livt_hf.runs import Run, check_same_settings, new_run, parse_training, unfinished_run
from livt_hf.settings import EvalArguments, FinetuneArguments, PretrainArguments, parse, save_yaml, words_of


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
    arguments = parse(PretrainArguments, list(argv))
    run = new_run(arguments)
    run.begin(arguments)
    return run


# Where a value comes from


def test_a_value_comes_from_the_command_line_then_the_datasets_config_then_the_defaults(configs):
    arguments = parse(PretrainArguments, ["--epochs", "3"], configs)
    assert (arguments.epochs, arguments.seed, arguments.batch_size) == (3, 5, 4096)


def test_a_config_takes_the_place_of_the_datasets_own(configs, tmp_path):
    mine = written(tmp_path / "mine.yaml", "epochs: 7\n")
    arguments = parse(PretrainArguments, ["--config", mine], configs)
    assert (arguments.epochs, arguments.seed, arguments.model_size) == (7, 0, "base")
    assert parse(PretrainArguments, ["--seed", "1", "--config", mine, "--epochs", "9"], configs).epochs == 9


def test_the_datasets_config_is_that_of_the_stage_and_a_dataset_without_one_gets_the_paper_s_defaults(configs):
    assert parse(FinetuneArguments, [], configs).epochs == 20
    arguments = parse(FinetuneArguments, ["--dataset", "owner/name"], configs)
    assert (arguments.epochs, arguments.model_size) == (100, "base")


def test_settings_saved_and_read_back_are_the_same(tmp_path):
    arguments = parse(FinetuneArguments, ["--mixed_precision", "no", "--base_lr", "3e-7", "--flip", "false"])
    save_yaml(arguments, tmp_path / "arguments.yaml")
    assert parse(FinetuneArguments, ["--config", str(tmp_path / "arguments.yaml")]) == arguments


# How a value is written


@pytest.mark.parametrize("word", ["False", "false", "0", "no"])
def test_flag_false_is_false(word, tmp_path):
    assert parse(PretrainArguments, ["--flip", word]).flip is False
    assert parse(PretrainArguments, ["--config", written(tmp_path / "c.yaml", f"flip: {word}\n")]).flip is False


def test_a_flag_without_a_value_is_true():
    assert parse(PretrainArguments, ["--compile"]).compile is True


@pytest.mark.parametrize("number", ["1e-3", "1.0e-3", "0.001", ".001"])
def test_yaml_numbers_need_no_decimal_point(number, tmp_path):
    assert parse(PretrainArguments, ["--config", written(tmp_path / "c.yaml", f"base_lr: {number}\n")]).base_lr == 1e-3


def test_yaml_words_stay_words_and_null_is_nothing(tmp_path):
    text = "mixed_precision: no\npretrained: none\ntest_prior: none\nclip_grad: null\nsource: ~\nhub_model_id:\n"
    arguments = parse(FinetuneArguments, ["--config", written(tmp_path / "c.yaml", text)])
    assert (arguments.mixed_precision, arguments.pretrained, arguments.test_prior) == ("no", "none", "none")
    assert (arguments.clip_grad, arguments.source, arguments.hub_model_id) == (None, None, None)


def test_a_yaml_value_may_start_with_a_dash(tmp_path):
    arguments = parse(PretrainArguments, ["--config", written(tmp_path / "c.yaml", "dataset: -odd-name\n")])
    assert arguments.dataset == "-odd-name"


# What is refused


@pytest.mark.parametrize("words", [["--epoch", "3"], ["--epoch=3"]])
def test_an_unknown_option_suggests_the_nearest(words):
    with pytest.raises(SystemExit, match=r"there is no option '--epoch'; did you mean --epochs\?"):
        parse(PretrainArguments, words)


def test_an_option_like_no_other_points_to_the_help():
    with pytest.raises(SystemExit, match="there is no option '--xyzzy'; --help lists them"):
        parse(PretrainArguments, ["--xyzzy", "3"])


def test_an_option_of_the_other_stage_is_unknown():
    with pytest.raises(SystemExit, match="there is no option '--mask_ratio'"):
        parse(FinetuneArguments, ["--mask_ratio", "0.5"])


def test_an_unknown_yaml_key_names_the_file_and_suggests_the_nearest(tmp_path):
    file = written(tmp_path / "mine.yaml", "epochs: 3\nbatchsize: 8\n")
    with pytest.raises(SystemExit, match=r"mine.yaml: there is no option 'batchsize'; did you mean batch_size\?"):
        parse(PretrainArguments, ["--config", file])


@pytest.mark.parametrize(
    ("text", "message"),
    [("- epochs\n", "must hold 'option: value' lines, not a list"), ("epochs: [1, 2]\n", "epochs must be a single")],
)
def test_yaml_of_another_shape_is_refused(text, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        parse(PretrainArguments, ["--config", written(tmp_path / "c.yaml", text)])


def test_a_config_that_does_not_exist_is_named():
    with pytest.raises(SystemExit, match="the config file nowhere.yaml does not exist"):
        parse(PretrainArguments, ["--config", "nowhere.yaml"])


@pytest.mark.parametrize("words", [["--epochs", "ten"], ["--model_size", "giant"], ["--flip", "perhaps"]])
def test_a_value_of_the_wrong_kind_is_refused_with_the_option_s_name(words, capsys):
    with pytest.raises(SystemExit):
        parse(PretrainArguments, words)
    assert f"argument {words[0]}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["epochs", "batch_size", "accumulation", "eval_epochs", "max_steps"])
def test_a_count_below_one_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} is 0; it must be at least 1"):
        parse(FinetuneArguments, [f"--{name}", "0"])


@pytest.mark.parametrize("cls", [PretrainArguments, FinetuneArguments, EvalArguments])
def test_every_option_is_explained(cls):
    assert all(field.metadata["help"] for field in dataclasses.fields(cls))


# Run folders


def test_a_folder_completed_by_the_shell_is_the_same_dataset():
    assert parse(PretrainArguments, ["--dataset", "birds/"]) == parse(PretrainArguments, ["--dataset", "birds"])


def test_a_printed_command_can_be_copied_where_the_folder_has_spaces():
    message = resume_message(Run(Path("runs/pretrain-my birds-micro/1")), "pretrain.py")
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
    assert new_run(parse(PretrainArguments, ["--output_dir", str(tmp_path)])).folder == tmp_path


# Going on with a run


def test_a_resumed_run_keeps_the_settings_it_was_started_with(runs, configs):
    run = started("--epochs", "3", "--seed", "8")
    arguments = parse_training(PretrainArguments, ["--resume", str(run.folder)], configs)
    assert (arguments.epochs, arguments.seed) == (3, 8)
    check_same_settings(run, arguments)


def test_the_first_command_with_resume_after_it_goes_on(runs, tmp_path):
    first = ["--config", written(tmp_path / "mine.yaml", "epochs: 3\nmodel_size: micro\n"), "--seed", "8"]
    run = started(*first)
    arguments = parse_training(PretrainArguments, [*first, "--resume"])
    assert unfinished_run(arguments) == run
    check_same_settings(run, arguments)


def test_what_fine_tuning_found_for_itself_survives_resume_with_a_config(runs, tmp_path):
    first = ["--config", written(tmp_path / "mine.yaml", "model_size: micro\n")]
    arguments = parse(FinetuneArguments, first)
    arguments.pretrained = "runs/pretrain-glyphs-micro/1"
    new_run(arguments).begin(arguments)
    assert parse_training(FinetuneArguments, [*first, "--resume"]).pretrained == arguments.pretrained


def test_resume_auto_means_the_newest_unfinished_run_or_a_new_one(runs):
    assert unfinished_run(parse(PretrainArguments, ["--resume"])) is None
    first, second = started(), started()
    assert unfinished_run(parse(PretrainArguments, ["--resume", "auto"])) == second
    second.write_results({})
    assert unfinished_run(parse(PretrainArguments, ["--resume"])) == first


def test_resuming_with_other_settings_says_which_differ(runs):
    run = started("--epochs", "3")
    asked = ["--resume", str(run.folder), "--epochs", "5", "--base_lr", "1e-2", "--save_steps", "7"]
    with pytest.raises(ValueError) as refused:
        check_same_settings(run, parse_training(PretrainArguments, asked))
    assert "base_lr was 0.00015 and is now 0.01" in str(refused.value)
    assert "epochs was 3 and is now 5" in str(refused.value)
    assert "save_steps" not in str(refused.value)  # it changes nothing that is learned


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path):
    with pytest.raises(ValueError, match="is not a run: it has no arguments.yaml"):
        parse_training(PretrainArguments, ["--resume", str(tmp_path)])


# What fine-tuning takes from its pretraining


def finished(*argv: str) -> Run:
    run = started(*argv)
    run.write_results({})
    return run


def test_fine_tuning_takes_data_and_size_of_the_newest_pretraining(runs, configs):
    finished("--dataset", "imagenet-bal", "--images_per_class", "116", "--model_size", "tiny", "--split_seed", "3")
    arguments = parse(FinetuneArguments, inherited_options([]), configs)
    assert (arguments.dataset, arguments.images_per_class) == ("imagenet-bal", 116)
    assert (arguments.model_size, arguments.split_seed, arguments.epochs) == ("tiny", 3, 100)


def test_fine_tuning_that_names_its_data_takes_nothing(runs):
    finished("--dataset", "imagenet-bal")
    assert inherited_options(["--dataset", "glyphs"]) == inherited_options(["--config=mine.yaml"]) == []


def test_fine_tuning_keeps_the_image_size_of_its_checkpoint_unless_told_another(tmp_path):
    LiViTForPreTraining(pretraining_config("micro", image_size=8)).save_pretrained(tmp_path)
    train = Dataset.from_dict({"label": [0, 0, 1]}, features=Features(label=ClassLabel(names=["cat", "dog"])))

    def size(*words: str) -> int:
        arguments = parse(FinetuneArguments, ["--model_size", "micro", *words])
        return build_classifier(arguments, train).config.image_size

    assert size("--pretrained", str(tmp_path)) == 8
    assert size("--pretrained", str(tmp_path), "--image_size", "16") == 16
    assert size("--pretrained", "none") == 32


def test_fine_tuning_does_not_start_from_another_tail(runs):
    data = ["--dataset", "cifar100-lt", "--imbalance_factor"]
    run = finished(*data, "100")
    arguments = parse(FinetuneArguments, [*data, "100"])
    resolve_pretrained(arguments)
    assert arguments.pretrained == str(run.folder)
    with pytest.raises(ValueError, match="no finished pretraining with dataset cifar100-lt, .*imbalance_factor 10.0"):
        resolve_pretrained(parse(FinetuneArguments, [*data, "10"]))


@pytest.mark.parametrize("option", [("split_seed", "3"), ("test_fraction", "0.5"), ("label_column", "coarse")])
def test_fine_tuning_does_not_start_from_another_split_which_may_have_seen_its_test_images(runs, option):
    name, value = option
    run = finished("--dataset", "pictures", f"--{name}", value)
    with pytest.raises(ValueError, match="no finished pretraining with dataset pictures"):
        resolve_pretrained(parse(FinetuneArguments, ["--dataset", "pictures"]))
    arguments = parse(FinetuneArguments, ["--dataset", "pictures", f"--{name}", value])
    resolve_pretrained(arguments)
    assert arguments.pretrained == str(run.folder)


def test_a_run_folder_holds_its_settings_and_results_as_plain_files(runs):
    run = finished("--epochs", "3")
    assert yaml.safe_load((run.folder / "arguments.yaml").read_text())["epochs"] == 3
    assert json.loads((run.folder / "results.json").read_text()) == run.results == {}


def test_a_value_may_contain_an_equals_sign():
    assert words_of(["--model", "runs/seed=1", "--tau=0.5"]) == ["--model", "runs/seed=1", "--tau", "0.5"]
