"""`livt COMMAND ...`: every recipe as a command of the installed package."""

import argparse
import importlib
import itertools
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from livt_hf import __version__
from livt_hf.cli.options import parse_words
from livt_hf.cli.settings import COMMANDS, settings_class
from livt_hf.errors import LiVTError, suggest_name

LAUNCHED = ("pretrain", "finetune", "eval")
MODULE = "livt_hf.cli.main"
RESOLVED = "--resolved"  # before the file of the settings that a launched training is given
MAX_PROCESSES = 8
FEW_IMAGES = 64
# --multi_gpu is Accelerate's word for several processes, on CPUs too; without it, it would start one of them.
ON_CPUS = ["--multi_gpu", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]

USAGE = """\
usage: livt [LAUNCH OPTIONS] COMMAND [OPTIONS]

{commands}
livt COMMAND --help lists the options of a command; --version prints the version. {launched} run under
Accelerate: options before the command are those of `accelerate launch`, as in
`livt --multi_gpu --num_processes 8 pretrain --config FILE`. Without any, a machine without an accelerator gets as many
processes as it has cores.
"""


@contextmanager
def default_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end the process at once while libraries are imported: half of an import would print tracebacks."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # in the background of a shell, Ctrl-C is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def main() -> None:
    """Parse the command line once, and run the command here or under Accelerate."""
    words = sys.argv[1:]
    index = next((number for number, word in enumerate(words) if word in COMMANDS), None)
    if index is None:
        sys.exit(answer_without_command(words))
    launcher, command, argv = words[:index], words[index], words[index + 1 :]
    if argv[:1] == [RESOLVED]:
        from livt_hf.cli.inherit import Resolved

        run_here(command, Resolved.read(Path(argv[1])))
        return
    options: Any = parse_words(settings_class(command), argv)  # --help and misspelt options need no torch
    if command in LAUNCHED and "LOCAL_RANK" not in os.environ:  # else it has been launched
        with default_ctrl_c():
            options = resolve(command, options)
            launcher_options = add_cpu_options(launcher) if launcher else choose_launcher(command, options)
        if launcher_options is not None:
            launch(launcher_options, command, argv, options)
            return
    elif launcher:
        sys.exit(f"error: {launcher[0]} stands before {command}, which is not launched; put its options after it.")
    run_here(command, options)


def resolve(command: str, options: dict) -> Any:
    """Resolve the settings of a launched command, so that errors come before anything is launched."""
    from livt_hf.cli.inherit import Resolved, resolve_settings
    from livt_hf.cli.resume import resolve_training
    from livt_hf.cli.training_settings import STAGES

    if command in STAGES:
        return Resolved(*resolve_training(STAGES[command], options))
    return Resolved(resolve_settings(settings_class(command), options))


def run_here(command: str, options: Any) -> None:
    """Run a command in this process, with options that were parsed or resolved already."""
    with default_ctrl_c():
        from livt_hf.cli.console import run_command

        recipe = importlib.import_module(f"livt_hf.recipes.{command.replace('-', '_')}")
    run_command(lambda: recipe.main(options))


def answer_without_command(words: Sequence[str]) -> str | None:
    """Print the help or the version where they are asked for; otherwise return what is wrong."""
    if not words or {"-h", "--help"} & set(words):
        commands = "".join(f"  {name:13s} {settings_class(name).__doc__}\n" for name in COMMANDS)
        print(USAGE.format(commands=commands, launched=", ".join(LAUNCHED)), end="")
        return None
    if "--version" in words:
        print(f"livt_hf {__version__}")
        return None
    if words[0].startswith("-"):
        return f"error: there is no command after {words[0]}; see livt --help."
    hint = suggest_name(words[0], COMMANDS, otherwise="see livt --help.")
    return f"error: there is no command {words[0]!r}{hint}"


def launch(launcher: Sequence[str], command: str, argv: Sequence[str], options: Any) -> None:
    """Run a command under Accelerate; its errors end with their sentence, without the launcher's traceback."""
    with default_ctrl_c():
        import torch.distributed.run  # noqa: F401  with all loggers of the launcher
        from accelerate.commands import launch as accelerated
        from accelerate.utils.launch import prepare_simple_launcher_cmd_env
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        from livt_hf.cli.console import EXIT_UNFINISHED, exit_as

    mpi_launcher = accelerated.simple_launcher

    def launch_one(arguments: argparse.Namespace) -> None:
        """Run a single process as this one: no signal would reach a child of Accelerate's launcher."""
        words, environment = prepare_simple_launcher_cmd_env(arguments)
        if words[0] != sys.executable:
            mpi_launcher(arguments)
            return
        os.environ.update(environment)
        run_here(command, options)

    for name in list(logging.root.manager.loggerDict):  # each has a level of its own
        if name.startswith(("torch.distributed.elastic", "accelerate.commands.launch")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    # After a signal torch kills the processes in 30 seconds, whatever they are saving.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3600")
    accelerated.simple_launcher = launch_one
    with tempfile.TemporaryDirectory(prefix="livt-") as folder:
        # Other hosts have other disks.
        if "--mpirun_hostfile" not in launcher:
            argv = [RESOLVED, str(Path(folder, "settings.yaml"))]
            options.write(Path(argv[1]))
        words = [*launcher, "--module", MODULE, command, *argv]
        try:
            accelerated.launch_command(accelerated.launch_command_parser().parse_args(words))
        except subprocess.CalledProcessError as error:
            exit_as(error.returncode)
        except ChildFailedError as error:
            exit_as(error.get_first_failure()[1].exitcode)
        except SignalException:  # raised when the processes, which got the signal too, are gone
            sys.exit(EXIT_UNFINISHED)


def choose_launcher(command: str, options: Any) -> list[str] | None:
    """Return options of `accelerate launch` where none were given; None: one process, which is this one."""
    import torch
    from accelerate.commands.config.config_args import default_config_file

    if Path(default_config_file).exists():
        return []
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else None
    if command == "eval" or devices == 1:
        return [] if (devices or 1) > 1 else None  # Accelerate knows its accelerators
    processes = count_processes(options.settings, devices)
    if devices is not None and processes < devices:
        message = f"{processes} of {devices} accelerators are used: more cannot share the images of an update"
        print(f"{message}; livt --num_processes N {command} uses N of them", file=sys.stderr)
    if processes == 1:
        return None
    if devices is not None:
        return ["--num_processes", str(processes)]
    os.environ["ACCELERATE_USE_CPU"] = "1"
    return [*ON_CPUS, "--num_processes", str(processes)]


def add_cpu_options(launcher: Sequence[str]) -> list[str]:
    """Return options of `accelerate launch` with what several processes need without an accelerator."""
    import torch
    from accelerate.commands.launch import launch_command_parser

    parsed = launch_command_parser().parse_args([*launcher, "script.py"])
    if torch.accelerator.is_available() or (parsed.num_processes or 1) == 1:
        return list(launcher)
    os.environ["ACCELERATE_USE_CPU"] = "1"
    return [*ON_CPUS, *(word for word in launcher if word != "--cpu")]


def count_processes(settings: Any, devices: int | None = None) -> int:
    """Return one process per accelerator or core, up to eight, or the next lower number that can share an update.

    One process per core was 1.19 times as fast as one process with a thread per core, on two cores.
    """
    from livt_hf.long_tail.loss_table import LOSSES
    from livt_hf.threads import available_cores

    is_finetuning, optimization = settings.stage == "finetune", settings.optimization
    if is_finetuning and LOSSES[settings.loss.loss].batch_statistic:
        return 1  # the statistic of a batch is not that of its parts
    if has_few_images(Path(settings.data.dataset)):
        return 1  # an update may take fewer images than the config says
    share = optimization.batch_size // optimization.accumulation
    augmentation = settings.augmentation
    pairs = 2 if is_finetuning and (augmentation.mixup or augmentation.cutmix) else 1  # mixup pairs images
    cores = min(available_cores(), MAX_PROCESSES) if optimization.threads is None else 1
    most = cores if devices is None else devices
    return next((number for number in range(most, 1, -1) if share % (number * pairs) == 0), 1)


def has_few_images(folder: Path) -> bool:
    """Return True if a folder has image files, but few of them."""
    from livt_hf.data.decoding import image_suffixes

    suffixes = image_suffixes()
    images = (path for path in folder.rglob("*") if path.suffix.lower() in suffixes)
    return folder.is_dir() and 0 < len(list(itertools.islice(images, FEW_IMAGES))) < FEW_IMAGES


def command() -> None:
    """Run the command line, as the entry point of the package."""
    from livt_hf.cli.console import exit_with, protect_terminal

    protect_terminal()
    try:
        main()
    except LiVTError as error:
        exit_with(error)
    except KeyboardInterrupt:  # a training that has begun saves itself
        sys.exit(130)


if __name__ == "__main__":
    command()
