"""What the second stage needs around its model: where it starts, what it is measured by, which weights are kept."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from datasets import DatasetDict
from safetensors.torch import save_model
from torch import Tensor, nn
from transformers import BaseImageProcessor, PreTrainedModel

from livt_hf.data import Batches, DeviceTransform, class_counts, eval_loader, train_loader
from livt_hf.data.batches import build_eval_batches
from livt_hf.data.division import is_carved, refuse_single_class
from livt_hf.data.labels import is_multi_label, number_of_classes
from livt_hf.data.transforms import FinetuneAugmentation
from livt_hf.errors import LiVTError
from livt_hf.evaluation.rules import given_labels, headline, standard_rules
from livt_hf.evaluation.running import evaluate_multi_label, evaluate_rules, logits_of
from livt_hf.files import replacing
from livt_hf.long_tail.losses import LOSSES
from livt_hf.long_tail.structure import get_classifier
from livt_hf.metrics import GROUPS, shot_groups
from livt_hf.modeling_livit import LiViTForImageClassification
from livt_hf.processors import InputSpec, read_input_spec
from livt_hf.randomness import keyed_uniform, purpose_seed
from livt_hf.results import OWN, PAPER, UNIFORM, Results
from livt_hf.settings import FinetuneSettings
from livt_hf.training.checkpoints import explain_save_errors, list_checkpoints, load_weights, read_state
from livt_hf.training.frozen import FeatureClassifier, FeatureLoader, FrozenBackbone
from livt_hf.training.loop import TrainingLoop, TrainingTask
from livt_hf.training.lora import add_lora, merge_lora
from livt_hf.training.results import build_batches, build_common_results, is_local, is_own, summarize_class_counts
from livt_hf.training.start import freeze_unused_parameters

CLASS_ACCURACIES = ("mean_class_accuracy", "worst_class_accuracy")
_AUGMENTATION = {
    "rand_augment": dict(policy="resized-crop", rand_augment="rand-m9-mstd0.5-inc1"),
    "three_augment": dict(policy="resized-crop", rand_augment="3a"),
    "crop": dict(policy="resized-crop", rand_augment=None),
    "pad_crop": dict(policy="pad-crop", rand_augment=None),
}


def check_options(settings: FinetuneSettings, data: DatasetDict) -> None:
    """What cannot work is refused before anything is computed or written."""
    refuse_single_class(data["train"])
    Batches(settings.batch_size).updates(len(data["train"]))
    if not LOSSES[settings.loss].soft_labels and (settings.mixup or settings.cutmix):
        raise LiVTError(f"loss {settings.loss!r} wants hard labels; pass --mixup 0 --cutmix 0.")
    if settings.tune == "head" and (settings.mixup or settings.cutmix or settings.erase):
        raise LiVTError("features of a frozen backbone cannot be mixed; pass --mixup 0 --cutmix 0 --erase 0.")
    if settings.tune == "head" and settings.gradient_checkpointing:
        raise LiVTError("a classifier on frozen features keeps next to nothing; leave --gradient_checkpointing out.")
    if settings.tune == "head" and settings.normalised_classifier:
        raise LiVTError(
            "features of a frozen backbone are standardised, which cosines are not; leave --normalised_classifier out."
        )
    if settings.tune == "head" and settings.pretrained == "none":
        raise LiVTError("--tune head needs a pretrained model; name one with --pretrained.")
    if settings.hours is not None and settings.sampler == "progressive":
        raise LiVTError("the progressive sampler must know the number of epochs; pass --epochs instead of --hours.")
    if settings.select == "best":
        _check_selection(settings, data)
    elif settings.select_metric is not None:
        raise LiVTError("--select_metric says what the best epoch is best by; pass --select best with it.")


def _check_selection(settings: FinetuneSettings, data: DatasetDict) -> None:
    if "validation" not in data:
        raise LiVTError(
            f"--select best needs a validation split, which {settings.dataset} does not have; the test split is "
            "never used to select. Use --select last."
        )
    several = is_multi_label(data["train"])
    name = choose_selection_metric(settings, several)
    known = {*GROUPS, "macro_f1"} | ({"map", "auroc"} if several else {"accuracy", *CLASS_ACCURACIES})
    if name not in known:
        labels = "several labels" if several else "one label"
        raise LiVTError(f"select_metric {name} is not defined for {labels}; choose one of {', '.join(sorted(known))}.")
    counts, held_out = class_counts(data["train"]), class_counts(data["validation"])
    if name in GROUPS and not held_out[shot_groups(counts).numpy() == GROUPS.index(name)].any():
        raise LiVTError(f"the validation split has no image of a {name}-shot class; choose another --select_metric.")


def choose_selection_metric(settings: FinetuneSettings, several: bool) -> str:
    """What the best epoch is best by: plain accuracy on imbalanced images would reward the frequent classes."""
    return settings.select_metric or ("map" if several else CLASS_ACCURACIES[0])


def build_augmentation(settings: FinetuneSettings, facts: InputSpec) -> FinetuneAugmentation:
    return FinetuneAugmentation(
        facts.size,
        scale=(settings.crop_scale, 1.0),
        flip=settings.flip,
        mean=facts.mean,
        **_AUGMENTATION[settings.augmentation],
    )


def draw_kept_patches(settings: FinetuneSettings, epoch: int, indices: Tensor, num_patches: int) -> Tensor:
    """Of `--keep_ratio`: the numbers of the patches that are shown of each image, in their order. (B, kept)"""
    noise = keyed_uniform(purpose_seed(settings.seed, "keep"), epoch, indices.cpu().numpy(), num_patches)
    kept = noise.argsort(axis=1)[:, : max(1, round(settings.keep_ratio * num_patches))]
    return torch.from_numpy(np.sort(kept, axis=1)).to(indices.device)


@dataclass(frozen=True)
class FinetuneTask(TrainingTask):
    """Images through the whole model, or kept features through its classifier."""

    eval_batches: Callable[[str], Iterable[dict]]  # a split -> what it is measured on
    published: Callable[[nn.Module], PreTrainedModel]  # what was trained -> the whole model


def build_finetune_task(
    settings: FinetuneSettings,
    data: DatasetDict,
    model: PreTrainedModel,
    processor: BaseImageProcessor,
    accelerator: Accelerator,
) -> FinetuneTask:
    if settings.keep_ratio < 1 and (settings.tune == "head" or not isinstance(model, LiViTForImageClassification)):
        raise LiVTError(
            f"keep_ratio is {settings.keep_ratio}, but only a LiViT that learns from images can leave out patches; "
            "pass --keep_ratio 1."
        )
    if settings.tune == "head":
        return _on_features(settings, data, model, FrozenBackbone(model, processor, accelerator))
    if settings.gradient_checkpointing and not model.supports_gradient_checkpointing:
        kind = model.config.model_type
        raise LiVTError(f"a {kind} cannot trade time for memory; leave --gradient_checkpointing out.")
    facts, batches = read_input_spec(processor), build_batches(settings, accelerator)
    if settings.tune == "lora":
        add_lora(model, settings.lora_rank)
    if not isinstance(model, LiViTForImageClassification):
        freeze_unused_parameters(model, facts.size)
    fixed = dict(erase=settings.erase, num_classes=number_of_classes(data["train"]), seed=settings.seed)
    mixing = DeviceTransform(facts.mean, facts.std, mixup=settings.mixup, cutmix=settings.cutmix, **fixed)
    mixing.check_batch(batches.micro_size)
    plain = DeviceTransform(facts.mean, facts.std, **fixed)

    def compute_loss(module, batch, step):
        left = settings.epochs - step.epoch
        transform = mixing if left > settings.mixup_off_epochs else plain
        batch, shown = transform(batch, **vars(step)), {}
        if settings.keep_ratio < 1 and left > settings.keep_all_epochs:
            shown = {"kept": draw_kept_patches(settings, step.epoch, batch["index"], model.config.num_patches)}
        return module(batch["pixel_values"], labels=batch["labels"], **shown).loss

    def eval_batches(split):
        return eval_loader(data[split], processor, build_eval_batches(256, accelerator, settings.num_workers))

    loader = train_loader(data["train"], build_augmentation(settings, facts), batches)
    published = merge_lora if settings.tune == "lora" else lambda module: module
    return FinetuneTask(model, loader, compute_loss, eval_batches, published)


def _on_features(
    settings: FinetuneSettings, data: DatasetDict, model: PreTrainedModel, backbone: FrozenBackbone
) -> FinetuneTask:
    accelerator = backbone.accelerator
    augmentation = build_augmentation(settings, read_input_spec(backbone.processor)) if settings.views > 1 else None
    features = backbone.features(data["train"], settings, augmentation)
    loader = FeatureLoader(features, data["train"], build_batches(settings, accelerator))

    def compute_loss(module, batch, _step):
        return module(batch["pixel_values"], labels=batch["labels"]).loss

    def eval_batches(split):
        kept = backbone.features(data[split], settings)
        return FeatureLoader(kept, data[split], build_eval_batches(1024, accelerator)).in_order()

    def published(module):
        module.unstandardise()
        get_classifier(model).load_state_dict(module.classifier.state_dict())
        model.config.long_tail = module.config.long_tail  # a moving average has a config of its own
        return model

    return FinetuneTask(FeatureClassifier(model, features), loader, compute_loss, eval_batches, published)


def measure(model: nn.Module, loader: Iterable[dict], accelerator: Accelerator, counts: np.ndarray) -> dict:
    """Metrics of the paper's rule and, where the head gives probabilities, of the posterior rule, as in `Results`."""
    batches = logits_of(model, loader, accelerator)
    if model.head.multi_label:
        given = partial(given_labels, model)
        return {"metrics": evaluate_multi_label(batches, counts, given).compute(), "posterior": None}
    measured = evaluate_rules(batches, accelerator, counts, standard_rules(model))
    fields = {"metrics": PAPER, "posterior": UNIFORM, "own_prior": OWN}
    return {field: measured[rule].compute() if rule in measured else None for field, rule in fields.items()}


class BestCheckpoint:
    """Of `--select best`: the weights of the epoch that was best on the validation split.

    One file per epoch, so that a checkpoint and the weights it speaks of belong together whenever a run is killed.
    """

    def __init__(self, loop: TrainingLoop):
        self.loop = loop

    def path(self, epoch: int) -> Path:
        return self.loop.run.checkpoints / f"best-{epoch}.safetensors"

    def consider(self, epoch: int, value: float) -> None:
        progress = self.loop.progress
        if progress.best_accuracy is None or value > progress.best_accuracy:
            progress.best_epoch, progress.best_accuracy = epoch, value
            if self.loop.accelerator.is_main_process:
                self._write(self.path(epoch))

    def restore(self) -> None:
        self.loop.accelerator.wait_for_everyone()
        load_weights(self.loop.final_model, self.path(self.loop.progress.best_epoch))

    def _write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with explain_save_errors("the best weights", self.loop.run), replacing(path) as writing:
            save_model(self.loop.final_model, str(writing))
        spoken_of = [read_state(folder).get("best_epoch") for folder in list_checkpoints(self.loop.run)]
        kept = {path, *(self.path(epoch) for epoch in spoken_of)}
        for old in set(path.parent.glob("best-*.safetensors")) - kept:
            old.unlink()


def build_results(
    settings: FinetuneSettings, data: DatasetDict, loop: TrainingLoop, model: PreTrainedModel, measured: dict
) -> Results:
    config, best, name = (
        model.config,
        loop.progress.best_epoch,
        choose_selection_metric(settings, model.head.multi_label),
    )
    held_out = is_carved(data, "validation")
    watched = "held-out training images" if held_out else "the validation split"
    calibration = config.long_tail.calibration
    return Results(
        **build_common_results(settings, loop, model),
        **measured,
        headline=headline(model),
        split="test",
        test_carved=is_carved(data, "test"),
        validation_carved=held_out,
        num_images=measured["metrics"]["num_images"],
        num_train_images=config.long_tail.num_images,
        num_classes=config.num_labels,
        class_counts=summarize_class_counts(class_counts(data["train"])),
        loss=settings.loss,
        tau=settings.tau,
        epoch=loop.progress.update / loop.per_epoch if best is None else best,
        selection="last epoch" if best is None else f"epoch of the best {name} on {watched}",
        pretrained=settings.pretrained,
        pretrained_local=is_local(settings.pretrained),
        pretrained_own=is_own(settings.pretrained),
        calibrated_on=None if calibration is None else calibration["num_images"],
    )
