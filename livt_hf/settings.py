"""What each command can be told: one dataclass per command, and one declaration per option (see options.py).

The defaults are the paper's. Nothing here imports torch, so `--help` is fast.
"""

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from livt_hf.errors import LiVTError
from livt_hf.options import CommandSettings, option


def loss_names() -> list[str]:
    from livt_hf.long_tail.losses import LOSSES  # imports torch

    return sorted(LOSSES)


@dataclass
class DataSettings(CommandSettings):
    """Which images, from where, divided how."""

    dataset: str = option(
        "glyphs",
        "benchmark name, image folder, table of labels (.csv, .tsv, .jsonl, .parquet), image list (.txt), parquet "
        "folder or Hub dataset",
        place=True,
        positional=True,
    )
    source: str | None = option(
        None,
        "local copy of a named benchmark, or the folder of the images that a table or a list names",
        place=True,
        free=True,
    )
    imbalance_factor: float | None = option(
        None, "largest class over smallest class; a long tail is derived where this is given"
    )
    rule: str | None = option(
        None,
        "how the long tail is made; default: the dataset's own rule",
        choices=("exponential", "pareto", "balanced"),
    )
    images_per_class: int | None = option(
        None, "images of the largest class; ImageNet-BAL: 160 (the appendix) or 116 (the text)", at_least=1
    )
    cap: bool = option(False, "take all images of a class that has fewer than the rule asks for, or refuse")
    lists: str | None = option(
        None, "folder of a benchmark's split lists, where they are not in source", place=True, free=True
    )
    image_column: str | None = option(None, "column of the images, where it cannot be told")
    label_column: str | None = option(
        None, "column of the labels, where it cannot be told; or, separated by commas, one column of 0 and 1 per class"
    )
    label_separator: str | None = option(
        None, "what stands between the labels of an image that has several, such as '|'"
    )
    split_column: str | None = option(
        None, "column that says train, val or test; default: one called split; none: no column"
    )
    group_column: str | None = option(
        None,
        "column of what belongs together (patient, site, animal): no group is on both sides of a split that is made",
    )
    exclude_labels: str | None = option(None, "labels that are no classes, separated by commas, such as todo,Unknown")
    min_images: int | None = option(
        None, "smallest number of training images, before any are set aside, with which a class is kept", at_least=1
    )
    rare_classes: Literal["drop", "merge"] = option(
        "drop", "what to do with classes below min_images: leave them out or make them one class"
    )
    drop_empty: bool = option(False, "leave out classes without a training image instead of refusing them")
    split_seed: int = option(
        0,
        "seed of the images picked for the tail and the test set; 0 picks the community's CIFAR-LT",
        at_least=0,
        at_most=2**32 - 1,
    )
    test_fraction: float | None = option(  # None: no test split is made
        0.2, "share of each class set aside when a dataset has no test split"
    )
    validation_fraction: float | None = option(
        0.0,
        "share of each class held out of the training images, to calibrate and to select on",
        before=0.0,
        selects=False,
    )
    fold: str | None = option(
        None,
        "test on one part of a cross-validation and train on the others: 2/5 is the second of five; `finetune "
        "--folds 5` goes through all",
    )
    on_broken: Literal["error", "skip"] = option(
        "error", "what to do with an image that cannot be read", selects=False
    )
    num_workers: int = option(0, "data loading processes per training process", free=True, at_least=0)

    def __post_init__(self):
        super().__post_init__()
        for name in ("exclude_labels", "label_column"):
            if isinstance(getattr(self, name), list | tuple):  # as Python has them
                setattr(self, name, ",".join(map(str, getattr(self, name))))
        if self.dataset is not None:
            if not self.dataset.strip():
                raise LiVTError(
                    "the name of the dataset is empty: name a benchmark, a folder, a table or a Hub dataset."
                )
            # As shells complete folders; runs are found by this name.
            self.dataset = self.dataset.rstrip("/") or "/"
            if Path(self.dataset).name in ("", ".."):  # of the folder one works in
                self.dataset = os.path.abspath(self.dataset)
        if self.fold is not None:
            number, _, folds = self.fold.partition("/")
            if not (number.isdecimal() and folds.isdecimal() and 1 <= int(number) <= int(folds) >= 2):
                raise LiVTError(f"fold is {self.fold!r}; it must be one of several parts, such as 2/5.")

    def said_of_data(self) -> dict[str, Any]:
        """The options of the data that are not at their defaults."""
        values = {name: getattr(self, name) for name in DataSettings.names()}
        return {name: value for name, value in values.items() if value != self.__dataclass_fields__[name].default}

    @staticmethod
    def selecting() -> list[str]:
        """The options that decide which images are trained on and which are tested on."""
        facts = {declared.name: declared.metadata for declared in fields(DataSettings)}
        return [name for name in facts if facts[name].get("selects", not facts[name].get("free"))]

    @property
    def fold_numbers(self) -> tuple[int, int]:
        """Of fold 2/5: 2 and 5."""
        number, _, folds = str(self.fold).partition("/")
        return int(number), int(folds)


@dataclass
class TrainingSettings(DataSettings):
    """What both stages share."""

    model_size: str = option("base", "preset of the encoder", choices=("micro", "tiny", "small", "base", "large"))
    image_size: int | None = option(None, "pixels; default: the preset's", at_least=1)
    patch_size: int | None = option(None, "pixels; default: the preset's", at_least=1)
    epochs: int = option(100, "passes over the training set", at_least=1)
    hours: float | None = option(
        None, "train for as many epochs as fit into these hours, start-up included; evaluation comes on top", above=0
    )
    warmup_epochs: float = option(10, "epochs of linear warm-up", at_least=0)
    batch_size: int = option(1024, "images per update, over all processes and accumulation steps", at_least=1)
    accumulation: int = option(1, "micro-batches per update on each process", at_least=1)
    base_lr: float = option(1e-3, "learning rate for 256 images per update; scaled by batch_size / 256", at_least=0)
    min_lr: float = option(0.0, "floor of the cosine, not scaled by the batch", at_least=0)
    weight_decay: float = option(0.05, "AdamW's decoupled decay", at_least=0)
    adam_beta2: float = option(0.95, "AdamW's second beta", at_least=0, below=1)
    clip_grad: float | None = option(None, "largest gradient norm; default: no clipping, as in the paper", above=0)
    flip: bool = option(True, "mirror training images at random; not for images with a handedness, such as text")
    seed: int = option(0, "seed of everything random except the split: order, crops, masks, initial weights")
    output_dir: str | None = option(
        None, "run folder; default: runs/<stage>-<dataset>-<model>/<n>", place=True, free=True
    )
    resume: str | None = option(
        None,
        "go on with an interrupted run: its folder; alone: the newest unfinished one; auto: that or a new run",
        alone="newest",
        place=True,
        free=True,
    )
    max_steps: int | None = option(None, "stop after this many updates, the schedule shortened to fit", at_least=1)
    max_hours: float | None = option(None, "save and stop after this many hours", free=True, at_least=0)
    save_steps: int | None = option(None, "updates between checkpoints", free=True, at_least=1)
    save_minutes: float = option(10.0, "minutes between checkpoints", free=True)
    save_total_limit: int = option(2, "number of checkpoints to keep", free=True, at_least=1)
    log_steps: int = option(10, "updates between lines of log.jsonl", at_least=1)
    trackers: str | None = option(
        None, "also log to these, separated by commas: tensorboard, wandb, trackio", free=True
    )
    mixed_precision: Literal["auto", "no", "fp16", "bf16"] = option(
        "auto", "auto: bf16 or fp16 on a GPU, none on a CPU"
    )
    compile: Literal[True, False, "auto"] = option(
        False, "torch.compile the model; auto: on a GPU, and on a CPU where it trains for half an hour"
    )
    gradient_checkpointing: bool = option(False, "trade a third more time for less memory")
    ema_decay: float | None = option(
        None, "keep a moving average of the weights and publish that", at_least=0, below=1
    )
    threads: int | None = option(
        None, "CPU threads per process; default: the machine's cores shared out", free=True, at_least=1
    )
    push_to_hub: bool = option(False, "publish the finished run", free=True)
    hub_model_id: str | None = option(None, "organisation/name on the Hub", free=True)
    hub_public: bool = option(False, "make the Hub repository public; without it the repository is private", free=True)
    hub_license: str | None = option(
        None,
        "licence of the published weights, as the Hub spells it; must be named for own data and for weights that "
        "started from somebody else's checkpoint",
        free=True,
    )


@dataclass
class PretrainSettings(TrainingSettings):
    """Masked generative pretraining (MGP) of a ViT on your images."""

    stage: ClassVar[str] = "pretrain"

    epochs: int = option(800, "passes over the training set", at_least=1)
    warmup_epochs: float = option(40, "epochs of linear warm-up", at_least=0)
    batch_size: int = option(4096, "images per update, over all processes and accumulation steps", at_least=1)
    base_lr: float = option(1.5e-4, "learning rate for 256 images per update; scaled by batch_size / 256", at_least=0)
    mask_ratio: float = option(0.75, "share of patches hidden from the encoder")
    decode_ratio: float = option(1.0, "share of hidden patches decoded: 1 is the paper, less is faster and different")
    crop_scale: float = option(
        0.2, "smallest area of a random resized crop; 1 keeps the whole image", above=0, at_most=1
    )
    streaming: bool = option(False, "read the data as a stream, for datasets that do not fit")


@dataclass
class FinetuneSettings(TrainingSettings):
    """Balanced fine-tuning (BFT) of a pretrained model."""

    stage: ClassVar[str] = "finetune"

    image_size: int | None = option(None, "pixels; default: the checkpoint's, or the preset's", at_least=1)
    model_size: str = option("base", "preset of the encoder; that of a checkpoint is known")
    pretrained: str | None = option(
        None,
        "MGP run, or checkpoint folder or Hub id of any image classifier; 'none' trains from scratch; default: the "
        "newest MGP run",
        place=True,
    )
    tune: Literal["full", "lora", "head"] | None = option(
        None,
        "what is trained: everything, low-rank additions (LoRA), or the classifier on features of the frozen "
        "backbone; each has a config of its own; default: everything, with the dataset's config",
    )
    lora_rank: int = option(8, "rank of LoRA's additions", at_least=1)
    views: int = option(1, "views per image that a frozen backbone keeps; all but the first are augmented", at_least=1)
    min_lr: float = option(1e-6, "floor of the cosine, not scaled by the batch", at_least=0)
    adam_beta2: float = option(0.99, "AdamW's second beta", at_least=0, below=1)
    optimizer: Literal["adamw", "lamb", "muon"] = option(
        "adamw", "adamw is the paper's, lamb DeiT III's; muon learns faster from scratch, and leaves vectors to NAdamW"
    )
    layer_decay: float = option(0.75, "learning rate factor from each layer to the one below", at_least=0)
    drop_path: float = option(0.1, "stochastic depth of the last layer", at_least=0, below=1)
    keep_ratio: float = option(
        1.0,
        "share of an image's patches, drawn anew each epoch, that a LiViT trains on: 1 is the paper, less is faster",
        above=0,
        at_most=1,
    )
    keep_all_epochs: int = option(1, "number of last epochs with all patches", at_least=0)
    pooling: Literal["mean", "cls"] = option("mean", "features: mean of the patch tokens, or the class token")
    loss: str = option(
        "bal_bce",
        "loss of the head: bal_bce, bal_ce, bce, ce, cb_bce, cb_ce, bal_nt_bce, nt_bce, ldam, lade, ib, or a plugin's",
        choices=loss_names,
    )
    tau: float = option(1.0, "strength of the logit bias")
    test_prior: str = option(
        "uniform",
        "uniform, none, or a JSON file of class probabilities; uniform is none where images have several labels",
        place=True,
    )
    bias: Literal["bce", "ce"] = option("bce", "bias of balanced sigmoid losses: bce (Theorem 3) or ce (Theorem 1)")
    head_start: Literal["prior", "zero"] = option("prior", "where the classifier bias of a sigmoid loss starts")
    label_smoothing: float = option(0.0, "probability mass moved to all classes, in the loss")
    sampler: Literal["natural", "balanced", "sqrt", "progressive"] = option(
        "natural",
        "how often images of a class of n are drawn: each once, ~ 1/n, ~ 1/sqrt(n), or from natural to balanced over "
        "the epochs",
    )
    class_weights: str | None = option(
        None,
        "JSON or YAML file with one weight per class, by name or as a list: factors of its images' loss",
        place=True,
    )
    normalised_classifier: bool = option(False, "LDAM: logits are cosines, as Cao et al. have them (not the paper)")
    drw_start: float | None = option(
        None, "deferred re-weighting: share of the epochs after which images are weighted by class; default: never"
    )
    cb_beta: float = option(0.9999, "beta of the class weights of CB and of deferred re-weighting")
    ldam_max_margin: float = option(0.5, "LDAM: margin of the rarest class")
    ldam_scale: float = option(30.0, "LDAM: factor of the logits")
    lade_weight: float = option(0.1, "LADE: weight of its regulariser; 0.005 on Places-LT, 0.05 on ImageNet-LT")
    lade_lambda: float = option(0.01, "LADE: lambda; 0.1 on Places-LT, 0.5 on ImageNet-LT")
    ib_alpha: float = option(1000.0, "IB: factor of the loss")
    ib_warmup: float = option(0.5, "IB: share of the epochs on cross-entropy before it starts")
    nt_lambda: float = option(2.0, "lambda of the NT-BCE losses; 1 is plain BCE")
    augmentation: Literal["rand_augment", "three_augment", "crop", "pad_crop"] = option(
        "rand_augment", "the paper's, DeiT III's, random resized crops alone, or pad-and-crop for small images"
    )
    crop_scale: float = option(
        0.08, "smallest area of a random resized crop; 1 keeps the whole image", above=0, at_most=1
    )
    erase: float = option(0.25, "probability of random erasing", at_least=0, at_most=1)
    mixup: float = option(0.8, "mixup alpha; 0 is off", at_least=0)
    cutmix: float = option(1.0, "cutmix alpha; 0 is off", at_least=0)
    mixup_off_epochs: int = option(0, "number of last epochs without mixup and cutmix", at_least=0)
    folds: int | None = option(
        None,
        "cross-validate: train this many models, each tested on images (and groups) that only it has not seen",
        at_least=2,
    )
    validation_fraction: float | None = option(
        None,
        "share of each class held out of the training images, to calibrate and to select on; default: 0.1 of own "
        "datasets of at least 500 training images without a validation split, and 0 of benchmarks",
        before=0.0,
    )
    eval_epochs: int = option(5, "epochs between evaluations", at_least=1)
    select: Literal["last", "best"] = option("last", "weights to keep: the last, or the best on the validation split")
    select_metric: str | None = option(
        None,
        "number that the best weights are best by; default: mean_class_accuracy, or map where images have several "
        "labels",
        choices=("mean_class_accuracy", "accuracy", "macro_f1", "many", "medium", "few", "worst_class_accuracy")
        + ("map", "auroc"),
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
        place=True,
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
        place=True,
        trained=True,
        positional=True,
    )
    dataset: str | None = option(  # type: ignore[assignment]
        None, "default: the one the run was trained on", place=True
    )
    split: str = option("test", "split to measure on; all: every image, for a model that was trained on none of them")
    batch_size: int = option(256, "images per forward pass on each process", at_least=1)
    prior: str | None = option(
        None, "class frequencies the model will meet: training, uniform, or a JSON or YAML file", place=True
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
        alone="50,25,10,5,2,-2,-5,-10,-25,-50",
        pattern=r"[-+.,\s\d]+",
    )
    many_above: int = option(100, "classes with more training images are many-shot", at_least=0)
    few_below: int = option(20, "classes with fewer training images are few-shot", at_least=0)
    predictions: str | None = option(
        None, "also write what each rule says of each image, to a .parquet or .csv file", place=True
    )
    report: str | None = option(
        None,
        "folder for the report; default: report in the folder of a run, report-<model> in runs of any other model",
        place=True,
    )
    compare: list[str] | None = option(
        None, "two runs or report folders to put side by side", place=True, trained=True
    )
    seed: int = option(0, "seed of the linear probe and of the images of shifted test sets")
    threads: int | None = option(None, "CPU threads per process; default: the machine's cores shared out", at_least=1)

    def __post_init__(self):
        super().__post_init__()
        if self.compare is not None and len(self.compare) != 2:
            raise LiVTError(f"--compare puts two runs side by side, not {len(self.compare)}; name two.")
