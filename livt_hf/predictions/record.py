"""The prediction record: an Arrow table with one row per image, and a folder of parquet parts on disk."""

import dataclasses
import json
import logging
import tempfile
from collections.abc import Iterable, Iterator, Sequence
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
from livt_hf.predictions.rules import ARGMAX, PER_LABEL, TEST_PRIOR, UNIFORM, DecisionRule, deployment_label
from livt_hf.text import format_error

logger = logging.getLogger(__name__)

LOGITS, LABEL, MODEL = RESERVED = ("logits", "label", "model")  # columns that a record has itself
FOLDER = "predictions"  # of a record in a run or a report
SUM_TOLERANCE = 0.01  # by which rounded probabilities of an image may miss the sum 1
_SMALLEST = {"softmax": 1e-12, "sigmoid": 1e-7}  # what stands for a probability that was rounded to 0
_METADATA = b"livt_hf"
_PART_SIZE = 2**24  # logits in a part: 64 MiB
_BLOCK = 2**20  # logits looked at in one piece
_IN_MEMORY = 2**30  # bytes of a folder that is read as a whole


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

    def thresholds(self, rule: DecisionRule | None = None, model: int = 0) -> Tensor:
        """Return the score from which on a rule gives each label, where an image may have several. (C,)

        The calibration chose them under the model's own prior; under any other one they are 0.5.
        """
        tail, head = self.models[model].long_tail, self.heads[model]
        is_own = (rule or self.default_rule).prior == "model" and head is not None and head.no_posterior is None
        fitted = tail.calibration if is_own else None
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
        models = tuple(
            ModelInfo(model["name"], model["long_tail"] and LongTailConfig.from_dict(model["long_tail"]))
            for model in values["models"]
        )
        rule = DecisionRule(**values["default_rule"])
        if isinstance(rule.prior, list):
            rule = dataclasses.replace(rule, prior=tuple(rule.prior))
        precision = values.get("precision", FLOAT32)
        return cls(tuple(values["class_names"]), models, values["multi_label"], rule, precision)


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
            logits = probabilities_to_logits(logits, activation)
        values = check_logits(logits, len(class_names))
        if not probabilities and len(values) and are_distributions(values):
            logger.warning("Each row of logits sums to 1; if they are probabilities, pass probabilities=True.")
        arrays = {name: check_column(name, column, len(values)) for name, column in columns.items()}
        several = False
        if labels is not None:
            labels = check_labels(labels, values.shape)
            several = labels.ndim == 2
            arrays[LABEL] = pa.array([np.flatnonzero(row) for row in labels] if several else labels)
        if class_counts is not None and len(class_counts) != len(class_names):
            message = f"class_counts has {len(class_counts)} numbers for {len(class_names)} classes; give one each."
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
        models = list(first.models)
        for part in parts[1:]:
            if (part.info.class_names, part.info.multi_label) != (first.class_names, first.multi_label):
                message = "records of other classes cannot be joined; pass records of models of the same classes."
                raise LiVTError(message, argument="parts")
            models += [model for model in part.info.models if model not in models]
        info, tables = first, [part.table for part in parts]
        if len(models) > 1:
            info = PredictionsInfo(first.class_names, tuple(models), first.multi_label, precision=first.precision)
            tables = [part._numbered(models) for part in parts]
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

    def thresholds(self, rule: DecisionRule | None = None) -> Tensor:
        """Return the scores from which on a rule gives labels, where an image may have several. (N, C)"""
        every = [self.info.thresholds(rule, model) for model in range(len(self.info.models))]
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


def are_distributions(values: np.ndarray) -> bool:
    """Return True if the numbers of each image are probabilities that sum to 1."""
    return bool((values >= 0).all() and (np.abs(values.sum(1) - 1) <= SUM_TOLERANCE).all())


def probabilities_to_logits(values: np.ndarray, activation: str) -> np.ndarray:
    """Return logits whose softmax or sigmoid gives probabilities (N, C), or raise an error if they are none."""
    values = np.asarray(values, dtype=np.float64)
    wrong = np.flatnonzero(~((values >= 0) & (values <= 1)).all(1))  # written this way so that NaN fails the check
    if len(wrong):
        row = values[wrong[0]]
        message = f"row {wrong[0]} holds {row[~((row >= 0) & (row <= 1))][0]:g}; probabilities lie between 0 and 1."
        raise LiVTError(message, argument="probabilities")
    least = _SMALLEST[activation]
    if activation == "sigmoid":
        values = values.clip(least, 1 - least)
        return np.log(values) - np.log1p(-values)
    sums = values.sum(1)
    wrong = np.flatnonzero(np.abs(sums - 1) > SUM_TOLERANCE)
    if len(wrong):
        raise LiVTError(
            f"the probabilities of row {wrong[0]} sum to {sums[wrong[0]]:.4g}; those of one label per image sum to 1, "
            "those of a sigmoid need loss bce.",
            argument="probabilities",
        )
    return np.log(values.clip(least))


def _as_array(values) -> np.ndarray:
    return np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)


def check_logits(logits, num_classes: int) -> np.ndarray:
    """Return logits of any framework as an array of float32 (N, C), or raise an error."""
    try:
        # Not texts, not complex numbers.
        values = _as_array(logits).astype(np.float32, casting="same_kind", copy=False)
    except (TypeError, ValueError) as error:
        raise LiVTError("the logits are not numbers; pass an array (images, classes).", argument="logits") from error
    if values.ndim != 2 or values.shape[1] != num_classes:
        message = f"the logits have shape {values.shape} for {num_classes} class names; pass (images, {num_classes})."
        raise LiVTError(message, argument="logits")
    wrong = np.flatnonzero(np.isnan(values).any(1) | np.isposinf(values).any(1))
    if len(wrong):
        message = f"the logits of {len(wrong)} images are NaN or infinite, first of row {wrong[0]}; leave them out."
        raise LiVTError(message, argument="logits")
    return values


def check_labels(labels, shape: tuple[int, int]) -> np.ndarray:
    """Return class ids (N,), or rows of 0 and 1 (N, C), for logits of a shape, or raise an error."""
    labels = _as_array(labels)
    if labels.shape not in (shape, shape[:1]) or not (np.issubdtype(labels.dtype, np.integer) or labels.ndim == 2):
        raise LiVTError(
            f"the labels are {labels.dtype} of shape {labels.shape}; pass {shape[0]} class ids, or 0 and 1 for each "
            "class.",
            argument="labels",
        )
    allowed = (labels == 0) | (labels == 1) if labels.ndim == 2 else (labels >= 0) & (labels < shape[1])
    if not allowed.all():
        message = f"the labels hold {labels[~allowed][0]}; the classes are 0 to {shape[1] - 1}."
        raise LiVTError(message, argument="labels")
    return labels


def check_column(name: str, values, rows: int) -> pa.Array:
    """Return one value per image as a column of a record, or raise an error."""
    if name in RESERVED:
        raise LiVTError(f"a column cannot be called {name!r}, which the record has already.", argument=name)
    try:
        column = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
    except (pa.ArrowException, TypeError) as error:
        raise LiVTError(f"column {name!r} cannot be stored: {format_error(error)}.", argument=name) from error
    if len(column) != rows:
        raise LiVTError(f"column {name!r} has {len(column)} values for {rows} images; pass one each.", argument=name)
    return column


Source = Predictions | str | Path  # a record, or its folder, of which one part is read at a time


def part_rows(num_classes: int) -> int:
    """Return how many images fill a part of a record."""
    return max(1, _PART_SIZE // num_classes)


def as_lists(logits: np.ndarray | Tensor) -> pa.Array:
    """Return logits (N, C) as a column."""
    values = np.ascontiguousarray(logits, dtype=np.float32)
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


def write_part(folder: str | Path, part: Predictions, start: int, total: int) -> None:
    """Write the rows of a record from `start` on, of `total` in all, unless they are there."""
    if read_matching_part(folder, start, part.table, part.info) is None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        _write_file(part_path(folder, start), part, start, total)


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
    file = part_path(folder, start)
    if not file.exists():
        return None
    part = _read_part(file)[0]
    known, wanted = (
        table.select([name for name in table.column_names if name not in ("error", LOGITS)])
        for table in (part.table, images)
    )
    is_same = part.info == info and known.equals(wanted)
    if is_same and LOGITS in images.column_names:  # those of a file that cannot be read are NaN
        is_same = np.array_equal(part.logits, Predictions(images, info).logits, equal_nan=True)
    if not is_same:
        raise LiVTError(f"{folder} holds another record; choose another folder.", argument="path")
    return part


def part_path(folder: str | Path, start: int) -> Path:
    """Return the file of the part that begins with a row; names sort as rows do."""
    return Path(folder, f"part-{start:012d}.parquet")


def read_parts(source: Source) -> Iterator[Predictions]:
    """Yield the parts of a record one by one, in order: of a folder, or the one that is in memory or in a file."""
    if isinstance(source, Predictions):
        yield source
        return
    path = Path(source)
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


def open_source(folder: Path) -> Source:
    """Return the record of a folder, or the folder itself where it is too large for memory."""
    size = sum(file.stat().st_size for file in folder.glob("part-*.parquet"))
    return Predictions.load(folder) if size <= _IN_MEMORY else folder


def iterate_blocks(source: Source, rows: np.ndarray | None = None) -> Iterator[Predictions]:
    """Yield a record block by block, all of it or the rows of a mask."""
    start = 0
    for part in read_parts(source):
        for block in part.blocks():
            yield block if rows is None else block.take(rows[start : start + len(block)])
            start += len(block)


def read_groups(source: Source) -> np.ndarray | None:
    """Return the group of each image as a number, or None where there is none; one that is empty is its own. (N,)"""
    parts = [block.column("group") for block in iterate_blocks(source)]
    if not parts or any(part is None for part in parts):
        return None
    codes = pa.array(np.concatenate(parts), from_pandas=True).dictionary_encode().indices.fill_null(-1).to_numpy()
    return np.where(codes >= 0, codes, len(codes) + np.arange(len(codes)))


def stack_on_disk(rows: Iterable[Tensor], columns: int) -> Tensor:
    """Stack rows of float32 numbers (N, columns) in a temporary file, which goes away with the tensor."""
    with tempfile.TemporaryFile() as file:
        for row in rows:
            file.write(row.detach().cpu().float().numpy().tobytes())
        file.flush()
        number = file.tell() // (4 * columns)
        if number == 0:  # an empty file cannot be mapped
            return torch.zeros(0, columns)
        return torch.from_numpy(np.memmap(file, np.float32, "r+", shape=(number, columns)))
