"""DataSpec: which images to load and how to split them. AugmentationSpec: how training images are varied.

Nothing here imports torch.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le

from livt_hf.errors import LiVTError
from livt_hf.specs import Fraction, FractionAboveZero, NonNegative, NonNegativeInt, Positive, Spec, option

_BENCHMARKS = "Benchmarks"
_BOXES = "Boxes"


@dataclass(frozen=True, kw_only=True)
class BoxSpec(Spec):
    """Boxes: how examples are cut out of pictures."""

    box_columns: str | None = option(
        None,
        "columns of a table of boxes, in pixels or 0..1: left,top,right,bottom, or left,top,width,height where the "
        "third name ends in w or width; default: well-known names; none: whole images",
        legacy_default="none",
        group=_BOXES,
    )
    box_margin: NonNegative = option(
        0.3,
        "each box is cut out as a square that is longer than the box by this share, at least 32 pixels",
        affects_split=False,
        group=_BOXES,
    )
    min_confidence: Fraction = option(0.2, "smallest confidence of a detection of MegaDetector", group=_BOXES)


@dataclass(frozen=True)
class DataSpec(BoxSpec):
    """Data: which images to load and how to split them."""

    dataset: str = option(
        "glyphs",
        "benchmark, image folder, table of labels (.csv, .tsv, .jsonl, .parquet) or boxes (too, or .json), image list "
        "(.txt), parquet folder or Hub dataset",
        common=True,
        is_path=True,
    )
    source: str | None = option(
        None,
        "local copy of a named benchmark, or the folder of the images that a table or a list names",
        common=True,
        is_path=True,
        may_change_on_resume=True,
    )
    imbalance_factor: float | None = option(
        None, "largest class over smallest class; a long-tailed subset is drawn where this is given", group=_BENCHMARKS
    )
    rule: str | None = option(
        None,
        "how the long tail is made; default: the dataset's own rule",
        choices=("exponential", "pareto", "balanced"),
        group=_BENCHMARKS,
    )
    images_per_class: Positive | None = option(
        None, "images of the largest class; ImageNet-BAL: 160 (the appendix) or 116 (the text)", group=_BENCHMARKS
    )
    cap: bool = option(
        False,
        "take all images of a class that has fewer than the rule asks for, instead of an error",
        group=_BENCHMARKS,
    )
    lists: str | None = option(
        None,
        "folder of a benchmark's split lists, where they are not in source",
        is_path=True,
        may_change_on_resume=True,
        group=_BENCHMARKS,
    )
    image_column: str | None = option(None, "column of the images, where it cannot be inferred")
    label_column: str | None = option(
        None,
        "column of the labels, where it cannot be inferred; or, separated by commas, one column of 0 and 1 per class",
        common=True,
    )
    label_separator: str | None = option(None, "separator between the labels of an image that has several, e.g. '|'")
    split_column: str | None = option(
        None, "column with the values train, val or test; default: one called split; none: no column"
    )
    group_column: str | None = option(
        None, "column of what must stay together in a split (patient, site, sequence)", common=True
    )
    group_from: str | None = option(
        None,
        "groups without a column: parent (the folder of an image), near_copies, capture_time, a regular expression on "
        "the path (its first group, or all of it) or a .csv file with the columns path and group",
        common=True,
        is_path=True,
    )
    exclude: list[str] | None = option(
        None,
        "files to leave out, as patterns of their paths in the dataset, e.g. 'masks/*' '*_aug*'; default: masks, "
        "where every image has one; none: no file",
        common=True,
    )
    where: list[str] | None = option(
        None, "rows of a table to take, as column=value; several values of a column are alternatives"
    )
    exclude_labels: str | None = option(None, "labels that are no classes, separated by commas, e.g. todo,Unknown")
    min_images: Positive | None = option(
        None, "smallest number of training images, before any are held out, with which a class is kept"
    )
    rare_classes: Literal["drop", "merge"] = option(
        "drop", "what to do with classes below min_images: drop them or merge them into one class"
    )
    drop_empty: bool = option(False, "drop classes without a training image instead of raising an error")
    split_seed: Annotated[int, Ge(0), Le(2**32 - 1)] = option(
        0, "seed of the images picked for the tail and the test set; 0 picks the community's CIFAR-LT"
    )
    test_fraction: float | None = option(  # None: no test split is made
        0.2, "share of each class held out when a dataset has no test split", common=True
    )
    validation_fraction: float | None = option(
        0.0,
        "share of each class held out of the training images, to calibrate and to select on",
        common=True,
        legacy_default=0.0,
        affects_split=False,
    )
    fold: str | None = option(
        None,
        "test on one part of a cross-validation and train on the others: 2/5 is the second of five; `finetune "
        "--folds 5` runs all",
    )
    on_broken: Literal["error", "skip"] = option(
        "error", "what to do with an image that cannot be read", affects_split=False
    )
    num_workers: NonNegativeInt = option(
        0, "data loading processes per training process", common=True, may_change_on_resume=True
    )

    def __post_init__(self):
        super().__post_init__()
        for name in ("exclude_labels", "label_column"):
            if isinstance(getattr(self, name), list | tuple):
                object.__setattr__(self, name, ",".join(map(str, getattr(self, name))))
        for name in ("exclude", "where"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, [getattr(self, name)])
        if self.group_from is not None and self.group_column is not None:
            raise LiVTError(
                f"group_from is {self.group_from!r}, but the groups are those of the column {self.group_column}: name "
                "one of the two.",
                "group_from",
            )
        if self.dataset is not None:
            if not self.dataset.strip():
                raise LiVTError(
                    "the name of the dataset is empty: name a benchmark, a folder, a table or a Hub dataset.",
                    "dataset",
                )
            # Runs are named by their dataset: without the trailing separators that shells append, and `..`.
            dataset = self.dataset.rstrip("/") or "/"
            is_named = Path(dataset).name not in ("", "..")
            object.__setattr__(self, "dataset", dataset if is_named else os.path.abspath(dataset))
        if self.fold is not None:
            number, _, folds = self.fold.partition("/")
            if not (number.isdecimal() and folds.isdecimal() and 1 <= int(number) <= int(folds) >= 2):
                raise LiVTError(f"fold is {self.fold!r}; it must be one of several parts, such as 2/5.", "fold")

    @staticmethod
    def split_options() -> list[str]:
        """Return the names of the options that decide which images are trained on and which are tested on."""
        return [
            name
            for name, one in DataSpec.options().items()
            if one.facts["affects_split"] is not False and not one.facts["may_change_on_resume"]
        ]

    @property
    def fold_numbers(self) -> tuple[int, int]:
        """Return the number of the fold and of all folds: 2 and 5 for `2/5`."""
        number, folds = map(int, str(self.fold).split("/"))
        return number, folds


@dataclass(frozen=True)
class AugmentationSpec(Spec):
    """Augmentation: how training images are varied."""

    crop_scale: FractionAboveZero = option(0.2, "smallest area of a random resized crop; 1 keeps the whole image")
    flip: bool = option(
        True, "mirror training images at random; not for images with a handedness, such as text", common=True
    )


@dataclass(frozen=True)
class FinetuneAugmentationSpec(AugmentationSpec):
    """Augmentation: how training images are varied."""

    crop_scale: FractionAboveZero = option(0.08, "smallest area of a random resized crop; 1 keeps the whole image")
    augmentation: Literal["rand_augment", "three_augment", "crop", "pad_crop"] = option(
        "rand_augment",
        "the paper's, DeiT III's, random resized crops alone, or pad-and-crop for small images",
        common=True,
    )
    crop_size: Positive | None = option(
        None,
        "side of the training crops in pixels; default: that of the model's images. Convolutional networks train "
        "faster on smaller crops, and often better (Touvron et al., 2019)",
    )
    erase: Fraction = option(0.25, "probability of random erasing")
    mixup: NonNegative = option(0.8, "mixup alpha; 0 is off", common=True)
    cutmix: NonNegative = option(1.0, "cutmix alpha; 0 is off", common=True)
    mixup_off_epochs: NonNegativeInt = option(0, "number of last epochs without mixup and cutmix")
