"""The prediction record: an Arrow table with one row per image, and a folder of parquet parts on disk."""

import dataclasses
import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from livt_hf.errors import LiVTError
from livt_hf.files import replacing
from livt_hf.long_tail.balance import BalancedClassifier
from livt_hf.long_tail.config import LongTailConfig
from livt_hf.long_tail.head import UNKNOWN_PRIOR, LongTailHead
from livt_hf.long_tail.priors import Prior, class_prior
from livt_hf.precision import FLOAT32
from livt_hf.predictions.arrays import (
    are_distributions,
    check_column,
    check_labels,
    check_logits,
    probabilities_to_logits,
)
from livt_hf.predictions.rules import ARGMAX, PER_LABEL, TEST_PRIOR, UNIFORM, DecisionRule, deployment_label
from livt_hf.text import format_error

logger = logging.getLogger(__name__)

LOGITS, LABEL, MODEL = "logits", "label", "model"
FOLDER = "predictions"  # of a record in a run or a report
_METADATA = b"livt_hf"
_PART_SIZE = 2**24  # logits in a part: 64 MiB
_BLOCK = 2**20  # logits looked at in one piece


@dataclass(frozen=True)
class ModelInfo:
    """Name of a model (its folder or Hub id) and the settings of its head; None is what is not known."""

    name: str | None = None
    long_tail: LongTailConfig | None = None


@dataclass(frozen=True)
class PredictionsInfo:
    """What holds for all images of a record.

    Out-of-fold records of a cross-validation have several models; the column "model" numbers them. The default rule
    is the one by which the predictions are judged and served where no other is asked for. The precision is that in
    which the model computed, None where it is not known.
    """

    class_names: tuple[str, ...]
    models: tuple[ModelInfo, ...] = (ModelInfo(),)
    multi_label: bool = False
    default_rule: DecisionRule = None  # type: ignore[assignment]  # set below where it is not given
    precision: str | None = FLOAT32

    def __post_init__(self):
        for model in self.models:
            if model.long_tail is not None:
                model.long_tail.check_labels(self.num_classes, self.multi_label)
        if self.default_rule is None:
            object.__setattr__(self, "default_rule", self.rules[0])

    @classmethod
    def from_model(cls, model: PreTrainedModel, name: str | None = None) -> "PredictionsInfo":
        """Describe the predictions of a model, under its own name or another one."""
        config = model.config
        names = tuple(config.id2label[label] for label in range(config.num_labels))
        long_tail = config.long_tail if isinstance(model, BalancedClassifier) else None
        several = config.problem_type == "multi_label_classification"
        return cls(names, (ModelInfo(name or config.name_or_path or None, long_tail),), several)

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def model(self) -> str | None:
        """Return the name of the model; None where there are several."""
        return self.models[0].name if len(self.models) == 1 else None

    @property
    def long_tail(self) -> LongTailConfig | None:
        """Return the settings of the model's head; None where there are several models."""
        return self.models[0].long_tail if len(self.models) == 1 else None

    @cached_property
    def heads(self) -> list[LongTailHead | None]:
        """Return the heads of the models, which turn logits into probabilities."""
        problem = "multi_label_classification" if self.multi_label else "single_label_classification"
        config = dict(num_labels=self.num_classes, problem_type=problem)
        tails = [model.long_tail for model in self.models]
        return [None if tail is None else LongTailHead(PreTrainedConfig(**config, long_tail=tail)) for tail in tails]

    @property
    def no_posterior(self) -> str | None:
        """Return why there are no class probabilities, or None where there are."""
        found = (UNKNOWN_PRIOR if head is None else head.no_posterior for head in self.heads)
        return next(filter(None, found), None)

    @property
    def is_calibrated(self) -> bool:
        return self.no_posterior is None and all(model.long_tail.calibration is not None for model in self.models)

    @property
    def uncalibrated_because(self) -> str | None:
        """Return what made posteriors unsure that no calibration has corrected; None where nothing is known."""
        if self.no_posterior is not None or self.is_calibrated:
            return None
        settings = next(model.long_tail for model in self.models if model.long_tail.calibration is None)
        softened = (settings.trained_with or {}) | {"label_smoothing": settings.label_smoothing}
        named = ", ".join(f"{name} {value:g}" for name, value in softened.items() if value)
        if not named:
            return None
        return f"it was trained with {named}, which leaves its posteriors unsure, and is not calibrated"

    @property
    def rules(self) -> list[DecisionRule]:
        """Return the standard rules, the default first: of several models those that all of them have."""
        first, *others = ([*self._rules_of(model, head)] for model, head in zip(self.models, self.heads, strict=True))
        return [rule for rule in first if all(rule in rules for rules in others)]

    def _rules_of(self, model: ModelInfo, head: LongTailHead | None) -> Iterator[DecisionRule]:
        """Yield the posterior under the model's own test prior once it is calibrated, the paper's rule, the uniform.

        Until a model is calibrated the paper's rule, which needs no calibrated posterior, comes first. Where an image
        may have several labels there is one rule, which decides on each label by itself.
        """
        known = head is not None and head.no_posterior is None
        test_prior = model.long_tail.deployment_prior if known else None
        if self.multi_label:
            named = "training prior" if test_prior is None else "the model's test prior"
            label = f"posterior of each label, {named}" if known else "sigmoid of each logit"
            yield DecisionRule(PER_LABEL, label, "model" if known else None)
            return
        calibrated, own = known and model.long_tail.calibration is not None, test_prior not in (None, "uniform")
        if calibrated and own:
            yield DecisionRule(TEST_PRIOR, deployment_label(model.long_tail.objective), "model")
        elif calibrated:
            yield DecisionRule.named(UNIFORM, "uniform")
        yield DecisionRule.named(ARGMAX)
        if known and (own or not calibrated):
            yield DecisionRule.named(UNIFORM, "uniform")

    def thresholds(self, model: int = 0) -> Tensor:
        """Return the score from which on each label is given, where an image may have several. (C,)"""
        tail, head = self.models[model].long_tail, self.heads[model]
        fitted = tail.calibration if head is not None and head.no_posterior is None else None
        return torch.tensor((fitted or {}).get("thresholds") or [0.5] * self.num_classes, dtype=torch.float64)

    def scores(self, logits: Tensor, rule: DecisionRule, model: int = 0) -> Tensor:
        """Return what a rule says of every class: posteriors, or the softmax (several labels: sigmoid) of logits."""
        if rule.prior is None:
            return logits.sigmoid() if self.multi_label else logits.softmax(-1)
        head = self.heads[model]
        if head is None or head.no_posterior is not None:
            raise LiVTError(
                f"{self.models[model].name or 'the model'} gives no probabilities under a prior "
                f"({self.no_posterior}); without one it ranks by its logits.",
                argument="prior",
            )
        prior: Prior = None if rule.prior == "model" else rule.prior
        if rule.prior == "training":
            prior = class_prior(head.settings.class_counts, head.settings.num_images)
        if head.logit_bias.device != logits.device:
            head.to(logits.device)
        return head.posterior(logits, prior)

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "PredictionsInfo":
        tails = [model["long_tail"] for model in values["models"]]
        models = tuple(
            ModelInfo(model["name"], None if tail is None else LongTailConfig.from_dict(tail))
            for model, tail in zip(values["models"], tails, strict=True)
        )
        rule = values["default_rule"]
        prior = tuple(rule["prior"]) if isinstance(rule["prior"], list) else rule["prior"]
        default = DecisionRule(rule["name"], rule["label"], prior)
        precision = values.get("precision", FLOAT32)
        return cls(tuple(values["class_names"]), models, values["multi_label"], default, precision)


@dataclass(frozen=True)
class Predictions:
    """Logits of a set of images with everything needed to decide, measure and report.

    Args:
        table: one row per image. "logits" is there always; "path", "label" (a class id, or a list of them), "group",
            "split" and any other column where they are known.
        info: class names, long-tail settings of the model, its name, and the default decision rule.

    Example:
        >>> predictions = Predictions.from_arrays([[2.0, 1.0], [0.0, 3.0]], [0, 1], class_names=["cat", "dog"],
        ...                                       class_counts=[90, 10])
        >>> predictions.posterior("uniform").argmax(1).tolist()
        [1, 1]
    """

    table: pa.Table
    info: PredictionsInfo

    @classmethod
    def from_arrays(
        cls,
        logits,
        labels=None,
        *,
        class_names: Sequence[str],
        class_counts: Sequence[int] | None = None,
        loss: str = "ce",
        num_train_images: int | None = None,
        probabilities: bool = False,
        **columns,
    ) -> "Predictions":
        """Build a record from the logits of any framework.

        Args:
            logits: numbers of shape (images, classes).
            labels: class ids, or rows of 0 and 1 where an image may have several labels.
            class_names: names in the order of the logits.
            class_counts: training images of each class; without them there are no probabilities under a prior.
            loss: what the model was trained with: "ce" for softmax, "bce" for sigmoid cross-entropy, or another name
                of `livt_hf.losses`.
            num_train_images: number of training images, where an image may have several labels.
            probabilities: the numbers are not logits but their softmax or, by the loss, sigmoid.
            **columns: further columns of one value per image, such as `path` or `group`.

        Returns:
            The record.
        """
        if probabilities:
            activation = LongTailConfig(loss=loss).definition.activation  # raises an error for an unknown loss
            logits = probabilities_to_logits(np.asarray(logits), activation)
        values = check_logits(logits, len(class_names))
        if not probabilities and len(values) and are_distributions(values):
            logger.warning("Each row of logits sums to 1; if they are probabilities, pass probabilities=True.")
        arrays = {name: check_column(name, column, len(values)) for name, column in columns.items()}
        if labels is not None:
            labels = check_labels(labels, values.shape)
            arrays[LABEL] = pa.array([np.flatnonzero(row) for row in labels] if labels.ndim == 2 else labels)
        several = labels is not None and labels.ndim == 2
        if class_counts is not None and len(class_counts) != len(class_names):
            message = (
                f"class_counts has {len(class_counts)} numbers for {len(class_names)} classes; give one per class."
            )
            raise LiVTError(message, argument="class_counts")
        long_tail = LongTailConfig(
            loss=loss,
            class_counts=class_counts,
            num_train_images=num_train_images,
            test_prior=None if several else "uniform",
        )
        info = PredictionsInfo(tuple(map(str, class_names)), (ModelInfo(None, long_tail),), several, precision=None)
        return cls(pa.table(arrays | {LOGITS: as_lists(values)}), info)

    @classmethod
    def load(cls, path: str | Path) -> "Predictions":
        """Read a record from its folder, or one of its parts from a file.

        Args:
            path: what `save` wrote.

        Returns:
            The record, all of it in memory; `read_parts` reads one part at a time.
        """
        return cls.concatenate(list(read_parts(path)))

    @classmethod
    def concatenate(cls, parts: Sequence["Predictions"]) -> "Predictions":
        """Join records of the same classes, one after another; those of several models keep their models.

        Args:
            parts: at least one record.

        Returns:
            The record of all images. Its default rule is the first of the first part that all models have.
        """
        if not parts:
            raise LiVTError("there is no record to join; pass at least one.", argument="parts")
        first = parts[0].info
        for part in parts[1:]:
            if (part.info.class_names, part.info.multi_label) != (first.class_names, first.multi_label):
                message = "records of other classes cannot be joined; pass records of models of the same classes."
                raise LiVTError(message, argument="parts")
        models: list[ModelInfo] = []
        for model in itertools.chain(*(part.info.models for part in parts)):
            if model not in models:
                models.append(model)
        info = first
        if len(models) > 1:
            info = PredictionsInfo(first.class_names, tuple(models), first.multi_label, precision=first.precision)
        tables = [part._numbered(models) if len(models) > 1 else part.table for part in parts]
        return cls(pa.concat_tables(tables, promote_options="default"), info)

    def _numbered(self, models: list[ModelInfo]) -> pa.Table:
        """Return the table with a column of the models' places in a longer list."""
        numbers = np.array([models.index(model) for model in self.info.models])[self.model_index]
        table = self.table.drop_columns(MODEL) if MODEL in self.table.column_names else self.table
        return table.append_column(MODEL, pa.array(numbers, pa.int32()))

    def save(self, path: str | Path, rows_per_part: int | None = None) -> Path:
        """Write the record as a folder of parquet parts.

        Each part is written as a whole or not at all. Parts that are there already, from a run that was killed, are
        kept.

        Args:
            path: the folder.
            rows_per_part: images in a part; by default as many as fill 64 MiB.

        Returns:
            The folder.
        """
        rows = rows_per_part or part_rows(self.info.num_classes)
        for start in range(0, max(1, len(self)), rows):
            write_part(path, Predictions(self.table.slice(start, rows), self.info), start, len(self))
        return Path(path)

    def __len__(self) -> int:
        return len(self.table)

    @property
    def class_names(self) -> list[str]:
        return list(self.info.class_names)

    @cached_property
    def logits(self) -> np.ndarray:
        """Return the logits as float32. (N, C)"""
        values = self.table[LOGITS].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        return values.reshape(-1, self.info.num_classes)

    @cached_property
    def labels(self) -> np.ndarray | None:
        """Return class ids (N,), or rows of 0 and 1 (N, C) where an image may have several labels; None without any.

        An image without a label has -1.
        """
        if LABEL not in self.table.column_names:
            return None
        column = self.table[LABEL].combine_chunks()
        if not self.info.multi_label:
            return np.array(column.cast(pa.int64()).fill_null(-1))
        hot = np.zeros((len(self), self.info.num_classes), dtype=np.uint8)
        lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        hot[np.repeat(np.arange(len(self)), lengths), column.flatten().to_numpy(zero_copy_only=False)] = 1
        return hot

    @property
    def model_index(self) -> np.ndarray:
        """Return which of `info.models` predicted each image. (N,)"""
        if MODEL not in self.table.column_names:
            return np.zeros(len(self), dtype=np.int64)
        return self.table[MODEL].to_numpy()

    @property
    def thresholds(self) -> Tensor:
        """Return the scores from which on labels are given, where an image may have several. (N, C)"""
        every = [self.info.thresholds(model) for model in range(len(self.info.models))]
        return torch.stack(every)[torch.from_numpy(self.model_index.copy())]

    def column(self, name: str) -> np.ndarray | None:
        """Return a column as an array, or None where the record has none of that name."""
        return self.table[name].to_numpy() if name in self.table.column_names else None

    def with_column(self, name: str, values) -> "Predictions":
        """Return the record with a further column of one value per image."""
        if name in self.table.column_names:
            raise LiVTError(f"the record has a column {name!r} already; choose another name.", argument=name)
        column = check_column(name, values, len(self))
        return dataclasses.replace(self, table=self.table.append_column(name, column))

    def take(self, rows) -> "Predictions":
        """Return the record of some images: their numbers, or a mask."""
        rows = np.asarray(rows)
        chosen = self.table.filter if rows.dtype == bool else self.table.take
        return dataclasses.replace(self, table=chosen(pa.array(rows)))

    def blocks(self) -> Iterator["Predictions"]:
        """Yield the images a few at a time, so that what is computed from them needs little memory."""
        rows = max(1, _BLOCK // self.info.num_classes)
        for start in range(0, len(self), rows):
            yield dataclasses.replace(self, table=self.table.slice(start, rows))

    def scores(self, rule: DecisionRule | None = None) -> Tensor:
        """Return what a rule says of every class, by default the default rule. (N, C)

        Posterior probabilities, or the softmax of the logits (the sigmoid, where an image may have several labels) for
        a rule without a prior.
        """
        rule, index = rule or self.info.default_rule, torch.from_numpy(self.model_index.copy())
        scores = torch.empty(len(self), self.info.num_classes)
        for model in index.unique().tolist():
            rows = index == model
            scores[rows] = self.info.scores(torch.from_numpy(self.logits[rows.numpy()]), rule, model)
        return scores

    def posterior(self, prior: Prior | str = None) -> np.ndarray:
        """Return class probabilities under a prior.

        Args:
            prior: "uniform", "training", one probability per class, or None for the prior that the model is
                configured for.

        Returns:
            Probabilities of shape (images, classes).
        """
        if prior is not None and not isinstance(prior, str):
            prior = tuple(float(value) for value in prior)
        return self.scores(DecisionRule("posterior", "posterior", "model" if prior is None else prior)).numpy()


def part_rows(num_classes: int) -> int:
    """Return how many images fill a part of a record."""
    return max(1, _PART_SIZE // num_classes)


def as_lists(logits: np.ndarray | Tensor) -> pa.Array:
    """Return logits (N, C) as a column."""
    values = np.ascontiguousarray(logits, dtype=np.float32)
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


def write_part(folder: str | Path, part: Predictions, start: int, total: int) -> None:
    """Write the rows of a record from `start` on, of `total` in all, unless they are there."""
    folder, path = Path(folder), part_path(folder, start)
    if path.exists():
        if _read_part(path)[0] == part:
            return
        raise LiVTError(f"{folder} holds another record; choose another folder.", argument="path")
    folder.mkdir(parents=True, exist_ok=True)
    _write_file(path, part, start, total)


def _write_file(path: Path, part: Predictions, start: int, total: int) -> None:
    metadata = json.dumps({"start": start, "total": total, "info": part.info.to_json()})
    with replacing(path) as writing:
        pq.write_table(part.table.replace_schema_metadata({_METADATA: metadata}), writing, compression="zstd")


def replace_info(folder: Path, info: PredictionsInfo) -> None:
    """Replace what a record says of its model, after a calibration for instance; the logits stay."""
    for file in sorted(folder.glob("part-*.parquet")):
        part, start, total = _read_part(file)
        _write_file(file, Predictions(part.table, info), start, total)


def read_matching_part(folder: str | Path, start: int, images: pa.Table, info: PredictionsInfo) -> Predictions | None:
    """Return a part that is there, if it is of these images and this model, or None where there is none."""
    file = part_path(Path(folder), start)
    if not file.exists():
        return None
    part = _read_part(file)[0]
    if part.info != info or not part.table.drop_columns(["error", LOGITS]).equals(images):
        raise LiVTError(f"{folder} holds another record; choose another folder.", argument="path")
    return part


def part_path(folder: Path, start: int) -> Path:
    """Return the file of the part that begins with a row; names sort as rows do."""
    return Path(folder, f"part-{start:012d}.parquet")


def read_parts(path: str | Path) -> Iterator[Predictions]:
    """Yield the parts of a record one by one, in order."""
    path = Path(path)
    if path.is_file():
        yield _read_part(path)[0]
        return
    files = sorted(path.glob("part-*.parquet"))
    if not files:
        message = f"{path} is no prediction record: there is no such file, or no part-*.parquet in the folder."
        raise LiVTError(message, argument="path")
    row = 0
    for file in files:
        part, start, total = _read_part(file)
        if start != row:
            raise LiVTError(f"{path} lacks rows from {row} on; predict again to complete it.", argument="path")
        row += len(part)
        yield part
    if row != total:
        raise LiVTError(f"{path} has {row} of {total} rows; predict again to complete it.", argument="path")


def _read_part(file: Path) -> tuple[Predictions, int, int]:
    """Return a part, its first row in the whole record, and the rows of the whole record."""
    try:
        table = pq.read_table(file, partitioning=None)
        metadata = (table.schema.metadata or {}).get(_METADATA)
        if metadata is None:
            raise ValueError("it was not written by livt_hf")
        values = json.loads(metadata)
        part = Predictions(table.replace_schema_metadata(None), PredictionsInfo.from_json(values["info"]))
        _check_part(part)
        return part, int(values["start"]), int(values["total"])
    # What damaged bytes and foreign files can lead to, a LiVTError (which is a ValueError) of the settings included.
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, pa.ArrowException) as error:
        message = f"{file} is damaged or no prediction record ({format_error(error)}); predict again."
        raise LiVTError(message, argument="path") from error


def _check_part(part: Predictions) -> None:
    """Raise ValueError where columns do not fit what a part says of its classes and models."""
    kind, classes = part.table.schema.field(LOGITS).type, part.info.num_classes
    if kind != pa.list_(pa.float32(), classes):
        raise ValueError(f"logits are {kind} for {classes} classes")
    if part.labels is not None and len(part) and not -1 <= part.labels.min() <= part.labels.max() < classes:
        raise ValueError("labels are no classes")
    index = part.model_index
    if len(index) and not 0 <= index.min() <= index.max() < len(part.info.models):
        raise ValueError("models are not numbered")
