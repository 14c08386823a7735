"""What the second stage needs around its model: where it starts, what it is measured by, which weights are kept."""

import dataclasses
import json
import logging
from functools import partial
from pathlib import Path

import numpy as np
from accelerate import Accelerator
from datasets import Dataset, DatasetDict
from safetensors.torch import load_model, save_model
from transformers import BaseImageProcessor, ViTImageProcessor

from livt_hf.commands import counts_summary, image_size, is_native, local_places, size_name
from livt_hf.configuration_livit import LiViTConfig
from livt_hf.data import label_statistics, normalization
from livt_hf.data.labels import class_feature, is_multi_label
from livt_hf.data.loading import eval_loader
from livt_hf.data.transforms import FinetuneAugmentation, eval_processor
from livt_hf.errors import LiVTError
from livt_hf.evaluation.running import evaluate_classifier, evaluate_multi_label
from livt_hf.long_tail.losses import LOSSES
from livt_hf.long_tail.priors import read_prior
from livt_hf.modeling_livit import LiViTForImageClassification
from livt_hf.runs import Run, newest_finished, provenance, runs_folder
from livt_hf.settings import DataArguments, FinetuneArguments, words_of
from livt_hf.training.checkpoints import STATE, checkpoints
from livt_hf.training.loop import Loop

logger = logging.getLogger(__name__)

_AUGMENTATION = {
    "rand_augment": dict(policy="resized-crop", rand_augment="rand-m9-mstd0.5-inc1"),
    "three_augment": dict(policy="resized-crop", rand_augment="3a"),
    "crop": dict(policy="resized-crop", rand_augment=None),
    "pad_crop": dict(policy="pad-crop", rand_augment=None),
}


_WITHOUT_PRETRAINING = (
    "run recipes/pretrain.py first, name a checkpoint with --pretrained, or train from scratch with --pretrained none."
)


def inherited_options(argv: list[str]) -> list[str]:
    """Without a word about the data, fine-tuning takes that of its pretraining: the run named, or the newest one."""
    words = words_of(argv)
    if {"--dataset", "--config", "--resume", "--help", "-h"} & set(words):
        return []
    named = words[words.index("--pretrained") + 1] if "--pretrained" in words[:-1] else None
    run = newest_finished("pretrain") if named is None else Run(Path(named))
    if run is None:
        raise LiVTError(f"there is no finished pretraining under {runs_folder()}; {_WITHOUT_PRETRAINING}")
    if not run.finished:
        return []
    names = [field.name for field in dataclasses.fields(DataArguments)] + ["model_size"]
    saved = {name: run.arguments[name] for name in names if name != "num_workers"}
    return [f"--{name}={value}" for name, value in saved.items() if value is not None]


def resolve_pretrained(arguments: FinetuneArguments) -> None:
    """Fill in the newest finished pretraining of the same data and size where none is named."""
    if arguments.pretrained is not None:
        return
    # Whatever decides which images are trained on: another split may have pretrained on what is now the test set.
    names = ("dataset", "model_size", "imbalance_factor", "rule", "images_per_class")
    names += ("split_seed", "test_fraction", "label_column", "drop_empty")
    same = {name: getattr(arguments, name) for name in names}
    run = newest_finished("pretrain", **same)
    if run is None:
        wanted = ", ".join(f"{name} {value}" for name, value in same.items() if value is not None)
        raise LiVTError(
            f"there is no finished pretraining with {wanted} under {runs_folder()}; {_WITHOUT_PRETRAINING}"
        )
    arguments.pretrained = str(run.folder)


def check_options(arguments: FinetuneArguments, data: DatasetDict) -> None:
    """What cannot work is refused before anything is written."""
    if arguments.loss not in LOSSES:
        raise LiVTError(
            f"loss {arguments.loss!r} is not known; choose one of {', '.join(sorted(LOSSES))}, "
            "or import the module that registers it."
        )
    if not LOSSES[arguments.loss].soft_labels and (arguments.mixup or arguments.cutmix):
        raise LiVTError(f"loss {arguments.loss!r} wants hard labels; pass --mixup 0 --cutmix 0.")
    if arguments.select == "best" and "validation" not in data:
        raise LiVTError(
            f"--select best needs a validation split, which {arguments.dataset} does not have; the test split is "
            "never used to select. Use --select last."
        )


def build_classifier(arguments: FinetuneArguments, train: Dataset) -> LiViTForImageClassification:
    """The model at its start: an encoder from a checkpoint, or from scratch, under a head that knows the counts."""
    counts, num_images = label_statistics(train)
    empty = np.flatnonzero(counts == 0)
    if len(empty):
        names = [class_feature(train).names[label] for label in empty[:10]]
        raise LiVTError(f"classes {names} have no training image, so their prior is undefined; leave them out.")
    head = {
        "loss": arguments.loss,
        "tau": arguments.tau,
        "bias": arguments.bias,
        "head_start": arguments.head_start,
        "label_smoothing": arguments.label_smoothing,
        "nt_lambda": arguments.nt_lambda,
        "ib_warmup": arguments.ib_warmup,
        "test_prior": {"uniform": "uniform", "none": None}.get(arguments.test_prior, arguments.test_prior),
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
    encoder = {"pooling": arguments.pooling, "drop_path_rate": arguments.drop_path}
    if arguments.pretrained == "none" or arguments.image_size is not None:  # else that of the checkpoint
        encoder["image_size"] = image_size(arguments)
    if arguments.pretrained == "none":
        if arguments.patch_size is not None:
            encoder["patch_size"] = arguments.patch_size
        return LiViTForImageClassification(LiViTConfig.preset(arguments.model_size, **(encoder | head)))
    model = LiViTForImageClassification.from_pretrained(arguments.pretrained, **encoder, **head)
    found = size_name(model.config)
    if found != arguments.model_size:
        raise LiVTError(f"{arguments.pretrained} is of size {found}; pass --model_size {found}.")
    if arguments.patch_size not in (None, model.config.patch_size):
        raise LiVTError(f"{arguments.pretrained} has patches of {model.config.patch_size}; leave --patch_size out.")
    return model


def serving_processor(arguments: FinetuneArguments, train: Dataset, size: int) -> BaseImageProcessor:
    """The processor that is saved with the model; its statistics are those the encoder was pretrained with."""
    mean, std = normalization(arguments.dataset)
    if arguments.pretrained != "none":
        try:
            saved, _ = ViTImageProcessor.get_image_processor_dict(arguments.pretrained)
            mean, std = saved["image_mean"], saved["image_std"]
        except (OSError, KeyError):
            logger.warning(
                "%s does not say how its pictures were normalised; taking the statistics of %s.",
                arguments.pretrained,
                arguments.dataset,
            )
    return eval_processor(size, mean, std, native=is_native(train, size))


def finetune_augmentation(arguments: FinetuneArguments, processor: BaseImageProcessor) -> FinetuneAugmentation:
    return FinetuneAugmentation(
        processor.crop_size["height"],
        scale=(arguments.crop_scale, 1.0),
        flip=arguments.flip,
        mean=tuple(processor.image_mean),
        **_AUGMENTATION[arguments.augmentation],
    )


def measure(
    model: LiViTForImageClassification,
    dataset: Dataset,
    processor: BaseImageProcessor,
    accelerator: Accelerator,
    arguments: FinetuneArguments,
) -> dict:
    """Metrics of the paper's rule and, where the head gives probabilities, of the posterior rule."""
    loader = eval_loader(
        dataset,
        processor,
        batch_size=256,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        num_workers=arguments.num_workers,
    )
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


def results_of(arguments: FinetuneArguments, loop: Loop, counts: np.ndarray, measured: dict) -> dict:
    """The contents of results.json."""
    model, best = loop.final_model, loop.progress.best_epoch
    finished = loop.progress.update / loop.per_epoch
    return (
        {
            "stage": "finetune",
            "model_size": arguments.model_size,
            "parameters": sum(p.numel() for p in model.parameters()),
            "image_size": model.config.image_size,
            "dataset": arguments.dataset,
            "imbalance_factor": arguments.imbalance_factor,
            "split": "test",
            "num_images": measured["metrics"]["num_images"],
            "num_train_images": model.config.long_tail.num_images,
            "num_classes": model.config.num_labels,
            "class_counts": counts_summary(counts),
            "loss": arguments.loss,
            "tau": arguments.tau,
            "epoch": finished if best is None else best,
            "epochs": arguments.epochs,
            "updates": loop.progress.update,
            "selection": "last epoch" if best is None else "best epoch on the validation split",
            "weights": "model" if arguments.ema_decay is None else "ema",
            "seed": arguments.seed,
            "pretrained": arguments.pretrained,
            "seconds": loop.progress.seconds,
        }
        | local_places(arguments)
        | measured
        | provenance()
    )
