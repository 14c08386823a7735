"""The numbers of the paper (`paper.yaml`), which cards and sweeps show beside measured ones."""

from functools import cache
from importlib.resources import files

import yaml

from livt_hf.errors import LiVTError

# Tables that report the method itself: the comparison tables first, the ablations for other sizes, losses and CIFAR.
_MAIN_TABLES = ("performance-imagenet-lt", "performance-iNat", "performance-place", "bias-ablation", "loss-on-vit")


@cache
def _tables() -> dict[str, list[dict]]:
    text = (files("livt_hf.hub") / "paper.yaml").read_text(encoding="utf-8")
    tables = yaml.safe_load(text)
    return {
        label: [{"table": label, **table["common"], **row} for row in table["rows"]] for label, table in tables.items()
    }


def paper_table(label: str) -> list[dict]:
    """Return the rows of a table by its LaTeX label, numbers in percent as printed."""
    tables = _tables()
    if label not in tables:
        raise LiVTError(f"the paper has no result table {label!r}; it has {', '.join(tables)}.")
    return tables[label]


def paper_result(
    dataset: str,
    *,
    imbalance_factor: float | None = None,
    loss: str = "bal_bce",
    model_size: str = "base",
    image_size: int = 224,
) -> dict | None:
    """Return what the paper reports for two-stage training on `dataset`, or None.

    Dataset, imbalance and loss must agree; of several rows the one of this size and resolution is taken, or else the
    paper's ViT-B at 224. The row says which it is (`model_size`, `image_size`, `table`).
    """
    rows = [
        row
        for label in _MAIN_TABLES
        for row in paper_table(label)
        if row["dataset"] == dataset
        and row.get("imbalance_factor") in (None, imbalance_factor)
        and row["method"] in ("LiVT", "MAE")
        and row["loss"] == loss
    ]

    def distance(row: dict) -> tuple:
        same = row["model_size"] == model_size, row["image_size"] == image_size
        return -sum(same), row["model_size"] != "base", row["image_size"] != 224

    if not rows:
        return None
    best = min(rows, key=distance)
    twins = [row for row in rows if (row["model_size"], row["image_size"]) == (best["model_size"], best["image_size"])]
    # The comparison tables have no calibration; the ablation prints it for the same ViT-B.
    names = {"ece": "ece", "mce": "mce", "calibration_table": "table"}
    return best | {name: row[key] for row in twins if "ece" in row for name, key in names.items()}
