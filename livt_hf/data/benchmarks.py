"""The named data sets: where they come from, how their long tail is made, and their channel statistics."""

from dataclasses import dataclass

from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from livt_hf.data import glyphs


@dataclass(frozen=True)
class Benchmark:
    """Where a named data set comes from and how its long tail is made."""

    hub: str | None = None
    label_column: str | None = None
    lists: tuple[str, ...] = ()  # prefixes of the community's list files
    lists_from: str = ""
    train_images: int | None = None  # to tell a ready-made copy from the full data set
    reports_validation: bool = False  # the paper reports on the set that is published as validation
    rule: str | None = None
    imbalance_factor: float | None = None
    images_per_class: int | None = None
    mean: tuple[float, float, float] = IMAGENET_DEFAULT_MEAN
    std: tuple[float, float, float] = IMAGENET_DEFAULT_STD


CIFAR = {
    "rule": "exponential",
    "imbalance_factor": 100.0,
    "mean": (0.4914, 0.4822, 0.4465),
    "std": (0.2023, 0.1994, 0.2010),
}
OLTR = 'the data release of "Large-Scale Long-Tailed Recognition in an Open World" (Liu et al., CVPR 2019)'
BENCHMARKS = {
    "glyphs": Benchmark(mean=glyphs.MEAN, std=glyphs.STD),
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


def normalization(name: str) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Mean and standard deviation of a data set's channels; ImageNet's for data without numbers of their own."""
    benchmark = BENCHMARKS.get(name, Benchmark())
    return benchmark.mean, benchmark.std
