"""What the commands share: their data, their messages, how they end."""

import dataclasses
import logging
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict, disable_progress_bars
from transformers.utils.logging import disable_progress_bar

from livt_hf.configuration_livit import PRESETS
from livt_hf.data import load_long_tailed
from livt_hf.data.benchmarks import BENCHMARKS
from livt_hf.data.loading import StoredImages
from livt_hf.errors import LiVTError
from livt_hf.hub import Publication, publish
from livt_hf.metrics import group_sizes
from livt_hf.results import percent
from livt_hf.runs import Run
from livt_hf.settings import DataSettings as DataArguments
from livt_hf.settings import FinetuneSettings as FinetuneArguments
from livt_hf.settings import TrainingSettings as TrainingArguments
from livt_hf.training.loop import Interrupted

# Conventional for "failed for now, try again": what a scheduler may requeue.
EXIT_UNFINISHED = 75


def run_command(main: Callable[[], None]) -> None:
    """Run a recipe. What the package itself refuses is a message; anything else is a bug and keeps its traceback."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for chatty in ("httpx", "httpcore", "accelerate", "datasets", "filelock", "matplotlib", "PIL"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    if not sys.stderr.isatty():  # a log file gets plain lines
        disable_progress_bars()
        disable_progress_bar()
    try:
        main()
    except Interrupted:
        sys.exit(EXIT_UNFINISHED)
    except LiVTError as error:
        sys.exit(f"error: {error}")


def resume_message(run: Run, script: str) -> str:
    return f"Stopped and saved. To go on:\n  {launch_line(script, '--resume', run)}"


def launch_line(script: str, option: str, run: Run) -> str:
    """A command to copy: the folder is quoted where it has spaces."""
    return f"accelerate launch recipes/{script} {option} {shlex.quote(str(run.folder))}"


def publish_if_asked(arguments: TrainingArguments, run: Run) -> None:
    """Of `--push_to_hub`. A Hub that cannot be reached leaves the run complete and a command to publish it later."""
    if arguments.push_to_hub:
        publication = Publication(arguments.hub_model_id, license=arguments.hub_license, public=arguments.hub_public)
        commit = publish(run.folder, publication)
        logging.getLogger(__name__).info("published: %s", commit.repo_url)


def load_data(arguments: DataArguments, streaming: bool = False) -> DatasetDict:
    """The dataset the arguments name."""
    names = {field.name for field in dataclasses.fields(DataArguments)} - {"dataset", "num_workers", "split_seed"}
    options = {name: getattr(arguments, name) for name in names}
    return load_long_tailed(arguments.dataset, seed=arguments.split_seed, streaming=streaming, **options)


def is_native(dataset: Dataset, image_size: int) -> bool:
    """Whether pictures are small and come at the model's own size, so that evaluation leaves them as they are."""
    height, width = StoredImages(dataset.select(range(1))).images([0])[0].shape[-2:]
    return image_size <= 96 and (height, width) == (image_size, image_size)


def image_size(arguments: TrainingArguments) -> int:
    return arguments.image_size or PRESETS[arguments.model_size]["image_size"]


def size_name(config) -> str:
    """The preset a config has the sizes of, or its sizes."""
    for name, preset in PRESETS.items():
        if all(getattr(config, key) == preset[key] for key in ("hidden_size", "num_hidden_layers")):
            return name
    return f"{config.hidden_size}x{config.num_hidden_layers}"


def counts_summary(counts: np.ndarray) -> dict:
    """The shape of a long tail in six numbers."""
    sizes = {"max": int(counts.max()), "min": int(counts.min()), "imbalance": float(counts.max() / counts.min())}
    return sizes | group_sizes(counts)


def local_places(arguments: TrainingArguments) -> dict[str, bool]:
    """For results.json: what was read from a disk. `data/birds` could be either, and a card must not guess."""
    dataset = arguments.dataset not in BENCHMARKS and Path(arguments.dataset).expanduser().exists()
    if isinstance(arguments, FinetuneArguments):
        return {"dataset_local": dataset, "pretrained_local": Path(arguments.pretrained).expanduser().exists()}
    return {"dataset_local": dataset}


def accuracy_line(metrics: dict) -> str:
    """Overall (accuracy, or mAP where an image has several labels) and by group."""
    overall = "accuracy" if "accuracy" in metrics else "map"
    parts = [f"{name} {percent(metrics[name])}" for name in (overall, "many", "medium", "few")]
    calibration = f"; ECE {percent(metrics['ece'])}" if "ece" in metrics else ""
    return "  ".join(parts) + f"  (percent{calibration})"
