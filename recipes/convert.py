"""Convert a checkpoint to another form, with its image processor.

livt convert FILE.pth OUT --dataset imagenet-lt    # the authors' weights to LiViT, or to ViTMAE
livt convert RUN OUT --to beit                     # a LiViT to stock BEiT: plain transformers serves it
livt convert RUN OUT --to timm                     # a LiViT to timm.create_model("local-dir:OUT")
livt convert MODEL OUT --to onnx                   # any classifier to OUT/model.onnx: bytes of RGB in, logits out
livt convert MODEL OUT --to onnx --prior FILE      # with class probabilities under a prior instead
livt convert MODEL OUT --to torch-export           # the same as OUT/model.pt2, for torch.export.load
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from timm.data import ImageNetInfo
from transformers import BaseImageProcessor, PreTrainedModel

from livt_hf.classifiers import balance_by_counts, load_classifier, load_processor
from livt_hf.cli.console import run_command
from livt_hf.cli.inherit import resolve_settings
from livt_hf.cli.settings import ConvertSettings
from livt_hf.conversion import OFFICIAL_CLASSES, from_official, save_timm, to_beit
from livt_hf.data import eval_processor, normalization
from livt_hf.errors import LiVTError
from livt_hf.export import EXPORTERS, export_model, get_output_size
from livt_hf.files import read_record, read_values, replacing, write_values
from livt_hf.modeling_livit import LiViTForImageClassification
from livt_hf.plugins import find_module
from livt_hf.predictions import PredictionsInfo
from livt_hf.predictions.decisions import load_prior
from livt_hf.processors import to_portable_processor

OF_AUTHORS = ("dataset", "labels", "keep_class_order")  # what their files do not say


def main(argv: Sequence[str] | None = None) -> None:
    settings = resolve_settings(ConvertSettings, argv)
    if settings.prior is not None and settings.to not in EXPORTERS:
        raise LiVTError(f"--to {settings.to} writes weights, whose prior is chosen in serving; leave --prior out.")
    told = [name for name in OF_AUTHORS if getattr(settings, name)]
    if told and settings.to != "livit":
        raise LiVTError(f"--to {settings.to} writes a model that knows its classes; leave --{told[0]} out.")
    folder = Path(settings.output)
    if folder.exists() and not (folder.is_dir() and next(folder.iterdir(), None) is None):
        raise LiVTError(f"{folder} exists and is not empty; name a new folder.")
    if settings.to == "onnx" and not all(find_module(name) for name in ("onnxruntime", "onnxscript")):
        raise LiVTError("ONNX needs more packages; install them with: pip install 'livt-hf[export]'")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing(folder) as writing:
        writing.mkdir()
        if settings.to == "livit":
            convert_official(settings, writing)
        else:
            model = load_classifier(settings.source, **settings.foreign.to_dict())
            write = export if settings.to in EXPORTERS else write_form
            write(settings, writing, model, load_processor(settings.source))
    print(f"wrote {folder}")


def write_form(settings: ConvertSettings, folder: Path, model: PreTrainedModel, processor: BaseImageProcessor) -> None:
    """Write the same weights under the names of another library."""
    if not isinstance(model, LiViTForImageClassification):
        raise LiVTError(
            f"{settings.source} holds {type(model).__name__}; only a fine-tuned LiViT has the form {settings.to}. "
            "Pass --to onnx or torch-export, or load it with transformers as it is."
        )
    if settings.to == "timm":
        save_timm(model, folder, processor)
    else:
        to_beit(model).save_pretrained(folder)
        processor.save_pretrained(folder)
        path = folder / "preprocessor_config.json"
        write_values(path, to_portable_processor(read_record(path)))


def export(settings: ConvertSettings, folder: Path, model: PreTrainedModel, processor: BaseImageProcessor) -> None:
    """Write a graph that runs without this package."""
    for name in ("onnxscript", "onnx_ir"):  # which tell every rewritten node
        logging.getLogger(name).setLevel(logging.WARNING)
    prior = None if settings.prior is None else load_prior(settings.prior, PredictionsInfo.from_model(model))
    off = export_model(settings.to, folder, model, processor, prior)
    height, width = get_output_size(processor)
    given = "logits" if prior is None else "class probabilities"
    said = next(name for name in ("preprocessor_config.json", "config.json") if (folder / name).exists())
    print(
        f"It takes bytes of RGB (images, {height}, {width}, 3), resized and cropped as {said} says, and gives {given} "
        f"in the order of classes.json; on random images those of the model, within {off:.0e}."
    )


def convert_official(settings: ConvertSettings, folder: Path) -> None:
    if not settings.source.endswith(".pth"):
        raise LiVTError(
            f"{settings.source} is not a .pth file of the authors, which --to livit is for; pass --to onnx or "
            "torch-export, or of a fine-tuned LiViT --to beit or timm."
        )
    names, order = None if settings.labels is None else read_names(settings.labels), settings.keep_class_order
    model = from_official(settings.source, id2label=names, keep_class_order=order)
    classes = model.config.num_labels if isinstance(model, LiViTForImageClassification) else None
    if classes is None and settings.foreign.class_counts is not None:
        raise LiVTError(f"{settings.source} holds a pretraining, which has no classes; leave --class_counts out.")
    dataset = settings.dataset or told_by_head(classes, settings)
    if dataset == "imagenet-lt" and names is None and classes == OFFICIAL_CLASSES[dataset]:
        names = imagenet_names()
        model.config.id2label, model.config.label2id = names, {name: label for label, name in names.items()}
    if settings.foreign.class_counts is not None:
        model = balance_by_counts(model, **settings.foreign.to_dict())
    model.save_pretrained(folder)
    eval_processor(model.config.image_size, *normalization(dataset)).save_pretrained(folder)
    if classes is not None and dataset == "inat18":
        said = "in the authors' order" if order else "in order of numeric category ids"
        print(f"classes are {said}; the authors' order was read in their code and not verified on data")


def told_by_head(classes: int | None, settings: ConvertSettings) -> str:
    """Find the dataset of an authors' file, whose normalisation the processor needs: a head tells it by its size."""
    fitting = [name for name, number in OFFICIAL_CLASSES.items() if number == classes]
    if fitting:
        return fitting[0]
    if settings.foreign.class_counts is not None:
        return "own images"  # trained with the authors' code, which takes ImageNet's statistics for them
    what = "is a pretraining file" if classes is None else f"has {classes} classes"
    known = ", ".join(f"{name} ({number})" for name, number in OFFICIAL_CLASSES.items())
    raise LiVTError(
        f"{settings.source} {what}, which names no dataset; pass --dataset, or the --class_counts of your own images. "
        f"The authors' heads are {known}."
    )


def read_names(path: str) -> dict[int, str]:
    values = read_values(Path(path))
    if not isinstance(values, list):
        raise LiVTError(f"{path} holds a {type(values).__name__}, not a JSON list with one entry per class.")
    return dict(enumerate(values))


def imagenet_names() -> dict[int, str]:
    """ImageNet's names, which timm brings; ImageNet-LT numbers its classes in the same order."""
    info, labels = ImageNetInfo(), range(OFFICIAL_CLASSES["imagenet-lt"])
    names = [info.index_to_description(label) for label in labels]
    detailed = [info.index_to_description(label, detailed=True) for label in labels]
    # "crane" is a bird and a machine.
    return {label: detailed[label] if names.count(name) > 1 else name for label, name in enumerate(names)}


if __name__ == "__main__":
    run_command(main)
