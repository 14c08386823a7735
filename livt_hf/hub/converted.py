"""Cards of the authors' released weights after conversion: their numbers, their terms.

`python -m livt_hf.hub.converted model_cards` writes them again.
"""

import sys
from pathlib import Path

from huggingface_hub import ModelCard

from livt_hf.errors import LiVTError
from livt_hf.hub.cards import CITATION, GROUPS, PAPER_URL, card_data, count_row, dataset_names, percent, render
from livt_hf.hub.paper import paper_result

SOURCE_URL = "https://github.com/XuZhengzhuo/LiVT"
DATA = {
    "imagenet-lt": {
        "num_train_images": 115_846,
        "num_classes": 1000,
        "class_counts": {"max": 1280, "min": 5, "imbalance": 256.0, "many": 385, "medium": 479, "few": 136},
        "pretrain_size": 224,
        "reported_on": "the 50,000 ILSVRC validation images",
        "split": "validation",
    },
    "inat18": {
        "num_train_images": 437_513,
        "num_classes": 8142,
        "class_counts": {"max": 1000, "min": 2, "imbalance": 500.0, "many": 842, "medium": 4076, "few": 3224},
        "pretrain_size": 128,
        "reported_on": "the 24,426 validation images",
        "split": "validation",
    },
}
DATA_TERMS = {
    "imagenet-lt": "ImageNet is for non-commercial research and education",
    "inat18": "the iNaturalist 2018 pictures are for non-commercial research and education",
}
TERMS = (
    "**Terms.** These weights were trained and released by the authors of the paper and only converted here; they are "
    "not covered by livt_hf's licence. Their [repository]({url}) is under the MIT licence but builds on MAE's code "
    "(CC BY-NC 4.0), names no licence for the weights, and {data}. Ask the authors before publishing or using them "
    "commercially: this card is a draft for that day, and publishing needs their leave."
)


def converted_names() -> list[str]:
    """The repositories we would publish: classifiers at two resolutions and the MGP weights they started from."""
    return [f"livt-base-{dataset}{suffix}" for dataset in DATA for suffix in ("", "-384", "-mgp")]


def converted_card(name: str, organisation: str = "org") -> ModelCard:
    """The card of one of `converted_names()`; every number in it is the paper's."""
    if name not in converted_names():
        raise LiVTError(f"{name!r} is none of the authors' checkpoints; they are {', '.join(converted_names())}.")
    dataset, pretraining = (
        name.removeprefix("livt-base-").removesuffix("-384").removesuffix("-mgp"),
        name.endswith("-mgp"),
    )
    facts = DATA[dataset]
    size = facts["pretrain_size"] if pretraining else 384 if name.endswith("-384") else 224
    results = {"stage": "pretrain" if pretraining else "finetune", "dataset": dataset, "image_size": size, **facts}
    title, repo_id = dataset_names(results)[0], f"{organisation}/{name}"
    license = dict(license="other", license_name="livt-authors-terms", license_link=SOURCE_URL)
    common = dict(
        repo_id=repo_id,
        title=name,
        terms=TERMS.format(url=SOURCE_URL, data=DATA_TERMS[dataset]),
        data=f"{title}, training split.",
        counts=count_row(results),
        counts_picture=None,
        pictures=[],
        citation=CITATION,
    )
    if pretraining:
        return _pretraining_card(results, repo_id, license, common)
    paper = paper_result(dataset, image_size=size)
    results["metrics"] = {
        metric: round(paper[metric] / 100, 4) for metric in (*GROUPS, "ece", "mce") if metric in paper
    }
    tables = dict.fromkeys([paper["table"], paper.get("calibration_table", paper["table"])])
    source = dict(source_name=f"The paper, {' and '.join(f'table {table}' for table in tables)}", source_url=PAPER_URL)
    return render(
        "classifier",
        card_data(results, repo_id, **license, source=source, base_model=f"{organisation}/livt-base-{dataset}-mgp"),
        **common,
        summary=(
            f"The ViT-B/16 of [LiVT]({PAPER_URL}), fine-tuned by its authors on {title} at {size} px with the "
            "balanced binary cross-entropy loss after masked generative pretraining on the same images at "
            f"{facts['pretrain_size']} px."
        ),
        evaluation=(
            f"The authors' numbers, from table `{paper['table']}` of the paper: measured by them on "
            f"{facts['reported_on']}, at their best epoch on that set. They were not measured again "
            "with the converted weights."
        ),
        measure="top-1 accuracy",
        balanced=True,
        posterior=True,
        accuracy_rows=[["the paper", *(percent(results["metrics"][group]) for group in GROUPS)]],
        calibration_rows=_calibration(results["metrics"]),
        paper_note=paper.get("note"),
        limits=_limits(dataset),
        training=_training(f"{size} px, 100 epochs, Bal-BCE, tau 1"),
    )


def write_cards(folder: str | Path) -> list[Path]:
    """Write every converted model's card as `<name>.md`."""
    paths = []
    for name in converted_names():
        paths.append(Path(folder) / f"{name}.md")
        converted_card(name).save(paths[-1])
    return paths


def _pretraining_card(results: dict, repo_id: str, license: dict, common: dict) -> ModelCard:
    title = dataset_names(results)[0]
    return render(
        "pretraining",
        card_data(results, repo_id, **license),
        **common,
        summary=(
            f"The ViT-B/16 of [LiVT]({PAPER_URL}) after masked generative pretraining by its authors on {title} at "
            f"{results['image_size']} px, 800 epochs. A stock ViTMAE checkpoint."
        ),
        evaluation=(
            "The paper reports no number for the pretrained weights alone; what they lead to is on the cards "
            f"`{repo_id.removesuffix('-mgp')}` and `{repo_id.removesuffix('-mgp')}-384`."
        ),
        limits="- This is a starting point, not a classifier: its features are meant to be fine-tuned.\n"
        f"- Trained at {results['image_size']} px; fine-tuning at another size resizes the positions.",
        training=_training(f"{results['image_size']} px, 800 epochs, mask ratio 0.75"),
    )


def _calibration(metrics: dict) -> list[list[str]]:
    return [["the paper, softmax(z)", percent(metrics["ece"]), percent(metrics["mce"])]] if "ece" in metrics else []


def _limits(dataset: str) -> str:
    lines = ["It always names one of its classes, also for pictures of something else."]
    lines.append("The reported epoch was chosen on the reported pictures, so the numbers are slightly optimistic.")
    if dataset == "inat18":
        lines.append(
            "The authors' head is in lexicographic order of the category ids; conversion permutes it to numeric "
            "order. That order was read from their code and not verified on data."
        )
    return "\n".join(f"- {line}" for line in lines)


def _training(setting: str) -> str:
    return f"By the authors: {setting}. Converted from their `.pth` file with `recipes/convert.py` of livt_hf."


if __name__ == "__main__":
    write_cards(sys.argv[1])
