"""Near copies: images that are nearer to each other than images of different classes come by chance.

An image is described by a vector, of its pixels or of features of a model. The similarity of two images is the cosine
of their vectors, in units of the cosines that these images have with others (`standardize`), and after Fisher's
transformation: where all images are smooth and much alike, copies would hardly exceed the others without it. Images of
other classes say how near unrelated ones come by chance (`scale_by_chance`): to a round object on white nearer than to
a street. Up to `EXACT` images, all pairs are compared; of more, each image is compared with its neighbours in several
sorted orders, which takes n log n steps and finds most near copies.
"""

import io
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from datasets import Dataset
from PIL import Image
from threadpoolctl import threadpool_limits

from livt_hf.data.decoding import (
    BrokenImageError,
    crop_box,
    decode_rgb,
    format_findings,
    list_stored_images,
    process_stored,
    select_stored_images,
)
from livt_hf.data.labels import BOX, image_paths, labels_of, number_of_classes
from livt_hf.threads import available_cores

logger = logging.getLogger(__name__)

SIDE, FREQUENCIES = 32, 12  # pixels of a thumbnail, and of its cosine transform the rows and columns that are kept
EXACT = 20_000  # images of which all pairs are compared
# Of more: sorted orders, times the logarithm of their number, and images that are compared with each other in one.
ORDERS, NEIGHBOURS = 2.4, 128
AXES, DIGITS = 16, 3  # of a sort key: random axes, of which the nearest one or its opposite is a digit; digits
BLOCK = 1024  # images that are compared at a time
SAMPLE = 2_000  # images that tell what chance is
RANK, ENOUGH = 3, 60  # of so many images of other classes or more, the rank of the one that tells how near they come
NOISE = 0.01  # smallest scale of a component: what varies less, of blurred images, is noise
FLOOR = 4.0  # similarity below which nothing is a near copy
MAX_PAIRS = 6  # pairs that are named and shown
CLASS_WEIGHT = 2  # images of all classes that are added to the mean of a class, for small ones


def pixel_vectors(dataset: Dataset) -> np.ndarray:
    """Return one vector per image, of the low frequencies of its grey thumbnail; zeros for blank and broken images.

    All vectors have the same length, so that brightness and contrast do not count.
    """
    vectors = np.zeros((len(dataset), FREQUENCIES**2 - 1), dtype=np.float32)
    with ThreadPoolExecutor(available_cores()) as pool:
        start = 0
        for rows in select_stored_images(dataset).iter(batch_size=256):
            for number, vector in enumerate(pool.map(_pixel_vector, list_stored_images(rows))):
                vectors[start + number] = vector
            start += len(rows["image"])
    return vectors


def _pixel_vector(stored: Mapping | None) -> np.ndarray | float:
    from scipy.fft import dctn

    try:
        is_box = stored is not None and stored.get(BOX) is not None
        thumbnail = process_stored(stored, 0, decode_rgb if is_box else _read_thumbnail, crop_box)
    except BrokenImageError:
        return 0.0
    if is_box:
        thumbnail = _shrink(Image.fromarray(thumbnail.permute(1, 2, 0).numpy()))
    low = dctn(thumbnail, norm="ortho")[:FREQUENCIES, :FREQUENCIES].ravel()[1:]  # without the mean
    length = np.linalg.norm(low)
    return low / length if length > SIDE else 0.0  # grey values that differ by less than one are a blank image


def _read_thumbnail(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        image.draft("L", (2 * SIDE, 2 * SIDE))  # a JPEG is decoded at an eighth of its size
        return _shrink(image)


def _shrink(image: Image.Image) -> np.ndarray:
    grey = image.convert("F" if image.mode[0] in "IF" else "L")  # 16 bits do not fit into L
    return np.asarray(grey.resize((SIDE, SIDE), Image.Resampling.BOX), dtype=np.float32)


def feature_vectors(features: np.ndarray, labels: np.ndarray, dimensions: int = 128) -> np.ndarray:
    """Return features without what images of a class have in common, in their whitened principal components."""
    centred = features - features.mean(0)
    counts = np.bincount(labels)
    order, starts = np.argsort(labels, kind="stable"), np.cumsum(counts) - counts
    sums = np.add.reduceat(centred[order], starts[counts > 0])
    means = np.zeros((len(counts), features.shape[1]), dtype=np.float32)
    means[counts > 0] = sums / (counts[counts > 0, None] + CLASS_WEIGHT)
    centred -= means[labels]
    values, axes = np.linalg.eigh(centred.T @ centred / len(centred))
    kept = slice(-min(dimensions, len(centred) // 4 or 1), None)
    return centred @ (axes[:, kept] / np.sqrt(values[kept] + 1e-3 * values.mean()))


def standardize(vectors: np.ndarray) -> np.ndarray:
    """Return vectors whose dot products are similarities, but for Fisher's transformation.

    All components get the same mean and scale. Smooth images, for instance, have larger cosines with all others: a
    vector of length one is divided by the root of the root mean square of its cosines. Vectors of zeros stay zeros.
    """
    is_blank = ~vectors.any(1)
    if is_blank.all():
        return vectors
    number = len(vectors) - is_blank.sum()
    scaled = vectors - vectors.sum(0, dtype=np.float64).astype(np.float32) / number
    scaled[is_blank] = 0
    scaled /= np.maximum(np.sqrt(np.einsum("nd,nd->d", scaled, scaled) / number), NOISE)
    scaled /= _lengths(scaled)[:, None]
    moments = scaled.T @ scaled / len(scaled)
    for start in range(0, len(scaled), BLOCK):
        block = scaled[start : start + BLOCK]
        spread = np.sqrt(np.einsum("nd,nd->n", block @ moments, block))
        block /= np.sqrt(np.maximum(spread, 1e-9))[:, None]
    return scaled


Block = tuple[np.ndarray, np.ndarray, np.ndarray]  # rows (b,), those they are compared with (k,), similarities (b, k)


def _lengths(vectors: np.ndarray) -> np.ndarray:
    return np.maximum(np.sqrt(np.einsum("nd,nd->n", vectors, vectors)), 1e-9)


def _similarities(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return all products, with the cosine c in them replaced by atanh(c); below .5 they are nearly the same."""
    similarities = one @ other.T
    lengths = _lengths(one)[:, None] * _lengths(other)
    is_large = np.flatnonzero(similarities > 0.5 * lengths)
    large, lengths = np.take(similarities, is_large), np.take(lengths, is_large)
    similarities.ravel()[is_large] = np.arctanh(np.minimum(large / lengths, 1 - 1e-6)) * lengths
    return similarities


def _compare_with(vectors: np.ndarray, columns: np.ndarray) -> Iterator[Block]:
    """Compare all images with those of some rows."""
    others = vectors[columns]
    for start in range(0, len(vectors), BLOCK):
        block = vectors[start : start + BLOCK]
        yield np.arange(start, start + len(block)), columns, _similarities(block, others)


def _compare_neighbours(vectors: np.ndarray) -> Iterator[Block]:
    """Compare images that are neighbours when they are sorted by the random axes that they are nearest to.

    Two images share the nearest of 16 axes more often than the signs of five (Andoni et al., 2015).
    """
    generator, keys = np.random.default_rng(0), np.empty(len(vectors), dtype=np.int64)
    weights = (2 * AXES) ** np.arange(DIGITS)
    with threadpool_limits(1, "blas"):  # threads would wait for each other more than they compute in small blocks
        for _ in range(round(ORDERS * np.log(len(vectors)))):
            axes = generator.standard_normal((vectors.shape[1], DIGITS * AXES), dtype=np.float32)
            for start in range(0, len(keys), BLOCK):
                along = (vectors[start : start + BLOCK] @ axes).reshape(-1, DIGITS, AXES)
                keys[start : start + BLOCK] = np.concatenate([along, -along], axis=2).argmax(2) @ weights
            order = np.argsort(keys, kind="stable")
            for start in range(0, len(order), NEIGHBOURS):
                rows = order[start : start + NEIGHBOURS]
                block = vectors[rows]
                yield rows, rows, _similarities(block, block)


def compare(vectors: np.ndarray, exact: int = EXACT) -> Iterator[Block]:
    """Yield the similarities of all pairs or, of more than `exact` images, of those that may be near."""
    if len(vectors) <= exact:
        return _compare_with(vectors, np.arange(len(vectors)))
    return _compare_neighbours(vectors)


def nearest_other(blocks: Iterator[Block], code: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the similarity and row of each image's nearest one that differs in its code; -1 where there is none."""
    similarity, nearest = np.full(len(code), -1.0, dtype=np.float32), np.full(len(code), -1)
    for rows, columns, similarities in blocks:
        similarities[code[rows][:, None] == code[columns]] = -1
        best = similarities.argmax(1)
        highest = similarities[np.arange(len(rows)), best]
        better = highest > similarity[rows]
        similarity[rows[better]], nearest[rows[better]] = highest[better], columns[best[better]]
    return similarity, nearest


def scale_by_chance(
    vectors: np.ndarray, labels: np.ndarray, groups: np.ndarray | None = None
) -> tuple[np.ndarray, float]:
    """Return vectors in whose similarities chance is the same for all images, and the similarity of a near copy.

    A vector is divided by the root of how much nearer images of other classes and groups come to it than normally
    distributed similarities would, where they come nearer: measured at a rank, which one or two true copies with
    different labels do not move. A near copy has a similarity that, by chance, about one of all images has to the
    nearest image of another class. The similarity to the nearest of many is a maximum, so a Gumbel distribution is
    fitted: by the median and the upper decile, which a few true copies with different labels do not move.
    """
    from scipy.special import ndtri

    rows = np.flatnonzero(vectors.any(1))
    rows = rows[np.unique(np.linspace(0, len(rows) - 1, min(SAMPLE, len(rows))).astype(int))]
    scaled, highest = vectors.copy(), np.full(len(rows), -1.0, dtype=np.float32)
    for block, columns, similarities in _compare_with(vectors, rows):
        is_same = labels[block][:, None] == labels[columns]
        if groups is not None:
            is_same |= groups[block][:, None] == groups[columns]
        similarities[is_same] = -1
        others = len(columns) - is_same.sum(1)
        is_enough = others >= ENOUGH
        near = np.partition(similarities, -RANK, axis=1)[is_enough, -RANK] if is_enough.any() else 0
        excess = np.ones(len(block), dtype=np.float32)
        excess[is_enough] = np.maximum(near / ndtri(1 - (RANK - 0.5) / others[is_enough]), 1)
        scaled[block] /= np.sqrt(excess)[:, None]
        highest = np.maximum(highest, (similarities / np.sqrt(excess)[:, None]).max(0))
    if not len(rows) or (highest < 0).any():  # one class
        return scaled, FLOOR
    highest *= _lengths(scaled[rows]) / _lengths(vectors[rows])
    median, decile = np.quantile(highest, [0.5, 0.9])
    scale = (decile - median) / (np.log(np.log(2)) - np.log(np.log(10 / 9)))
    return scaled, float(max(FLOOR, median + scale * (np.log(len(vectors)) + np.log(np.log(2)))))


def connected_copies(vectors: np.ndarray, threshold: float) -> np.ndarray:
    """Return the group of each image: images that are near copies of each other, directly or through others."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    codes, pairs, pending = np.arange(len(vectors)), [], 0

    def merge() -> np.ndarray:
        one, other = np.concatenate(pairs, axis=1)
        graph = coo_array((np.ones(len(one), dtype=bool), (codes[one], codes[other])), shape=(len(codes),) * 2)
        return connected_components(graph, directed=False)[1][codes]

    for rows, columns, similarities in compare(vectors):
        block, column = np.divmod(np.flatnonzero(similarities >= threshold), len(columns))
        one, other = rows[block], columns[column]
        is_new = codes[one] != codes[other]
        pairs.append(np.stack([one[is_new], other[is_new]]))
        pending += is_new.sum()
        if pending > 4_000_000:
            codes, pairs, pending = merge(), [], 0
    return merge() if pairs else codes


@dataclass(frozen=True)
class Leaks:
    """Images of one side of a split that have near copies on the other.

    Attributes:
        pairs: rows of such images and of their nearest ones in another split, as (split, row) each; nearest first.
        counts: number of such images in each split.
        threshold: the similarity from which images are near copies.
    """

    pairs: list[tuple[tuple[str, int], tuple[str, int], float]]
    counts: dict[str, int]
    threshold: float

    @property
    def shown(self) -> list:
        """Return some pairs from the nearest to the farthest, to be named and drawn."""
        return [self.pairs[row] for row in np.unique(np.linspace(0, len(self.pairs) - 1, MAX_PAIRS).astype(int))]


def find_leaks(splits: Mapping[str, Dataset], vectors: np.ndarray) -> Leaks | None:
    """Return the images that are nearer to one in another split than chance; None where there are none."""
    sizes = [len(part) for part in splits.values()]
    split_of, starts = np.repeat(np.arange(len(sizes)), sizes), np.cumsum(sizes) - sizes
    names = list(splits)
    scaled, threshold = scale_by_chance(vectors, *_labels_and_groups(splits))
    similarity, nearest = nearest_other(compare(scaled), split_of)
    found = np.flatnonzero(similarity >= threshold)
    if not len(found):
        return None
    found = found[np.argsort(-similarity[found], kind="stable")]
    both = np.sort([found, nearest[found]], axis=0)
    chosen = found[np.sort(np.unique(both, axis=1, return_index=True)[1])]

    def where(row: int) -> tuple[str, int]:
        return names[split_of[row]], int(row - starts[split_of[row]])

    pairs = [(where(row), where(nearest[row]), float(similarity[row])) for row in chosen]
    counts = np.bincount(split_of[found], minlength=len(names))
    return Leaks(pairs, dict(zip(names, counts.tolist(), strict=True)), threshold)


def _labels_and_groups(splits: Mapping[str, Dataset]) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the class of each image of all splits and, where there are groups, its group."""
    parts = list(splits.values())
    labels = np.concatenate([labels_of(part).rarest(number_of_classes(part)) for part in parts])
    if "group" not in parts[0].column_names:
        return labels, None
    groups = np.concatenate([labels_of(part, "group").values for part in parts])
    return labels, np.unique(groups, return_inverse=True)[1]


def describe_leaks(leaks: Leaks, splits: Mapping[str, Dataset], made: bool) -> str:
    """Return a message about images that have near copies in another split, with the way out.

    `made` is true of splits that were made here, in which groups are kept together.
    """
    paths = {split: image_paths(part) for split, part in splits.items()}

    def name(split: str, row: int) -> str:
        return f"{paths[split][row].as_py() or f'image {row}'} of {split}"

    shares = (
        f"{count:,} of {len(splits[split]):,} images of {split}" for split, count in leaks.counts.items() if count
    )
    findings = format_findings(
        f"{name(*one)} ~ {name(*other)} ({similarity:.1f})" for one, other, similarity in leaks.shown
    )
    way_out = (
        "Keep near copies on one side of a split with group_from near_copies, or all images of what they share (a "
        "site, a part, a burst) with group_column or group_from."
        if made
        else "The dataset itself divides them: leave out one side with exclude, or test on other images."
    )
    return (
        f"Near copies in two splits: {', '.join(shares)} are nearer to an image of another split (similarity "
        f"{leaks.threshold:.1f} or more) than images of different classes come by chance, so the test is too easy:"
        f"{findings}\n{way_out}"
    )
