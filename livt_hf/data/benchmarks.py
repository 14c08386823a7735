"""Named datasets: where they come from, how their long tail is made, and their channel statistics.

Nothing here imports torch or `datasets`, so that commands can ask for a name before they load anything.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from livt_hf.data.spec import DataSpec
from livt_hf.errors import LiVTError

if TYPE_CHECKING:
    from datasets import DatasetDict

Channels = tuple[float, float, float]


@dataclass(frozen=True)
class Benchmark:
    """Where a named dataset comes from and how its long tail is made."""

    load: Callable[[DataSpec], "DatasetDict"] | None = None  # makes the dataset, instead of the Hub
    own_tail: bool = False  # `load` follows the rule and the imbalance factor itself
    hub: str | None = None
    label_column: str | None = None
    lists: tuple[str, ...] = ()  # prefixes of the community's list files
    lists_from: str = ""
    train_images: int | None = None  # to tell a ready-made copy from the full dataset
    reports_validation: bool = False  # the paper reports on the set that is published as validation
    rule: str | None = None
    imbalance_factor: float | None = None
    images_per_class: int | None = None
    mean: Channels = (0.485, 0.456, 0.406)  # ImageNet's, also for data without numbers of their own
    std: Channels = (0.229, 0.224, 0.225)


def _load_glyphs(spec: DataSpec) -> "DatasetDict":
    from livt_hf.data.glyphs import load_glyphs  # imports matplotlib and `datasets`

    return load_glyphs(spec)


CIFAR = {
    "rule": "exponential",
    "imbalance_factor": 100.0,
    "mean": (0.4914, 0.4822, 0.4465),
    "std": (0.2023, 0.1994, 0.2010),
}
OLTR = 'the data release of "Large-Scale Long-Tailed Recognition in an Open World" (Liu et al., CVPR 2019)'
BENCHMARKS = {
    "glyphs": Benchmark(
        load=_load_glyphs,
        own_tail=True,
        rule="exponential",
        imbalance_factor=100.0,
        mean=(0.328, 0.327, 0.327),
        std=(0.183, 0.174, 0.189),
    ),
    "cifar10-lt": Benchmark(hub="uoft-cs/cifar10", label_column="label", **CIFAR),
    "cifar100-lt": Benchmark(hub="uoft-cs/cifar100", label_column="fine_label", **CIFAR),
    "imagenet-1k": Benchmark(hub="ILSVRC/imagenet-1k", reports_validation=True),
    "imagenet-bal": Benchmark(
        hub="ILSVRC/imagenet-1k",
        reports_validation=True,
        rule="balanced",
        images_per_class=160,
        mean=(0.480767, 0.457071, 0.407718),
        std=(0.279940, 0.272481, 0.286038),
    ),
    "imagenet-lt": Benchmark(
        hub="ILSVRC/imagenet-1k",
        lists=("ImageNet_LT",),
        lists_from=OLTR,
        train_images=115_846,
        mean=(0.479672, 0.457713, 0.407721),
        std=(0.278976, 0.271203, 0.286062),
    ),
    "places-lt": Benchmark(lists=("Places_LT", "Places_LT_v2"), lists_from=OLTR, train_images=62_500),
    "inat18": Benchmark(
        lists=("iNaturalist18",),
        lists_from="the repositories of long-tailed recognition methods on iNaturalist 2018",
        train_images=437_513,
        reports_validation=True,
        mean=(0.466, 0.471, 0.380),
        std=(0.195, 0.194, 0.192),
    ),
}
PUBLIC = frozenset(BENCHMARKS)  # not what a plugin registers: those are the images of its user


def register_dataset(name: str, **facts) -> Callable[[Callable], Callable]:
    """Register a function as a dataset that every command takes by name.

    Args:
        name: name of the dataset.
        facts: fields of `Benchmark`, such as `mean` and `std`.

    Returns:
        A decorator of a function that takes a `DataSpec` and returns a `DatasetDict` with the columns `image` and
        `label`. A missing test split is split off, and a rule subsamples, as with any other dataset.

    Example:
        >>> @register_dataset("birds", mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))
        ... def load_birds(spec):
        ...     return datasets.load_dataset("imagefolder", data_dir="birds")
    """

    def register(load: Callable[[DataSpec], "DatasetDict"]) -> Callable:
        if name in BENCHMARKS:
            raise LiVTError(f"a dataset named {name!r} exists already; choose another name.", "name")
        BENCHMARKS[name] = Benchmark(load=load, **facts)
        return load

    return register


def normalization(name: str) -> tuple[Channels, Channels]:
    """Return mean and standard deviation of a dataset's channels; ImageNet's for data without numbers of their own."""
    benchmark = BENCHMARKS.get(name, Benchmark())
    return benchmark.mean, benchmark.std


def locate_dataset(dataset: str) -> Path | str:
    """Return the resolved path of a dataset on this machine; a benchmark or Hub dataset is its name."""
    path = Path(dataset).expanduser()
    return dataset if dataset in BENCHMARKS or not path.exists() else path.resolve()
