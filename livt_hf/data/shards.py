"""Shards of a stream and how many images each holds, which is found without reading the images.

With these numbers a stream is shared out so that an epoch sees each image at most once, and is resumed where it was
left.
"""

import itertools
import os
import tarfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, IterableDataset, SplitDict, SplitInfo
from datasets.packaged_modules.webdataset.webdataset import base_plus_ext

from livt_hf.errors import LiVTError

STREAM_SHARDS = 64  # of data that is stored as paths: enough to share out among processes and workers


def as_stream(dataset: Dataset, num_shards: int = STREAM_SHARDS) -> IterableDataset:
    """Return a stored dataset as a stream."""
    num_shards = min(num_shards, len(dataset))
    lengths = [len(dataset.shard(num_shards, number)) for number in range(num_shards)]
    return with_shard_lengths(dataset.to_iterable_dataset(num_shards), lengths)


def with_shard_lengths(stream: IterableDataset, lengths: Sequence[int]) -> IterableDataset:
    """Return the stream with the number of images of each shard in its info, where `datasets` has a field for it."""
    stream = stream.select_columns(stream.column_names)  # a copy: the streams of a dataset share their info
    split = SplitInfo(name=str(stream.split), num_examples=sum(lengths), shard_lengths=list(lengths))
    stream.info.splits = SplitDict({split.name: split})
    return stream


def shard_lengths(stream: IterableDataset) -> list[int]:
    """Return how many images each shard holds."""
    split = (stream.info.splits or {}).get(str(stream.split))
    if split is None or split.shard_lengths is None:
        raise LiVTError(
            "the stream does not say how many images its shards hold: open it with load_long_tailed(..., "
            "streaming=True), or tell it by livt_hf.data.shards.with_shard_lengths."
        )
    return split.shard_lengths


def count_images(kind: str, files: Sequence[str]) -> list[int]:
    """Count the images of each file by the footer of parquet, the headers of a tar, the memory map of arrow."""
    count = {"parquet": _in_parquet, "arrow": _in_arrow, "webdataset": _in_tar}[kind]
    with ThreadPoolExecutor(16) as pool:  # files on the Hub take a request each
        return list(pool.map(count, files))


def _in_parquet(file: str) -> int:
    with fsspec.open(file, "rb") as opened:
        return pq.read_metadata(opened).num_rows


def _in_arrow(file: str) -> int:
    with pa.memory_map(file) as opened:
        try:
            reader = pa.ipc.open_stream(opened)
        except pa.ArrowInvalid:  # arrow has two formats
            reader = pa.ipc.open_file(opened)
        return reader.read_all().num_rows


def _in_tar(file: str) -> int:
    """Count images, whose files follow each other and differ in what comes after the first dot."""
    with tarfile.open(file) as tar:
        names = [member.name for member in tar if member.isreg()]
    seen = [name for name in names if not os.path.basename(name).startswith((".", "__"))]  # as `datasets` does
    keys = [key for key, _ in map(base_plus_ext, seen) if key is not None]
    return sum(1 for _ in itertools.groupby(keys))
