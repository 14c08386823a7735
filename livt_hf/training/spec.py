"""Specs of the training loop and of the two tasks: model, optimisation, checkpoints. Nothing here imports torch."""

from dataclasses import dataclass
from typing import Literal

from livt_hf.constants import PRESETS
from livt_hf.long_tail.loss_table import CONVEX_LOSSES
from livt_hf.long_tail.spec import LossSpec
from livt_hf.specs import (
    AboveZero,
    FractionAboveZero,
    FractionBelowOne,
    NonNegative,
    NonNegativeInt,
    Positive,
    Spec,
    option,
)


@dataclass(frozen=True)
class ModelSpec(Spec):
    """Model: which network to train."""

    model_size: str = option("base", "preset of the encoder", choices=tuple(PRESETS), common=True)
    image_size: Positive | None = option(None, "pixels; default: the preset's", common=True)
    patch_size: Positive | None = option(None, "pixels; default: the preset's")

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes that were given, by the names of a config."""
        sizes = {"image_size": self.image_size, "patch_size": self.patch_size}
        return {name: size for name, size in sizes.items() if size is not None}


@dataclass(frozen=True)
class PretrainModelSpec(ModelSpec):
    """Model: which network to train."""

    mask_ratio: float = option(0.75, "share of patches hidden from the encoder", common=True)
    decode_ratio: float = option(1.0, "share of hidden patches decoded: 1 is the paper, less is faster and different")


@dataclass(frozen=True)
class FinetuneModelSpec(ModelSpec):
    """Model: which network to fine-tune, and how much of it."""

    pretrained: str | None = option(
        None,
        "MGP run, or checkpoint folder or Hub id of any image classifier; 'none' trains from scratch; default: the "
        "newest MGP run",
        common=True,
        is_path=True,
    )
    tune: Literal["full", "lora", "head"] | None = option(
        None,
        "what is trained: everything, low-rank additions (LoRA), or the classifier on features of the frozen "
        "backbone; each has a config of its own; default: full or, of a LiViT, the dataset's config",
        common=True,
    )
    model_size: str = option("base", "preset of the encoder; that of a checkpoint is known", common=True)
    image_size: Positive | None = option(None, "pixels; default: the checkpoint's, or the preset's", common=True)
    framing: Literal["auto", "own", "crop", "squash", "pad"] = option(
        "auto",
        "what a model sees of an image that is not square: the centre (crop), all of it squashed to a square (squash) "
        "or padded to one (pad), or what the processor of the checkpoint does (own); auto: for a backbone on own "
        "images that are not nearly square, crop or squash by cross-validation on frozen features, else own",
        common=True,
        legacy_default="own",
    )
    precision: Literal["auto", "float32", "bfloat16"] = option(
        "auto",
        "what tune head computes the features in; auto: bfloat16 on a CPU that has it if it is faster and the "
        "similarities of the first images agree within 0.02, else float32",
        legacy_default="float32",
    )
    solver: Literal["exact", "loop"] = option(
        "exact",
        "how tune head finds the classifier: exact solves a convex loss to its optimum, with the L2 strength by "
        "cross-validation and without learning rate, epochs or batch; loop trains it, as other losses always do",
        legacy_default="loop",
    )
    lora_rank: Positive = option(8, "rank of the LoRA matrices")
    views: Positive = option(1, "views per image that a frozen backbone encodes; all but the first are augmented")
    drop_path: FractionBelowOne = option(0.1, "stochastic depth of the last layer")
    pooling: Literal["mean", "cls"] = option("mean", "features: mean of the patch tokens, or the class token")


@dataclass(frozen=True)
class OptimizationSpec(Spec):
    """Optimisation: how long, how fast, on which hardware."""

    epochs: Positive = option(100, "passes over the training set", common=True)
    hours: AboveZero | None = option(
        None,
        "train for as many epochs as fit into these hours, start-up included; evaluation comes on top",
        common=True,
    )
    max_steps: Positive | None = option(None, "stop after this many updates, with the schedule shortened to fit")
    warmup_epochs: NonNegative = option(10, "epochs of linear warm-up")
    batch_size: Positive = option(1024, "images per update, over all processes and accumulation steps", common=True)
    accumulation: Positive = option(1, "micro-batches per update on each process")
    base_lr: NonNegative = option(
        1e-3, "learning rate for 256 images per update; scaled by batch_size / 256", common=True
    )
    min_lr: NonNegative = option(0.0, "floor of the cosine, not scaled by the batch")
    weight_decay: NonNegative = option(0.05, "AdamW's decoupled decay")
    adam_beta2: FractionBelowOne = option(0.95, "AdamW's second beta")
    clip_grad: AboveZero | None = option(None, "largest gradient norm; default: no clipping, as in the paper")
    ema_decay: FractionBelowOne | None = option(None, "keep a moving average of the weights and publish that")
    seed: int = option(
        0, "seed of everything random except the split: order, crops, masks, initial weights", common=True
    )
    mixed_precision: Literal["auto", "no", "fp16", "bf16"] = option(
        "auto", "auto: half precision on a GPU, the faster on a CPU", common=True
    )
    compile: Literal[True, False, "auto"] = option(
        False, "torch.compile the model; auto: on a GPU, and on a CPU if training takes more than half an hour"
    )
    gradient_checkpointing: bool = option(False, "trade a third more time for less memory")
    threads: Positive | None = option(
        None, "CPU threads per process; default: the machine's cores shared out", may_change_on_resume=True
    )


@dataclass(frozen=True)
class FinetuneOptimizationSpec(OptimizationSpec):
    """Optimisation: how long, how fast, on which hardware."""

    min_lr: NonNegative = option(1e-6, "floor of the cosine, not scaled by the batch")
    adam_beta2: FractionBelowOne = option(0.99, "AdamW's second beta")
    optimizer: Literal["adamw", "lamb", "muon"] = option(
        "adamw", "adamw is the paper's, lamb DeiT III's; muon learns faster from scratch, and leaves vectors to NAdamW"
    )
    layer_decay: NonNegative = option(0.75, "learning rate factor from each layer to the one below")
    freeze_batch_norm: bool = option(
        False, "keep the running statistics of BatchNorm layers, as with LoRA: training starts at what was served"
    )
    keep_ratio: FractionAboveZero = option(
        1.0,
        "share of an image's patches, drawn anew each epoch, that a LiViT trains on: 1 is the paper, less is faster",
    )
    keep_all_epochs: NonNegativeInt = option(1, "number of last epochs with all patches")
    sampler: Literal["natural", "balanced", "sqrt", "progressive"] = option(
        "natural",
        "how often images of a class of n are drawn: each once, ~ 1/n, ~ 1/sqrt(n), or from natural to balanced over "
        "the epochs",
    )


@dataclass(frozen=True)
class CheckpointSpec(Spec):
    """Checkpoints: when to save, to log and to stop."""

    max_hours: NonNegative | None = option(None, "save and stop after this many hours", may_change_on_resume=True)
    save_steps: Positive | None = option(None, "updates between checkpoints", may_change_on_resume=True)
    save_minutes: float = option(10.0, "minutes between checkpoints", common=True, may_change_on_resume=True)
    save_total_limit: Positive = option(2, "number of checkpoints to keep", may_change_on_resume=True)
    log_steps: Positive = option(10, "updates between lines of log.jsonl")
    trackers: str | None = option(
        None,
        "also log to these, separated by commas: tensorboard, wandb, trackio",
        may_change_on_resume=True,
    )


@dataclass(frozen=True)
class FinetuneCheckpointSpec(CheckpointSpec):
    """Checkpoints: when to save, to evaluate, to log and to stop."""

    eval_epochs: Positive = option(5, "epochs between evaluations", common=True)
    select: Literal["last", "best"] = option(
        "last", "weights to keep: the last, or the best on the validation split", common=True
    )
    select_metric: str | None = option(
        None,
        "metric that selects the best weights; default: mean_class_accuracy, or map where images have several labels",
        choices=("mean_class_accuracy", "accuracy", "macro_f1", "many", "medium", "few", "worst_class_accuracy")
        + ("map", "auroc"),
    )


def is_solvable(model: FinetuneModelSpec, optimization: FinetuneOptimizationSpec, loss: LossSpec) -> bool:
    """Return True if the classifier is solved exactly: a convex loss on frozen features, every image drawn once."""
    exact = model.tune == "head" and model.solver == "exact" and optimization.sampler == "natural"
    return exact and loss.loss in CONVEX_LOSSES and loss.drw_start is None
