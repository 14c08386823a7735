"""Names of datasets, splits and local paths as a publication shows them."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from livt_hf.data.benchmarks import BENCHMARKS
from livt_hf.results import Results

DATASET_TITLES = {
    "glyphs": "glyphs (drawn by livt_hf itself)",
    "cifar10-lt": "CIFAR-10-LT",
    "cifar100-lt": "CIFAR-100-LT",
    "imagenet-lt": "ImageNet-LT",
    "imagenet-bal": "ImageNet-BAL",
    "imagenet-1k": "ImageNet-1K",
    "inat18": "iNaturalist 2018",
    "places-lt": "Places-LT",
}
# Options that leave out images or change their classes, with their defaults.
SELECTION_OPTIONS = {
    "exclude_labels": None, "min_images": None, "rare_classes": "drop", "drop_empty": False, "on_broken": "error",
}  # fmt: skip
# Options that read other images, labels or splits from a dataset than its publisher intended.
COLUMN_OPTIONS = dict.fromkeys(("image_column", "label_column", "label_separator", "split_column"))


def shorten_path(path: str) -> str:
    """Return the last part of a local path, or the name of a run below `runs/`, as `(local)/name`.

    Nothing is kept of a home directory, whose name is that of its owner.
    """
    parts = [part for part in PurePosixPath(path.replace("\\", "/")).parts if part != "/"]
    kept = parts[parts.index("runs") + 1 :] if "runs" in parts[:-1] else parts[-1:]
    if parts[-2:-1] in (["home"], ["Users"]) or any(part.startswith("~") for part in kept):
        kept = []
    return "/".join(["(local)", *kept])


def find_hub_ids(results: Results) -> set[str]:
    """Return the names in the results that are Hub ids: those that the run did not find on its disk."""
    names = set() if results.dataset_local else {results.dataset}
    names |= set() if results.pretrained_local else {results.pretrained}
    return names - {None, "none", *BENCHMARKS}


def dataset_title(results: Results) -> tuple[str, str | None]:
    """Return the dataset's name for text, and its Hub id or None."""
    name = results.dataset
    if name in BENCHMARKS:  # also those that a plugin has registered
        title, hub_id = DATASET_TITLES.get(name, name), BENCHMARKS[name].hub
    elif name in find_hub_ids(results):
        title, hub_id = name, name.partition(":")[0]  # a configuration follows the colon
    else:
        title, hub_id = PurePosixPath(name).name, None
    gamma = results.imbalance_factor
    return (f"{title} (imbalance {gamma:g})" if gamma else title), hub_id


def split_title(results: Results) -> str | None:
    """Return the measured split under its publisher's name.

    `test` is what the paper reports on: the validation images of ILSVRC, whose test labels are secret, and of
    iNaturalist. A test split that was held out of the training data is not the dataset's own.
    """
    if results.split == "test":
        benchmark = BENCHMARKS.get(results.dataset)
        if results.test_carved:
            return "held-out part of train"
        if benchmark and (benchmark.reports_validation or benchmark.hub == BENCHMARKS["imagenet-1k"].hub):
            return "validation"
    return results.split


def format_options(arguments: Mapping, names: Sequence[str] = (*SELECTION_OPTIONS, *COLUMN_OPTIONS)) -> str:
    """Return the options by which data differ from what their publisher intended; empty where there are none."""
    defaults = SELECTION_OPTIONS | COLUMN_OPTIONS
    changed = {name: arguments[name] for name in names if arguments.get(name, defaults[name]) != defaults[name]}
    return shlex.join(word for name, value in changed.items() for word in (f"--{name}", str(value)))
