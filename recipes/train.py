"""Train a classifier on your images in a given time.

    livt train FOLDER --hours 0.5                                      # the exact head, then all of a backbone
    livt train FOLDER --hours 0.5 --pretrained org/any-classifier      # of another one
    livt train FOLDER --hours 2 --pretrained none                      # from scratch: MGP, then BFT
    livt train --resume runs/train-FOLDER/1                            # resume what was interrupted

It says what it chose and why before it starts; the rules are in livt_hf/training/autotune.py (from scratch),
anytime.py and recipe.py (a backbone). The folder of the run ends up holding plan.json and the runs of its stages, that
of the last with its report. Evaluation comes on top of the hours.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
from huggingface_hub import constants as hub_constants

from livt_hf.cli.console import EXIT_UNFINISHED, SIGNALLED, WITHIN_TRAIN, exit_as, format_next_command, run_command
from livt_hf.cli.copies import warn_about_copies
from livt_hf.cli.inherit import check_plugin
from livt_hf.cli.options import CONFIGS, format_words, parse_words
from livt_hf.cli.training_settings import STAGES, FinetuneSettings, TrainSettings
from livt_hf.configuration_livit import LiViTConfig
from livt_hf.constants import FEW_IMAGES, SMALL_BACKBONE
from livt_hf.data import load_dataset
from livt_hf.data.benchmarks import BENCHMARKS
from livt_hf.data.decoding import sample_image_sizes
from livt_hf.data.load import ImagePool, check_several_classes, load_pool
from livt_hf.data.spec import DataSpec
from livt_hf.errors import Interrupted, LiVTError
from livt_hf.files import read_record, write_values
from livt_hf.hub.publication import HUB_ERRORS
from livt_hf.long_tail.losses import LOSSES
from livt_hf.runs import PLAN, Run, claim_file, dataset_name, next_run, runs_folder
from livt_hf.text import shell_words
from livt_hf.threads import available_cores
from livt_hf.training import autotune
from livt_hf.training.finetune import check_finetune_options
from livt_hf.training.start import build_head_config, build_label_config

logger = logging.getLogger(__name__)

PRETRAINED_IS_BETTER = (
    "\n  A pretrained backbone is better for so few images: half an hour of one core led from 2,321 photographs to "
    "63.8 % with one and to 19.1 % from scratch. Name one with --pretrained."
)


def main(argv: Sequence[str] | None = None) -> None:
    """Plan a training, or read the plan to resume; train, and evaluate the result."""
    explicit = TrainSettings.explicit_options(argv)
    settings = TrainSettings.resolve(explicit)
    if settings.resume is not None and (other := explicit.keys() - {"resume", "threads", "launch", "plugin"}):
        name = min(other)
        message = f"{settings.resume} is resumed with its own plan; leave {name} out, or start a new run."
        raise LiVTError(message, argument=name)
    if settings.resume is None:
        pool = None if settings.pretrained else load_pool(settings.data)
        if pool is not None:
            settings = settings.replace(pretrained=choose_start(settings.data, len(pool.splits["train"])))
        if settings.pretrained != "none":
            train_pretrained(settings, pool=pool)
            return
    folder = write_plan(settings) if settings.resume is None else Path(settings.resume)
    if not (folder / PLAN).exists():
        what = f"has no {PLAN}" if folder.exists() else "does not exist"
        raise LiVTError(f"{folder} {what}; give the folder of a livt train run.", argument="resume")
    hints = {"why": str, "stages": dict[Literal["pretrain", "finetune"], list[str]], "train": dict[str, Any]}
    plan = read_record(folder / PLAN, hints, required=["why"])
    if "plugin" not in explicit:
        check_plugins(folder, plan)
    if "train" in plan:
        changed = {name: explicit[name] for name in ("threads", "launch", "plugin") if name in explicit}
        train_pretrained(TrainSettings.resolve(plan["train"] | changed), folder)
        return
    run_stages(folder, plan, settings)


def check_plugins(folder: Path, plan: dict) -> None:
    """Raise an error for a plugin that the plan of a downloaded training names."""
    stages = {stage: parse_words(STAGES[stage], words) for stage, words in plan.get("stages", {}).items()}
    for options in (plan.get("train", {}), *stages.values()):
        check_plugin(folder, options.get("plugin"))
        if "config" in options:  # which could name a plugin, and which no plan of ours has
            raise LiVTError(f"{folder / PLAN} is damaged: it names a config; start a new run.", argument="resume")


def choose_start(data: DataSpec, num_images: int) -> str:
    """Return what is trained where nothing is named: a small backbone for few images of one's own, else "none"."""
    if data.dataset in BENCHMARKS or num_images >= FEW_IMAGES:
        return "none"
    files = ("config.json", "model.safetensors")
    try:
        HfApi().model_info(SMALL_BACKBONE, timeout=10)  # one question, where a download asks many times
        for name in files:
            hf_hub_download(SMALL_BACKBONE, name)
    except HUB_ERRORS as error:
        if all(isinstance(try_to_load_from_cache(SMALL_BACKBONE, name), str) for name in files):
            hub_constants.HF_HUB_OFFLINE = True  # else every file is asked for again, for half a minute each
        else:
            raise _explain_missing_backbone(num_images) from error
    logger.info(
        "Starting from %s, the default for fewer than %s images; --pretrained none trains from scratch.",
        SMALL_BACKBONE,
        f"{FEW_IMAGES:,}",
    )
    return SMALL_BACKBONE


def _explain_missing_backbone(num_images: int) -> LiVTError:
    return LiVTError(
        f"pretrained is not given, and {SMALL_BACKBONE}, the default for {num_images:,} images, is neither in the "
        f"local cache nor can it be downloaded; run `hf download {SMALL_BACKBONE}` where there is internet, name the "
        "folder of another classifier, or train from scratch with --pretrained none.",
        argument="pretrained",
    )


def train_pretrained(settings: TrainSettings, folder: Path | None = None, pool: ImagePool | None = None) -> None:
    """Train a backbone for the time asked for and evaluate it; `folder` is that of a training to resume."""
    if settings.launch:
        message = "launch starts several processes, and livt train uses one for a backbone; leave it out."
        raise LiVTError(message, argument="launch")
    from livt_hf.recipes import train_backbone as backbone  # which imports from here

    session = backbone.Session.open(settings, pool)
    folder = backbone.start_training(session) if folder is None else folder
    try:
        run = backbone.train_backbone(session, folder)
    except (Interrupted, KeyboardInterrupt) as stopped:
        raise Interrupted("train", "--resume", folder) from stopped
    if session.accelerator.is_main_process:
        print(backbone.format_summary(session, run))
        print(f"Report: {backbone.write_run_report(session, run)}")
        print(format_next_command("Next, try it in the browser", "demo", run.folder))


def run_stages(folder: Path, plan: dict, settings: TrainSettings) -> None:
    """Run the stages of a plan, each in a process of its own, and evaluate the result."""
    if "stages" not in plan:
        raise LiVTError(f"{folder / PLAN} is damaged: it has no stages; start a new run.", argument="resume")
    trained = all(Run(folder / stage).finished for stage in plan["stages"])
    print(f"{folder} is trained; it is evaluated again." if trained else plan["why"], flush=True)
    threads = [] if settings.threads is None else ["--threads", str(settings.threads)]
    launcher = shell_words(settings.launch)
    for stage, words in plan["stages"].items():
        output = ["--output_dir", str(folder / stage), "--resume", "auto"]
        with delete_plan_unless_started(folder, next(iter(plan["stages"]))):
            stopped = not Run(folder / stage).finished and run_livt([*launcher, stage, *words, *output, *threads])
        if stopped:
            raise Interrupted("train", "--resume", folder)
    plugin = FinetuneSettings.explicit_options(plan["stages"]["finetune"]).get("plugin")
    run_livt([*launcher, "eval", str(folder / "finetune"), *format_words({"plugin": plugin}), *threads])
    print(format_next_command("Next, try it in the browser", "demo", folder / "finetune"))


@contextlib.contextmanager
def delete_plan_unless_started(folder: Path, first_stage: str) -> Iterator[None]:
    """Delete the plan if its first stage fails before it starts, so that the folder is free for another try."""
    try:
        yield
    except SystemExit as ended:
        if not Run(folder / first_stage).started:
            (folder / PLAN).unlink()
            if not any(folder.iterdir()):
                folder.rmdir()
        elif ended.code > SIGNALLED:
            print(format_next_command("To resume", "train", "--resume", folder))
        raise


def run_livt(words: list[str]) -> bool:
    """Run a command in a process of its own, which may launch several; return True if it was stopped and saved.

    It gets every signal to stop that this process gets.
    """
    environment = os.environ | {WITHIN_TRAIN: "1"}
    command = subprocess.Popen([sys.executable, "-m", "livt_hf.cli.main", *words], env=environment)
    signals = signal.SIGINT, signal.SIGTERM
    before = {number: signal.signal(number, lambda sent, _frame: command.send_signal(sent)) for number in signals}
    status = command.wait()
    for number in signals:
        signal.signal(number, before[number])
    if status not in (0, EXIT_UNFINISHED):
        exit_as(status)
    return status == EXIT_UNFINISHED


def write_plan(settings: TrainSettings) -> Path:
    """Choose the stages and their options and write them to a new folder; a resumed run does not choose again."""
    data = load_dataset(settings.data)
    check_several_classes(data["train"])
    warn_about_copies(data, settings.data)
    if settings.hours == 0:
        raise LiVTError("hours is 0, which trains nothing from scratch; allow more, or name a backbone.", "hours")
    reason, stages = plan_scratch(settings, data)
    if settings.output_dir is None:
        folder = next_run(runs_folder() / f"train-{dataset_name(settings.data.dataset)}").folder
    else:
        folder = Path(settings.output_dir)
    if "pretrain" in stages:
        stages["finetune"]["pretrained"] = str(folder / "pretrain")
    with claim_file(folder / PLAN) as path:
        words = {stage: format_words(options) for stage, options in stages.items()}
        write_values(path, {"why": reason, "stages": words})
    return folder


def stage_options(settings: TrainSettings, stage: str) -> dict:
    """Return the options of a stage besides those that are chosen for it."""
    options = settings.non_defaults("data") | {"dataset": settings.data.dataset, "plugin": settings.plugin}
    options |= {"seed": settings.seed, "flip": settings.flip}
    options |= {"loss": settings.loss, "objective": settings.objective} if stage == "finetune" else {}
    return {name: value for name, value in options.items() if value is not None}


def plan_scratch(settings: TrainSettings, data: DatasetDict) -> tuple[str, dict[str, dict]]:
    """Return the reason and the options of both stages of a training from scratch."""
    choice = plan_scratch_training(settings.hours, data["train"], settings.loss, settings.threads)
    chosen = choice.options(settings.hours)
    stages = {stage: stage_options(settings, stage) | options for stage, options in chosen.items()}
    # What the second stage would not accept raises an error now, not after the first.
    second = FinetuneSettings.parse(stages["finetune"] | {"pretrained": "none"}, CONFIGS)
    check_finetune_options(
        data, second.model, second.optimization, second.loss, second.augmentation, second.checkpoints
    )
    head = build_head_config(data["train"], second.loss, second.optimization, second.augmentation)
    LiViTConfig(**head, **build_label_config(data["train"]))
    reason = choice.explain(settings.hours)
    return reason + PRETRAINED_IS_BETTER if len(data["train"]) < FEW_IMAGES else reason, stages


def plan_scratch_training(hours: float, train: Dataset, loss: str, threads: int | None = None) -> autotune.ScratchPlan:
    """Choose what this machine, or `threads` of its cores, can train from scratch on these images."""
    sizes = sample_image_sizes(train)
    side = int(np.median([min(size) for size in sizes]))
    per_second = (threads or available_cores()) * autotune.CORE_FLOPS
    if torch.accelerator.is_available():
        per_second = torch.accelerator.device_count() * autotune.GPU_FLOPS
    facts = {"alike": set(sizes) == {(side, side)}, "soft_labels": LOSSES[loss].soft_labels}
    return autotune.ScratchPlan(len(train), side, 3600 * hours * per_second, **facts)


def mixing_options(loss: str) -> dict[str, float]:
    """Return the options that turn mixing off where a loss does not accept soft labels."""
    return {} if LOSSES[loss].soft_labels else {"mixup": 0.0, "cutmix": 0.0}


if __name__ == "__main__":
    run_command(main)
