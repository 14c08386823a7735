"""What each command beyond the two stages and their evaluation can be told, and all commands by name.

Like livt_hf/settings.py this imports no torch, so that `livt` answers `--help` and refuses a misspelt option at once.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from livt_hf.data.benchmarks import BENCHMARKS, PUBLIC
from livt_hf.errors import LiVTError
from livt_hf.long_tail.spec import loss_names
from livt_hf.options import CommandSettings
from livt_hf.runs import runs_folder
from livt_hf.settings import (
    DataSettings,
    ElsewhereSettings,
    EvalSettings,
    FinetuneSettings,
    PretrainSettings,
)
from livt_hf.specs import REQUIRED, AboveZero, Positive, option
from livt_hf.text import shell_line, shell_words

CONFIGS = Path(__file__).parent / "configs"
STAGES = {"pretrain": PretrainSettings, "finetune": FinetuneSettings}


def sweep_names() -> tuple[str, ...]:
    from livt_hf.recipes.ablations import SWEEPS  # imports torch

    return tuple(SWEEPS)


@dataclass
class TrainSettings(DataSettings):
    """Train a classifier on your images in a given time: both stages, or a pretrained backbone."""

    stage: ClassVar[str] = "train"

    hours: AboveZero = option(1.0, "hours of training; evaluation comes on top")
    pretrained: str | None = option(
        None, "checkpoint folder or Hub id of any image classifier; default: from scratch", is_path=True
    )
    loss: str = option("bal_bce", "as for `livt finetune`", choices=loss_names)
    flip: bool | None = option(None, "as for `livt finetune`; default: as the dataset's configs say, else true")
    seed: int = option(0, "seed of everything random except the split")
    validation_fraction: float | None = option(None, "as for `livt finetune`")
    output_dir: str | None = option(None, "default: runs/train-<dataset>/<n>", is_path=True)
    resume: str | None = option(None, "go on with an interrupted run: its folder", is_path=True)
    launch: str = option("", "options of accelerate launch, such as --launch='--num_processes 1'")
    threads: Positive | None = option(None, "CPU threads per process; default: the machine's cores shared out")

    def words(self, stage: str) -> list[str]:
        """What a stage is told besides what is chosen for it."""
        loss = {"loss": self.loss} if stage == "finetune" else {}
        own = {name: getattr(self, name) for name in ("dataset", "seed", "flip", "plugin")}
        return as_words(self.non_default_data_options() | own | loss)


@dataclass(kw_only=True)
class CalibrateSettings(ElsewhereSettings, DataSettings):
    """Make the class probabilities of a trained model right, on images it was not trained on."""

    stage: ClassVar[str] = "calibrate"

    model: str = option(
        REQUIRED, "run or checkpoint folder; its config.json is changed", positional=True, is_path=True, is_model=True
    )
    dataset: str | None = option(None, "default: the one the run was trained on", is_path=True)
    split: str = option("validation", "labelled images that the model was not trained on; all: of another dataset")
    batch_size: Positive = option(256, "images per forward pass")
    threads: Positive | None = option(None, "CPU threads; default: all cores")


@dataclass(kw_only=True)
class PredictSettings(ElsewhereSettings):
    """Classify image files."""

    stage: ClassVar[str] = "predict"

    model: str = option(REQUIRED, "run folder, checkpoint or Hub id", positional=True, is_path=True, is_model=True)
    images: list[str] = option(REQUIRED, "files, folders or quoted patterns", positional=True, is_path=True)
    prior: str | None = option(
        None,
        "how frequent each class is where the model serves: training, uniform, or a JSON or YAML file; "
        "default: the largest logit until the model is calibrated, and then its own test prior",
        is_path=True,
    )
    top_k: Positive = option(5, "classes to print per image")
    format: Literal["table", "jsonl", "csv"] = option("table", "what a line looks like")
    output: str | None = option(
        None, "also write the scores of all classes for each file, to a .parquet or .csv file", is_path=True
    )
    batch_size: Positive = option(32, "images per forward pass")
    device: str | None = option(None, "cuda, mps or cpu; default: the first of them that is there")
    threads: Positive | None = option(None, "CPU threads; default: all cores")


@dataclass(kw_only=True)
class DemoSettings(CommandSettings):
    """Try models in the browser, on this machine."""

    stage: ClassVar[str] = "demo"

    models: list[str] = option(
        REQUIRED, "run folders, checkpoints or Hub ids", positional=True, is_path=True, is_model=True
    )
    images: str | None = option(
        None, "folder of example images; default: images of the run's test split", is_path=True
    )
    report: str | None = option(
        None, "report folder with predictions.parquet; default: the newest one in the run's folder", is_path=True
    )
    port: Positive | None = option(None, "port on this machine; default: the first free one from 7860 on")
    share: bool = option(False, "also make a public link, through Gradio's servers")
    browser: bool = option(True, "open the page in the browser")
    device: str | None = option(None, "cuda, mps or cpu; default: the first of them that is there")

    def __post_init__(self):
        super().__post_init__()
        if self.report is not None and len(self.models) > 1:
            raise LiVTError(f"--report {self.report} belongs to one model; name only that one.")


@dataclass
class PublishSettings(CommandSettings):
    """Put a finished run on the Hub, with its model card."""

    stage: ClassVar[str] = "publish"

    run: str | None = option(None, "folder of a finished run", positional=True, is_path=True, is_model=True)
    repo_id: str | None = option(None, "organisation/name on the Hub", positional=True)
    license: str | None = option(
        None,
        "licence of the weights, as the Hub spells it; must be named for own data and for weights that started from "
        "somebody else's checkpoint; default for this package's benchmarks: apache-2.0",
    )
    public: bool = option(False, "make the repository public; without it the repository is private")
    with_pictures: bool = option(
        False,
        "also upload the pictures that show images of the dataset (report page, best and worst classes, "
        "reconstructions); without it only plots of numbers are uploaded",
    )
    form: Literal["transformers", "timm"] = option("transformers", "library that is to load the classifier")
    tag: str | None = option(None, "git tag of this version, for instance v1.0")
    folder: str | None = option(None, "write what would be uploaded to this folder and upload nothing", is_path=True)
    space: bool = option(False, "also publish a Gradio Space of the same name that serves the model under any prior")
    dry_run: bool = option(False, "list the files that would be uploaded and upload nothing")

    def __post_init__(self):
        super().__post_init__()
        if self.run is None or self.repo_id is None:
            raise LiVTError("publish needs the folder of a run and a repository: livt publish RUN organisation/name.")
        if self.space and self.form != "transformers":
            raise LiVTError(f"a Space serves the transformers form of a model, not {self.form}; leave --form out.")


@dataclass
class PublishDataSettings(DataSettings):
    """Put a long-tailed dataset on the Hub, with its card."""

    stage: ClassVar[str] = "publish-data"

    dataset: str | None = option(None, "the images, as for `livt finetune`", positional=True, is_path=True)
    repo_id: str | None = option(None, "organisation/name on the Hub", positional=True)
    license: str | None = option(
        None, "licence of the images, as the Hub spells it; must be named for images of your own"
    )
    public: bool = option(False, "make the repository public; without it the repository is private")
    dry_run: bool = option(False, "say what would be uploaded and upload nothing")

    def __post_init__(self):
        super().__post_init__()
        if self.dataset is None or self.repo_id is None:
            raise LiVTError(
                "publish-data needs a dataset and a repository: livt publish-data DATASET organisation/name."
            )
        own = self.dataset in BENCHMARKS or Path(self.dataset).exists()
        if self.license is None and own and self.dataset not in PUBLIC:
            raise LiVTError(
                f"{self.dataset} holds images of your own; name their licence as the Hub spells it, for instance "
                "--license cc-by-nc-4.0."
            )


@dataclass(kw_only=True)
class ConvertSettings(ElsewhereSettings):
    """Convert checkpoints: the authors' files, BEiT, timm, ONNX, torch.export."""

    stage: ClassVar[str] = "convert"

    source: str = option(
        REQUIRED, "a .pth file of the authors, or a run folder or Hub id", positional=True, is_model=True
    )
    output: str = option(REQUIRED, "folder to write", positional=True)
    to: Literal["livit", "beit", "timm", "onnx", "torch-export"] = option(
        "livit", "form to write; livit is for the authors' files"
    )
    prior: str | None = option(
        None, "of onnx and torch-export: give class probabilities under this prior: training, uniform, or a file",
        is_path=True,
    )  # fmt: skip
    dataset: str | None = option(
        None,
        "what an authors' file was trained on, where its number of classes does not tell: sets the normalisation; "
        "imagenet-1k for images of your own",
        choices=lambda: tuple(BENCHMARKS),
    )
    labels: str | None = option(None, "JSON list with one name per class")
    keep_class_order: bool = option(False, "leave the heads of iNat18 in the authors' order")


@dataclass
class LookSettings(DataSettings):
    """Look at a dataset before training on it: its table, its broken images, and two pictures."""

    stage: ClassVar[str] = "data"

    output: str | None = option(
        None, "folder of the pictures; default: data-<dataset> in runs or $LIVT_RUNS", is_path=True
    )
    check_images: bool = option(
        True, "read every image to find broken ones and copies in two splits, which takes as long as an epoch"
    )


@dataclass(kw_only=True)
class CompareSettings(DataSettings):
    """Which way for your images: from scratch, or a pretrained backbone's head, LoRA or all of it."""

    stage: ClassVar[str] = "compare"

    dataset: str = option(REQUIRED, "the images, as for `livt finetune`", positional=True, is_path=True)
    pretrained: str | None = option(None, "checkpoint folder or Hub id of the backbone", is_path=True)
    ways: list[Literal["scratch", "head", "lora", "full"]] | None = option(None, "some of the ways; default: all")
    minutes: Annotated[float, Ge(0.1)] = option(
        30.0, "time of each way on this machine; a head that needs less takes less"
    )
    image_size: Positive | None = option(None, "pixels of the backbone's images; default: its own")
    loss: str = option("bal_bce", "loss of every way", choices=loss_names)
    seeds: list[int] | None = option(None, "seeds of the runs; default: 0")
    validation_fraction: float | None = option(None, "as for `livt finetune`")
    output_dir: str | None = option(None, "default: runs/compare/<dataset>-<backbone>-<minutes>", is_path=True)
    dry_run: bool = option(False, "print the commands and run nothing")

    def __post_init__(self):
        super().__post_init__()
        if self.pretrained is None:
            words = shell_line(["livt", "compare", self.dataset, "--pretrained", "CHECKPOINT"])
            raise LiVTError(f"name a backbone to start from: {words}")

    @property
    def folder(self) -> Path:
        name = f"{Path(self.dataset).name}-{Path(self.pretrained).name}-{self.minutes:g}"
        return Path(self.output_dir or runs_folder() / "compare" / name)


@dataclass
class SweepSettings(CommandSettings):
    """The paper's ablations, one command each."""

    stage: ClassVar[str] = "sweep"

    sweep: str | None = option(
        None, "which ablation; without one they are listed", choices=sweep_names, positional=True
    )
    only: list[str] | None = option(None, "some of its variants, by their labels")
    dataset: str = option("glyphs", "its configs are the base of every variant", is_path=True)
    source: str | None = option(
        None, "local copy of the dataset; of another one: --pretrain '--source F'", is_path=True
    )
    imbalance_factor: str | None = option(None, "largest class over smallest class")
    model_size: Literal["micro", "tiny", "small", "base", "large"] | None = option(
        None, "preset of every variant; default: that of the checkpoint or of the configs"
    )
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
        return "-".join(filter(None, (Path(self.dataset).name, self.model_size, self.imbalance_factor)))

    @property
    def folder(self) -> Path:
        return Path(self.output_dir or runs_folder() / "sweeps" / self.name)

    def words(self, stage: str, options: dict) -> list[str]:
        """What a run is told: what all runs on its dataset are, then what its stage is, then its own options."""
        further = {"pretrain": shell_words(self.pretrain), "finetune": shell_words(self.finetune)}
        asked = {name: STAGES[name].asked(words) for name, words in further.items()}
        dataset = options.get("dataset", asked[stage].get("dataset", self.dataset))
        shared = {"dataset": dataset, "plugin": self.plugin}
        if dataset == self.dataset:
            shared |= {"source": self.source, "imbalance_factor": self.imbalance_factor}
        elif stage == "finetune":  # on the data of the first stage
            shared |= {name: asked["pretrain"].get(name) for name in ("source", "lists")}
        if self.model_size is not None:
            of_this_size = CONFIGS / f"{stage}-{dataset}-{self.model_size}.yaml"
            own = of_this_size.exists() and "tune" not in options  # what is tuned has a config of its own
            shared |= {"config": of_this_size if own else None, "model_size": self.model_size}
        return [*as_words(shared), *further[stage], *as_words(options)]


def as_words(options: dict) -> list[str]:
    """Values as the command line takes them; a list is one option with several values."""
    words = []
    for name, value in options.items():
        if isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        elif str(value).startswith("-"):  # by itself it would be taken for an option
            words.append(f"--{name}={value}")
        elif value is not None:
            words += [f"--{name}", str(value)]
    return words


COMMANDS: dict[str, type[CommandSettings]] = {
    settings.stage: settings
    for settings in (
        TrainSettings, PretrainSettings, FinetuneSettings, EvalSettings, CalibrateSettings, PredictSettings,
        DemoSettings, PublishSettings, PublishDataSettings, ConvertSettings, LookSettings, CompareSettings,
        SweepSettings,
    )
}  # fmt: skip
