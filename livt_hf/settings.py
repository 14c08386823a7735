"""What each command can be told: one dataclass a command, YAML under command line. Defaults are the paper's."""

import dataclasses
import difflib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml
from transformers import HfArgumentParser

from livt_hf.errors import LiVTError


def option(default, help: str, **metadata):
    return field(default=default, metadata={"help": help} | metadata)


@dataclass
class DataArguments:
    dataset: str = option("glyphs", "benchmark name, image folder, image list (.txt), parquet folder or Hub dataset")
    source: str | None = option(None, "local copy of a named benchmark, or the root folder of an image list")
    imbalance_factor: float | None = option(None, "largest over smallest class; derives a long tail where given")
    rule: str | None = option(
        None, "how the tail is made: exponential, pareto or balanced; default: the dataset's own"
    )
    images_per_class: int | None = option(
        None, "of the largest class; ImageNet-BAL: 160 (the appendix) or 116 (the text)"
    )
    lists: str | None = option(None, "folder of a benchmark's split lists, where they are not in source")
    image_column: str | None = option(None, "column of the pictures, where it cannot be told")
    label_column: str | None = option(None, "column of the labels, where it cannot be told")
    drop_empty: bool = option(False, "leave out classes without a training image instead of refusing them")
    split_seed: int = option(0, "of the images picked for the tail and the test; 0 picks the community's CIFAR-LT")
    test_fraction: float = option(0.2, "share of each class set aside when a dataset has no test split")
    on_broken: Literal["error", "skip"] = option("error", "what to do with an image that cannot be decoded")
    num_workers: int = option(0, "data loading processes for each training process")

    def __post_init__(self):
        if self.dataset is not None:
            self.dataset = self.dataset.rstrip("/") or "/"  # as shells complete folders; runs are found by this name


_COUNTS = {
    "epochs", "batch_size", "accumulation", "image_size", "patch_size", "max_steps", "save_steps", "save_total_limit",
    "log_steps", "eval_epochs", "threads",
}  # fmt: skip


@dataclass
class TrainingArguments(DataArguments):
    """What both stages share."""

    model_size: Literal["micro", "tiny", "small", "base", "large"] = option("base", "preset of the encoder")
    image_size: int | None = option(None, "pixels; default: the preset's")
    patch_size: int | None = option(None, "pixels; default: the preset's")
    epochs: int = option(100, "passes over the training set")
    warmup_epochs: float = option(10, "epochs of linear warm-up")
    batch_size: int = option(1024, "images an update, over all processes and accumulation steps")
    accumulation: int = option(1, "micro-batches an update on each process")
    base_lr: float = option(1e-3, "learning rate for 256 images an update; scaled by batch_size / 256")
    min_lr: float = option(0.0, "floor of the cosine, not scaled by the batch")
    weight_decay: float = option(0.05, "AdamW's decoupled decay")
    adam_beta2: float = option(0.95, "AdamW's second beta")
    clip_grad: float | None = option(None, "largest gradient norm; default: no clipping, as in the paper")
    flip: bool = option(True, "mirror training pictures at random; not for pictures with a handedness, such as text")
    seed: int = option(0, "of everything random but the split: order, crops, masks, initial weights")
    output_dir: str | None = option(None, "run folder; default runs/<stage>-<dataset>-<model>/<n>")
    resume: str | None = option(
        None, "go on with an interrupted run: its folder, or auto (the newest unfinished one)", nargs="?", const="auto"
    )
    max_steps: int | None = option(None, "stop after so many updates, the schedule shortened to fit")
    max_hours: float | None = option(None, "save and stop after so many hours")
    save_steps: int | None = option(None, "updates between checkpoints")
    save_minutes: float = option(10.0, "minutes between checkpoints")
    save_total_limit: int = option(2, "checkpoints to keep")
    log_steps: int = option(10, "updates between lines of log.jsonl")
    trackers: str | None = option(None, "also log to these, comma-separated: tensorboard, wandb, trackio")
    mixed_precision: Literal["auto", "no", "fp16", "bf16"] = option(
        "auto", "auto: bf16 or fp16 on a GPU, none on a CPU"
    )
    compile: bool = option(False, "torch.compile the model")
    gradient_checkpointing: bool = option(False, "trade a third more time for less memory")
    ema_decay: float | None = option(None, "keep a moving average of the weights and publish that")
    threads: int | None = option(None, "CPU threads a process; default: the machine's cores shared out")
    push_to_hub: bool = option(False, "publish the finished run")
    hub_model_id: str | None = option(None, "organisation/name on the Hub")
    hub_private: bool = option(False, "make the Hub repository private")
    hub_license: str = option("apache-2.0", "licence of the published weights, as the Hub spells it")

    def __post_init__(self):
        super().__post_init__()
        for name, value in vars(self).items():
            if name in _COUNTS and value is not None and value < 1:
                raise LiVTError(f"{name} is {value}; it must be at least 1.")


@dataclass
class PretrainArguments(TrainingArguments):
    """Masked generative pretraining (MGP)."""

    stage = "pretrain"
    epochs: int = option(800, "passes over the training set")
    warmup_epochs: float = option(40, "epochs of linear warm-up")
    batch_size: int = option(4096, "images an update, over all processes and accumulation steps")
    base_lr: float = option(1.5e-4, "learning rate for 256 images an update; scaled by batch_size / 256")
    mask_ratio: float = option(0.75, "share of patches hidden from the encoder")
    decode_ratio: float = option(1.0, "share of hidden patches decoded: 1 is the paper, less is faster and different")
    crop_scale: float = option(0.2, "smallest area of a random resized crop; 1 keeps the whole picture")
    streaming: bool = option(False, "read the data as a stream, for sets that do not fit")
    num_images: int | None = option(None, "images of a stream that does not know its length")


@dataclass
class FinetuneArguments(TrainingArguments):
    """Balanced fine-tuning (BFT)."""

    stage = "finetune"
    image_size: int | None = option(None, "pixels; default: the checkpoint's, or the preset's")
    pretrained: str | None = option(
        None, "MGP run, ViT or ViTMAE checkpoint or Hub id; 'none' trains from scratch; default: the newest MGP run"
    )
    min_lr: float = option(1e-6, "floor of the cosine, not scaled by the batch")
    adam_beta2: float = option(0.99, "AdamW's second beta")
    optimizer: Literal["adamw", "lamb"] = option("adamw", "lamb is DeiT III's")
    layer_decay: float = option(0.75, "learning rate factor from each layer to the one below")
    drop_path: float = option(0.1, "stochastic depth of the last layer")
    pooling: Literal["mean", "cls"] = option("mean", "features: mean of patch tokens, or the class token")
    loss: str = option("bal_bce", "see livt_hf.losses.LOSSES")
    tau: float = option(1.0, "strength of the logit bias")
    test_prior: str = option("uniform", "uniform, none, or a JSON file of class probabilities")
    bias: Literal["bce", "ce"] = option("bce", "whose theorem's bias a balanced sigmoid loss gets")
    head_start: Literal["prior", "zero"] = option("prior", "where the classifier bias of a sigmoid loss starts")
    label_smoothing: float = option(0.0, "mass moved to all classes, in the loss")
    nt_lambda: float = option(2.0, "lambda of the NT-BCE losses")
    ib_warmup: float = option(0.5, "share of the epochs on cross-entropy before the IB loss starts")
    augmentation: Literal["rand_augment", "three_augment", "crop", "pad_crop"] = option(
        "rand_augment", "the paper's, DeiT III's, random resized crops alone, or pad-and-crop for small pictures"
    )
    crop_scale: float = option(0.08, "smallest area of a random resized crop; 1 keeps the whole picture")
    erase: float = option(0.25, "probability of random erasing")
    mixup: float = option(0.8, "mixup alpha; 0 is off")
    cutmix: float = option(1.0, "cutmix alpha; 0 is off")
    eval_epochs: int = option(5, "epochs between evaluations")
    select: Literal["last", "best"] = option("last", "weights to keep: the last, or the best on the validation split")


@dataclass
class EvalArguments(DataArguments):
    """Measure a checkpoint."""

    model: str = option("auto", "run folder, checkpoint or Hub id; auto: the newest finished fine-tuning")
    dataset: str | None = option(None, "default: the one the run was trained on")
    split: str = option("test", "split to measure on")
    batch_size: int = option(256, "images a forward pass on each process")
    prior: str | None = option(None, "JSON file with the class probabilities the model will meet")
    adapt_prior: bool = option(False, "estimate the prior of the test images from the images alone")
    report: str | None = option(None, "folder for the report; default: report/ in a run folder")
    seed: int = option(0, "of the linear probe")
    threads: int | None = option(None, "CPU threads a process; default: the machine's cores shared out")


def parse(cls, argv: list[str] | None = None, configs: Path | None = None, underneath: Path | None = None):
    """An instance of `cls` from the command line over a YAML file over the defaults.

    The file is `--config` or, without it, the dataset's own: `<stage>-<dataset>.yaml` in the folder `configs`. So a
    config is complete over the defaults, which are the paper's. `underneath` is a file that lies below both: the
    settings of a run to resume. YAML goes through the same parser as the command line, so a type is checked in one
    place.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = HfArgumentParser(cls, allow_abbrev=False, description=cls.__doc__)
    parser.add_argument("--config", default=None, help="YAML file with any of these options")
    given = _parse_known(parser, argv)
    config = given.config
    if config is None and configs is not None:
        named = configs / f"{cls.stage}-{given.dataset.replace('/', '-')}.yaml"
        config = named if named.exists() else None
    files = [path for path in (underneath, config) if path is not None]
    values = _parse_known(parser, [word for path in files for word in yaml_argv(path, cls)] + argv)
    return cls(**{f.name: getattr(values, f.name) for f in dataclasses.fields(cls)})


def words_of(argv: list[str]) -> list[str]:
    """Command-line words with `--option=value` in two; a value may contain the sign itself."""
    return [part for word in argv for part in (word.split("=", 1) if word.startswith("--") else [word])]


def yaml_argv(path: str | Path, cls) -> list[str]:
    """A YAML file as command-line words; unknown keys are errors."""
    if not Path(path).exists():
        raise SystemExit(f"the config file {path} does not exist.")
    # The base loader leaves every value as it is written: `mixed_precision: no` is "no", and 1e-3 needs no point.
    values = yaml.load(Path(path).read_text(), Loader=yaml.BaseLoader) or {}
    if not isinstance(values, dict):
        raise SystemExit(f"{path} must hold 'option: value' lines, not a {type(values).__name__}.")
    names = [f.name for f in dataclasses.fields(cls)]
    argv = []
    for name, value in values.items():
        if name not in names:
            raise SystemExit(f"{path}: there is no option {name!r}{_nearest(name, names)}")
        if not isinstance(value, str):
            raise SystemExit(f"{path}: {name} must be a single value, not a {type(value).__name__}.")
        if value not in ("", "~", "null"):
            argv.append(f"--{name}={value}")
    return argv


def save_yaml(arguments, path: Path) -> None:
    path.write_text(yaml.safe_dump(dataclasses.asdict(arguments), sort_keys=False))


def _parse_known(parser, argv: list[str]):
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        names = [action.dest for action in parser._actions]
        word = unknown[0].split("=")[0]
        raise SystemExit(f"there is no option {word!r}{_nearest(word.lstrip('-'), names, '--')}")
    return values


def _nearest(name: str, names: list[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else "; --help lists them."
