"""`results.json`: the one record that a finished run leaves, written by both stages and read by everything after."""

import dataclasses
import importlib.metadata
import json
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, get_type_hints

from livt_hf.files import read_record
from livt_hf.predictions.rules import ARGMAX, LABELS, PER_LABEL, TEST_PRIOR, UNIFORM, deployment_label, rule_name
from livt_hf.text import format_accuracy
from livt_hf.version import __version__


@dataclass(kw_only=True)
class Results:
    """What was trained on what, and what came out. Fractions, not percent; None is what was not measured or not said.

    `rules` holds the numbers by decision rule, the default rule first, and `metrics` those of the first one (of a
    pretraining, the loss on held-out images). Files from before 0.3 have those of the largest logit as `metrics`,
    of the posterior under the uniform prior as `posterior`, and of the model's test prior as `own_prior`.
    """

    stage: str
    dataset: str
    default_rule: str = ARGMAX  # the name of the rule by which the model is judged and served
    metrics: dict[str, float | None] = field(default_factory=dict)
    rules: dict[str, dict[str, float | None]] = field(default_factory=dict)

    # The model.
    model_type: str | None = None  # transformers' name of the family; None in files from before there was another
    model_size: str | None = None
    parameters: int | None = None
    image_size: int | None = None
    loss: str | None = None
    tau: float | None = None
    calibrated_on: int | None = None  # so many labelled images; None: not calibrated
    calibration_split: str | None = None  # the split of these images; "all" is another dataset
    mask_ratio: float | None = None
    decode_ratio: float | None = None
    # The data. `class_counts` is a summary: max, min, imbalance, and the number of classes in each shot group.
    imbalance_factor: float | None = None
    num_train_images: int | None = None
    num_classes: int | None = None
    class_counts: dict[str, float] | None = None
    split: str | None = None
    # Of a cross-validation: metrics of `each` fold, their `mean` and their `deviation`.
    folds: dict[str, list | dict] | None = None
    # Whether `test` and `validation` are not the dataset's own, but were set aside from its training images.
    test_carved: bool = False
    validation_carved: bool = False
    num_images: int | None = None
    trained_on: str | None = None  # `data.labels.digest_of`; None in files from before there was one, and of a stream
    # The training.
    pretrained: str | None = None
    epoch: float | None = None
    epochs: float | None = None
    updates: int | None = None
    selection: str | None = None
    head: dict | None = None  # of an exact head: L2 `strength` and `path`
    # Of a calibrated model: the `objective` it is served for, the `exponent` of its deployment prior, the exponents of
    # all objectives, and the trade-off curve they were chosen on.
    trade_off: dict | None = None
    # Of `livt train`: each part of the training with its scores on held-out images and whether it was kept.
    parts: list[dict] | None = None
    framing: dict | None = None  # `chosen`, and where it was by a trial what `FramingTrial` says
    weights: str = "model"
    precision: str | None = None  # in which the model computed, "float32", "bfloat16" or "float16"
    seed: int | None = None
    seconds: float | None = None
    preparation_seconds: float | None = None  # before the first update: data, model, features of a frozen backbone
    # Where things came from. `data/birds` could be a folder or a Hub id, and a card must not guess.
    dataset_local: bool = True
    pretrained_local: bool = True
    pretrained_own: bool = True  # nothing but runs of this package lies behind it
    versions: dict[str, str] | None = None
    git_revision: str | None = None

    def __post_init__(self):
        if self.rules:
            self.rules = dict(sorted(self.rules.items(), key=lambda item: item[0] != self.default_rule))
            self.metrics = next(iter(self.rules.values()))

    @classmethod
    def from_dict(cls, values: Mapping) -> Self:
        """Read the values of a file of any version: what this one does not know is left out."""
        metrics = values.get("metrics") or {}
        first = PER_LABEL if "map" in metrics else ARGMAX
        if "headline" in values:  # the label of the default rule, before rules had names
            values = {"default_rule": first if "map" in metrics else rule_name(values["headline"])} | dict(values)
        if "rules" not in values and values.get("stage") == "finetune":
            blocks = {first: metrics, UNIFORM: values.get("posterior"), TEST_PRIOR: values.get("own_prior")}
            values = dict(values) | {"rules": {rule: block for rule, block in blocks.items() if block}}
        known = {f.name for f in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls.from_dict(read_record(path, get_type_hints(cls), required=("stage", "dataset")))

    @property
    def rule_labels(self) -> dict[str, str]:
        """Return the labels of the rules."""
        return LABELS | {TEST_PRIOR: deployment_label((self.trade_off or {}).get("objective"))}

    def to_json(self) -> str:
        """Return the text of results.json."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def format_rules(results: Results) -> str:
    """Return lines of text: the accuracies on the test images by each rule, and what the deployment prior is for."""
    labels, chosen = results.rule_labels, results.trade_off
    lines = [f"  test, {labels[rule]}: {format_accuracy(metrics)}\n" for rule, metrics in results.rules.items()]
    if chosen is not None and chosen["objective"] is not None:
        lines.append(
            f"  objective {chosen['objective']}: deployment prior pi^{chosen['exponent']:g}, chosen on "
            f"{chosen['num_images']:,} images ({chosen['split']})\n"
        )
    return "".join(lines)


def provenance() -> dict:
    """Return the versions of the libraries and, where there is one, the revision of the code."""
    packages = ("torch", "torchvision", "transformers", "datasets", "accelerate", "timm")
    versions = {"python": platform.python_version(), "livt-hf": __version__}
    versions |= {name: importlib.metadata.version(name) for name in packages}
    return {"versions": versions, "git_revision": _git_revision(Path(__file__).resolve().parents[1])}


def _git_revision(checkout: Path) -> str | None:
    """Return the commit of a folder that is the root of a repository; None for any other, or without git."""
    git = shutil.which("git")
    if git is None:
        return None
    # An installed package may lie in somebody else's repository: the root has to be the folder itself.
    command = [git, "rev-parse", "--show-toplevel", "HEAD"]
    answer = subprocess.run(command, cwd=checkout, capture_output=True, encoding="utf-8")
    if answer.returncode != 0:
        return None
    root, revision = answer.stdout.splitlines()
    return revision if Path(root).resolve() == checkout else None
