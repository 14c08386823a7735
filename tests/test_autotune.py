"""How much training fits into a given time."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from recipe_runs import TINY, RecipeRun, assert_same_weights, make_pictures
from refusals import refusal

from livt_hf.cli.console import WITHIN_TRAIN, format_next_command
from livt_hf.cli.options import CONFIGS, format_words, read_config
from livt_hf.cli.resume import resolve_training
from livt_hf.cli.training_settings import FinetuneSettings, PretrainSettings, TrainSettings
from livt_hf.data import load_long_tailed
from livt_hf.errors import Interrupted
from livt_hf.recipes import train
from livt_hf.runs import Run
from livt_hf.training import autotune
from livt_hf.training.loop import TrainingTask

STAGES = PretrainSettings, FinetuneSettings
SCRATCH = ["--pretrained", "none"]


def test_epochs_that_fit_are_whole_and_never_fewer_than_one():
    assert autotune.fit_epochs(60, 25) == 2
    assert autotune.fit_epochs(50, 25) == 2
    assert autotune.fit_epochs(10, 25) == autotune.fit_epochs(-5, 25) == 1
    assert autotune.fit_epochs(100, 10, last=3, per_last=20) == 7  # 4 x 10 and 3 x 20
    assert autotune.fit_epochs(50, 10, last=3, per_last=20) == 2  # 2 x 20
    assert autotune.fit_epochs(0, 10, last=1, per_last=20) == 1


def test_a_pass_through_the_micro_vit_costs_what_its_matrices_say():
    """17 tokens, 6 layers of width 128: per token 12 D^2 multiplications for weights and 2 D N for attention."""
    multiplications = 6 * 17 * (12 * 128**2 + 2 * 128 * 17)
    assert autotune.count_training_flops("micro", 32, 8) == 3 * 2 * multiplications


@pytest.mark.parametrize(
    ("num_images", "side", "core_hours", "model"),
    [
        (10_847, 32, 0.25, ("micro", 32, 8)),  # CIFAR-100-LT: 13 passes over half of 64 patches are too few
        (10_847, 32, 0.43, ("micro", 32, 4)),  # 23 passes
        (10_847, 28, 0.43, ("micro", 32, 4)),  # of MNIST's size: enlarged to 32 in any case
        (2_336, 256, 1, ("micro", 64, 8)),  # PlantDoc in half an hour of two cores: 123 passes
        (2_336, 256, 20, ("tiny", 224, 16)),  # 167 passes
        (2_336, 200, 20, ("micro", 64, 8)),  # no image is enlarged
        (1_000_000, 256, 1, ("micro", 32, 8)),  # never enough: the smallest
    ],
)
def test_the_largest_model_that_sees_each_image_a_hundred_times_is_trained(num_images, side, core_hours, model):
    choice = autotune.ScratchPlan(num_images, side, 3600 * core_hours * autotune.CORE_FLOPS)
    assert choice.model == model


def parsed(choice: autotune.ScratchPlan, hours: float) -> tuple[PretrainSettings, FinetuneSettings]:
    """The settings of both stages that a plan leads to."""
    options = choice.options(hours=hours).values()
    return tuple(settings.parse(format_words(said)) for settings, said in zip(STAGES, options, strict=True))


def test_cifar_gets_the_batches_and_rates_of_its_own_config():
    choice = autotune.ScratchPlan(10_847, 32, 900 * autotune.CORE_FLOPS)
    assert (choice.batch_size, choice.base_lrs) == (128, (2e-3, 4e-3))
    first, second = parsed(choice, 0.25)
    assert (first.optimization.hours, second.optimization.hours) == (0.15, 0.1)
    assert (second.optimization.batch_size, second.model.patch_size) == (64, 8)
    assert (second.augmentation.augmentation, second.augmentation.mixup) == ("pad_crop", 0.0)
    assert second.optimization.keep_ratio == 0.5  # 0.1 hours show half of the patches 21 times


def test_half_a_core_hour_of_cifar_is_spent_on_small_patches_by_muon():
    choice = autotune.ScratchPlan(10_847, 32, 1800 * autotune.CORE_FLOPS)
    first, second = parsed(choice, 0.5)
    assert (first.optimization.hours, second.optimization.hours) == (0.2, 0.3)  # not as in two hours
    assert (first.model.patch_size, first.model.decode_ratio, second.optimization.optimizer) == (4, 0.25, "muon")
    assert (second.augmentation.mixup, second.augmentation.cutmix) == (0.0, 0.0)
    assert second.optimization.keep_all_epochs == 1
    assert "40% of the time" in choice.explain(0.5) and "by Muon, without mixup" in choice.explain(0.5)


def test_a_large_model_is_fine_tuned_on_all_patches():
    choice = autotune.ScratchPlan(2_336, 256, 20 * 3600 * autotune.CORE_FLOPS)
    assert choice.model[0] == "tiny" and "keep_ratio" not in choice.options(hours=20.0)["finetune"]
    assert "half of their patches" not in choice.explain(20.0)


def test_two_core_hours_of_cifar_are_spent_as_the_long_configs_say():
    options = autotune.ScratchPlan(10_847, 32, 2 * 3600 * autotune.CORE_FLOPS).options(hours=2.0)
    fitted = {"hours", "epochs", "warmup_epochs", "eval_epochs", "compile"}
    for cls, said in zip(STAGES, options.values(), strict=True):
        config = cls.parse(["--config", str(CONFIGS / f"{cls.stage}-cifar100-lt-long.yaml")]).to_dict()
        given = read_config(cls, CONFIGS / f"{cls.stage}-cifar100-lt-long.yaml").keys() - fitted
        asked = cls.parse([*format_words(said), "--dataset", "cifar100-lt", "--imbalance_factor", "100"]).to_dict()
        assert {name: asked[name] for name in given} == {name: config[name] for name in given}


@pytest.mark.parametrize(("used", "epochs"), [(0, 36), (1800, 18), (4000, 1)])
def test_hours_are_those_that_are_left_of_the_time_since_the_start(monkeypatch, used, epochs):
    monkeypatch.setattr(autotune, "measure_update_seconds", lambda *_: 10.0)
    monkeypatch.setattr(autotune, "clock", lambda: 5000.0 + used)
    task = SimpleNamespace(loader=SimpleNamespace(updates_per_epoch=10), slow_final_epochs=0)
    spec = FinetuneSettings.build(dataset="glyphs", hours=1.0, warmup_epochs=0, mixed_precision="no").optimization
    assert autotune.resolve_auto_options(spec, task, Accelerator(cpu=True), began=5000.0).epochs == epochs


@pytest.fixture
def commands(monkeypatch, tmp_path) -> list[list[str]]:
    """What `livt train` would run; the first command is stopped and saved, all others end well."""
    run = []

    def record(words: list[str]) -> bool:
        run.append(words)
        if len(run) > 1 and "--output_dir" in words:
            folder = Path(words[words.index("--output_dir") + 1])
            folder.mkdir()
            (folder / "results.json").touch()
        return len(run) == 1

    monkeypatch.setattr(train, "run_livt", record)
    monkeypatch.setattr(train, "available_cores", lambda: 1)
    monkeypatch.setenv("LIVT_RUNS", str(tmp_path / "runs"))
    return run


def test_train_says_what_it_chose_and_goes_on_with_it(commands, tmp_path, capsys):
    pictures = make_pictures(tmp_path / "pictures")
    with pytest.raises(Interrupted) as stopped:
        train.main([*SCRATCH, str(pictures), "--hours", "0.5", "--test_fraction", "0.3", "--validation_fraction", "0"])
    folder = tmp_path / "runs" / "train-pictures" / "1"
    assert "From scratch: micro at 32 pixels with patches of 4" in capsys.readouterr().out
    assert stopped.value.args == ("train", "--resume", folder)
    train.main(["--resume", str(folder)])
    assert [words[0] for words in commands] == ["pretrain", "pretrain", "finetune", "eval"]
    assert commands[0] == commands[1]  # not planned again
    first, second = (settings.parse(words[1:]) for settings, words in zip(STAGES, commands[1:3], strict=True))
    assert (first.data.dataset, second.model.pretrained) == (str(pictures), str(folder / "pretrain"))
    assert (first.data.test_fraction, second.data.test_fraction) == (0.3, 0.3)
    assert (first.optimization.hours, second.optimization.hours) == (0.3, 0.2)
    assert second.data.validation_fraction == 0.0  # as asked for; by itself, fine-tuning may hold images out
    assert capsys.readouterr().out.endswith(f"  livt demo {folder / 'finetune'}\n")
    train.main(["--resume", str(folder)])
    assert [words[0] for words in commands[4:]] == ["eval"]
    with refusal("hours"):
        train.main(["--resume", str(folder), "--hours", "3"])


def test_train_gives_its_plugin_to_the_evaluation_too(commands, tmp_path):
    pictures, plugin = make_pictures(tmp_path / "pictures"), tmp_path / "plugin.py"
    plugin.touch()
    with pytest.raises(Interrupted):
        train.main([*SCRATCH, str(pictures), "--plugin", str(plugin), "--output_dir", str(tmp_path / "out")])
    with refusal(None, "--plugin", plugin):  # a folder outside of the runs may be a download
        train.main(["--resume", str(tmp_path / "out")])
    train.main(["--resume", str(tmp_path / "out"), "--plugin", str(plugin)])
    assert all(words[words.index("--plugin") + 1] == str(plugin) for words in commands)


def test_a_share_of_the_cores_is_what_the_model_is_chosen_for(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "available_cores", lambda: 8)
    images = load_long_tailed(make_pictures(tmp_path / "pictures"))["train"]
    whole, share = (train.plan_scratch_training(1, images, "bal_bce", threads) for threads in (None, 2))
    assert whole.flops == 4 * share.flops


def test_the_size_of_images_is_that_of_most_of_them(tmp_path):
    folder = make_pictures(tmp_path / "pictures")
    Image.new("RGB", (64, 64)).save(folder / "train" / "class0" / "0.png")  # the first of all
    choice = train.plan_scratch_training(1, load_long_tailed(str(folder))["train"], "bal_bce")
    assert (choice.side, choice.alike) == (8, False)
    assert autotune.ScratchPlan(64, 32, 1e15).options(1)["finetune"]["augmentation"] == "pad_crop"
    assert autotune.ScratchPlan(64, 32, 1e15, alike=False).options(1)["finetune"]["augmentation"] == "crop"


def test_images_of_one_class_are_refused_before_anything_is_trained(tmp_path):
    folder = make_pictures(tmp_path / "pictures", train=(20,))
    with refusal("dataset", "class0"):
        train.main([*SCRATCH, str(folder), "--hours", "0.1"])


@pytest.mark.parametrize("loss", ["lade", "ib"])
def test_a_loss_of_hard_labels_is_trained_without_mixing_and_said_to_be(commands, tmp_path, capsys, loss):
    folder = make_pictures(tmp_path / "pictures")
    assert autotune.ScratchPlan(48, 8, 3600 * autotune.CORE_FLOPS).mixes  # otherwise it would
    with pytest.raises(Interrupted):
        train.main([*SCRATCH, str(folder), "--loss", loss, "--output_dir", str(tmp_path / "out")])
    assert "without mixup, for the loss wants hard labels." in capsys.readouterr().out
    train.main(["--resume", str(tmp_path / "out")])
    second = FinetuneSettings.parse(commands[2][1:])
    assert (second.loss.loss, second.augmentation.mixup, second.augmentation.cutmix) == (loss, 0, 0)


def test_a_loss_that_does_not_fit_the_labels_is_refused_before_the_first_stage(commands, tmp_path):
    files = sorted(make_pictures(tmp_path / "pictures").rglob("*.png"))
    rows = [f"{path},{'a|b' if number % 2 else 'a'}" for number, path in enumerate(files)]
    (tmp_path / "labels.csv").write_text("\n".join(["path,label", *rows]))
    words = [*SCRATCH, str(tmp_path / "labels.csv"), "--label_separator", "|", "--output_dir", str(tmp_path / "out")]
    with refusal("loss", "'bal_ce'"):
        train.main([*words, "--loss", "bal_ce"])
    assert not commands and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("said", "flip"), [([], False), (["--flip"], True)])
def test_train_mirrors_letters_only_where_that_is_asked_for(said, flip):
    settings = TrainSettings.parse(said)
    for cls in STAGES:
        assert cls.parse(train.stage_options(settings, cls.stage), CONFIGS).augmentation.flip == flip


def test_an_update_takes_no_more_images_than_there_are():
    assert [autotune.limit_batch_size(count) for count in (100_000, 1_280, 16, 11, 1)] == [256, 16, 16, 8, 1]
    assert autotune.ScratchPlan(11, 32, 1e15).second_batch_size == 8


def test_a_training_that_its_first_stage_refuses_leaves_the_folder_free(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "run_livt", lambda _words: sys.exit(1))
    words = [*SCRATCH, str(make_pictures(tmp_path / "pictures")), "--output_dir", str(tmp_path / "run")]
    for _ in range(2):  # the second try is not told that the folder holds another run
        with pytest.raises(SystemExit, match="1"):
            train.main(words)
    assert not (tmp_path / "run").exists()


def test_a_stage_that_the_system_killed_is_said_with_the_way_to_go_on(tmp_path, monkeypatch, capsys):
    class Killed:
        def __init__(self, words, env):
            if begins:
                Run(tmp_path / "run" / "pretrain").begin(PretrainSettings().to_dict())

        def wait(self):
            return -9

    monkeypatch.setattr(train.subprocess, "Popen", Killed)
    words = [*SCRATCH, str(make_pictures(tmp_path / "pictures")), "--output_dir", str(tmp_path / "run")]
    for begins in (False, True):  # what has not begun has no way to go on
        with pytest.raises(SystemExit, match="137"):
            train.main(words)
        out, err = capsys.readouterr()
        assert "error: a process was ended by SIGKILL, by the system if memory ran out.\n" in err
        assert (f"livt train --resume {tmp_path / 'run'}" in out) == (tmp_path / "run").exists() == begins


def test_a_stage_within_livt_train_names_no_next_command_of_its_own(monkeypatch):
    assert "livt eval" in format_next_command("Next", "eval")
    monkeypatch.setenv(WITHIN_TRAIN, "1")
    assert format_next_command("Next", "eval") == ""


@pytest.mark.slow
def test_train_runs_both_stages_and_the_evaluation(tmp_path):
    words = [make_pictures(tmp_path / "pictures"), *SCRATCH, "--hours", 2 / 3600, "--threads", 1]
    done = RecipeRun("train", tmp_path / "run", *words)
    assert done.wait() == 0, done.printed
    assert (tmp_path / "run" / "finetune" / "report" / "report.html").exists()
    assert done.printed.count("Next, ") == 1  # what it does by itself is not to be done


def test_compiling_pays_on_a_gpu_and_after_half_an_hour_of_a_cpu():
    assert autotune.compile_pays(1, "cuda") and autotune.compile_pays(1800, "cpu")
    assert not autotune.compile_pays(1799, "cpu") and not autotune.compile_pays(9999, "mps")


def test_compile_is_a_truth_or_auto():
    words = {"": False, "--compile": True, "--compile false": False, "--compile auto": "auto"}
    assert {text: PretrainSettings.parse(text.split()).optimization.compile for text in words} == words
    with refusal("compile", "'maybe'", "true, false, auto"):
        PretrainSettings.parse(["--compile=maybe"])


def test_a_run_of_some_hours_is_bit_for_bit_the_run_of_its_epochs(tmp_path):
    place = TINY.index("--epochs")
    tiny = [*TINY[:place], *TINY[place + 2 :]]
    options = ["--dataset", make_pictures(tmp_path / "pictures"), *tiny, "--pretrained", "none", "--mixup", 0.5]
    options += ["--drop_path", 0.5, "--ema_decay", 0.5]
    short = RecipeRun("finetune", tmp_path / "hours", *options, "--hours", 2 / 3600, "--compile", "auto").finish()
    epochs = short.arguments["epochs"]
    assert epochs >= 1 and short.results.epochs == epochs and short.arguments["compile"] is False
    same = RecipeRun("finetune", tmp_path / "epochs", *options, "--epochs", epochs).finish()
    assert_same_weights(short.folder, same.folder)
    (short.folder / "results.json").unlink()
    words = [*map(str, options), "--hours", str(2 / 3600), "--compile", "auto", "--resume", str(short.folder)]
    settings, _ = resolve_training(FinetuneSettings, words[2:])  # the same command goes on with what was chosen
    assert (settings.optimization.epochs, settings.optimization.compile) == (epochs, False)


def test_a_time_too_short_for_one_epoch_is_said_to_be(monkeypatch, capsys):
    monkeypatch.setattr(autotune, "measure_update_seconds", lambda *_: 3.0)
    for seconds, epochs in ((20, 1), (70, 2)):
        spec = PretrainSettings.build(hours=seconds / 3600, mixed_precision="no").optimization
        task = TrainingTask(None, SimpleNamespace(updates_per_epoch=10))
        chosen = autotune.resolve_auto_options(spec, task, Accelerator(cpu=True), autotune.clock())
        assert chosen.epochs == epochs
        assert ("one epoch takes longer than that" in capsys.readouterr().err) == (epochs == 1)


def test_resnet32_has_its_464_thousand_weights_and_31_convolutions():
    from livt_hf.recipes.benchmarks.race import resnet32

    model = resnet32(classes=10)
    convolutions = [layer for layer in model.modules() if isinstance(layer, torch.nn.Conv2d)]
    assert len(convolutions) == 31  # with the classifier 32 layers
    assert sum(p.numel() for p in model.parameters()) == 464_154  # 0.46 million in He et al., Table 6
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_a_plain_loop_of_the_race_ends_with_its_budget(monkeypatch):
    """A clock of one second per look: the rate rises over the first twentieth (5.05 s) and falls to 0."""
    from livt_hf.recipes.benchmarks import race

    ticks = iter(range(1000))
    monkeypatch.setattr(race, "core_seconds", lambda: next(ticks))
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rates = []
    losses = (rates.append(optimizer.param_groups[0]["lr"]) or model(torch.ones(1)).sum() for _ in range(1000))
    assert race.train(model, optimizer, losses, until=101) == 100
    assert rates.index(max(rates)) == 5 and rates[0] == pytest.approx(1 / 5.05)
    assert rates[-1] < 0.001
