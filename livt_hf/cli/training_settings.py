"""Settings of the commands that train: pretrain, finetune, train, compare, sweep. The defaults are the paper's."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from annotated_types import Ge

from livt_hf.cli.options import CONFIGS, CommandSettings
from livt_hf.constants import FEW_IMAGES, SMALL_BACKBONE
from livt_hf.data.spec import AugmentationSpec, DataSpec, FinetuneAugmentationSpec
from livt_hf.hub.spec import HubSpec
from livt_hf.long_tail.spec import LossSpec, Objective, loss_names
from livt_hf.runs import dataset_name, runs_folder
from livt_hf.specs import REQUIRED, NonNegative, Positive, option, part
from livt_hf.training.spec import (
    CheckpointSpec,
    FinetuneCheckpointSpec,
    FinetuneModelSpec,
    FinetuneOptimizationSpec,
    ModelSpec,
    OptimizationSpec,
    PretrainModelSpec,
    is_solvable,
)

logger = logging.getLogger(__name__)

_VALIDATION = {
    "validation_fraction": "share of each class held out of the training images, to calibrate and to select on; "
    "default: 0.1 of own datasets of at least 500 training images without a validation split, and 0 of benchmarks"
}


@dataclass(frozen=True)
class TrainingSettings(CommandSettings, positionals=("dataset",)):
    """Base of the two stages."""

    output_dir: str | None = option(
        None, "run folder; default: runs/<stage>-<dataset>-<model>/<n>", is_path=True, may_change_on_resume=True
    )
    resume: str | None = option(
        None,
        "resume an interrupted run: its folder; alone: the newest unfinished one; auto: that or a new run",
        const="newest",
        is_path=True,
        may_change_on_resume=True,
    )
    data: DataSpec = part(DataSpec)
    model: ModelSpec = part(ModelSpec)
    optimization: OptimizationSpec = part(OptimizationSpec)
    augmentation: AugmentationSpec = part(AugmentationSpec)
    checkpoints: CheckpointSpec = part(CheckpointSpec)
    hub: HubSpec = part(HubSpec)

    @property
    def run_name(self) -> str:
        """Return the name of the folder that numbered runs of these settings are in."""
        factor = f"-{self.data.imbalance_factor:g}" if self.data.imbalance_factor else ""
        return f"{self.stage}-{dataset_name(self.data.dataset)}{factor}-{self.model.model_size}"

    @property
    def solvable(self) -> bool:
        """Return True if the classifier is solved exactly, without gradient steps."""
        return False

    def reduce_batch_size(self, num_images: int) -> Self:
        """Reduce the default batch size to what the images fill; an explicit larger one raises an error later."""
        from livt_hf.training.autotune import limit_batch_size  # imports torch

        if self.optimization.batch_size <= num_images:
            return self
        known = {name: value for name, value in self.to_dict().items() if name in ("dataset", "tune") and value}
        if self.optimization.batch_size != self.resolve(known, CONFIGS).optimization.batch_size:
            return self
        batch_size = limit_batch_size(num_images)
        logger.info("there are only %d training images: an update takes %d of them", num_images, batch_size)
        return self.replace(batch_size=batch_size)


@dataclass(frozen=True)
class PretrainSettings(TrainingSettings, stage="pretrain"):
    """Pretrain a ViT on your images by masked generative pretraining (MGP), the first stage of LiVT."""

    streaming: bool = option(False, "read the data as a stream, for datasets that do not fit on the disk")
    model: PretrainModelSpec = part(PretrainModelSpec)
    optimization: OptimizationSpec = part(
        OptimizationSpec, epochs=800, warmup_epochs=40, batch_size=4096, base_lr=1.5e-4
    )


@dataclass(frozen=True)
class FinetuneSettings(TrainingSettings, stage="finetune"):
    """Fine-tune a classifier with a prior-aware loss (BFT), the second stage of LiVT."""

    folds: Annotated[int, Ge(2)] | None = option(
        None, "cross-validate: train this many models, each tested on images (and groups) that only it has not seen"
    )
    data: DataSpec = part(DataSpec, _VALIDATION, validation_fraction=None)
    model: FinetuneModelSpec = part(FinetuneModelSpec)
    optimization: FinetuneOptimizationSpec = part(FinetuneOptimizationSpec)
    loss: LossSpec = part(LossSpec)
    augmentation: FinetuneAugmentationSpec = part(FinetuneAugmentationSpec)
    checkpoints: FinetuneCheckpointSpec = part(FinetuneCheckpointSpec)

    @classmethod
    def default_config(cls, values: dict) -> str:
        """Return the config of `--tune`, which is the same for all datasets, or else that of the dataset."""
        return f"tune/{values['tune']}.yaml" if values.get("tune") else super().default_config(values)

    @property
    def solvable(self) -> bool:
        return is_solvable(self.model, self.optimization, self.loss)


STAGES: dict[str, type[TrainingSettings]] = {"pretrain": PretrainSettings, "finetune": FinetuneSettings}


@dataclass(frozen=True)
class TrainSettings(CommandSettings, stage="train", positionals=("dataset",)):
    """Train a classifier on your images in a given time: both stages, or a pretrained backbone."""

    hours: NonNegative = option(1.0, "hours of training; evaluation comes on top")
    pretrained: str | None = option(
        None,
        "checkpoint folder or Hub id of any image classifier; none: from scratch; default: "
        f"{SMALL_BACKBONE} for fewer than {FEW_IMAGES:,} training images of your own, else none",
        is_path=True,
    )
    loss: str = option("bal_bce", "as for `livt finetune`", choices=loss_names)
    objective: Objective | None = option(None, "what to serve the model for; default: as for `livt finetune`")
    flip: bool | None = option(None, "as for `livt finetune`; default: as the dataset's configs say, else true")
    seed: int = option(0, "seed of everything random except the split")
    output_dir: str | None = option(None, "default: runs/train-<dataset>/<n>", is_path=True)
    resume: str | None = option(None, "resume an interrupted run: its folder", is_path=True)
    launch: str = option("", "options of accelerate launch, such as --launch='--num_processes 1'")
    threads: Positive | None = option(None, "CPU threads per process; default: the machine's cores shared out")
    data: DataSpec = part(DataSpec, _VALIDATION, validation_fraction=None)


@dataclass(frozen=True, kw_only=True)
class CompareSettings(CommandSettings, stage="compare", positionals=("dataset",), required=("dataset",)):
    """Compare training strategies on your images: from scratch, or a pretrained backbone's head, LoRA or all of it."""

    pretrained: str = option(REQUIRED, "checkpoint folder or Hub id of the backbone", is_path=True)
    ways: list[Literal["scratch", "head", "lora", "full"]] | None = option(
        None, "some of the strategies; default: all"
    )
    minutes: Annotated[float, Ge(0.1)] = option(
        30.0, "time of each strategy on this machine; a head that needs less takes less"
    )
    image_size: Positive | None = option(None, "pixels of the backbone's images; default: its own")
    loss: str = option("bal_bce", "loss of every strategy", choices=loss_names)
    seeds: list[int] | None = option(None, "seeds of the runs; default: 0")
    output_dir: str | None = option(None, "default: runs/compare/<dataset>-<backbone>-<minutes>", is_path=True)
    dry_run: bool = option(False, "print the commands and run nothing")
    data: DataSpec = part(DataSpec, _VALIDATION, validation_fraction=None)

    @property
    def folder(self) -> Path:
        """Return the folder of the runs and of the report."""
        name = f"{dataset_name(self.data.dataset)}-{Path(self.pretrained).name}-{self.minutes:g}"
        return Path(self.output_dir or runs_folder() / "compare" / name)


@dataclass(frozen=True)
class SweepSettings(CommandSettings, stage="sweep", positionals=("sweep",)):
    """Run one of the paper's ablations on a dataset."""

    sweep: str | None = option(None, "which ablation; without one they are listed")
    only: list[str] | None = option(None, "some of its variants, by their labels")
    dataset: str = option("glyphs", "its configs are the base of every variant", is_path=True)
    source: str | None = option(
        None, "local copy of the dataset; of another one: --pretrain '--source F'", is_path=True
    )
    imbalance_factor: float | None = option(None, "largest class over smallest class")
    model_size: str | None = option(None, "preset of every variant; default: that of the checkpoint or of the configs")
    pretrained: str | None = option(
        None, "start every variant from this checkpoint instead of an MGP run", is_path=True
    )
    seeds: list[int] | None = option(None, "seeds of the runs; default: 0")
    pretrain: str = option("", "further options of the first stage, such as --pretrain='--epochs 50'")
    finetune: str = option("", "further options of the second stage")
    launch: str = option("", "options of accelerate launch, such as --launch=--multi_gpu")
    jobs: Positive = option(1, "runs at a time, each with its share of the cores")
    output_dir: str | None = option(None, "default: runs/sweeps/<dataset>[-<size>][-<factor>]", is_path=True)
    dry_run: bool = option(False, "print the commands and run nothing")

    @property
    def name(self) -> str:
        """Return the name of the folder of the runs."""
        factor = f"{self.imbalance_factor:g}" if self.imbalance_factor else None
        return "-".join(filter(None, (dataset_name(self.dataset), self.model_size, factor)))

    @property
    def folder(self) -> Path:
        """Return the folder of the runs and of the report."""
        return Path(self.output_dir or runs_folder() / "sweeps" / self.name)
