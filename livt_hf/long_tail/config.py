"""`LongTailConfig`: the settings of a long-tailed head, saved as `config.long_tail` of any image classifier."""

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, fields
from typing import Any, Literal, get_type_hints

import numpy as np
from transformers import PreTrainedConfig

from livt_hf.errors import LiVTError
from livt_hf.long_tail.calibration import Calibration
from livt_hf.long_tail.losses import LOSSES, LossDefinition
from livt_hf.long_tail.priors import as_prior, class_prior, tempered_prior
from livt_hf.specs import check_types
from livt_hf.text import shorten


@dataclass(frozen=True, eq=False)
class LongTailConfig(dict):
    """Settings of a long-tail head; the defaults are the paper's.

    It is a dictionary as well, so that the config of every transformers model can save it as JSON.

    Args:
        loss: a name of `livt_hf.losses.LOSSES`.
        class_counts: training images of each class.
        shot_counts: training images of each class before any were held out, which make the shot groups; None where
            they are the `class_counts`.
        seen_counts: images of each class that an epoch shows, where a sampler does not show each image once; prior and
            bias of the head are theirs.
        class_weights: loss weight of each class, in place of those of CB and DRW; with another loss, from the start.
        num_train_images: must be given where an image may have several labels; elsewhere it is the sum of the counts.
        tau: strength of the logit bias.
        test_prior: None (Theorem 2), "uniform" (Eq. 13) or one probability per class (Theorem 3).
        bias: of balanced sigmoid losses: "bce" (Theorems 2 and 3) or "ce" (Theorem 1, the paper's negative example).
        head_start: initial classifier bias under a sigmoid loss: "zero", or "prior", with which a fresh model predicts
            the training prior at tau 1.
        label_smoothing: applied once, in the loss, in training mode.
        normalised_classifier: logits are cosines of features and weights, without a bias (Cao et al.; LiViT only).
        drw_start: share of the training after which images are weighted by class (deferred re-weighting, Cao et al.).
        cb_beta: of the class weights of CB and DRW.
        ldam_max_margin, ldam_scale: margin of the rarest class and factor of the logits of LDAM.
        lade_weight, lade_lambda: .1 and .01 in LADE's runs on CIFAR-100, .005 and .1 on Places-LT, .05 and .5 on
            ImageNet-LT.
        ib_alpha, ib_warmup: factor of the IB loss, and share of the training with plain cross-entropy before it.
        nt_lambda: of the NT-BCE losses; 1 is plain BCE.
        focal_gamma: exponent of the focal loss; 0 is cross-entropy.
        trained_with: what else made the targets soft, such as {"mixup": 0.8, "cutmix": 1.0}; None if unknown.
        calibration: the fields of a `Calibration`, fitted after training.
        fingerprint: of the classifier that the settings were saved with; None if unknown, as in version 0.2.

    Example:
        >>> config = LongTailConfig(loss="bal_ce", class_counts=[90, 10], tau=0.5)
        >>> config.num_images, config["tau"]
        (100, 0.5)
    """

    loss: str = "bal_bce"
    class_counts: list[int] | None = None
    shot_counts: list[int] | None = None
    seen_counts: list[float] | None = None
    class_weights: list[float] | None = None
    num_train_images: int | None = None
    tau: float = 1.0
    test_prior: Literal["uniform"] | list[float] | None = "uniform"
    bias: Literal["bce", "ce"] = "bce"
    head_start: Literal["prior", "zero"] = "prior"
    label_smoothing: float = 0.0
    normalised_classifier: bool = False
    drw_start: float | None = None
    cb_beta: float = 0.9999
    ldam_max_margin: float = 0.5
    ldam_scale: float = 30.0
    lade_weight: float = 0.1
    lade_lambda: float = 0.01
    ib_alpha: float = 1000.0
    ib_warmup: float = 0.5
    nt_lambda: float = 2.0
    focal_gamma: float = 2.0
    trained_with: dict[str, float] | None = None
    calibration: dict | None = None
    fingerprint: list[float] | None = None

    def __post_init__(self):
        values = vars(self)  # the class is frozen, so that the attributes and the dictionary stay the same
        values |= {name: value.item() for name, value in values.items() if isinstance(value, np.generic)}  # for JSON
        for name, number in _NUMBERS.items():
            if values[name] is not None and not isinstance(values[name], str):
                values[name] = _listed(name, values[name], number)
        # `check_labels` knows what the test prior can be.
        check_types(values, LongTailConfig.__annotations__ | {"test_prior": Any})
        if self.calibration is not None:
            check_types(self.calibration, get_type_hints(Calibration))
        dict.update(self, values)
        self._check()

    def _reject_change(self, *names, **settings):
        name = next((name for name in (*names, *settings) if isinstance(name, str)), None)
        raise LiVTError(
            f"{name or 'a setting'} cannot be changed in a head's config, for its bias and prior would stay as they "
            "are; pass it to from_pretrained or balance, as in balance(model, tau=2).",
            argument=name,
        )

    # Not pop, by which transformers drops keys of its own.
    __setitem__ = __delitem__ = __ior__ = clear = setdefault = update = _reject_change

    def __reduce__(self):
        return LongTailConfig.from_dict, (dict(self),)  # dict's own way sets item by item

    @classmethod
    def names(cls) -> list[str]:
        return [field.name for field in fields(cls)]

    @classmethod
    def from_dict(cls, values: dict) -> "LongTailConfig":
        """Build a config from keywords or from a file."""
        unknown = sorted(values.keys() - set(cls.names()))
        if unknown:
            raise LiVTError(f"settings {unknown} of the head are not known; check the spelling, or upgrade livt-hf.")
        return cls(**values)

    @classmethod
    def merge(cls, saved: dict, changes: dict) -> dict:
        """Return saved settings with changes.

        New counts drop what belongs to the old ones; any change of the head drops the calibration. Whoever names
        counts or loss knows the classifier, so the fingerprint goes, too.
        """
        void = {"calibration"} if changes.keys() & set(cls.names()) else set()
        if changes.keys() & {"class_counts", "loss"}:
            void.add("fingerprint")
        if "class_counts" in changes:
            void |= {"num_train_images", "shot_counts", "seen_counts", "class_weights"}
        return {name: value for name, value in saved.items() if name not in void} | changes

    @property
    def definition(self) -> LossDefinition:
        return LOSSES[self.loss]

    @property
    def weighted_from(self) -> float | None:
        """Return the share of the training after which images are weighted by class; None if they never are."""
        if self.definition.class_weighted or (self.class_weights is not None and self.drw_start is None):
            return 0.0
        return self.drw_start

    @property
    def prior_counts(self) -> list[int] | list[float] | None:
        """Return the images of each class that training shows; the head learns the posterior under their prior."""
        return self.class_counts if self.seen_counts is None else self.seen_counts

    @property
    def num_images(self) -> int:
        """Return the number of training images."""
        return self.num_train_images or sum(self.class_counts)

    @property
    def objective(self) -> str | None:
        """Return what the deployment prior was chosen for; None if it is the test prior of the training."""
        return (self.calibration or {}).get("objective")

    @property
    def deployment_prior(self) -> Literal["uniform"] | list[float] | None:
        """Return the prior to serve the model under where no other is named: pi^t for its objective, or `test_prior`.

        `test_prior` itself is part of a balanced loss, and a trained model keeps it.
        """
        if self.objective is None:
            return self.test_prior
        prior = class_prior(self.class_counts, self.num_train_images)
        return tempered_prior(prior, self.calibration["exponents"][self.objective]).tolist()

    @property
    def trade_off(self) -> dict | None:
        """Return objective, exponent and trade-off curve for `results.json`, with the images they were chosen on."""
        found = self.calibration or {}
        if not found.get("exponents"):
            return None
        names = ("objective", "exponents", "curve", "num_images", "split")
        return {"exponent": found["exponents"].get(self.objective)} | {name: found.get(name) for name in names}

    def _check(self) -> None:
        """Raise an error for values that are wrong for any classes."""
        loss, smoothing = f"loss {self.loss!r}", self.label_smoothing
        known = f"choose one of {', '.join(sorted(LOSSES))}, or import the module that registers it (plugin)."
        _require(self.loss in LOSSES, "loss", f"{loss} is not known; {known}")
        for name, (holds, text) in _RANGES.items():
            _require(self[name] is None or holds(self[name]), name, f"{name} {self[name]} {text}.")
        text = f"label_smoothing {smoothing} cannot be used with {loss}, which needs hard labels; set it to 0."
        _require(not smoothing or self.definition.soft_labels, "label_smoothing", text)
        text = f"normalised_classifier gives logits between -1 and 1, from which {loss} learns nothing; take ldam."
        _require(not self.normalised_classifier or self.definition.scaled, "normalised_classifier", text)
        text = f"drw_start cannot be used with {loss}, which weights images by class already; leave it out."
        _require(self.drw_start is None or not self.definition.class_weighted, "drw_start", text)
        text = f"{self._weighted_by} cannot be used with {loss}, which is no mean over images; leave it out."
        _require(self.weighted_from is None or not self.definition.batch_statistic, self._weighted_by, text)

    @property
    def _weighted_by(self) -> str:
        """Return the name of the setting by which images are weighted by class."""
        if self.definition.class_weighted:
            return "loss"
        return "class_weights" if self.drw_start is None else "drw_start"

    def check_labels(self, num_labels: int, multi_label: bool) -> None:
        """Raise an error for settings that do not fit the labels of the model."""
        text = f"num_labels is {num_labels}; a classifier needs at least two classes."
        _require(num_labels >= 2, "num_labels", text)
        if multi_label:
            self._check_multi_label()
        if self.test_prior is not None:
            prior = as_prior(self.test_prior, num_labels, multi_label=multi_label, what="test_prior")
            text = "test_prior must lie strictly between 0 and 1 in every class; its log-odds are used."
            _require(not ((prior <= 0).any() or (prior >= 1).any()), "test_prior", text)
        if self.class_counts is not None:
            self._check_counts(num_labels, multi_label)
        if self.calibration is not None:
            offsets = self.calibration["offsets"]
            errors = self.calibration.get("offset_errors") or [1.0] * num_labels  # version 0.2 kept none
            numbers = [self.calibration["scale"], self.calibration["odds"], *offsets, *errors]
            fits = len(offsets) == len(errors) == num_labels and all(map(math.isfinite, numbers))
            text = f"the calibration is not one of {num_labels} classes, or not of finite numbers; calibrate again."
            _require(fits, "calibration", text)
            exponents = self.calibration.get("exponents") or {}
            text = f"objective {self.objective!r} has no exponent between 0 and 1; calibrate again."
            fits = all(map(_is_share, exponents.values())) and self.objective in (None, *exponents)
            _require(fits and (self.objective is None or self.class_counts is not None), "objective", text)

    def _check_multi_label(self) -> None:
        text = "bias='ce' compares the classes of one image; multi-label data needs bias='bce'."
        _require(self.bias != "ce", "bias", text)
        text = f"loss {self.loss!r} picks one class per image; multi-label data needs a sigmoid loss."
        _require(self.definition.activation != "softmax", "loss", text)
        text = f"{self._weighted_by} {self[self._weighted_by]!r} weights an image by its one label; leave it out."
        _require(self.weighted_from is None, self._weighted_by, text)
        text = "a sampler draws an image by its one label; multi-label data needs sampler natural."
        _require(self.seen_counts is None, "sampler", text)
        text = f"label_smoothing {self.label_smoothing} cannot be used with multi-label targets; set it to 0."
        _require(not self.label_smoothing, "label_smoothing", text)
        text = "test_prior='uniform' has no meaning where an image may have several labels; pass None or a list."
        _require(self.test_prior != "uniform", "test_prior", text)

    def _check_counts(self, num_labels: int, multi_label: bool) -> None:
        counts, images, total = self.class_counts, self.num_train_images, sum(self.class_counts)
        for name in ("class_counts", "seen_counts", "class_weights"):
            values = self[name] or counts
            text = f"{name} has {len(values)} entries for {num_labels} labels; give one per class."
            _require(len(values) == num_labels, name, text)
        empty = [label for label, count in enumerate(counts) if count <= 0]
        listed = str(empty[:10])[:-1] + (", ...]" if len(empty) > 10 else "]")
        text = f"classes {listed} have no training image, so their prior is undefined; drop them."
        _require(not empty, "class_counts", text)
        if multi_label:
            text = "multi-label priors are n_j / num_train_images; pass num_train_images."
            _require(images is not None, "num_train_images", text)
            label = counts.index(max(counts))
            text = f"class {label} has {counts[label]} of {images} images; a label of every image cannot be learned."
            _require(max(counts) < images, "num_train_images", text)
        else:
            text = f"num_train_images is {images} but class_counts sum to {total}; leave it out."
            _require(images in (None, total), "num_train_images", text)
        for name in ("seen_counts", "class_weights"):
            wrong = [value for value in self[name] or () if not (math.isfinite(value) and value > 0)]
            _require(not wrong, name, f"{name} holds {wrong[:1]}; every class needs a positive number.")
        seen = sum(self.seen_counts or counts)
        text = f"seen_counts sum to {seen:g}; an epoch draws as many images as class_counts have, {total}."
        _require(math.isclose(seen, total, rel_tol=1e-6), "seen_counts", text)


def check_labels(config: PreTrainedConfig, long_tail: LongTailConfig | None = None) -> None:
    """Raise an error for a config whose labels are not what its long-tail settings are made for."""
    if config.problem_type == "regression":
        message = "problem_type 'regression' has no classes; use a plain model of transformers for it."
        raise LiVTError(message, argument="problem_type")
    several = config.problem_type == "multi_label_classification"
    (long_tail or config.long_tail).check_labels(config.num_labels, several)


def _require(condition: bool, argument: str, message: str) -> None:
    if not condition:
        raise LiVTError(message, argument=argument)


def _listed(name: str, values, number: Callable) -> list:
    """Return one number per class as a list, from a list, an array or a tensor."""
    try:
        if isinstance(values, Mapping | Set):  # Counter(labels) has the order in which labels come
            raise TypeError
        return [number(value) for value in values]
    except LiVTError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        message = f"{name} cannot be {shorten(values)}; give a list of one number per class, in their order."
        raise LiVTError(message, argument=name) from error


def _whole(count) -> int:
    if not math.isfinite(count) or count != int(count):
        raise LiVTError(f"class_counts holds {count}; counts are whole numbers.", argument="class_counts")
    return int(count)


def _is_share(value: float) -> bool:
    return 0 <= value <= 1


_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "tau": (lambda tau: 0 <= tau < math.inf, "must be a finite number, 0 (no bias) or more"),
    "label_smoothing": (lambda share: 0 <= share < 1, "must be at least 0 and below 1"),
    "nt_lambda": (lambda tolerance: tolerance > 0, "must be positive; 1 is plain BCE"),
    "focal_gamma": (lambda gamma: 0 <= gamma < math.inf, "must be a finite number, 0 (cross-entropy) or more"),
    "cb_beta": (lambda beta: 0 < beta < 1, "must lie between 0 and 1"),
    "ib_warmup": (_is_share, "is a share of the training; it lies between 0 and 1"),
    "drw_start": (_is_share, "is a share of the training; it lies between 0 and 1"),
}
_NUMBERS = {"class_counts": _whole, "shot_counts": _whole} | dict.fromkeys(
    ("seen_counts", "class_weights", "test_prior", "fingerprint"), float
)
