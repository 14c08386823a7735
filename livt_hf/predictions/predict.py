"""Predict: from the images of a loader, or from image files, to the prediction record."""

import fnmatch
import glob
import itertools
import operator
import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers.image_processing_backends import TorchvisionBackend

from livt_hf.classifiers import choose_device, class_names, load_classifier, load_processor
from livt_hf.data.decoding import BrokenImageError, image_suffixes, read_image
from livt_hf.data.labels import BOX, image_paths, labels_of, select_rows
from livt_hf.errors import LiVTError
from livt_hf.files import is_hidden
from livt_hf.precision import AUTO, FLOAT32, TRIAL_IMAGES, autocast, resolve_precision
from livt_hf.predictions.record import (
    LABEL,
    LOGITS,
    Predictions,
    PredictionsInfo,
    as_lists,
    part_path,
    part_rows,
    read_matching_part,
    read_parts,
    write_part,
)
from livt_hf.runs import is_in_runs_folder
from livt_hf.text import format_error, path_to_text, text_to_path

MAX_STARS, MAX_LOOKED_AT = 2, 1_000_000  # times ** in a pattern, and files that it looks through
BATCHES_AHEAD = 2  # read while the model works on an earlier one
LogitBatches = Iterator[tuple[Tensor, dict]]  # logits (B, C) with what else is known of their images


def show_progress(loader: Iterable[dict], text: str, accelerator: Accelerator) -> Iterable[dict]:
    """Count batches on the terminal of the main process, and not in a log file."""
    return tqdm(loader, desc=text, unit="batch", leave=False, disable=None if accelerator.is_main_process else True)


@torch.no_grad()
def predict_batches(
    model: nn.Module, loader: Iterable[dict], accelerator: Accelerator, precision: str | None = FLOAT32
) -> LogitBatches:
    """Yield pairs of logits, in float32, and batch."""
    model.eval()
    for batch in show_progress(loader, "evaluating", accelerator):
        with autocast(accelerator.device, precision):
            logits = model(batch["pixel_values"].to(accelerator.device)).logits
        yield logits.float(), batch


def describe_images(dataset: Dataset, split: str) -> pa.Table:
    """Return what a record says of the images of a dataset besides their logits: path, label, split and columns."""
    columns = {"path": image_paths(dataset).cast(pa.string()), LABEL: labels_of(dataset).to_arrow()}
    columns["split"] = pa.array([split] * len(dataset))
    for name in dataset.column_names:
        kind = dataset.data.schema.field(name).type
        if name not in ("image", *columns, LOGITS) and (name == BOX or not pa.types.is_nested(kind)):
            columns[name] = select_rows(dataset, dataset.data.column(name))
    return pa.table(columns)


def store_batches(
    batches: LogitBatches, info: PredictionsInfo, folder: Path, images: pa.Table, accelerator: Accelerator
) -> LogitBatches:
    """Write the logits of a pass over a dataset to the folder of a record, and yield the batches again.

    Each process writes the parts of its own images, which are contiguous.

    Args:
        batches: of this process, with the rows of the dataset as "index".
        info: of the model.
        folder: of the record; one that is there is replaced.
        images: what `describe_images` says of the whole dataset.
        accelerator: of the processes.
    """
    if accelerator.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    accelerator.wait_for_everyone()
    waiting: list[Tensor] = []
    start = 0

    def write() -> None:
        logits = torch.cat(waiting)
        table = images.slice(start, len(logits)).append_column(LOGITS, as_lists(logits))
        write_part(folder, Predictions(table, info), start, len(images))

    for logits, batch in batches:
        start = start if waiting else int(batch["index"][0])
        waiting.append(logits.cpu())
        if sum(map(len, waiting)) >= part_rows(info.num_classes):
            write()
            waiting = []
        yield logits, batch
    if waiting:
        write()
    accelerator.wait_for_everyone()


def predict(
    model: nn.Module,
    loader: Iterable[dict],
    accelerator: Accelerator,
    folder: Path,
    info: PredictionsInfo,
    images: pa.Table,
) -> None:
    """Run a model over the images of a loader and write the record of all processes to a folder."""
    batches = predict_batches(model, loader, accelerator, info.precision)
    for _ in store_batches(batches, info, folder, images, accelerator):
        pass


class Predictor:
    """Classifies image files.

    Args:
        model: folder or Hub id of a classifier.
        device: where it runs; by default the fastest device.
        precision: "float32", "bfloat16" or "auto", a choice that the first images to predict decide; see
            `livt_hf.precision.resolve_precision`. `info.precision` names it.
        **training: what `load_classifier` is told of a model that was trained elsewhere.

    Example:
        >>> predictor = Predictor("runs/finetune-birds-base/1")
        >>> predictions = Predictions.concatenate(list(predictor.predict([Path("bird.jpg")])))
        >>> predictions.posterior("uniform")
    """

    def __init__(self, model: str, device: str | None = None, precision: str = AUTO, **training: str | None):
        self.device, self.precision = choose_device(device), precision
        self.model = load_classifier(model, **training).to(self.device)
        self.processor = load_processor(model)
        # Whether the processor does what transformers' do by default, so that its steps may be called singly.
        standard = isinstance(self.processor, TorchvisionBackend) and not self.processor.do_pad
        self.stepwise = standard and type(self.processor)._preprocess is TorchvisionBackend._preprocess
        self.labels = class_names(self.model)
        self.info = PredictionsInfo.from_model(self.model)

    def read(self, image: Path | Mapping) -> Tensor | str:
        """Read a file, or a box of it, to pixels (3, H, W), or return why it cannot be.

        They are bytes where `finish` can do the rest.
        """
        processor, stored = self.processor, dict(image) if isinstance(image, Mapping) else {"path": os.fspath(image)}
        try:
            image = read_image({"bytes": None, **stored}, 0)
        except BrokenImageError as error:
            return format_error(error.__cause__ or error)
        if not self.stepwise:
            # In a list: the processor of timm models takes a single tensor for one that is rescaled already.
            return processor([image], return_tensors="pt")["pixel_values"][0]
        # The processor as a whole would first copy the image to another memory layout, in which resizing is slow.
        if processor.do_resize:
            image = processor.resize(image, processor.size, processor.resample)
        return processor.center_crop(image, processor.crop_size) if processor.do_center_crop else image

    def finish(self, pixels: Tensor) -> Tensor:
        """Rescale and normalise a whole batch, on the model's device."""
        processor, pixels = self.processor, pixels.to(self.device)
        if not self.stepwise:
            return pixels
        names = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
        return processor.rescale_and_normalize(pixels, **{name: getattr(processor, name) for name in names})

    @torch.inference_mode()
    def logits(self, pixels: Sequence[Tensor]) -> Tensor:
        """Compute logits (B, C). Images that the processor leaves at their own size go through size by size."""
        result = torch.empty(len(pixels), len(self.labels))
        for shape in {tuple(image.shape) for image in pixels}:
            chosen = [i for i, image in enumerate(pixels) if tuple(image.shape) == shape]
            batch = torch.stack([pixels[i] for i in chosen])
            with autocast(self.device, self.info.precision):
                result[chosen] = self.model(self.finish(batch)).logits.float().cpu()
        return result

    def choose_precision(self, images: pa.Table) -> None:
        """Replace precision "auto" by that in which a model classifies these images, and keep it."""

        def read_batch() -> Tensor | None:
            read = self._read_all(images.slice(0, TRIAL_IMAGES).to_pylist())
            pixels = [image for image in read if isinstance(image, Tensor)]
            alike = [image for image in pixels if image.shape == pixels[0].shape]
            return self.finish(torch.stack(alike)) if alike else None

        chosen = resolve_precision(
            self.precision,
            self.model,
            len(images),
            read_batch,
            lambda pixels: self.model(pixels).logits,
            lambda logits: self.info.scores(logits, self.info.default_rule),
        )
        self.precision, self.info = chosen, replace(self.info, precision=chosen)

    def predict(
        self, images: Sequence[Path] | pa.Table, batch_size: int = 32, workers: int | None = None
    ) -> Iterator[Predictions]:
        """Yield a record for each batch of files, in order.

        Args:
            images: files, or a table with the column `path` and, of boxes, `box` and `box_margin`; further columns are
                carried along.
            batch_size: images per forward pass.
            workers: threads that read files.

        Yields:
            Records. The column "error" says why a file could not be read, whose logits are NaN.
        """
        images = as_table(images)
        self.choose_precision(images)
        with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
            waiting: deque = deque()
            for start in range(0, len(images), batch_size):
                batch = images.slice(start, batch_size)
                # One thread reads all boxes of a picture, which it decodes once.
                pictures = itertools.groupby(batch.to_pylist(), operator.itemgetter("path"))
                waiting.append((batch, [pool.submit(self._read_all, list(rows)) for _, rows in pictures]))
                if len(waiting) > BATCHES_AHEAD:
                    yield self._predict_batch(*waiting.popleft())
            while waiting:
                yield self._predict_batch(*waiting.popleft())

    def _read_all(self, rows: list[dict]) -> list[Tensor | str]:
        return [self.read(row | {"path": str(text_to_path(row["path"]))}) for row in rows]

    def _predict_batch(self, batch: pa.Table, reading: list[Future]) -> Predictions:
        images = [image for future in reading for image in future.result()]
        readable = [i for i, image in enumerate(images) if isinstance(image, Tensor)]
        logits = torch.full((len(batch), len(self.labels)), torch.nan)
        logits[readable] = self.logits([images[i] for i in readable])
        errors = pa.array([image if isinstance(image, str) else None for image in images], pa.string())
        table = batch.append_column("error", errors).append_column(LOGITS, as_lists(logits))
        return Predictions(table, self.info)

    def predict_to(
        self, folder: str | Path, images: Sequence[Path] | pa.Table, batch_size: int = 32
    ) -> Iterator[Predictions]:
        """Write the record of many files to a folder, part by part, and yield its parts.

        Parts that are there already, of a run that was killed, are read and not predicted again; their size stays,
        and precision "auto" is theirs.
        """
        images, rows = as_table(images), min(part_rows(len(self.labels)), 100 * batch_size)
        first = part_path(folder, 0)
        if first.exists():
            part = next(read_parts(first))
            rows = len(part) or rows
            if self.precision == AUTO:
                self.precision = part.info.precision or FLOAT32
        self.choose_precision(images)
        for start in range(0, len(images), rows):
            chosen = images.slice(start, rows)
            part = read_matching_part(folder, start, chosen, self.info)
            if part is None:
                part = Predictions.concatenate(list(self.predict(chosen, batch_size)))
                write_part(folder, part, start, len(images))
            yield part


def as_table(images: Sequence[Path] | pa.Table) -> pa.Table:
    """Return files as a table with the column `path`; a table is returned as it is."""
    if isinstance(images, pa.Table):
        return images
    return pa.table({"path": pa.array(map(path_to_text, images), pa.string())})


def find_images(arguments: Sequence[str]) -> list[Path]:
    """List files as named (also those that do not exist), every image below a folder, and what a pattern matches."""
    found: dict[Path, None] = {}
    for argument in arguments:
        pattern = glob.has_magic(argument) and not Path(argument).exists()
        for match in _match_pattern(argument) if pattern else [Path(argument)]:
            found |= dict.fromkeys(_images_below(match) if match.is_dir() else [match])
    return list(found)


def _images_below(folder: Path) -> list[Path]:
    suffixes = image_suffixes()
    images = [Path(folder, *below) for below in _walk(folder) if Path(below[-1]).suffix.lower() in suffixes]
    of_runs = {parent for parent in {path.parent for path in images} if is_in_runs_folder(parent, folder)}
    return sorted(path for path in images if path.parent not in of_runs)


def _walk(top: str | Path) -> Iterator[tuple[str, ...]]:
    """Yield files and folders below a folder by the parts of their paths, but no hidden ones; follow no links."""
    for folder, folders, files in os.walk(top):
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        below = Path(folder).relative_to(top).parts
        yield from ((*below, name) for name in sorted([*folders, *files]) if not is_hidden(name))


def _match_pattern(pattern: str) -> list[Path]:
    """Return the files and folders that a pattern matches, sorted; `**` are any folders, but no links to folders."""
    parts = [part for part, after in itertools.pairwise([*Path(pattern).parts, ""]) if (part, after) != ("**", "**")]
    if "**" not in parts:
        return sorted(map(Path, glob.iglob(pattern)))
    first = parts.index("**")
    if parts.count("**") > MAX_STARS:
        raise LiVTError(f"{pattern} has ** more than {MAX_STARS} times; name a folder instead.", "images")
    tops = glob.iglob(str(Path(*parts[:first]))) if first else [""]
    rest, looked_at, matches = tuple(parts[first:]), 0, []
    for top in tops:
        if rest == ("**",):
            matches.append(Path(top))
            continue
        for below in _walk(top or "."):
            looked_at += 1
            if looked_at > MAX_LOOKED_AT:
                message = f"{pattern} looks through more than {MAX_LOOKED_AT:,} files; name a folder."
                raise LiVTError(message, "images")
            if _matches(rest, below):
                matches.append(Path(top, *below))
    return matches


def _matches(pattern: tuple[str, ...], names: tuple[str, ...]) -> bool:
    """Return True if a pattern matches a path, part by part; `**` is any number of parts."""
    if not pattern or not names:
        return not names and not any(part != "**" for part in pattern)
    if pattern[0] == "**":
        return any(_matches(pattern[1:], names[start:]) for start in range(len(names) + 1))
    return fnmatch.fnmatchcase(names[0], pattern[0]) and _matches(pattern[1:], names[1:])
