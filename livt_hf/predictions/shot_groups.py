"""Shot groups of classes (many, medium, few), and the checks that all metrics share."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from livt_hf.constants import FEW_BELOW, MANY_ABOVE
from livt_hf.errors import LiVTError

GROUPS = ("many", "medium", "few")
THRESHOLDS = {"many_above": MANY_ABOVE, "few_below": FEW_BELOW}


def shot_groups(
    class_counts: Sequence[int] | Tensor, many_above: int = MANY_ABOVE, few_below: int = FEW_BELOW
) -> Tensor:
    """Return the group of each class as an index into `GROUPS`; classes at the thresholds are medium."""
    if few_below > many_above + 1:
        raise LiVTError(
            f"few_below={few_below} is above many_above={many_above}, so a class would be in both groups; lower it.",
            "few_below",
        )
    counts = as_counts(class_counts)
    return 1 - (counts > many_above).long() + (counts < few_below).long()


def group_sizes(class_counts: Sequence[int] | Tensor) -> dict[str, int]:
    """Return the number of classes in each group."""
    return dict(zip(GROUPS, torch.bincount(shot_groups(class_counts), minlength=len(GROUPS)).tolist(), strict=True))


def class_mean(values: Tensor) -> float | None:
    """Return the mean over the classes whose value is not NaN, or None where there is none."""
    found = values[~values.isnan()]
    return found.mean().item() if len(found) else None


def group_means(values: Tensor, groups: Tensor, suffix: str = "") -> dict[str, float | None]:
    """Return the mean over the classes of each group, by the name of the group and a suffix."""
    return {f"{name}{suffix}": class_mean(values[groups == index]) for index, name in enumerate(GROUPS)}


class ClassMetrics:
    """Base of metrics that know the training images and shot groups of the classes."""

    def __init__(self, class_counts: Sequence[int] | Tensor, many_above: int = MANY_ABOVE, few_below: int = FEW_BELOW):
        self.class_counts = as_counts(class_counts)
        self.many_above, self.few_below = many_above, few_below
        self.groups = shot_groups(self.class_counts, many_above, few_below)
        self.num_classes = len(self.class_counts)

    def rows(self, names: Sequence[str] | None, images: Tensor, measured: dict[str, Tensor]) -> list[dict]:
        """Return one row per class: its id, name, training images, group, test images, and its metrics."""
        ids = torch.arange(self.num_classes)
        known: dict[str, Sequence | Tensor] = {
            "class": ids,
            "name": [str(label) for label in ids.tolist()] if names is None else names,
            "count": self.class_counts,
            "group": [GROUPS[i] for i in self.groups.tolist()],
            "images": images,
        }
        return as_rows(known | measured)


def as_rows(columns: Mapping[str, Sequence | Tensor]) -> list[dict]:
    """Return the rows of a table given by columns; NaN becomes None."""
    lists = (column.tolist() if isinstance(column, Tensor) else column for column in columns.values())
    return [
        {name: None if value != value else value for name, value in zip(columns, row, strict=True)}
        for row in zip(*lists, strict=True)
    ]


def as_counts(class_counts: Sequence[int] | Tensor) -> Tensor:
    """Return the training images of each class as a 1-D int64 tensor; a class may have none."""
    counts = torch.as_tensor(class_counts).cpu()
    if counts.ndim != 1 or len(counts) == 0:
        raise LiVTError(
            f"class_counts has shape {tuple(counts.shape)}; give one number of training images per class.",
            "class_counts",
        )
    if (counts < 0).any() or counts.is_floating_point() and (counts != counts.round()).any():
        raise LiVTError(
            "class_counts must be whole numbers of images, none below 0; pass counts, not shares.", "class_counts"
        )
    return counts.long()


def check_scores(scores: Tensor, num_classes: int) -> None:
    if scores.ndim != 2 or scores.shape[1] != num_classes:
        raise LiVTError(
            f"scores have shape {tuple(scores.shape)} but class_counts name {num_classes} classes; "
            f"pass (images, {num_classes})."
        )


def check_labels(labels: Tensor, num_images: int, num_classes: int, what: str = "label") -> None:
    """Raise an error for labels, or predictions, that are not one class of `class_counts` per image."""
    if labels.ndim != 1 or labels.is_floating_point() or labels.dtype == torch.bool:
        raise LiVTError(
            f"{what}s are {labels.dtype} of shape {tuple(labels.shape)}, not one class id per image; "
            "for several labels per image use MultiLabelMetrics."
        )
    if len(labels) != num_images:
        raise LiVTError(f"{len(labels)} {what}s for {num_images} images; pass one per image.")
    outside = labels[(labels < 0) | (labels >= num_classes)]
    if len(outside):
        raise LiVTError(
            f"{what} {outside[0].item()} is outside the {num_classes} classes of class_counts; "
            "pass the counts of all classes, in the order of the model's outputs."
        )
