"""Which parameters fine-tuning changes: all, low-rank additions to all (LoRA), or the classifier alone.

A frozen backbone sees each image once: its features are kept on disk under a key that names everything they depend on
(weights, images, processing), so that an epoch of the classifier takes milliseconds, and the next run none at all.
"""

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
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
from livt_hf.data.loading import UpdateSampler, augmented_in_order
from livt_hf.errors import LiVTError
from livt_hf.evaluation.running import progress
from livt_hf.long_tail.balance import BalancedClassifier
from livt_hf.long_tail.structure import extract_features, get_classifier
from livt_hf.processors import read_input_spec
from livt_hf.runs import runs_folder
from livt_hf.settings import FinetuneSettings

logger = logging.getLogger(__name__)

DIGEST_BYTES = hashlib.sha256().digest_size
# What a config says beside how its model computes features.
_NOT_OF_FEATURES = LABEL_FIELDS | {"num_classes", "label_names", "long_tail"}
_NOT_OF_FEATURES |= {"architectures", "transformers_version", "_name_or_path"}


class FeatureClassifier(BalancedClassifier, nn.Module):
    """The classifier and the balanced head of a model, on standardised features of its frozen backbone."""

    def __init__(self, model: PreTrainedModel, features: np.ndarray):
        super().__init__()
        self.config, self.head = model.config, model.head
        self.classifier = get_classifier(model)
        mean = features.mean(axis=(0, 1), dtype=np.float64)
        # numpy's own variance would hold all features twice more in memory.
        square = np.einsum("vnd,vnd->d", features, features, dtype=np.float64) / (
            features.shape[0] * features.shape[1]
        )
        std = np.sqrt(np.maximum(square - mean**2, 1e-12))
        for name, values in (("mean", mean), ("std", std)):  # not every device has float64
            self.register_buffer(name, torch.from_numpy(values).float().to(self.classifier.weight.device))
        self._standardise()

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ImageClassifierOutput:
        """`pixel_values` are features (B, D): evaluation need not know the difference."""
        features = (pixel_values - self.mean) / self.std
        logits = self.classifier(features)
        loss = None if labels is None else self.head(logits, labels, features)
        return ImageClassifierOutput(loss=loss, logits=logits)

    def parameter_depths(self) -> dict[str, int]:
        return {name: 0 for name, _ in self.named_parameters()}

    @torch.no_grad()
    def _standardise(self) -> None:
        """Let the classifier answer as before, which fits the backbone's own features, now that they are standardised.

        A feature that no training image has keeps its weight, which would else be divided by next to nothing.
        """
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
    """The interface of `TrainLoader` over kept features (views, images, D): epoch e takes view e modulo views."""

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
        """Every image of this process once, for evaluation."""
        for indices in self.batches.in_order(self.num_images):
            yield self._batch(self.features[0], indices)

    def _batch(self, view: np.ndarray, indices: list[int]) -> dict:
        targets = torch.from_numpy(self.labels.targets(indices, self.num_classes))
        return {"pixel_values": torch.from_numpy(view[indices]), "labels": targets, "index": torch.tensor(indices)}


class FrozenBackbone:
    """Features of a model that does not change, computed once per image and view and kept on disk."""

    def __init__(self, model: PreTrainedModel, processor: BaseImageProcessor, accelerator: Accelerator):
        self.model, self.processor, self.accelerator = model.to(accelerator.device).eval(), processor, accelerator
        self.weights = _hash_backbone(model)

    def features(self, dataset: Dataset, settings: FinetuneSettings, augmentation: FinetuneAugmentation | None = None):
        """Features (views, images, D), float32. View 0 is the plain image, the others augmented.

        Plain images are kept one by one: whatever split or fold asks for them, those that are there are not computed.
        """
        digests = [digest for _, digest in image_digests(dataset)]
        key = {"weights": self.weights, "processor": self.processor.to_dict()}
        if augmentation is not None:  # an augmented view depends on the place of its image among all of them
            key |= {"augmentation": repr(augmentation), "views": settings.views, "seed": settings.seed}
            key["data"] = hashlib.sha256(b"".join(digests)).hexdigest()
        name = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:16]
        kept = FeatureCache(runs_folder() / "features" / name)
        missing = [kept.missing(digests)]
        if missing[0] and augmentation is not None:
            missing = [list(range(len(digests)))]
        broadcast_object_list(missing)  # another job may be writing just now, and all processes must do the same
        if missing[0]:
            part = dataset if len(missing[0]) == len(dataset) else dataset.select(missing[0])
            self._compute(part, [digests[row] for row in missing[0]], kept, settings, augmentation)
            if self.accelerator.is_main_process:
                (kept.folder / "key.json").write_text(json.dumps(key, indent=2, default=str) + "\n", encoding="utf-8")
            self.accelerator.wait_for_everyone()
        return kept.read(digests)

    def _compute(
        self, dataset: Dataset, digests: list[bytes], kept: "FeatureCache", settings: FinetuneSettings, augmentation
    ) -> None:
        batches = dataclasses.replace(
            build_eval_batches(64, self.accelerator, settings.num_workers), seed=settings.seed
        )
        numbers = range(1 if augmentation is None else settings.views)
        mine = [digests[row] for rows in batches.in_order(len(dataset)) for row in rows]
        if mine:  # of few images, some processes have none
            kept.write(np.stack([self._view(dataset, batches, augmentation, number) for number in numbers]), mine)
        self.accelerator.wait_for_everyone()

    @torch.no_grad()
    def _view(self, dataset: Dataset, batches: Batches, augmentation, number: int) -> np.ndarray:
        if number == 0:
            loader, transform = eval_loader(dataset, self.processor, batches), None
        else:
            facts = read_input_spec(self.processor)
            loader = augmented_in_order(dataset, augmentation, batches, number)
            transform = DeviceTransform(facts.mean, facts.std)
        features = []
        for batch in progress(loader, f"features, view {number}", self.accelerator):
            batch = {name: value.to(self.accelerator.device) for name, value in batch.items()}
            if transform is not None:
                batch = transform(batch, epoch=number, update=0)
            features.append(extract_features(self.model, batch["pixel_values"]).float().cpu().numpy())
        return np.concatenate(features)


class FeatureCache:
    """Features on disk, in parts: each a file of features (views, images, D) and the digests of their images."""

    def __init__(self, folder: Path):
        self.folder = folder

    def write(self, features: np.ndarray, digests: list[bytes]) -> None:
        """Add a part, which is whole or absent."""
        self.folder.mkdir(parents=True, exist_ok=True)
        joined = bytearray(b"".join(digests))
        place = self.folder / f"{hashlib.sha256(joined).hexdigest()[:16]}.safetensors"
        writing = self.folder / f".{place.name}-{os.getpid()}"
        try:
            listed = torch.frombuffer(joined, dtype=torch.uint8)
            save_file({"features": torch.from_numpy(features), "digests": listed}, writing)
            writing.rename(place)
        except (OSError, SafetensorError) as error:
            writing.unlink(missing_ok=True)
            raise LiVTError(
                f"could not keep features in {self.folder}: {error}; make room, or set LIVT_RUNS to another folder."
            ) from error

    def missing(self, digests: list[bytes]) -> list[int]:
        """Rows of the images that no part holds, each image once; all rows where there is no part at all."""
        there = self._places()
        if not there:
            return list(range(len(digests)))
        first = {digest: row for row, digest in reversed(list(enumerate(digests))) if digest not in there}
        return sorted(first.values())

    def read(self, digests: list[bytes]) -> np.ndarray:
        """The features of images in their order; mapped from disk where they are a whole part."""
        there = self._places()
        parts, rows = zip(*(there[digest] for digest in digests), strict=True)
        arrays = {part: load_file(part)["features"].numpy() for part in set(parts)}  # mapped, not read
        first = arrays[parts[0]]
        if len(arrays) == 1 and rows == tuple(range(first.shape[1])):
            return first
        features = np.empty((first.shape[0], len(digests), first.shape[2]), dtype=np.float32)
        for part, array in arrays.items():
            wanted = [i for i, other in enumerate(parts) if other == part]
            features[:, wanted] = array[:, [rows[i] for i in wanted]]
        return features

    def _places(self) -> dict[bytes, tuple[Path, int]]:
        """Digest -> the part that holds its features, and the row there. A part that is damaged counts for nothing."""
        places: dict[bytes, tuple[Path, int]] = {}
        for part in sorted(self.folder.glob("*.safetensors")):
            try:
                held = load_file(part)
                _, images, _ = held["features"].shape
                digests = held["digests"].view(images, DIGEST_BYTES).numpy()
            except (SafetensorError, KeyError, ValueError, RuntimeError):
                logger.warning("%s is damaged: its features are computed again", part)
                continue
            for row, digest in enumerate(digests):
                places.setdefault(digest.tobytes(), (part, row))
        return places


def _hash_backbone(model: PreTrainedModel) -> str:
    """Of everything the features depend on: the classifier, which is fresh, and its labels are left out."""
    classifier = {id(parameter) for parameter in get_classifier(model).parameters()}
    digest = hashlib.sha256(str(type(model)).encode())
    config = {name: value for name, value in model.config.to_dict().items() if name not in _NOT_OF_FEATURES}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if id(tensor) not in classifier and not name.startswith("head."):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
