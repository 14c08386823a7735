"""`livt COMMAND ...`: every recipe as a command of the installed package."""

import argparse
import importlib
import itertools
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from livt_hf import __version__
from livt_hf.errors import LiVTError, suggest_name
from livt_hf.options import command_line
from livt_hf.recipes.settings import COMMANDS, CONFIGS, STAGES

LAUNCHED = ("pretrain", "finetune", "eval")
MOST_PROCESSES = 8
FEW_IMAGES = 64
# --multi_gpu is Accelerate's word for several processes, on CPUs too; without it, it would start one of them.
ON_CPUS = ["--multi_gpu", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]

HELP = f"""\
usage: livt [LAUNCH OPTIONS] COMMAND [OPTIONS]

{"".join(f"  {name:13s} {settings.__doc__}{chr(10)}" for name, settings in COMMANDS.items())}
livt COMMAND --help lists the options of a command; --version prints the version. {", ".join(LAUNCHED)} run under
Accelerate: options before the command are those of `accelerate launch`, as in
`livt --multi_gpu --num_processes 8 pretrain --config FILE`. Without any, a machine without an accelerator gets as many
processes as it has cores.
"""


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """While libraries are imported, Ctrl-C ends the process at once: half of an import would end in tracebacks."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # in the background of a shell, Ctrl-C is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def main() -> None:
    words = sys.argv[1:]
    place = next((number for number, word in enumerate(words) if word in COMMANDS), None)
    if place is None:
        sys.exit(without_command(words))
    launcher, command, argv = words[:place], words[place], words[place + 1 :]
    command_line(COMMANDS[command], argv)  # --help and what is misspelt are answered before torch is imported
    if command in LAUNCHED and "LOCAL_RANK" not in os.environ:  # else it has been launched
        with ended_by_ctrl_c():
            launcher = several_on_cpus(launcher) if launcher else chosen_layout(command, argv)
        if launcher is not None:
            launch(launcher, command, argv)
            return
    elif launcher:
        sys.exit(f"error: {launcher[0]} stands before {command}, which is not launched; put its options after it.")
    run_here(command, argv)


def run_here(command: str, argv: Sequence[str]) -> None:
    """Run a command in this process."""
    with ended_by_ctrl_c():
        from livt_hf.commands import run_command

        recipe = importlib.import_module(f"livt_hf.recipes.{command.replace('-', '_')}")
    run_command(lambda: recipe.main(argv))


def without_command(words: Sequence[str]) -> str | None:
    """Help or the version where they were asked for; otherwise what is wrong."""
    if not words or {"-h", "--help"} & set(words):
        print(HELP, end="")
        return None
    if "--version" in words:
        print(f"livt_hf {__version__}")
        return None
    hint = suggest_name(words[0], COMMANDS, otherwise="see livt --help.")
    return f"error: there is no command {words[0]!r}{hint}"


def launch(launcher: Sequence[str], command: str, argv: Sequence[str]) -> None:
    """Run a stage under Accelerate; what the stage refuses ends with its sentence, without the launcher's trace."""
    with ended_by_ctrl_c():
        import torch.distributed.run  # noqa: F401  with all loggers of the launcher
        from accelerate.commands import launch as accelerated
        from accelerate.utils.launch import prepare_simple_launcher_cmd_env
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        from livt_hf.commands import EXIT_UNFINISHED, exit_as

    by_mpi = accelerated.simple_launcher

    def launch_one(arguments: argparse.Namespace) -> None:
        """A single process is this one. Accelerate's would be a child that no signal reaches: the launcher would end
        alone, and the training would go on.
        """
        words, environment = prepare_simple_launcher_cmd_env(arguments)
        if words[0] != sys.executable:
            by_mpi(arguments)
            return
        os.environ.update(environment)
        run_here(command, argv)

    for name in list(logging.root.manager.loggerDict):  # each has a level of its own
        if name.startswith(("torch.distributed.elastic", "accelerate.commands.launch")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    # After a signal torch kills the processes in 30 seconds, whatever they are saving.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3600")
    words = [*launcher, "--module", "livt_hf.recipes.cli", command, *argv]
    accelerated.simple_launcher = launch_one
    try:
        accelerated.launch_command(accelerated.launch_command_parser().parse_args(words))
    except subprocess.CalledProcessError as error:
        exit_as(error.returncode)
    except ChildFailedError as error:
        exit_as(error.get_first_failure()[1].exitcode)
    except SignalException:  # raised when the processes, which got the signal too, are gone
        sys.exit(EXIT_UNFINISHED)


def chosen_layout(command: str, argv: Sequence[str]) -> list[str] | None:
    """Options of `accelerate launch` where none were given. None: one process, which is this one."""
    import torch
    from accelerate.commands.config.config_args import default_config_file

    if Path(default_config_file).exists():
        return []
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else None
    if command == "eval" or devices == 1:
        return [] if (devices or 1) > 1 else None  # Accelerate knows its accelerators
    processes = fitting_processes(command, argv, devices)
    if devices is not None and processes < devices:
        said = f"{processes} of {devices} accelerators are used: more cannot share the images of an update"
        print(f"{said}; livt --num_processes N {command} uses N of them", file=sys.stderr)
    if processes == 1:
        return None
    if devices is not None:
        return ["--num_processes", str(processes)]
    os.environ["ACCELERATE_USE_CPU"] = "1"
    return [*ON_CPUS, "--num_processes", str(processes)]


def several_on_cpus(launcher: Sequence[str]) -> list[str]:
    """Options of `accelerate launch` as they were given, with what several processes need without an accelerator."""
    import torch
    from accelerate.commands.launch import launch_command_parser

    asked = launch_command_parser().parse_args([*launcher, "script.py"])
    if torch.accelerator.is_available() or (asked.num_processes or 1) == 1:
        return list(launcher)
    os.environ["ACCELERATE_USE_CPU"] = "1"
    return [*ON_CPUS, *(word for word in launcher if word != "--cpu")]


def fitting_processes(command: str, argv: Sequence[str], devices: int | None = None) -> int:
    """One process per accelerator or core, of which up to eight, or the next lower number that can share the images
    of an update.

    One process per core was 1.19 times as fast as one process with a thread per core, on two cores. Settings are read
    here as the stage will read them, so what it refuses is refused before anything is launched.
    """
    from livt_hf.long_tail.losses import LOSSES
    from livt_hf.runs import lent_by_pretraining, parse_training
    from livt_hf.training.device import available_cores

    lends = {"finetune": lent_by_pretraining, "pretrain": lambda _: {}}
    settings, _ = parse_training(STAGES[command], argv, CONFIGS, lends[command])
    if command == "finetune" and LOSSES[settings.loss].batch_statistic:
        return 1  # the statistic of a batch is not that of its parts
    if has_few_images(Path(settings.dataset)):
        return 1  # an update may take fewer images than the config says
    share = settings.batch_size // settings.accumulation
    pairs = 2 if command == "finetune" and (settings.mixup or settings.cutmix) else 1  # mixup pairs images
    cores = min(available_cores(), MOST_PROCESSES) if settings.threads is None else 1
    most = cores if devices is None else devices
    return next((number for number in range(most, 1, -1) if share % (number * pairs) == 0), 1)


def has_few_images(folder: Path) -> bool:
    """Whether a folder of image files has next to none; one of shards has no image file at all."""
    from livt_hf.data.decoding import image_suffixes

    suffixes = image_suffixes()
    images = (path for path in folder.rglob("*") if path.suffix.lower() in suffixes)
    return folder.is_dir() and 0 < len(list(itertools.islice(images, FEW_IMAGES))) < FEW_IMAGES


def command() -> None:
    """The entry point of the package."""
    try:
        main()
    except LiVTError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:  # a training that has begun saves itself; of anything else nothing is left to say
        sys.exit(130)


if __name__ == "__main__":
    command()
