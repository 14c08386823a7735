"""Train a classifier on your images in a given time.

    livt train FOLDER --hours 2                                        # from scratch: MGP, then BFT
    livt train FOLDER --hours 0.5 --pretrained org/any-classifier      # all of a backbone or its head, as time allows
    livt train --resume runs/train-FOLDER/1                            # resume what was interrupted

It says what it chose and why before it starts; the rules are in livt_hf/training/autotune.py. The folder of the run
ends up holding plan.json and the runs of its stages, that of the last with its report. Evaluation comes on top of the
hours.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from transformers import BaseImageProcessor

from livt_hf.cli.console import EXIT_UNFINISHED, SIGNALLED, WITHIN_TRAIN, exit_as, format_next_command, run_command
from livt_hf.cli.inherit import inherit_from_checkpoint
from livt_hf.cli.options import CONFIGS, format_words
from livt_hf.cli.training_settings import FinetuneSettings, TrainSettings
from livt_hf.configuration_livit import LiViTConfig
from livt_hf.data import Batches, eval_loader, load_dataset
from livt_hf.data.decoding import SAMPLE_SIZE, sample_image_sizes, spread_rows
from livt_hf.data.load import check_several_classes
from livt_hf.errors import Interrupted, LiVTError
from livt_hf.files import read_record, write_values
from livt_hf.long_tail.losses import LOSSES
from livt_hf.processors import read_input_spec
from livt_hf.runs import PLAN, Run, claim_file, next_run, runs_folder
from livt_hf.text import format_duration, shell_words
from livt_hf.threads import available_cores, configure_threads
from livt_hf.training import autotune
from livt_hf.training.finetune import check_finetune_options
from livt_hf.training.start import build_classifier, build_head_config, build_label_config, build_processor


def main(argv: Sequence[str] | None = None) -> None:
    """Plan the stages, or read the plan to resume; run them, and evaluate the result."""
    explicit = TrainSettings.explicit_options(argv)
    settings = TrainSettings.resolve(explicit)
    if settings.resume is not None and (other := explicit.keys() - {"resume", "threads", "launch", "plugin"}):
        name = min(other)
        message = f"{settings.resume} is resumed with its own plan; leave {name} out, or start a new run."
        raise LiVTError(message, argument=name)
    folder = write_plan(settings) if settings.resume is None else Path(settings.resume)
    if not (folder / PLAN).exists():
        what = f"has no {PLAN}" if folder.exists() else "does not exist"
        raise LiVTError(f"{folder} {what}; give the folder of a livt train run.", argument="resume")
    hints = {"why": str, "stages": dict[Literal["pretrain", "finetune"], list[str]]}
    plan = read_record(folder / PLAN, hints, required=hints)
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
    if settings.pretrained is not None:
        reason, stages = plan_backbone(settings, data["train"])
    else:
        reason, stages = plan_scratch(settings, data)
    if settings.output_dir is None:
        folder = next_run(runs_folder() / f"train-{Path(settings.data.dataset).name}").folder
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
    options |= {"loss": settings.loss} if stage == "finetune" else {}
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
    return choice.explain(settings.hours), stages


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


def plan_backbone(settings: TrainSettings, train: Dataset) -> tuple[str, dict[str, dict]]:
    """Return the reason and the options of a fine-tuning: of a whole backbone or of its head, as time allows."""
    options = stage_options(settings, "finetune") | mixing_options(settings.loss) | {"pretrained": settings.pretrained}
    head = FinetuneSettings.parse(options | {"tune": "head"}, inherit=inherit_from_checkpoint)
    model = build_classifier(train, head.model, head.loss, head.optimization, head.augmentation).eval()
    processor = build_processor(model, train, head.model, settings.data.dataset)
    size, budgeted = read_input_spec(processor).size, 3600 * settings.hours
    forward, read = measure_forward_seconds(model, size, settings.threads), measure_read_seconds(train, processor)
    full = FinetuneSettings.parse(options | {"tune": "full"}, CONFIGS, inherit_from_checkpoint)
    batch = full.optimization.batch_size
    features, epoch = ((times * forward + read) * len(train) for times in (1, 3))  # a step is three forward passes
    tune = autotune.choose_tuning(budgeted, epoch, len(train), batch)
    late = " That is longer than asked for; a smaller backbone or fewer images fit." if features > budgeted else ""
    enough = f"{autotune.FULL_EPOCHS} of them and {autotune.FULL_UPDATES} updates of {batch} images"
    chosen = {
        "full": f"hold {enough} or more: all of it is fine-tuned.",
        "head": f"do not hold {enough}: its classifier is trained on frozen features, which take about "
        f"{format_duration(features)} to compute.{late}",
    }
    reason = (
        f"{settings.pretrained}: an epoch of {len(train):,} images at {size} pixels takes about "
        f"{format_duration(epoch)} where everything is trained, and {settings.hours:g} hours {chosen[tune]}"
    )
    limit = {"hours": settings.hours} if tune == "full" else {}  # on its features, a head is done in seconds
    return reason, {"finetune": options | {"tune": tune} | limit}


def measure_read_seconds(train: Dataset, processor: BaseImageProcessor) -> float:
    """Return the time to decode and resize one image."""
    some = train.select(spread_rows(train, SAMPLE_SIZE))
    began = time.perf_counter()
    list(eval_loader(some, processor, Batches(len(some))))
    return (time.perf_counter() - began) / len(some)


@torch.inference_mode()
def measure_forward_seconds(model: torch.nn.Module, size: int, threads: int | None, images: int = 8) -> float:
    """Return the time of the forward pass of one image, by the second of two batches."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    configure_threads(device, threads)
    model, pixels = model.to(device), torch.randn(images, 3, size, size, device=device)
    for _ in range(2):
        began = time.perf_counter()
        model(pixels).logits.sum().item()
    return (time.perf_counter() - began) / images


if __name__ == "__main__":
    run_command(main)
