"""What each command can be told: one dataclass per command, made of the specs that the library takes.

The defaults are the paper's. Nothing here imports torch, so `--help` is fast.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from livt_hf.data.spec import AugmentationSpec, DataSpec, FinetuneAugmentationSpec
from livt_hf.errors import LiVTError
from livt_hf.hub.spec import HubSpec
from livt_hf.long_tail.spec import LossSpec
from livt_hf.options import CommandSettings
from livt_hf.specs import NonNegative, NonNegativeInt, Positive, option
from livt_hf.training.spec import (
    CheckpointSpec,
    FinetuneCheckpointSpec,
    FinetuneModelSpec,
    FinetuneOptimizationSpec,
    ModelSpec,
    OptimizationSpec,
    PretrainModelSpec,
)


@dataclass
class DataSettings(CommandSettings, DataSpec):
    """Which images, from where, divided how."""


@dataclass
class TrainingSettings(DataSettings, ModelSpec, OptimizationSpec, AugmentationSpec, CheckpointSpec, HubSpec):
    """What both stages share."""

    output_dir: str | None = option(
        None,
        "run folder; default: runs/<stage>-<dataset>-<model>/<n>",
        common=True,
        is_path=True,
        may_change_on_resume=True,
    )
    resume: str | None = option(
        None,
        "resume an interrupted run: its folder; alone: the newest unfinished one; auto: that or a new run",
        common=True,
        const="newest",
        is_path=True,
        may_change_on_resume=True,
    )


@dataclass
class PretrainSettings(PretrainModelSpec, TrainingSettings):
    """Masked generative pretraining (MGP) of a ViT on your images."""

    stage: ClassVar[str] = "pretrain"

    epochs: Positive = option(800, "passes over the training set", common=True)
    warmup_epochs: NonNegative = option(40, "epochs of linear warm-up")
    batch_size: Positive = option(4096, "images per update, over all processes and accumulation steps", common=True)
    base_lr: NonNegative = option(
        1.5e-4, "learning rate for 256 images per update; scaled by batch_size / 256", common=True
    )
    streaming: bool = option(False, "read the data as a stream, for datasets that do not fit on the disk")


@dataclass
class FinetuneSettings(
    FinetuneModelSpec, FinetuneOptimizationSpec, LossSpec, FinetuneAugmentationSpec, FinetuneCheckpointSpec,
    TrainingSettings,
):  # fmt: skip
    """Balanced fine-tuning (BFT) of a pretrained model."""

    stage: ClassVar[str] = "finetune"

    folds: Annotated[int, Ge(2)] | None = option(
        None,
        "cross-validate: train this many models, each tested on images (and groups) that only it has not seen",
        common=True,
    )
    validation_fraction: float | None = option(
        None,
        "share of each class held out of the training images, to calibrate and to select on; default: 0.1 of own "
        "datasets of at least 500 training images without a validation split, and 0 of benchmarks",
        common=True,
        legacy_default=0.0,
        affects_split=False,
    )

    @classmethod
    def _own_config(cls, values: dict) -> str:
        """Pretrained backbones want another recipe than a ViT from scratch, whatever the dataset."""
        return f"tune/{values['tune']}.yaml" if values.get("tune") else super()._own_config(values)


@dataclass
class ElsewhereSettings(CommandSettings):
    """What a model that was trained elsewhere does not say of its training."""

    class_counts: str | None = option(
        None,
        "of a model that was trained elsewhere: its training folder, or a JSON or YAML file with the number of "
        "training images per class; gives it probabilities under any prior",
        is_path=True,
    )
    trained_with: Literal["ce", "bce"] | None = option(None, "the loss of such a model; default: ce")

    def __post_init__(self):
        super().__post_init__()
        if self.trained_with is not None and self.class_counts is None:
            raise LiVTError(
                f"--trained_with {self.trained_with} is the loss of a model that --class_counts are given for; pass "
                "them, or leave it out."
            )

    @property
    def training(self) -> dict[str, str | None]:
        """As `load_classifier` is told it."""
        return {"class_counts": self.class_counts, "trained_with": self.trained_with}


@dataclass
class EvalSettings(ElsewhereSettings, DataSettings):
    """Measure a model, by class frequency and under several decision rules; write a report."""

    stage: ClassVar[str] = "eval"

    model: str = option(
        "auto",
        "run folder, checkpoint or Hub id; auto: the newest finished fine-tuning",
        is_path=True,
        is_model=True,
        positional=True,
    )
    dataset: str | None = option(  # type: ignore[assignment]
        None, "default: the one the run was trained on", is_path=True
    )
    split: str = option("test", "split to measure on; all: every image, for a model that was trained on none of them")
    batch_size: Positive = option(256, "images per forward pass on each process")
    prior: str | None = option(
        None, "class frequencies the model will meet: training, uniform, or a JSON or YAML file", is_path=True
    )
    probe: bool = option(
        False,
        "measure the features by kNN and a linear probe, whatever classes the model has; a pretraining always is",
    )
    adapt_prior: bool = option(False, "estimate the prior of the test images from the images alone")
    test_imbalance: str | None = option(
        None,
        "measure on long tails cut out of a balanced split too: 50 is forward (as in training), =-50 backward, "
        "=50,10,-10 several; alone: 50 to 2 in both directions",
        const="50,25,10,5,2,-2,-5,-10,-25,-50",
        pattern=r"[-+.,\s\d]+",
    )
    many_above: NonNegativeInt = option(100, "classes with more training images are many-shot")
    few_below: NonNegativeInt = option(20, "classes with fewer training images are few-shot")
    predictions: str | None = option(
        None, "also write what each rule says of each image, to a .parquet or .csv file", is_path=True
    )
    report: str | None = option(
        None,
        "folder for the report; default: report in the folder of a run, report-<model> in runs of any other model",
        is_path=True,
    )
    compare: list[str] | None = option(
        None, "two runs or report folders to put side by side", is_path=True, is_model=True
    )
    seed: int = option(0, "seed of the linear probe and of the images of shifted test sets")
    threads: Positive | None = option(None, "CPU threads per process; default: the machine's cores shared out")

    def __post_init__(self):
        super().__post_init__()
        if self.compare is not None and len(self.compare) != 2:
            raise LiVTError(f"--compare puts two runs side by side, not {len(self.compare)}; name two.")
