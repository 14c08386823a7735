"""Convert checkpoints between forms, each with its image processor.

python recipes/convert.py official FILE.pth OUT [--dataset NAME]   the authors' weights to LiViT, or to ViTMAE
python recipes/convert.py beit RUN OUT                             LiViT to stock BEiT: plain transformers serves it
python recipes/convert.py timm RUN OUT                             LiViT to timm.create_model("local-dir:OUT")
"""

import argparse
import json
from pathlib import Path

from timm.data import ImageNetInfo
from transformers import BaseImageProcessor, PreTrainedModel

from livt_hf import LiViTForImageClassification
from livt_hf.commands import run_command
from livt_hf.conversion import from_official, save_timm, to_beit
from livt_hf.data import normalization
from livt_hf.data.transforms import eval_processor
from livt_hf.evaluation.models import load_checkpoint, load_processor

CLASSES = {"imagenet-lt": 1000, "inat18": 8142, "places-lt": 365}


def convert_official(options: argparse.Namespace) -> None:
    counts = read_list(options.class_counts) if options.class_counts else None
    names = dict(enumerate(read_list(options.labels))) if options.labels else None
    model = from_official(
        options.source, class_counts=counts, id2label=names, keep_class_order=options.keep_class_order
    )
    dataset = dataset_of(model, options)
    if isinstance(model, LiViTForImageClassification) and dataset == "imagenet-lt" and names is None:
        names = imagenet_names()
        model.config.id2label, model.config.label2id = names, {name: label for label, name in names.items()}
    model.save_pretrained(options.output)
    eval_processor(model.config.image_size, *normalization(dataset)).save_pretrained(options.output)
    if isinstance(model, LiViTForImageClassification) and dataset == "inat18":
        order = "in the authors' order" if options.keep_class_order else "in order of numeric category ids"
        print(f"classes are {order}; the authors' order was read in their code and not verified on data")


def read_list(path: Path) -> list:
    try:
        values = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}); give a file that holds a list.") from error
    if not isinstance(values, list):
        raise ValueError(f"{path} holds a {type(values).__name__}, not a JSON list with an entry for each class.")
    return values


def imagenet_names() -> dict[int, str]:
    """ImageNet's names, which timm brings; ImageNet-LT numbers its classes in the same order."""
    info = ImageNetInfo()
    names = [info.index_to_description(label) for label in range(CLASSES["imagenet-lt"])]
    detailed = [info.index_to_description(label, detailed=True) for label in range(CLASSES["imagenet-lt"])]
    # "crane" is a bird and a machine.
    return {label: detailed[label] if names.count(name) > 1 else name for label, name in enumerate(names)}


def dataset_of(model: PreTrainedModel, options: argparse.Namespace) -> str:
    """The data set the file was trained on, whose normalisation the processor needs; a head tells it by its size."""
    if not isinstance(model, LiViTForImageClassification):
        if options.dataset is None:
            raise ValueError(f"{options.source} is a pretraining file, which names no data set; pass --dataset.")
        return options.dataset
    fitting = [name for name, classes in CLASSES.items() if classes == model.config.num_labels]
    if options.dataset not in (None, *fitting) or not fitting:
        raise ValueError(
            f"{options.source} has {model.config.num_labels} classes, which is not {options.dataset or 'known'}; "
            f"there are {', '.join(f'{name} ({classes})' for name, classes in CLASSES.items())}."
        )
    return fitting[0]


def convert_beit(options: argparse.Namespace) -> None:
    model, processor = load_classifier(options.source)
    to_beit(model).save_pretrained(options.output)
    processor.save_pretrained(options.output)


def convert_timm(options: argparse.Namespace) -> None:
    model, processor = load_classifier(options.source)
    save_timm(model, options.output, processor)


def load_classifier(source: str) -> tuple[LiViTForImageClassification, BaseImageProcessor]:
    model, processor = load_checkpoint(source), load_processor(source)
    if not isinstance(model, LiViTForImageClassification):
        raise ValueError(f"{source} holds {model.config.architectures[0]}; only a fine-tuned LiViT has this form.")
    return model, processor


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    forms = parser.add_subparsers(required=True, metavar="{official,beit,timm}")
    commands = {"official": convert_official, "beit": convert_beit, "timm": convert_timm}
    for name, convert in commands.items():
        form = forms.add_parser(name)
        form.set_defaults(convert=convert)
        form.add_argument("source", help="the authors' .pth file" if name == "official" else "run folder or Hub id")
        form.add_argument("output", type=Path, help="folder to write")
        if name == "official":
            form.add_argument("--dataset", choices=sorted(CLASSES), help="needed for pretraining files")
            form.add_argument("--class_counts", type=Path, help="JSON list of training images a class")
            form.add_argument("--labels", type=Path, help="JSON list of class names")
            form.add_argument("--keep_class_order", action="store_true", help="leave iNat18 heads as the authors did")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    options.convert(options)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    run_command(main)
