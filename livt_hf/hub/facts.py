"""What the records of a run say about its dataset and its loss, in the words of cards."""

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from livt_hf.data.benchmarks import BENCHMARKS
from livt_hf.errors import LiVTError
from livt_hf.long_tail.losses import LOSSES, PACKAGED, LossDefinition
from livt_hf.results import Results
from livt_hf.settings import DataSettings
from livt_hf.text import shell_line

# How the benchmarks of this package are called in prose.
TITLES = {
    "glyphs": "glyphs (drawn by livt_hf itself)",
    "cifar10-lt": "CIFAR-10-LT",
    "cifar100-lt": "CIFAR-100-LT",
    "imagenet-lt": "ImageNet-LT",
    "imagenet-bal": "ImageNet-BAL",
    "imagenet-1k": "ImageNet-1K",
    "inat18": "iNaturalist 2018",
    "places-lt": "Places-LT",
}
IMAGENET = BENCHMARKS["imagenet-1k"].hub
# The options by which images are left out, or get another class.
CHOOSING = ("exclude_labels", "min_images", "rare_classes", "drop_empty", "on_broken")
# And those by which a dataset has other images, labels or splits than its publisher meant.
READING = ("image_column", "label_column", "label_separator", "split_column")


def is_vit(results: Results) -> bool:
    """Whether a run trained a ViT of ours, pretrained or fine-tuned, and not another backbone."""
    return results.model_type in (None, "livit", "vit_mae")


def loss_spec(results: Results) -> LossDefinition:
    """What the loss of a run is. A loss of the user's own is known once its plugin is loaded."""
    if results.loss not in LOSSES:
        raise LiVTError(
            f"the run was trained with the loss {results.loss!r}, which is not registered; "
            "name the file or module that registers it with --plugin."
        )
    return LOSSES[results.loss]


def needs_plugin(results: Results) -> bool:
    """Whether livt_hf can load the model only where the plugin that registers its loss is imported first."""
    return results.loss is not None and results.loss not in PACKAGED


def data_choices(arguments: Mapping, names: Sequence[str] = (*CHOOSING, *READING)) -> str:
    """The options by which a run's data differ from what their publisher means by them; empty where they do not."""
    told = DataSettings(**{name: arguments[name] for name in names if name in arguments})
    return shell_line(
        [word for name, value in told.non_default_data_options().items() for word in (f"--{name}", value)]
    )


def dataset_names(results: Results) -> tuple[str, str | None]:
    """The dataset in words, and its id on the Hub or None."""
    name = results.dataset
    if name in BENCHMARKS:  # also those that a plugin has registered
        title, hub_id = TITLES.get(name, name), BENCHMARKS[name].hub
    elif name in hub_ids(results):
        title, hub_id = name, name.partition(":")[0]  # what follows is one of its configurations
    else:
        title, hub_id = PurePosixPath(name).name, None
    gamma = results.imbalance_factor
    return (f"{title} (imbalance {gamma:g})" if gamma else title), hub_id


def hub_ids(results: Results) -> set[str]:
    """Which names in the results are ids on the Hub: those that the run did not find on its disk.

    Nothing is claimed for a run that did not record it.
    """
    names = set() if results.dataset_local else {results.dataset}
    return (names if results.pretrained_local else names | {results.pretrained}) - {None, "none", *BENCHMARKS}


def published_split(results: Results) -> str | None:
    """The measured split as its publisher calls it.

    `test` is what the paper reports on: the validation images of ILSVRC, whose test labels are secret, and of
    iNaturalist. A test split that was set aside from the training data is not the dataset's own.
    """
    if results.split == "test":
        benchmark = BENCHMARKS.get(results.dataset)
        if results.test_carved:
            return "held-out part of train"
        if benchmark and (benchmark.reports_validation or benchmark.hub == IMAGENET):
            return "validation"
    return results.split
