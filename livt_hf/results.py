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
from livt_hf.predictions.rules import ARGMAX, PER_LABEL, TEST_PRIOR, UNIFORM, rule_name
from livt_hf.version import __version__


@dataclass(kw_only=True)
class Results:
    """What was trained on what, and what came out. Fractions, not percent; None is what was not measured or not said.

    `metrics` holds the numbers of the largest logit, the paper's rule (of a pretraining, the loss on held-out images),
    `posterior` those of the posterior under the uniform prior, where the loss has one, and `own_prior` those under the
    model's test prior, where it has another one. The file says so too, in `metric_rules`.
    """

    stage: str
    dataset: str
    metrics: dict[str, float | None] = field(default_factory=dict)
    posterior: dict[str, float | None] | None = None
    own_prior: dict[str, float | None] | None = None
    default_rule: str = ARGMAX  # the name of the rule by which the model is judged and served

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
    # Of an exact head: L2 `strength` and `path`, and where they were chosen `objective`, `exponent` and `curve`.
    head: dict | None = None
    weights: str = "model"
    seed: int | None = None
    seconds: float | None = None
    preparation_seconds: float | None = None  # before the first update: data, model, features of a frozen backbone
    # Where things came from. `data/birds` could be a folder or a Hub id, and a card must not guess.
    dataset_local: bool = True
    pretrained_local: bool = True
    pretrained_own: bool = True  # nothing but runs of this package lies behind it
    versions: dict[str, str] | None = None
    git_revision: str | None = None

    @classmethod
    def from_dict(cls, values: Mapping) -> Self:
        """Read the values of a file of any version: what this one does not know is left out."""
        if "headline" in values:  # the label of the default rule, before rules had names
            several = "map" in (values.get("metrics") or {})
            values = {"default_rule": PER_LABEL if several else rule_name(values["headline"])} | dict(values)
        known = {f.name for f in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls.from_dict(read_record(path, get_type_hints(cls), required=("stage", "dataset")))

    @property
    def rules(self) -> dict[str, dict]:
        """Return metrics by the names of the rules, those of the default rule first."""
        measured = {rule: getattr(self, block) for block, rule in self.metric_rules.items()}
        return dict(sorted(measured.items(), key=lambda item: item[0] != self.default_rule))

    @property
    def metric_rules(self) -> dict[str, str]:
        """Return the name of the decision rule of each block of metrics that there is."""
        first = PER_LABEL if "map" in self.metrics else ARGMAX
        named = {"metrics": first, "posterior": UNIFORM, "own_prior": TEST_PRIOR}
        return {block: rule for block, rule in named.items() if getattr(self, block)}

    def to_json(self) -> str:
        """Return the text of results.json, which also says the decision rule of each block of metrics."""
        rules = {} if self.stage == "pretrain" else self.metric_rules
        return json.dumps(dataclasses.asdict(self) | {"metric_rules": rules}, indent=2) + "\n"


def provenance() -> dict:
    """Versions and, where there is one, the revision of the code."""
    packages = ("torch", "torchvision", "transformers", "datasets", "accelerate", "timm")
    versions = {"python": platform.python_version(), "livt-hf": __version__}
    versions |= {name: importlib.metadata.version(name) for name in packages}
    return {"versions": versions, "git_revision": _git_revision(Path(__file__).resolve().parents[1])}


def _git_revision(checkout: Path) -> str | None:
    """The commit of a folder that is the root of a repository; None for any other, or without git."""
    git = shutil.which("git")
    if git is None:
        return None
    # An installed package may lie in somebody else's repository: the root has to be the folder itself.
    asked = [git, "rev-parse", "--show-toplevel", "HEAD"]
    answer = subprocess.run(asked, cwd=checkout, capture_output=True, encoding="utf-8")
    if answer.returncode != 0:
        return None
    root, revision = answer.stdout.splitlines()
    return revision if Path(root).resolve() == checkout else None
