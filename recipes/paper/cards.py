"""Drafts of cards for the authors' weights after conversion: their terms, and the numbers of the paper as text.

The weights were not loaded here, so the drafts have no `model-index`.

python recipes/paper/cards.py model_cards    # writes them again
"""

import sys
from dataclasses import replace
from pathlib import Path

from huggingface_hub import ModelCard

from livt_hf.errors import LiVTError
from livt_hf.hub.card import ACCURACY_COLUMNS, card_data, fractions, render
from livt_hf.hub.paper import paper_result
from livt_hf.predictions.rules import ARGMAX
from livt_hf.results import Results
from livt_hf.text import format_percent

SOURCE_URL = "https://github.com/XuZhengzhuo/LiVT"
DATA = {
    "imagenet-lt": {
        "num_train_images": 115_846,
        "num_classes": 1000,
        "class_counts": {"max": 1280, "min": 5, "imbalance": 256.0, "many": 385, "medium": 479, "few": 136},
    },
    "inat18": {
        "num_train_images": 437_513,
        "num_classes": 8142,
        "class_counts": {"max": 1000, "min": 2, "imbalance": 500.0, "many": 842, "medium": 4076, "few": 3224},
    },
}
PRETRAIN_SIZE = {"imagenet-lt": 224, "inat18": 128}
REPORTED_ON = {
    "imagenet-lt": "the 50,000 ILSVRC validation images",
    "inat18": "the 24,426 validation images",
}
DATA_TERMS = {
    "imagenet-lt": "ImageNet is for non-commercial research and education",
    "inat18": "the iNaturalist 2018 images are for non-commercial research and education",
}
TEMPLATES = Path(__file__).parent / "templates"
LICENSE = dict(license="other", license_name="livt-authors-terms", license_link=SOURCE_URL)


def converted_names() -> list[str]:
    """Return the names of the authors' weights: classifiers at two resolutions and the MGP they started from."""
    return [f"livt-base-{dataset}{suffix}" for dataset in DATA for suffix in ("", "-384", "-mgp")]


def converted_card(name: str) -> ModelCard:
    """Return the draft of one of `converted_names()`; every number in it is the paper's."""
    if name not in converted_names():
        raise LiVTError(f"{name!r} is none of the authors' checkpoints; they are {', '.join(converted_names())}.")
    pretraining = name.endswith("-mgp")
    dataset = name.removeprefix("livt-base-").removesuffix("-384").removesuffix("-mgp")
    size = PRETRAIN_SIZE[dataset] if pretraining else 384 if name.endswith("-384") else 224
    stage = "pretrain" if pretraining else "finetune"
    results = Results(stage=stage, dataset=dataset, image_size=size, split="validation", **DATA[dataset])
    context = dict(repo_id=name, title=name, counts_picture=None, pictures=[], options="", results=results)
    context |= dict(source_url=SOURCE_URL, data_terms=DATA_TERMS[dataset])
    if pretraining:
        return render("converted_pretrain", card_data(results, name, **LICENSE), ModelCard, TEMPLATES, **context)
    return _classifier_card(results, context)


def write_cards(folder: str | Path) -> list[Path]:
    """Write every converted model's card as `<name>.md`."""
    paths = []
    for name in converted_names():
        paths.append(Path(folder) / f"{name}.md")
        converted_card(name).save(paths[-1])
    return paths


def _classifier_card(results: Results, context: dict) -> ModelCard:
    paper = paper_result(results.dataset, image_size=results.image_size)
    metrics = fractions(paper)
    results = replace(results, rules={ARGMAX: metrics})
    calibration = ["the paper, softmax(z)", format_percent(metrics.get("ece")), format_percent(metrics.get("mce"))]
    context |= dict(
        form="transformers",
        needs_plugin=False,
        multi_label=False,
        tau=1.0,
        sigmoid=True,
        resampled=False,
        own_test_prior=False,
        trade_off=None,
        no_posterior=None,
        calibrated_on=None,
        paper=dict(table=paper["table"], note=paper.get("note")),
        pretrain_size=PRETRAIN_SIZE[results.dataset],
        reported_on=REPORTED_ON[results.dataset],
        accuracy_rows=[["the paper", *(format_percent(metrics[column]) for column in ACCURACY_COLUMNS)]],
        calibration_rows=[calibration] if "ece" in metrics else [],
    )
    data = card_data(results, context["title"], **LICENSE)
    data.eval_results = data.model_name = None  # the numbers are not of these weights
    return render("converted_finetune", data, ModelCard, TEMPLATES, **context)


if __name__ == "__main__":
    write_cards(sys.argv[1])
