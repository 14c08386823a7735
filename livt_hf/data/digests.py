"""By what a run remembers the images that it was trained on: no image is read, and no name can be read from it."""

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset

from livt_hf.data.labels import image_paths, labels_of, of_rows


def digest_of(dataset: Dataset | IterableDataset) -> str | None:
    """A digest of the labels and file names of all images, in their order, and of the length of those without a name.

    Folders do not count, for data may move. A stream is not read for it and has none.
    """
    if isinstance(dataset, IterableDataset):
        return None
    labels = labels_of(dataset)
    names = pc.replace_substring_regex(image_paths(dataset), r"^.*[/\\]", "")
    lengths = of_rows(dataset, pc.binary_length(pc.struct_field(dataset.data.column("image"), "bytes")))
    texts = pc.coalesce(names, lengths.cast(pa.string()), "")
    digest = hashlib.sha256("\0".join(texts.to_pylist()).encode())
    for numbers in (labels.values, [] if labels.offsets is None else labels.offsets):
        digest.update(np.asarray(numbers, dtype="<i8").tobytes())
    return digest.hexdigest()
