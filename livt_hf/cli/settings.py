"""Settings of the commands that do not train, and all commands by name. Nothing here imports torch."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le

from livt_hf.cli.options import CommandSettings
from livt_hf.constants import FEW_BELOW, MANY_ABOVE
from livt_hf.data.benchmarks import BENCHMARKS, PUBLIC
from livt_hf.data.spec import BoxSpec, DataSpec
from livt_hf.errors import LiVTError
from livt_hf.specs import REQUIRED, NonNegativeInt, Positive, Spec, option, part

_DATASET = {"dataset": "the images; default: those the run was trained on"}
_PRECISION = (
    "what the model computes in; auto: bfloat16 on a CPU that has it if it is faster and the posteriors of the first "
    "images agree within 0.02, else float32"
)
_THREADS = "CPU threads per process; default: the machine's cores shared out"


@dataclass(frozen=True)
class ForeignModelSpec(Spec):
    """Model trained elsewhere: what its checkpoint does not say of its training."""

    class_counts: str | None = option(
        None,
        "of a model that was trained elsewhere: its training folder, or a JSON or YAML file with the number of "
        "training images per class; gives it probabilities under any prior",
        common=True,
        is_path=True,
    )
    trained_with: Literal["ce", "bce"] | None = option(None, "the loss of such a model; default: ce", common=True)

    def __post_init__(self):
        super().__post_init__()
        if self.trained_with is not None and self.class_counts is None:
            raise LiVTError(
                f"trained_with {self.trained_with} is the loss of a model that class_counts are given for; pass them, "
                "or leave it out.",
                argument="trained_with",
            )


@dataclass(frozen=True)
class EvalSettings(CommandSettings, stage="eval", positionals=("model",)):
    """Measure a model, by class frequency and under several decision rules; write a report."""

    model: str = option(
        "auto", "run folder, checkpoint or Hub id; auto: the newest finished fine-tuning", is_model=True
    )
    split: str = option("test", "split to measure on; all: every image, for a model that was trained on none of them")
    batch_size: Positive = option(256, "images per forward pass on each process")
    precision: Literal["auto", "float32", "bfloat16"] = option("auto", _PRECISION)
    prior: str | None = option(
        None, "class frequencies at deployment: training, uniform, or a JSON or YAML file", is_path=True
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
    many_above: NonNegativeInt = option(MANY_ABOVE, "classes with more training images are many-shot")
    few_below: NonNegativeInt = option(FEW_BELOW, "classes with fewer training images are few-shot")
    predictions: str | None = option(
        None, "also write the scores of each image under each rule, to a .parquet or .csv file", is_path=True
    )
    report: str | None = option(
        None,
        "folder for the report; default: report in the folder of a run, report-<model> in runs of any other model",
        is_path=True,
    )
    compare: list[str] | None = option(None, "two runs or report folders to put side by side", is_model=True)
    seed: int = option(0, "seed of the linear probe and of the images of shifted test sets")
    threads: Positive | None = option(None, _THREADS)
    data: DataSpec = part(DataSpec, _DATASET, dataset=None)
    foreign: ForeignModelSpec = part(ForeignModelSpec)

    def __post_init__(self):
        super().__post_init__()
        if self.compare is not None and len(self.compare) != 2:
            raise LiVTError(
                f"compare puts two runs side by side, not {len(self.compare)}; name two.", argument="compare"
            )


@dataclass(frozen=True, kw_only=True)
class CalibrateSettings(CommandSettings, stage="calibrate", positionals=("model",)):
    """Calibrate the class probabilities of a trained model on images it was not trained on."""

    model: str = option(REQUIRED, "run or checkpoint folder; its config.json is changed", is_model=True)
    split: str | None = option(
        None,
        "labelled images that the model was not trained on; all: of another dataset; default: validation or, with "
        "objective, none where the model is calibrated",
    )
    objective: Literal["mean_class_accuracy", "macro_f1", "balanced", "accuracy"] | None = option(
        None, "what to serve the model for: chooses the deployment prior pi^t; default: as it was"
    )
    batch_size: Positive = option(256, "images per forward pass")
    threads: Positive | None = option(None, "CPU threads; default: all cores")
    data: DataSpec = part(DataSpec, _DATASET, dataset=None)
    foreign: ForeignModelSpec = part(ForeignModelSpec)


@dataclass(frozen=True, kw_only=True)
class PredictSettings(CommandSettings, stage="predict", positionals=("model", "images")):
    """Classify image files."""

    model: str = option(REQUIRED, "run folder, checkpoint or Hub id", is_model=True)
    images: list[str] = option(
        REQUIRED,
        "files, folders or quoted patterns; or one file of boxes: a table, or COCO's or MegaDetector's .json",
        is_path=True,
    )
    source: str | None = option(None, "folder of the pictures that a file of boxes names", is_path=True)
    prior: str | None = option(
        None,
        "class frequencies at deployment: training, uniform, or a JSON or YAML file; default: the largest logit until "
        "the model is calibrated, and then its own test prior",
        is_path=True,
    )
    top_k: Positive = option(5, "classes to print per image")
    format: Literal["table", "jsonl", "csv"] | None = option(
        None, "format of the line of a file; default: table, or with output no lines but the number of files per class"
    )
    output: str | None = option(
        None,
        "also write the scores of all classes for each file, to a .parquet or .csv file; the classes of boxes to a "
        "copy of their .json file; or a prediction record to a folder",
        is_path=True,
    )
    batch_size: Positive = option(32, "images per forward pass")
    precision: Literal["auto", "float32", "bfloat16"] = option("auto", _PRECISION)
    device: str | None = option(None, "cuda, mps or cpu; default: the first that is available")
    threads: Positive | None = option(None, "CPU threads; default: all cores")
    boxes: BoxSpec = part(BoxSpec, {"box_margin": "margin around each box; default: that of the training, or 0.3"})
    foreign: ForeignModelSpec = part(ForeignModelSpec)


@dataclass(frozen=True, kw_only=True)
class DecideSettings(CommandSettings, stage="decide", positionals=("predictions",)):
    """Decide saved predictions by another prior or for another objective, without an image."""

    predictions: str = option(
        REQUIRED,
        "prediction record, or the folder of a run or a report that holds one; or a CSV, TSV, parquet or npz file of "
        "logits or probabilities from any framework",
        is_path=True,
    )
    prior: str | None = option(
        None,
        "class frequencies at deployment: training, uniform, or a JSON or YAML file; default: the record's own rule",
        is_path=True,
    )
    objective: Literal["mean_class_accuracy", "macro_f1", "balanced", "accuracy"] | None = option(
        None, "decide under the prior pi^t for this, with the exponent that is stored with the model"
    )
    choose_on: str | None = option(
        None,
        "choose the exponent on this labelled record instead: images the model was not trained on, nor tested on",
        is_path=True,
    )
    values: Literal["logits", "probabilities"] | None = option(
        None, "what a file holds; default: numbers that sum to 1 for every image are probabilities"
    )
    output: str | None = option(
        None,
        "write the class and the scores of each image to a .parquet or .csv file; a name without a suffix is a folder "
        "for a prediction record with this rule",
        is_path=True,
    )
    boxes: str | None = option(
        None,
        "file of COCO or MegaDetector that the boxes of the predictions came from; their answers are written into a "
        "copy of it, an output that ends in .json",
        is_path=True,
    )
    foreign: ForeignModelSpec = part(ForeignModelSpec)

    def __post_init__(self):
        super().__post_init__()
        if (self.boxes is None) == str(self.output).endswith(".json"):
            message = (
                f"boxes is {self.boxes} and output {self.output}; name a file of boxes and a .json file, or neither."
            )
            raise LiVTError(message, "boxes")
        if self.prior is not None and self.objective is not None:
            raise LiVTError(
                f"prior {self.prior} and objective {self.objective} both name a prior; leave one out.", "prior"
            )
        if self.choose_on is not None and self.objective is None:
            raise LiVTError(f"choose_on {self.choose_on} chooses for an objective; name one.", "choose_on")


@dataclass(frozen=True, kw_only=True)
class DemoSettings(CommandSettings, stage="demo", positionals=("models",)):
    """Try models in the browser, on this machine."""

    models: list[str] = option(REQUIRED, "run folders, checkpoints or Hub ids", is_model=True)
    images: str | None = option(
        None, "folder of example images; default: images of the run's test split", is_path=True
    )
    report: str | None = option(
        None, "report folder with predictions; default: the newest one in the run's folder", is_path=True
    )
    port: Annotated[int, Ge(1), Le(65535)] | None = option(
        None, "port on this machine; default: the first free one from 7860 on"
    )
    share: bool = option(False, "also make a public link, through Gradio's servers")
    browser: bool = option(True, "open the page in the browser")
    device: str | None = option(None, "cuda, mps or cpu; default: the first that is available")

    def __post_init__(self):
        super().__post_init__()
        if self.report is not None and len(self.models) > 1:
            raise LiVTError(f"report {self.report} belongs to one model; name only that one.", argument="report")


@dataclass(frozen=True, kw_only=True)
class PublishSettings(CommandSettings, stage="publish", positionals=("run", "repo_id")):
    """Publish a finished run on the Hub, with its model card."""

    run: str = option(REQUIRED, "folder of a finished run", is_model=True)
    repo_id: str = option(REQUIRED, "organisation/name on the Hub")
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
        if self.space and self.form != "transformers":
            raise LiVTError(
                f"a Space serves the transformers form of a model, not {self.form}; leave form out.", argument="form"
            )


@dataclass(frozen=True, kw_only=True)
class PublishDataSettings(
    CommandSettings, stage="publish-data", positionals=("dataset", "repo_id"), required=("dataset",)
):
    """Publish a long-tailed dataset on the Hub, with its card."""

    repo_id: str = option(REQUIRED, "organisation/name on the Hub")
    license: str | None = option(
        None, "licence of the images, as the Hub spells it; must be named for images of your own"
    )
    public: bool = option(False, "make the repository public; without it the repository is private")
    dry_run: bool = option(False, "list what would be uploaded and upload nothing")
    data: DataSpec = part(DataSpec)

    def __post_init__(self):
        super().__post_init__()
        dataset = self.data.dataset
        is_local = dataset in BENCHMARKS or Path(dataset).exists()
        if self.license is None and is_local and dataset not in PUBLIC:
            raise LiVTError(
                f"{dataset} holds images of your own; name their license as the Hub spells it, such as cc-by-nc-4.0.",
                argument="license",
            )


@dataclass(frozen=True, kw_only=True)
class ConvertSettings(CommandSettings, stage="convert", positionals=("source", "output")):
    """Convert checkpoints: the authors' files, BEiT, timm, ONNX, torch.export."""

    source: str = option(REQUIRED, "a .pth file of the authors, or a run folder or Hub id", is_model=True)
    output: str = option(REQUIRED, "folder to write", is_path=True)
    to: Literal["livit", "beit", "timm", "onnx", "torch-export"] = option(
        "livit", "form to write; livit is for the authors' files"
    )
    prior: str | None = option(
        None,
        "of onnx and torch-export: give class probabilities under this prior: training, uniform, or a file",
        is_path=True,
    )
    dataset: str | None = option(
        None,
        "what an authors' file was trained on, where its number of classes does not tell: sets the normalisation; "
        "imagenet-1k for images of your own",
        choices=lambda: tuple(BENCHMARKS),
    )
    labels: str | None = option(None, "JSON list with one name per class", is_path=True)
    keep_class_order: bool = option(False, "leave the heads of iNat18 in the authors' order")
    foreign: ForeignModelSpec = part(ForeignModelSpec)


@dataclass(frozen=True)
class InspectDataSettings(CommandSettings, stage="data", positionals=("dataset",)):
    """Inspect a dataset before training on it: counts, labels, broken images, copies and two pictures."""

    output: str | None = option(
        None, "folder of the pictures; default: data-<dataset> in runs or $LIVT_RUNS", is_path=True
    )
    check_images: bool = option(
        True, "read every image to find broken ones and copies in two splits, which takes as long as an epoch"
    )
    pretrained: str | None = option(
        None,
        "look for near copies by the features of this classifier, a folder or a Hub id, and show what it sees of an "
        "image; default: by pixels, and a centre crop",
        is_path=True,
    )
    data: DataSpec = part(DataSpec)


COMMANDS = {
    "train": "training_settings.TrainSettings",
    "pretrain": "training_settings.PretrainSettings",
    "finetune": "training_settings.FinetuneSettings",
    "eval": "settings.EvalSettings",
    "calibrate": "settings.CalibrateSettings",
    "predict": "settings.PredictSettings",
    "decide": "settings.DecideSettings",
    "demo": "settings.DemoSettings",
    "publish": "settings.PublishSettings",
    "publish-data": "settings.PublishDataSettings",
    "convert": "settings.ConvertSettings",
    "data": "settings.InspectDataSettings",
    "compare": "training_settings.CompareSettings",
    "sweep": "training_settings.SweepSettings",
}


def settings_class(command: str) -> type[CommandSettings]:
    """Return the settings class of a command; a command that does not train imports none of those that do."""
    module, _, name = COMMANDS[command].partition(".")
    return getattr(importlib.import_module(f"livt_hf.cli.{module}"), name)
