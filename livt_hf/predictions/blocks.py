"""Records block by block: what is computed from a record of any length needs the memory of one part."""

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from livt_hf.predictions.record import Predictions, read_parts
from livt_hf.predictions.rules import DecisionRule

Source = Predictions | str | Path  # a record, or its folder, of which one part is read at a time
_IN_MEMORY = 2**30  # bytes of a folder that is read as a whole


def open_source(folder: Path) -> Source:
    """Return the record of a folder, or the folder itself where it is too large for memory."""
    size = sum(file.stat().st_size for file in folder.glob("part-*.parquet"))
    return Predictions.load(folder) if size <= _IN_MEMORY else folder


def iterate_blocks(source: Source, rows: np.ndarray | None = None) -> Iterator[Predictions]:
    """Yield a record block by block, all of it or the rows of a mask."""
    start = 0
    for part in [source] if isinstance(source, Predictions) else read_parts(source):
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


def rank_by(block: Predictions, rule: DecisionRule) -> Tensor:
    """Return what a rule ranks the classes by: the logits or, of several models, whose logits differ, the scores."""
    if rule.prior is None and len(block.info.models) == 1:
        return torch.from_numpy(block.logits.copy())
    return block.scores(rule)


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
