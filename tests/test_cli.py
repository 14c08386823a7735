"""The command `livt`: what it finds, how it launches, how it refuses."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from recipe_runs import TINY, make_pictures
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from livt_hf.cli import main as cli
from livt_hf.cli.console import EXIT_UNFINISHED
from livt_hf.cli.inherit import Resolved
from livt_hf.cli.options import CONFIGS
from livt_hf.cli.training_settings import STAGES, PretrainSettings
from livt_hf.runs import Run

RECIPES = CONFIGS.parent


def livt(*words, **environment) -> subprocess.CompletedProcess:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"} | environment
    command = [sys.executable, "-m", "livt_hf.cli.main", *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def resolved(stage: str, words: list[str]) -> Resolved:
    return Resolved(STAGES[stage].parse(words, CONFIGS))


def processes_of(stage: str, words: list[str]) -> int:
    return cli.count_processes(resolved(stage, words).settings)


@pytest.fixture
def four_cores(monkeypatch):
    monkeypatch.setattr("livt_hf.threads.available_cores", lambda: 4)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("cli") / "pictures")


def test_every_command_is_a_recipe_and_listed_by_help(capsys, monkeypatch):
    assert all((RECIPES / f"{name.replace('-', '_')}.py").is_file() for name in cli.COMMANDS)
    monkeypatch.setattr(sys, "argv", ["livt", "--help"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code is None
    printed = capsys.readouterr().out
    assert all(f"  {name}" in printed for name in cli.COMMANDS)


def test_help_of_every_command_and_a_misspelt_option_are_answered_without_torch():
    code = """
import contextlib, io, sys
from livt_hf.errors import LiVTError
from livt_hf.cli import main as cli
for command in cli.COMMANDS:
    for launcher, word in (["--num_processes=2"], "--help"), ([], "--hlep"):
        sys.argv = ["livt", *launcher, command, word]
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit, LiVTError):
            cli.main()
        assert ("usage: livt " + command in printed.getvalue()) == (word == "--help")
print([name for name in ("torch", "transformers", "datasets", "numpy") if name in sys.modules])
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (answer.stdout, answer.stderr) == ("[]\n", "")


def test_an_unknown_command_suggests_the_nearest():
    assert cli.answer_without_command(["pretrian"]).endswith("'pretrian'; did you mean pretrain?")
    assert "no command after --num_processes" in cli.answer_without_command(["--num_processes", "2"])


def test_an_option_that_does_not_exist_is_refused_before_anything_is_launched():
    answer = livt("pretrain", "--epoch", 3)
    assert (answer.returncode, answer.stderr) == (1, "error: there is no option '--epoch'; did you mean --epochs?\n")


@pytest.mark.parametrize(
    ("cores", "words", "processes"),
    [
        (4, ["--batch_size", "64"], 4),
        (6, ["--batch_size", "64"], 4),
        (64, ["--batch_size", "64"], cli.MAX_PROCESSES),
        (4, ["--batch_size", "50"], 2),
        (4, ["--batch_size", "7"], 1),
        (4, ["--batch_size", "64", "--accumulation", "8"], 4),
        (4, ["--batch_size", "64", "--accumulation", "32"], 2),
        (4, ["--batch_size", "64", "--threads", "2"], 1),
    ],
)
def test_an_update_is_shared_by_as_many_processes_as_cores_where_it_divides(monkeypatch, cores, words, processes):
    monkeypatch.setattr("livt_hf.threads.available_cores", lambda: cores)
    assert processes_of("pretrain", words) == processes
    assert PretrainSettings.parse(words).optimization.batch_size % processes == 0


@pytest.mark.parametrize(
    ("words", "processes"),
    [
        (["--mixup", "0", "--cutmix", "0", "--loss", "lade"], 1),  # a statistic of its batch
        (["--mixup", "0", "--cutmix", "0", "--loss", "bal_ce"], 4),
        (["--batch_size", "36"], 3),  # mixup keeps pairs of images together, and 36 / 4 images are an odd number
        (["--batch_size", "36", "--mixup", "0", "--cutmix", "0"], 4),
    ],
)
def test_a_loss_of_a_batch_stays_on_one_process_and_mixup_keeps_pairs_on_each(four_cores, words, processes):
    assert processes_of("finetune", ["--dataset", "somewhere", "--pretrained", "none", *words]) == processes


@pytest.mark.parametrize(("words", "processes"), [(["--batch_size", "64"], 4), (["--batch_size", "7"], None)])
def test_one_process_needs_no_launcher(monkeypatch, four_cores, words, processes):
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", "nowhere")
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    layout = cli.choose_launcher("pretrain", resolved("pretrain", words))
    assert layout == processes or launch_command_parser().parse_args([*layout, "script.py"]).num_processes == processes


@pytest.mark.parametrize(
    ("devices", "words", "processes"),
    [(1, [], None), (8, [], 8), (6, [], 4), (6, ["--threads", "2"], 4), (3, ["--batch_size", "7"], None)],
)
def test_an_update_is_shared_by_as_many_accelerators_as_divide_it(monkeypatch, capsys, devices, words, processes):
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", "nowhere")
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: devices)
    expected = None if processes is None else ["--num_processes", str(processes)]
    assert cli.choose_launcher("pretrain", resolved("pretrain", ["--dataset", "glyphs", *words])) == expected
    assert (f"{processes or 1} of {devices} accelerators are used" in capsys.readouterr().err) == (devices in (3, 6))
    assert cli.choose_launcher("eval", {}) == (None if devices == 1 else [])


@pytest.mark.parametrize(("images", "processes"), [((5, 4), 1), ((50, 40), 8)])
def test_few_images_are_trained_on_by_one_process(monkeypatch, tmp_path, images, processes):
    monkeypatch.setattr("livt_hf.threads.available_cores", lambda: 8)
    folder = make_pictures(tmp_path / "pictures", train=images, test=2)
    words = ["--dataset", str(folder), "--pretrained", str(tmp_path / "somewhere"), "--tune", "full"]
    assert processes_of("finetune", words) == processes


def test_a_folder_of_shards_is_not_taken_for_few_images(tmp_path):
    (tmp_path / "train-0.parquet").touch()
    assert not cli.has_few_images(tmp_path)
    (tmp_path / "one.JPG").touch()
    assert cli.has_few_images(tmp_path)


@pytest.mark.parametrize("launched", [True, False])
def test_a_process_that_the_system_killed_is_one_sentence(monkeypatch, capsys, launched):
    def killed(_arguments):
        if launched:
            raise ChildFailedError("livt", {0: ProcessFailure(0, 1, -9, "no file")})
        raise subprocess.CalledProcessError(-9, "livt")

    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")
    monkeypatch.setattr("accelerate.commands.launch.simple_launcher", None)
    monkeypatch.setattr("accelerate.commands.launch.launch_command", killed)
    with pytest.raises(SystemExit) as ended:
        cli.launch([], "pretrain", [], resolved("pretrain", []))
    assert ended.value.code == 128 + 9
    assert capsys.readouterr().err == "error: a process was ended by SIGKILL, by the system if memory ran out.\n"


def test_several_processes_that_were_asked_for_are_launched_without_an_accelerator_too(monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    asked = launch_command_parser().parse_args([*cli.add_cpu_options(["--num_processes", "2", "--cpu"]), "script.py"])
    assert (asked.multi_gpu, asked.num_processes, asked.cpu) == (True, 2, False)
    assert cli.add_cpu_options(["--num_processes", "1"]) == ["--num_processes", "1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "threads"),
    [([], []), ([], ["--threads", "1"]), (["--num_processes", "1"], [])],
    ids=["a process per core", "one process", "one launched process"],
)
def test_a_signal_to_livt_alone_saves_the_run(pictures, tmp_path, launcher, threads):
    options = ["--dataset", pictures, *TINY[:-2], "--output_dir", tmp_path / "run", "--log_steps", 1, *threads]
    command = [sys.executable, "-m", "livt_hf.cli.main", *launcher, "pretrain", *map(str, options)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    livt = subprocess.Popen([*command, "--epochs", "1000"], text=True, **pipes)
    while not (tmp_path / "run" / "log.jsonl").exists():
        assert livt.poll() is None
        time.sleep(0.05)
    livt.terminate()
    printed, told = livt.communicate(timeout=120)
    assert livt.returncode == EXIT_UNFINISHED and "Stopped and saved." in printed
    assert "death signal" not in told and told.count("stopping after this update") == 1
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_two_processes_that_are_given_a_wrong_checkpoint_say_one_sentence(pictures, tmp_path):
    options = ["--dataset", pictures, *TINY[:-2], "--pretrained", tmp_path / "nowhere", "--mixup", 0, "--cutmix", 0]
    answer = livt("--multi_gpu", "--num_processes", 2, "finetune", *options, ACCELERATE_USE_CPU="1")
    assert answer.returncode != 0
    errors = [line for line in answer.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and "nowhere could not be loaded as a checkpoint folder or from the Hub" in errors[0]
    assert "Traceback" not in answer.stderr


def test_a_stage_launched_by_livt_trains_and_names_the_next_command(pictures, tmp_path):
    answer = livt("pretrain", "--dataset", pictures, *TINY[:-2], "--max_steps", 2, "--output_dir", tmp_path / "run")
    assert answer.returncode == 0, answer.stderr
    results = Run(tmp_path / "run").results
    assert (results.updates, results.epochs) == (2, 1)  # of the epochs, the one that was reached
    assert f"livt finetune --pretrained {tmp_path / 'run'}" in answer.stdout


@pytest.mark.parametrize(("where", "trace"), [("with default_ctrl_c():", False), ("if True:", True)])
def test_ctrl_c_ends_the_process_without_a_trace_during_imports_and_raises_after_them(where, trace):
    lines = ["import os, signal", "from livt_hf.cli.main import default_ctrl_c"]
    lines += ["signal.signal(signal.SIGINT, signal.default_int_handler)"]  # these tests may run in the background
    lines += ["with default_ctrl_c(): pass"]
    script = "\n".join([*lines, where, "    os.kill(os.getpid(), signal.SIGINT)"])
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0 and ("KeyboardInterrupt" in ended.stderr) == trace
