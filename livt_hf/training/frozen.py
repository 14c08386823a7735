"""Training of a classifier on features of a frozen backbone.

The backbone sees each image once: its features are cached on disk under a key of everything they depend on (weights,
images, processing, versions of libraries), so that an epoch of the classifier takes milliseconds.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import BaseImageProcessor, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutput

from livt_hf.configuration_livit import LABEL_FIELDS
from livt_hf.data import Batches, DeviceTransform, FinetuneAugmentation, eval_loader
from livt_hf.data.batches import build_eval_batches
from livt_hf.data.decoding import image_digests
from livt_hf.data.labels import labels_of, number_of_classes
from livt_hf.data.loading import UpdateSampler, ordered_loader, read_first_pixels
from livt_hf.errors import LiVTError
from livt_hf.long_tail.balance import BalancedClassifier
from livt_hf.long_tail.structure import extract_features, get_classifier
from livt_hf.precision import (
    AUTO,
    BFLOAT16,
    FLOAT32,
    TRIAL_IMAGES,
    agree_on_precision,
    autocast,
    resolve_precision,
    similarity_posterior,
)
from livt_hf.predictions.predict import show_progress
from livt_hf.processors import read_input_spec
from livt_hf.runs import runs_folder
from livt_hf.training.device import compute_on_main_process

logger = logging.getLogger(__name__)

DIGEST_BYTES = hashlib.sha256().digest_size
_VERSIONED = ("pillow", "timm", "torch", "torchvision", "transformers")  # what reads images and computes features
# Fields of a config that features do not depend on.
_IRRELEVANT = LABEL_FIELDS | {"num_classes", "label_names", "long_tail", "pretrained_cfg"}  # the last: the processor's
_IRRELEVANT |= {"architectures", "transformers_version", "_name_or_path"}


class FeatureClassifier(BalancedClassifier, nn.Module):
    """Classifier and long-tail head of a model, on standardised features of its frozen backbone."""

    def __init__(self, model: PreTrainedModel, features: np.ndarray):
        super().__init__()
        self.config, self.head, self.name_or_path = model.config, model.head, model.name_or_path
        self.classifier = get_classifier(model)
        mean, (views, images, _) = features.mean(axis=(0, 1), dtype=np.float64), features.shape
        # numpy's own variance would hold all features twice more in memory.
        square = np.einsum("vnd,vnd->d", features, features, dtype=np.float64) / (views * images)
        std = np.sqrt(np.maximum(square - mean**2, 1e-12))
        for name, values in (("mean", mean), ("std", std)):  # not every device has float64
            self.register_buffer(name, torch.from_numpy(values).float().to(self.classifier.weight.device))
        self._standardise()

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ImageClassifierOutput:
        """Classify features (B, D), called `pixel_values` so that evaluation treats both kinds of model alike."""
        features = (pixel_values - self.mean) / self.std
        logits = self.classifier(features)
        loss = None if labels is None else self.head(logits, labels, features)
        return ImageClassifierOutput(loss=loss, logits=logits)

    def parameter_depths(self) -> dict[str, int]:
        return {name: 0 for name, _ in self.named_parameters()}

    @torch.no_grad()
    def _standardise(self) -> None:
        """Rescale the classifier, which fits the backbone's own features, to standardised features."""
        self.classifier.bias.add_(self.classifier.weight @ self.mean)
        self.classifier.weight.mul_(self.std)

    @torch.no_grad()
    def unstandardise(self) -> None:
        """Fold the standardisation into the classifier, so that it fits the backbone's own features."""
        weight = self.classifier.weight
        weight.div_(self.std)
        self.classifier.bias.sub_(weight @ self.mean)
        self.mean.zero_()
        self.std.fill_(1)


class FeatureLoader:
    """Loader of cached features (views, images, D), used like a `TrainLoader`; epoch e takes view e % views."""

    def __init__(self, features: np.ndarray, dataset: Dataset, batches: Batches):
        self.features, self.labels, self.batches = features, labels_of(dataset), batches
        self.num_classes = number_of_classes(dataset)
        self.num_images = len(dataset)
        self._sampler = UpdateSampler(self.labels, batches)

    @property
    def updates_per_epoch(self) -> int:
        return self.batches.updates(self.num_images)

    def epoch(self, epoch: int, start_update: int = 0) -> Iterator[dict]:
        self._sampler.epoch, self._sampler.start_update = epoch, start_update
        view = self.features[epoch % len(self.features)]
        for keys in self._sampler:
            yield self._batch(view, [draw % self.num_images for _, draw in keys])

    def in_order(self) -> Iterator[dict]:
        """Yield every image of this process once, for evaluation."""
        for indices in self.batches.in_order(self.num_images):
            yield self._batch(self.features[0], indices)

    def _batch(self, view: np.ndarray, indices: list[int]) -> dict:
        targets = torch.from_numpy(self.labels.targets(indices, self.num_classes))
        return {"pixel_values": torch.from_numpy(view[indices]), "labels": targets, "index": torch.tensor(indices)}


class FrozenBackbone:
    """Computes features of a model that does not change, once per image and view, and caches them on disk."""

    def __init__(
        self,
        model: PreTrainedModel,
        processor: BaseImageProcessor,
        accelerator: Accelerator,
        seed: int = 0,
        num_workers: int = 0,
        precision: str = FLOAT32,
    ):
        self.precision = precision
        self.model, self.processor, self.accelerator = model.to(accelerator.device).eval(), processor, accelerator
        self.seed, self.num_workers = seed, num_workers
        self.weights = _hash_backbone(model)

    def features(
        self, dataset: Dataset, augmentation: FinetuneAugmentation | None = None, views: int = 1
    ) -> np.ndarray:
        """Return features (views, images, D) as float32. View 0 is the plain image, the others are augmented.

        Plain images are cached one by one, so that splits and folds share them. The first call decides on precision
        "auto": that in which most of these images are cached, or by a trial.
        """
        digests = [digest for _, digest in image_digests(dataset)]
        self._choose_precision(dataset, digests)
        key = self._key(self.precision)
        if augmentation is not None:  # an augmented view depends on the index of its image among all of them
            key |= {"augmentation": repr(augmentation), "views": views, "seed": self.seed}
            if augmentation.framing.name != "crop":
                key["framing"] = augmentation.framing.name
            key["data"] = hashlib.sha256(b"".join(digests)).hexdigest()
        cache = FeatureCache.of_key(key)
        # Another job may be writing just now, and all processes must do the same.
        missing = compute_on_main_process(self.accelerator, lambda: cache.missing(digests))
        if missing and augmentation is not None:
            missing = list(range(len(digests)))
        if missing:
            part = dataset if len(missing) == len(dataset) else dataset.select(missing)
            batches = build_eval_batches(64, self.accelerator, self.num_workers)
            batches = dataclasses.replace(batches, seed=self.seed)
            mine = [digests[missing[row]] for rows in batches.in_order(len(part)) for row in rows]
            if mine:  # some processes have none if there are few images
                numbers = range(1 if augmentation is None else views)
                cache.write(np.stack([self._compute(part, batches, augmentation, view) for view in numbers]), mine)
            self.accelerator.wait_for_everyone()
            if self.accelerator.is_main_process:
                (cache.folder / "key.json").write_text(json.dumps(key, indent=2, default=str) + "\n", encoding="utf-8")
            self.accelerator.wait_for_everyone()
        return cache.read(digests)

    def _key(self, precision: str) -> dict:
        """Return what plain features depend on besides the image. Those of 0.2, in float32, name no precision."""
        versions = {name: importlib.metadata.version(name) for name in _VERSIONED}
        key = {"weights": self.weights, "processor": self.processor.to_dict(), "versions": versions}
        return key if precision == FLOAT32 else key | {"precision": precision}

    def _choose_precision(self, dataset: Dataset, digests: list[bytes]) -> None:
        requested = self.precision
        if requested == AUTO:
            caches = {name: FeatureCache.of_key(self._key(name)) for name in (FLOAT32, BFLOAT16)}
            cached = (name for name, cache in caches.items() if 2 * len(cache.missing(digests)) <= len(set(digests)))
            requested = next(cached, AUTO)
        read_batch = partial(read_first_pixels, dataset, self.processor, self.accelerator, TRIAL_IMAGES)
        forward = partial(extract_features, self.model)
        chosen = resolve_precision(requested, self.model, len(dataset), read_batch, forward, similarity_posterior)
        self.precision = agree_on_precision(chosen)

    @torch.no_grad()
    def _compute(self, dataset: Dataset, batches: Batches, augmentation, view: int) -> np.ndarray:
        if view == 0:
            loader, transform = eval_loader(dataset, self.processor, batches), None
        else:
            inputs = read_input_spec(self.processor)
            loader = ordered_loader(dataset, augmentation, batches, view)
            transform = DeviceTransform(inputs.mean, inputs.std)
        features = []
        for batch in show_progress(loader, f"features, view {view}", self.accelerator):
            batch = {name: value.to(self.accelerator.device) for name, value in batch.items()}
            if transform is not None:
                batch = transform(batch, epoch=view, update=0)
            with autocast(self.accelerator.device, self.precision):
                features.append(extract_features(self.model, batch["pixel_values"]).float().cpu().numpy())
        return np.concatenate(features)


class FeatureCache:
    """Features on disk in parts: files of features (views, images, D) and the digests of their images."""

    def __init__(self, folder: Path):
        self.folder = folder

    @classmethod
    def of_key(cls, key: dict) -> "FeatureCache":
        """Return the cache of features that depend on what a key says."""
        name = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:16]
        return cls(runs_folder() / "features" / name)

    def write(self, features: np.ndarray, digests: list[bytes]) -> None:
        """Add a part, which is written as a whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        joined = bytearray(b"".join(digests))
        path = self.folder / f"{hashlib.sha256(joined).hexdigest()[:16]}.safetensors"
        writing = self.folder / f".{path.name}-{os.getpid()}"
        try:
            listed = torch.frombuffer(joined, dtype=torch.uint8)
            save_file({"features": torch.from_numpy(features), "digests": listed}, writing)
            writing.rename(path)
        except (OSError, SafetensorError) as error:
            writing.unlink(missing_ok=True)
            raise LiVTError(
                f"could not cache features in {self.folder}: {error}; make room, or set LIVT_RUNS to another folder."
            ) from error

    def missing(self, digests: list[bytes]) -> list[int]:
        """Return the rows of images that are not cached, each image once; all rows if nothing is cached."""
        cached = self._locate()
        if not cached:
            return list(range(len(digests)))
        first = {digest: row for row, digest in reversed(list(enumerate(digests))) if digest not in cached}
        return sorted(first.values())

    def read(self, digests: list[bytes]) -> np.ndarray:
        """Return the features of images in order; mapped from disk where they are a whole part."""
        cached = self._locate()
        parts, rows = zip(*(cached[digest] for digest in digests), strict=True)
        arrays = {part: load_file(part)["features"].numpy() for part in set(parts)}  # mapped, not read
        first = arrays[parts[0]]
        if len(arrays) == 1 and rows == tuple(range(first.shape[1])):
            return first
        features = np.empty((first.shape[0], len(digests), first.shape[2]), dtype=np.float32)
        for part, array in arrays.items():
            wanted = [i for i, other in enumerate(parts) if other == part]
            features[:, wanted] = array[:, [rows[i] for i in wanted]]
        return features

    def _locate(self) -> dict[bytes, tuple[Path, int]]:
        """Return the part and the row of each cached digest; damaged parts are ignored."""
        locations: dict[bytes, tuple[Path, int]] = {}
        for part in sorted(self.folder.glob("*.safetensors")):
            try:
                held = load_file(part)
                _, images, _ = held["features"].shape
                digests = held["digests"].view(images, DIGEST_BYTES).numpy()
            except (SafetensorError, KeyError, ValueError, RuntimeError):
                logger.warning("%s is damaged: its features are computed again", part)
                continue
            for row, digest in enumerate(digests):
                locations.setdefault(digest.tobytes(), (part, row))
        return locations


def _hash_backbone(model: PreTrainedModel) -> str:
    """Hash everything that features depend on; the classifier and its labels are left out."""
    classifier = {id(parameter) for parameter in get_classifier(model).parameters()}
    digest = hashlib.sha256(str(type(model)).encode())
    config = {name: value for name, value in model.config.to_dict().items() if name not in _IRRELEVANT}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if id(tensor) not in classifier and not name.startswith("head."):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
