"""Read the outputs of any framework from a file: a CSV, TSV, parquet or npz with a logit or probability per class."""

import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from livt_hf.data.readers.image_table import GROUP_NAMES, IMAGE_NAMES, LABEL_NAMES, match_column_name
from livt_hf.errors import LiVTError
from livt_hf.files import read_values
from livt_hf.long_tail.priors import read_numbers
from livt_hf.predictions.record import Predictions, are_distributions
from livt_hf.text import format_error

SUFFIXES = (".csv", ".tsv", ".parquet", ".npz")
_PREFIXES = ("", "logit_", "logits_", "score_", "prob_", "probability_")
_NO_CLASS = ("index", "split", "error", "unnamed: 0", "")  # numbers that are no scores
_TOP_K = re.compile(r"(index|label|class|top)_?\d+")
# What the readers of tables and archives raise for damaged ones.
_UNREADABLE = (OSError, ValueError, KeyError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error, pa.ArrowException)
_ALL_CLASSES = (
    "a number for every class is needed (timm's inference.py writes them with --topk 0 --results-separate-col, "
    "scikit-learn's predict_proba returns them)"
)


def is_logit_file(path: str) -> bool:
    """Return True if a path is a file that `read_logit_file` reads."""
    return Path(path).suffix.lower() in SUFFIXES and Path(path).is_file()


def read_logit_file(
    path: str | Path, class_counts: str | None = None, loss: str = "ce", values: str | None = None
) -> Predictions:
    """Read logits or probabilities of any framework as a prediction record.

    A table has one row per image and one column per class, named as the class or `logit_<class>`, `score_<class>`,
    `prob_<class>`; or one column of lists. Columns of files, labels (names or class ids), groups and splits are found
    by their names. An npz file has an array `logits`, `probabilities` or `predictions` (images, classes) and perhaps
    `labels` (or `label_ids`), `class_names` and further arrays with a value per image.

    Args:
        path: the file.
        class_counts: JSON or YAML file with the number of training images per class; by name, it names the classes.
        loss: what the model was trained with: "ce" for softmax, "bce" for sigmoid cross-entropy.
        values: "logits" or "probabilities"; by default numbers that sum to 1 in every row are probabilities.

    Returns:
        The record.
    """
    path = Path(path)
    counted = None if class_counts is None else read_values(Path(class_counts))
    names = [str(name) for name in counted] if isinstance(counted, dict) else None
    try:
        read = _read_npz(path) if path.suffix.lower() == ".npz" else _read_table(path, names)
    except LiVTError:
        raise
    except _UNREADABLE as error:
        raise LiVTError(f"{path} cannot be read ({format_error(error)}); give logits as a table or npz.") from error
    scores, kind, labels = read.pop("scores"), read.pop("kind", None), read.pop("label", None)
    num_classes = scores.shape[1]
    names = read.pop("names", None) or names or [str(number) for number in range(num_classes)]
    if len(names) != num_classes:
        message = f"{path} has {num_classes} numbers per image and class_counts {len(names)} classes; give one each."
        raise LiVTError(message, argument="class_counts")
    return Predictions.from_arrays(
        scores,
        None if labels is None else _class_ids(labels, names, path),
        class_names=names,
        class_counts=None if counted is None else _counts(class_counts, counted, names),
        loss=loss,
        probabilities=_are_probabilities(scores, values or kind, path),
        **read,
    )


def _counts(path: str | None, counted: Any, names: Sequence[str]) -> list[float]:
    if isinstance(counted, list) and len(counted) != len(names):
        message = f"{path} holds {len(counted)} class_counts for {len(names)} classes; give one per class."
        raise LiVTError(message, argument="class_counts")
    return read_numbers(str(path), names, "class counts")


def _are_probabilities(scores: np.ndarray, values: str | None, path: Path) -> bool:
    """Return True for probabilities, recognised by their sums where they are not declared."""
    if values is not None:
        return values == "probabilities"
    if np.isnan(scores).any() or ((scores < 0) | (scores > 1)).any():
        return False
    if are_distributions(scores):
        return True
    row = int(np.abs(scores.sum(1) - 1).argmax())
    raise LiVTError(
        f"{path} holds numbers between 0 and 1 that sum to {scores[row].sum():.4g} in row {row}; say by values "
        "whether they are logits or probabilities.",
        argument="values",
    )


def _read_npz(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    name = next((name for name in ("logits", "probabilities", "predictions") if name in arrays), None)
    if name is None or arrays[name].ndim != 2 or arrays[name].shape[1] < 2:
        shapes = {name: array.shape for name, array in arrays.items()}
        raise LiVTError(f"{path} has arrays {shapes}; it needs logits or probabilities (images, classes).")
    read: dict[str, Any] = {"scores": arrays.pop(name), "kind": None if name == "predictions" else name}
    if "class_names" in arrays:
        read["names"] = [str(one) for one in arrays.pop("class_names")]
    for key in ("labels", "label_ids", "label"):
        if key in arrays:
            read["label"] = arrays.pop(key)
    images = len(read["scores"])
    return read | {key: value for key, value in arrays.items() if value.ndim == 1 and len(value) == images}


def _read_table(path: Path, classes: Sequence[str] | None) -> dict[str, Any]:
    """Read the columns of a table; `classes` are the names of the classes, where they are known."""
    if path.suffix.lower() == ".parquet":
        table = pq.read_table(path, partitioning=None)
    else:
        parsing = pa.csv.ParseOptions(delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        table = pa.csv.read_csv(path, parse_options=parsing)
    twice = [name for name, count in Counter(table.column_names).items() if count > 1]
    if twice:
        raise LiVTError(f"{path} has two columns called {twice[0]!r}; rename one.", argument="predictions")
    read: dict[str, Any] = {}
    free = list(table.column_names)
    found = {"path": IMAGE_NAMES, "label": LABEL_NAMES, "group": GROUP_NAMES, "split": ("split",)}
    for key, known in found.items():
        name = match_column_name((name for name in free if name not in (classes or ())), known)
        if name is not None:
            read[key] = table[name].combine_chunks()
            free.remove(name)
    lists = [name for name in free if _is_list(table.schema.field(name).type)]
    if len(lists) == 1:
        rows = table[lists[0]].combine_chunks()
        widths = pc.unique(pc.list_value_length(rows)).to_pylist()
        if len(widths) > 1 or None in widths:
            raise ValueError(f"the lists of {lists[0]} are not of one length")
        scores = rows.flatten().to_numpy(zero_copy_only=False).reshape(len(rows), -1)
        return read | {"scores": scores, "kind": _kind(lists[0])}
    prefix, chosen = _class_columns(table, free, classes, path)
    scores = np.column_stack([table[name].to_numpy().astype(np.float64) for name in chosen])
    return read | {"scores": scores, "names": [name.removeprefix(prefix) for name in chosen], "kind": _kind(prefix)}


def _is_list(kind: pa.DataType) -> bool:
    return (pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind)) and pa.types.is_floating(kind.value_type)


def _kind(name: str) -> str | None:
    """Return what a column says of its numbers by its name."""
    kinds = {"logit": "logits", "prob": "probabilities"}
    return next((kind for word, kind in kinds.items() if name.startswith(word)), None)


def _class_columns(
    table: pa.Table, free: Sequence[str], classes: Sequence[str] | None, path: Path
) -> tuple[str, list[str]]:
    """Return the columns of the classes, and the prefix of their names."""
    for prefix in _PREFIXES if classes is not None else ():
        names = [prefix + name for name in classes or ()]
        if set(names) <= set(table.column_names):
            return prefix, names
    shown = next((name for name in table.column_names if _TOP_K.fullmatch(name)), None)
    numbers = [name for name in free if _is_number(table.schema.field(name).type) and name.lower() not in _NO_CLASS]
    for prefix in _PREFIXES[1:]:
        named = [name for name in numbers if name.startswith(prefix)]
        if len(named) > 1:
            numbers = named
            break
    else:
        prefix = ""
    if shown is not None or len(numbers) < 2:
        held = f"the best few classes ({shown})" if shown else f"{len(numbers) or 'no'} column of numbers"
        raise LiVTError(f"{path} holds {held}; {_ALL_CLASSES}.", argument="predictions")
    return prefix, numbers


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_null(kind)


def _class_ids(labels: Any, names: Sequence[str], path: Path) -> np.ndarray:
    """Return labels as class ids, from names of classes or ids; rows of 0 and 1 stay as they are."""
    if isinstance(labels, np.ndarray) and (labels.ndim == 2 or labels.dtype.kind in "iu"):
        return labels
    labels, ids = np.asarray(labels), {name: number for number, name in enumerate(names)}
    texts = labels.astype(str).tolist()
    unknown = next((text for text in texts if text not in ids), None)
    if unknown is None:
        return np.array([ids[text] for text in texts], dtype=np.int64)
    if labels.dtype.kind in "iu":
        return labels
    raise LiVTError(f"{path} has the label {unknown!r}; the classes are {', '.join(names[:5])}...", argument="labels")
