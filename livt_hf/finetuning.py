"""What the second stage needs around its model: where it starts, what it is measured by, which weights are kept."""

import json
import logging
from functools import partial
from pathlib import Path

import numpy as np
from accelerate import Accelerator
from datasets import Dataset, DatasetDict
from safetensors.torch import load_model, save_model
from transformers import BaseImageProcessor, PreTrainedConfig, ViTImageProcessor

from livt_hf.configuration_livit import LiViTConfig, size_name
from livt_hf.data import eval_loader, eval_processor, label_statistics, normalization
from livt_hf.data.labels import class_feature, is_multi_label
from livt_hf.data.transforms import FinetuneAugmentation
from livt_hf.errors import LiVTError
from livt_hf.evaluation.running import evaluate_classifier, evaluate_multi_label
from livt_hf.long_tail.config import LongTailConfig
from livt_hf.long_tail.losses import LOSSES
from livt_hf.long_tail.priors import read_prior
from livt_hf.modeling_livit import LiViTForImageClassification
from livt_hf.results import Results
from livt_hf.runs import lent_by_pretraining
from livt_hf.settings import FinetuneSettings
from livt_hf.stages import common_results, counts_summary, image_size, is_local, is_native, shared_batches
from livt_hf.training.checkpoints import STATE, checkpoints
from livt_hf.training.loop import Loop

logger = logging.getLogger(__name__)

_AUGMENTATION = {
    "rand_augment": dict(policy="resized-crop", rand_augment="rand-m9-mstd0.5-inc1"),
    "three_augment": dict(policy="resized-crop", rand_augment="3a"),
    "crop": dict(policy="resized-crop", rand_augment=None),
    "pad_crop": dict(policy="pad-crop", rand_augment=None),
}


def lent_by_checkpoint(asked: dict) -> dict:
    """What fine-tuning takes over from where it starts: its size and, of a pretraining run, its data too."""
    lent, named = lent_by_pretraining(asked), asked.get("pretrained", "none")
    if not lent and named != "none":
        try:
            config, _ = PreTrainedConfig.get_config_dict(named)
        except OSError as error:
            raise LiVTError(f"{named} could not be loaded as a checkpoint folder or from the Hub: {error}") from error
        if "hidden_size" in config:
            lent = {"model_size": size_name(config), "patch_size": config.get("patch_size")}
    return lent


def check_options(settings: FinetuneSettings, data: DatasetDict) -> None:
    """What cannot work is refused before anything is written."""
    if not LOSSES[settings.loss].soft_labels and (settings.mixup or settings.cutmix):
        raise LiVTError(f"loss {settings.loss!r} wants hard labels; pass --mixup 0 --cutmix 0.")
    if settings.select == "best" and "validation" not in data:
        raise LiVTError(
            f"--select best needs a validation split, which {settings.dataset} does not have; the test split is "
            "never used to select. Use --select last."
        )


def build_classifier(settings: FinetuneSettings, train: Dataset) -> LiViTForImageClassification:
    """The model at its start: an encoder from a checkpoint, or from scratch, under a head that knows the counts."""
    counts, num_images = label_statistics(train)
    empty = np.flatnonzero(counts == 0)
    if len(empty):
        names = [class_feature(train).names[label] for label in empty[:10]]
        raise LiVTError(f"classes {names} have no training image, so their prior is undefined; leave them out.")
    head = {name: getattr(settings, name) for name in LongTailConfig.names() if name in settings.names()}
    head |= {
        "test_prior": {"uniform": "uniform", "none": None}.get(settings.test_prior, settings.test_prior),
        "class_counts": counts.tolist(),
        "id2label": dict(enumerate(class_feature(train).names)),
        "label2id": {name: label for label, name in enumerate(class_feature(train).names)},
    }
    if head["test_prior"] not in (None, "uniform"):
        several = is_multi_label(train)
        head["test_prior"] = read_prior(head["test_prior"], class_feature(train).names, multi_label=several)
    if is_multi_label(train):
        head |= {"problem_type": "multi_label_classification", "num_train_images": num_images}
    else:
        head["problem_type"] = None  # whatever the checkpoint's was
    encoder = {"pooling": settings.pooling, "drop_path_rate": settings.drop_path}
    if settings.pretrained == "none" or settings.image_size is not None:  # else that of the checkpoint
        encoder["image_size"] = image_size(settings)
    if settings.pretrained == "none":
        if settings.patch_size is not None:
            encoder["patch_size"] = settings.patch_size
        return LiViTForImageClassification(LiViTConfig.preset(settings.model_size, **(encoder | head)))
    model = LiViTForImageClassification.from_pretrained(settings.pretrained, **encoder, **head)
    found = size_name(model.config.to_dict())
    if found != settings.model_size:
        raise LiVTError(f"{settings.pretrained} is of size {found}; leave --model_size out.")
    if settings.patch_size not in (None, model.config.patch_size):
        raise LiVTError(f"{settings.pretrained} has patches of {model.config.patch_size}; leave --patch_size out.")
    return model


def serving_processor(settings: FinetuneSettings, train: Dataset, size: int) -> BaseImageProcessor:
    """The processor that is saved with the model; its statistics are those the encoder was pretrained with."""
    mean, std = normalization(settings.dataset)
    if settings.pretrained != "none":
        try:
            saved, _ = ViTImageProcessor.get_image_processor_dict(settings.pretrained)
            mean, std = saved["image_mean"], saved["image_std"]
        except (OSError, KeyError):
            logger.warning(
                "%s does not say how its images were normalised; taking the statistics of %s.",
                settings.pretrained,
                settings.dataset,
            )
    return eval_processor(size, mean, std, native=is_native(train, size))


def finetune_augmentation(settings: FinetuneSettings, processor: BaseImageProcessor) -> FinetuneAugmentation:
    return FinetuneAugmentation(
        processor.crop_size["height"],
        scale=(settings.crop_scale, 1.0),
        flip=settings.flip,
        mean=tuple(processor.image_mean),
        **_AUGMENTATION[settings.augmentation],
    )


def measure(
    model: LiViTForImageClassification,
    dataset: Dataset,
    processor: BaseImageProcessor,
    accelerator: Accelerator,
    num_workers: int = 0,
) -> dict:
    """Metrics of the paper's rule and, where the head gives probabilities, of the posterior rule."""
    loader = eval_loader(dataset, processor, shared_batches(256, accelerator, num_workers))
    counts = model.config.long_tail.class_counts
    if model.head.multi_label:
        return {"metrics": evaluate_multi_label(model, loader, accelerator, counts).compute(), "posterior": None}
    rules = {"metrics": None}
    if model.head.no_posterior is None:
        rules["posterior"] = partial(model.head.posterior, prior="uniform")
    measured, _ = evaluate_classifier(model, loader, accelerator, counts, rules)
    return {name: measured[name].compute() if name in measured else None for name in ("metrics", "posterior")}


class BestWeights:
    """Of `--select best`: the weights of the epoch that was most accurate on the validation split.

    A file an epoch, so that a checkpoint and the weights it speaks of belong together whenever a run is killed.
    """

    def __init__(self, loop: Loop):
        self.loop = loop

    def path(self, epoch: int) -> Path:
        return self.loop.run.checkpoints / f"best-{epoch}.safetensors"

    def consider(self, epoch: int, accuracy: float) -> None:
        progress = self.loop.progress
        if progress.best_accuracy is None or accuracy > progress.best_accuracy:
            progress.best_epoch, progress.best_accuracy = epoch, accuracy
            if self.loop.accelerator.is_main_process:
                self._write(self.path(epoch))

    def restore(self) -> None:
        self.loop.accelerator.wait_for_everyone()
        load_model(self.loop.final_model, str(self.path(self.loop.progress.best_epoch)))

    def _write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        writing = path.with_suffix(".writing")
        save_model(self.loop.final_model, str(writing))
        writing.replace(path)
        spoken_of = [json.loads((folder / STATE).read_text())["best_epoch"] for folder in checkpoints(self.loop.run)]
        kept = {path, *(self.path(epoch) for epoch in spoken_of)}
        for old in set(path.parent.glob("best-*.safetensors")) - kept:
            old.unlink()


def results_of(settings: FinetuneSettings, loop: Loop, counts: np.ndarray, measured: dict) -> Results:
    model, best = loop.final_model, loop.progress.best_epoch
    return Results(
        **common_results(settings, loop),
        **measured,
        image_size=model.config.image_size,
        split="test",
        num_images=measured["metrics"]["num_images"],
        num_train_images=model.config.long_tail.num_images,
        num_classes=model.config.num_labels,
        class_counts=counts_summary(counts),
        loss=settings.loss,
        tau=settings.tau,
        epoch=loop.progress.update / loop.per_epoch if best is None else best,
        selection="last epoch" if best is None else "best epoch on the validation split",
        pretrained=settings.pretrained,
        pretrained_local=is_local(settings.pretrained),
    )
