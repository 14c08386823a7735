"""Cards of the authors' released weights after conversion: their numbers, their terms.

python recipes/paper/cards.py model_cards    # writes them again
"""

import sys
from pathlib import Path

from huggingface_hub import ModelCard

from livt_hf.errors import LiVTError
from livt_hf.hub.cards import ACCURACY_COLUMNS, CITATION, EQUAL, PAPER_URL, card_data, count_row, fractions, render
from livt_hf.hub.facts import dataset_names
from livt_hf.hub.paper import paper_result
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
TERMS = (
    "**Terms.** These weights were trained and released by the authors of the paper and only converted here; they are "
    "not covered by livt_hf's licence. Their [repository]({url}) is under the MIT licence but builds on MAE's code "
    "(CC BY-NC 4.0), names no licence for the weights, and {data}. Ask the authors before publishing or using them "
    "commercially: this card is a draft for that day, and publishing needs their permission."
)


def converted_names() -> list[str]:
    """The repositories we would publish: classifiers at two resolutions and the MGP weights they started from."""
    return [f"livt-base-{dataset}{suffix}" for dataset in DATA for suffix in ("", "-384", "-mgp")]


def converted_card(name: str) -> ModelCard:
    """The card of one of `converted_names()`; every number in it is the paper's."""
    if name not in converted_names():
        raise LiVTError(f"{name!r} is none of the authors' checkpoints; they are {', '.join(converted_names())}.")
    pretraining = name.endswith("-mgp")
    dataset = name.removeprefix("livt-base-").removesuffix("-384").removesuffix("-mgp")
    size = PRETRAIN_SIZE[dataset] if pretraining else 384 if name.endswith("-384") else 224
    stage = "pretrain" if pretraining else "finetune"
    results = Results(stage=stage, dataset=dataset, image_size=size, split="validation", **DATA[dataset])
    common = dict(
        repo_id=f"org/{name}",
        title=name,
        terms=TERMS.format(url=SOURCE_URL, data=DATA_TERMS[dataset]),
        data=f"{dataset_names(results)[0]}, training split.",
        counts=count_row(results),
        counts_picture=None,
        pictures=[],
        citation=CITATION,
    )
    return (_pretraining_card if pretraining else _classifier_card)(results, common)


def write_cards(folder: str | Path) -> list[Path]:
    """Write every converted model's card as `<name>.md`."""
    paths = []
    for name in converted_names():
        paths.append(Path(folder) / f"{name}.md")
        converted_card(name).save(paths[-1])
    return paths


LICENSE = dict(license="other", license_name="livt-authors-terms", license_link=SOURCE_URL)


def _classifier_card(results: Results, common: dict) -> ModelCard:
    dataset, size, title = results.dataset, results.image_size, dataset_names(results)[0]
    paper = paper_result(dataset, image_size=size)
    results.metrics = metrics = fractions(paper)
    tables = dict.fromkeys([paper["table"], paper.get("calibration_table", paper["table"])])
    source = dict(source_name=f"The paper, {' and '.join(f'table {table}' for table in tables)}", source_url=PAPER_URL)
    base_model = f"{common['repo_id'].removesuffix('-384')}-mgp"
    calibration = ["the paper, softmax(z)", format_percent(metrics.get("ece")), format_percent(metrics.get("mce"))]
    return render(
        "classifier",
        card_data(results, common["title"], source=source, base_model=base_model, **LICENSE),
        **common,
        summary=(
            f"The ViT-B/16 of [LiVT]({PAPER_URL}), fine-tuned by its authors on {title} at {size} px with the "
            "balanced binary cross-entropy loss after masked generative pretraining on the same images at "
            f"{PRETRAIN_SIZE[dataset]} px."
        ),
        evaluation=(
            f"These are the authors' numbers, from table `{paper['table']}` of the paper. They measured them on "
            f"{REPORTED_ON[dataset]}, at their best epoch on that set. The numbers were not measured again with the "
            "converted weights."
        ),
        livit=True,
        measure="top-1 accuracy",
        bias=True,
        sigmoid=True,
        world=EQUAL,
        shares="of the training data",
        accuracy_rows=[["the paper", *(format_percent(metrics[column]) for column in ACCURACY_COLUMNS)]],
        calibration_rows=[calibration] if "ece" in metrics else [],
        paper_note=paper.get("note"),
        limits=_limits(dataset),
        training=_training(f"{size} px, 100 epochs, Bal-BCE, tau 1", "--class_counts COUNTS.json")
        + " The file lists the number of training images of each class, in the order of the classes; converted "
        "without it, the model gives no `probabilities`.",
    )


def _pretraining_card(results: Results, common: dict) -> ModelCard:
    size, classifier = results.image_size, common["repo_id"].removesuffix("-mgp")
    return render(
        "pretraining",
        card_data(results, common["title"], **LICENSE),
        **common,
        summary=(
            f"The ViT-B/16 of [LiVT]({PAPER_URL}) after masked generative pretraining by its authors on "
            f"{dataset_names(results)[0]} at {size} px for 800 epochs. It is a stock ViTMAE checkpoint."
        ),
        evaluation=(
            "The paper reports no number for the pretrained weights alone; what they lead to is on the cards "
            f"`{classifier}` and `{classifier}-384`."
        ),
        limits="- This is a starting point, not a classifier: its features are meant to be fine-tuned.\n"
        f"- Trained at {size} px; fine-tuning at another size resizes the positions.",
        training=_training(f"{size} px, 800 epochs, mask ratio 0.75", f"--dataset {results.dataset}"),
    )


def _limits(dataset: str) -> str:
    lines = ["It always names one of its classes, also for images of something else."]
    lines.append("The reported epoch was chosen on the reported images, so the numbers are slightly optimistic.")
    if dataset == "inat18":
        lines.append(
            "The authors' head orders its classes by the category ids as text; the conversion sorts them as numbers. "
            "The authors' order was read from their code and not verified on data."
        )
    return "\n".join(f"- {line}" for line in lines)


def _training(setting: str, told: str) -> str:
    command = f"`livt convert FILE.pth OUT {told}` of livt_hf"
    return f"By the authors: {setting}. To be converted from their `.pth` file with {command}."


if __name__ == "__main__":
    write_cards(sys.argv[1])
