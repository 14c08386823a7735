"""Predict: from the images of a loader, or from image files, to the prediction record."""

import glob
import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers.image_processing_backends import TorchvisionBackend

from livt_hf.classifiers import choose_device, class_names, load_classifier, load_processor
from livt_hf.data.decoding import DAMAGED, decode_rgb, image_suffixes
from livt_hf.data.labels import image_paths, labels_of, select_rows
from livt_hf.data.readers.folder import is_hidden
from livt_hf.predictions.record import (
    LABEL,
    LOGITS,
    Predictions,
    PredictionsInfo,
    as_lists,
    part_rows,
    read_matching_part,
    write_part,
)
from livt_hf.runs import is_in_runs_folder
from livt_hf.text import format_error

BATCHES_AHEAD = 2  # read while the model works on an earlier one
Batches = Iterator[tuple[Tensor, dict]]  # logits (B, C) with what else is known of their images


def show_progress(loader: Iterable[dict], text: str, accelerator: Accelerator) -> Iterable[dict]:
    """Count batches on the terminal of the main process, and not in a log file."""
    return tqdm(loader, desc=text, unit="batch", leave=False, disable=None if accelerator.is_main_process else True)


@torch.no_grad()
def predict_batches(model: nn.Module, loader: Iterable[dict], accelerator: Accelerator) -> Batches:
    """Yield pairs of logits and batch."""
    model.eval()
    for batch in show_progress(loader, "evaluating", accelerator):
        yield model(batch["pixel_values"].to(accelerator.device)).logits.float(), batch


def describe_images(dataset: Dataset, split: str) -> pa.Table:
    """Return what a record says of the images of a dataset besides their logits: path, label, split and columns."""
    columns = {"path": image_paths(dataset).cast(pa.string()), LABEL: labels_of(dataset).to_arrow()}
    columns["split"] = pa.array([split] * len(dataset))
    for name in dataset.column_names:
        kind = dataset.data.schema.field(name).type
        if name not in ("image", *columns, LOGITS) and not pa.types.is_nested(kind):
            columns[name] = select_rows(dataset, dataset.data.column(name))
    return pa.table(columns)


def store_batches(
    batches: Batches, info: PredictionsInfo, folder: Path, images: pa.Table, accelerator: Accelerator
) -> Batches:
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
    start = row = None

    def write() -> None:
        logits = torch.cat(waiting)
        table = images.slice(start, len(logits)).append_column(LOGITS, as_lists(logits))
        write_part(folder, Predictions(table, info), start, len(images))

    for logits, batch in batches:
        first = int(batch["index"][0])
        start = first if start is None else start
        waiting.append(logits.cpu())
        row = first + len(logits)
        if row - start >= part_rows(info.num_classes):
            write()
            waiting, start = [], row
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
    for _ in store_batches(predict_batches(model, loader, accelerator), info, folder, images, accelerator):
        pass


class Predictor:
    """Classifies image files.

    Args:
        model: folder or Hub id of a classifier.
        device: where it runs; by default the fastest device.
        **training: what `load_classifier` is told of a model that was trained elsewhere.

    Example:
        >>> predictor = Predictor("runs/finetune-birds-base/1")
        >>> predictions = Predictions.concatenate(list(predictor.predict([Path("bird.jpg")])))
        >>> predictions.posterior("uniform")
    """

    def __init__(self, model: str, device: str | None = None, **training: str | None):
        self.device = choose_device(device)
        self.model = load_classifier(model, **training).to(self.device)
        self.processor = load_processor(model)
        # Whether the processor does what transformers' do by default, so that its steps may be called singly.
        standard = isinstance(self.processor, TorchvisionBackend) and not self.processor.do_pad
        self.stepwise = standard and type(self.processor)._preprocess is TorchvisionBackend._preprocess
        self.labels = class_names(self.model)
        self.info = PredictionsInfo.from_model(self.model)

    def read(self, path: Path) -> Tensor | str:
        """Read a file to pixels (3, H, W), as bytes where `finish` can do the rest, or return why it cannot be."""
        processor = self.processor
        try:
            image = decode_rgb(path.read_bytes())
        except DAMAGED as error:
            return format_error(error)
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
            result[chosen] = self.model(self.finish(batch)).logits.float().cpu()
        return result

    def predict(
        self, paths: Sequence[Path], batch_size: int = 32, workers: int | None = None
    ) -> Iterator[Predictions]:
        """Yield a record for each batch of files, in order.

        The column "error" says why a file could not be read, whose logits are NaN.
        """
        with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
            waiting: deque = deque()
            for start in range(0, len(paths), batch_size):
                waiting.append([(path, pool.submit(self.read, path)) for path in paths[start : start + batch_size]])
                if len(waiting) > BATCHES_AHEAD:
                    yield self._predict_batch(waiting.popleft())
            while waiting:
                yield self._predict_batch(waiting.popleft())

    def _predict_batch(self, batch: list[tuple[Path, Future]]) -> Predictions:
        images = [future.result() for _, future in batch]
        readable = [i for i, image in enumerate(images) if isinstance(image, Tensor)]
        logits = torch.full((len(batch), len(self.labels)), torch.nan)
        logits[readable] = self.logits([images[i] for i in readable])
        errors = [image if isinstance(image, str) else None for image in images]
        columns = {"path": [str(path) for path, _ in batch], "error": pa.array(errors, pa.string())}
        return Predictions(pa.table(columns | {LOGITS: as_lists(logits)}), self.info)

    def predict_to(self, folder: str | Path, paths: Sequence[Path], batch_size: int = 32) -> Iterator[Predictions]:
        """Write the record of many files to a folder, part by part, and yield its parts.

        Parts that are there already, of a run that was killed, are read and not predicted again.
        """
        rows = min(part_rows(len(self.labels)), 100 * batch_size)
        for start in range(0, len(paths), rows):
            chosen = paths[start : start + rows]
            part = read_matching_part(folder, start, list(map(str, chosen)), self.info)
            if part is None:
                part = Predictions.concatenate(list(self.predict(chosen, batch_size)))
                write_part(folder, part, start, len(paths))
            yield part


def find_images(arguments: Sequence[str]) -> list[Path]:
    """List files as named (also those that do not exist), every image below a folder, and what a pattern matches."""
    suffixes = image_suffixes()
    found: dict[Path, None] = {}
    for argument in arguments:
        pattern = glob.has_magic(argument) and not Path(argument).exists()
        matches = sorted(glob.glob(argument, recursive=True)) if pattern else [argument]
        for match in map(Path, matches):
            if not match.is_dir():
                found[match] = None
                continue
            images = [path for path in match.rglob("*") if path.suffix.lower() in suffixes]
            of_runs = {folder for folder in {path.parent for path in images} if is_in_runs_folder(folder, match)}
            for path in sorted(images):
                if path.parent not in of_runs and not any(map(is_hidden, path.relative_to(match).parts)):
                    found[path] = None
    return list(found)
