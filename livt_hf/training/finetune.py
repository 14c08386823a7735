"""Fine-tuning: the task of the loop, the evaluation after an epoch, and the results of a run."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset, DatasetDict
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import BaseImageProcessor, PreTrainedModel

from livt_hf.configuration_livit import encoder_preset
from livt_hf.data import Batches, DeviceTransform, class_counts, eval_loader, shot_counts, train_loader
from livt_hf.data.batches import build_eval_batches, build_train_batches
from livt_hf.data.benchmarks import BENCHMARKS
from livt_hf.data.labels import is_multi_label, number_of_classes
from livt_hf.data.load import check_several_classes
from livt_hf.data.sampling import Sampler
from livt_hf.data.spec import DataSpec, FinetuneAugmentationSpec
from livt_hf.data.splitting import is_made_split
from livt_hf.data.transforms import FinetuneAugmentation
from livt_hf.errors import LiVTError
from livt_hf.files import read_values, write_values
from livt_hf.long_tail.losses import LOSSES
from livt_hf.long_tail.spec import LossSpec
from livt_hf.long_tail.structure import get_classifier
from livt_hf.metrics import GROUPS, shot_groups
from livt_hf.modeling_livit import LiViTForImageClassification
from livt_hf.precision import FLOAT32, PRECISION_NAMES
from livt_hf.predictions.evaluate import Evaluator, measure_batches
from livt_hf.predictions.predict import describe_images, predict_batches, store_batches
from livt_hf.predictions.record import FOLDER, PredictionsInfo
from livt_hf.predictions.rules import LABELS, PER_LABEL
from livt_hf.processors import FRAMINGS, read_framing, read_input_spec
from livt_hf.randomness import keyed_uniform, purpose_seed
from livt_hf.results import Results
from livt_hf.text import format_accuracy
from livt_hf.training.batch_statistics import freeze_statistics
from livt_hf.training.checkpoints import load_best, save_best
from livt_hf.training.framing import FRAMING, FramingTrial
from livt_hf.training.frozen import FeatureClassifier, FeatureLoader, FrozenBackbone
from livt_hf.training.loop import StepKey, TrainingLoop, TrainingTask
from livt_hf.training.lora import add_lora, merge_lora
from livt_hf.training.optim import make_optimizer
from livt_hf.training.results import build_common_results, is_local, is_own, summarize_class_counts
from livt_hf.training.spec import FinetuneCheckpointSpec, FinetuneModelSpec, FinetuneOptimizationSpec, is_solvable
from livt_hf.training.start import check_image_side, freeze_unused_parameters

CLASS_ACCURACIES = ("mean_class_accuracy", "worst_class_accuracy")
_POLICIES = {  # of `FinetuneAugmentation`, by the option `augmentation`
    "rand_augment": dict(policy="resized-crop", rand_augment="rand-m9-mstd0.5-inc1"),
    "three_augment": dict(policy="resized-crop", rand_augment="3a"),
    "crop": dict(policy="resized-crop", rand_augment=None),
    "pad_crop": dict(policy="pad-crop", rand_augment=None),
}


def check_finetune_options(
    dataset: DatasetDict,
    model: FinetuneModelSpec,
    optimization: FinetuneOptimizationSpec,
    loss: LossSpec,
    augmentation: FinetuneAugmentationSpec,
    checkpointing: FinetuneCheckpointSpec,
) -> None:
    """Raise an error for options that cannot work together, before anything is computed or written."""
    check_several_classes(dataset["train"])
    if model.pretrained == "none":
        encoder_preset(model.model_size)  # raises an error for a size that is not known
    Batches(optimization.batch_size).updates(len(dataset["train"]))  # raises where the images do not fill an update
    mixes, head_only = augmentation.mixup or augmentation.cutmix, model.tune == "head"
    if mixes and not LOSSES[loss.loss].soft_labels:
        raise LiVTError(f"loss {loss.loss!r} needs hard labels; set mixup 0 and cutmix 0.", argument="mixup")
    if head_only and (mixes or augmentation.erase):
        message = "features of a frozen backbone cannot be mixed; set mixup 0, cutmix 0 and erase 0."
        raise LiVTError(message, argument="mixup")
    if head_only and optimization.gradient_checkpointing:
        message = "a classifier on frozen features needs little memory; leave gradient_checkpointing out."
        raise LiVTError(message, argument="gradient_checkpointing")
    if head_only and loss.normalised_classifier:
        message = "features of a frozen backbone are standardised, cosines are not; leave normalised_classifier out."
        raise LiVTError(message, argument="normalised_classifier")
    if head_only and model.pretrained == "none":
        raise LiVTError("tune head needs a pretrained model; name one with pretrained.", argument="pretrained")
    if optimization.hours is not None and optimization.sampler == "progressive":
        message = "the progressive sampler must know the number of epochs; set epochs instead of hours."
        raise LiVTError(message, argument="hours")
    if loss.objective not in (None, "none"):
        _check_objective(dataset, loss.objective, is_solvable(model, optimization, loss))
    if checkpointing.select == "best":
        _check_selection(dataset, checkpointing)
    elif checkpointing.select_metric is not None:
        message = f"select_metric {checkpointing.select_metric} selects the best epoch; set select best with it."
        raise LiVTError(message, argument="select_metric")


def choose_objective(loss: LossSpec, data: DataSpec, multi_label: bool) -> str | None:
    """Return what a model is served for; None is the test prior of the loss.

    Images of your own are as imbalanced as the training images. There macro F1 counts rare classes and false alarms:
    against the objective of mean class accuracy it raised accuracy by 0 to 17 points and macro F1 by 1 to 4, for 1 to
    6 points of mean class accuracy (Bal-CE on the four datasets of `recipes/results/heads.json`). Benchmarks keep the
    paper's uniform prior, because their test sets are balanced.
    """
    if loss.objective is not None:
        return None if loss.objective == "none" else loss.objective
    is_own = data.dataset not in BENCHMARKS and loss.test_prior == "uniform"
    return "macro_f1" if is_own and not multi_label else None


def _check_objective(dataset: DatasetDict, objective: str, solvable: bool) -> None:
    if is_multi_label(dataset["train"]):
        message = f"objective {objective} is about one class per image; leave it out where images have several labels."
        raise LiVTError(message, argument="objective")
    if not solvable and "validation" not in dataset:
        raise LiVTError(
            f"objective {objective} chooses a prior on images that the model is not trained on, and there is no "
            "validation split; hold images out with validation_fraction.",
            argument="objective",
        )


def _check_selection(dataset: DatasetDict, spec: FinetuneCheckpointSpec) -> None:
    if "validation" not in dataset:
        raise LiVTError(
            "select best needs a validation split, which the dataset does not have; the test split is never used to "
            "select. Use select last, or hold images out with validation_fraction.",
            argument="select",
        )
    multi_label = is_multi_label(dataset["train"])
    name = choose_selection_metric(spec, multi_label)
    known = {*GROUPS, "macro_f1"} | ({"map", "auroc"} if multi_label else {"accuracy", *CLASS_ACCURACIES})
    if name not in known:
        labels = "several labels" if multi_label else "one label"
        raise LiVTError(
            f"select_metric {name} is not defined for {labels}; choose one of {', '.join(sorted(known))}.",
            argument="select_metric",
        )
    counts, held_out = shot_counts(dataset), class_counts(dataset["validation"])
    if name in GROUPS and not held_out[shot_groups(counts).numpy() == GROUPS.index(name)].any():
        message = f"the validation split has no image of a {name}-shot class; choose another select_metric."
        raise LiVTError(message, argument="select_metric")


def choose_selection_metric(spec: FinetuneCheckpointSpec, multi_label: bool) -> str:
    """Return the metric of `select best`; plain accuracy on imbalanced images would reward the frequent classes."""
    return spec.select_metric or ("map" if multi_label else CLASS_ACCURACIES[0])


def build_augmentation(
    spec: FinetuneAugmentationSpec, processor: BaseImageProcessor, framing: str = "own"
) -> FinetuneAugmentation:
    """Build the augmentation of training images for a model's processor; a named framing is that of the crops too."""
    inputs, policy = read_input_spec(processor), dict(_POLICIES[spec.augmentation])
    if framing in FRAMINGS:
        policy["framing"] = read_framing(processor)
    size = spec.crop_size or inputs.size
    return FinetuneAugmentation(size, scale=(spec.crop_scale, 1.0), flip=spec.flip, mean=inputs.mean, **policy)


def draw_kept_patches(ratio: float, seed: int, epoch: int, indices: Tensor, num_patches: int) -> Tensor:
    """Draw the patches of each image that an epoch trains on, in their order. (B, kept)"""
    noise = keyed_uniform(purpose_seed(seed, "keep"), epoch, indices.cpu().numpy(), num_patches)
    kept = noise.argsort(axis=1)[:, : max(1, round(ratio * num_patches))]
    return torch.from_numpy(np.sort(kept, axis=1)).to(indices.device)


class FinetuneTask(TrainingTask):
    """Base of both kinds of fine-tuning: of the model on images, or of its classifier on frozen features."""

    precision: str  # in which images are evaluated

    def __init__(self, module: nn.Module, loader, optimization: FinetuneOptimizationSpec):
        super().__init__(module, loader)
        self.optimization, self.epochs = optimization, optimization.epochs

    def begin_epoch(self, module: nn.Module, epoch: int, epochs: int) -> None:
        module.head.set_epoch(epoch, epochs)
        self.epochs = epochs

    def make_optimizer(self, spec: FinetuneOptimizationSpec) -> torch.optim.Optimizer:
        return make_optimizer(self.module, spec, spec.optimizer, spec.layer_decay)

    def eval_batches(self, split: str) -> Iterable[dict]:
        """Return the batches of a split for evaluation, each image on one process."""
        raise NotImplementedError

    def assemble_model(self, module: nn.Module) -> PreTrainedModel:
        """Return the model to publish, from the module that was trained: with LoRA merged, or with its backbone."""
        raise NotImplementedError


class ImageTask(FinetuneTask):
    """Fine-tuning of a model on images: all of it, or through LoRA."""

    def __init__(
        self,
        model: PreTrainedModel,
        processor: BaseImageProcessor,
        dataset: DatasetDict,
        spec: FinetuneModelSpec,
        optimization: FinetuneOptimizationSpec,
        augmentation: FinetuneAugmentationSpec,
        accelerator: Accelerator,
        num_workers: int,
    ):
        if optimization.gradient_checkpointing and not model.supports_gradient_checkpointing:
            kind = model.config.model_type
            message = f"a {kind} has no gradient checkpointing; leave gradient_checkpointing out."
            raise LiVTError(message, argument="gradient_checkpointing")
        inputs, batches = read_input_spec(processor), _build_batches(optimization, accelerator, num_workers)
        if augmentation.crop_size is not None:
            check_image_side(model, augmentation.crop_size, "crop_size")
        self.lora = spec.tune == "lora"
        if self.lora:
            add_lora(model, spec.lora_rank)
        if not isinstance(model, LiViTForImageClassification):
            freeze_unused_parameters(model, inputs.size)
        fixed = dict(erase=augmentation.erase, num_classes=number_of_classes(dataset["train"]), seed=optimization.seed)
        alphas = dict(mixup=augmentation.mixup, cutmix=augmentation.cutmix)
        self.mixing = DeviceTransform(inputs.mean, inputs.std, **alphas, **fixed)
        self.mixing.check_batch(batches.micro_size)
        self.plain = DeviceTransform(inputs.mean, inputs.std, **fixed)
        self.mixup_off_epochs = augmentation.mixup_off_epochs
        self.dataset, self.processor = dataset, processor
        self.accelerator, self.num_workers = accelerator, num_workers
        if optimization.keep_ratio < 1:
            self.slow_final_epochs, self.num_patches = optimization.keep_all_epochs, model.config.num_patches
        loader = train_loader(dataset["train"], build_augmentation(augmentation, processor, spec.framing), batches)
        super().__init__(model, loader, optimization)

    def compute_loss(self, module: nn.Module, batch: dict, step: StepKey) -> Tensor:
        epochs_left, ratio = self.epochs - step.epoch, self.optimization.keep_ratio
        transform = self.mixing if epochs_left > self.mixup_off_epochs else self.plain
        batch, inputs = transform(batch, **asdict(step)), {}
        if ratio < 1 and epochs_left > self.slow_final_epochs:
            seed = self.optimization.seed
            inputs["kept"] = draw_kept_patches(ratio, seed, step.epoch, batch["index"], self.num_patches)
        return module(batch["pixel_values"], labels=batch["labels"], **inputs).loss

    @property
    def precision(self) -> str:
        return PRECISION_NAMES[self.accelerator.mixed_precision]

    def eval_batches(self, split: str) -> Iterable[dict]:
        batches = build_eval_batches(256, self.accelerator, self.num_workers)
        return eval_loader(self.dataset[split], self.processor, batches)

    def begin_epoch(self, module: nn.Module, epoch: int, epochs: int) -> None:
        super().begin_epoch(module, epoch, epochs)
        if self.lora or self.optimization.freeze_batch_norm:
            freeze_statistics(module)

    def assemble_model(self, module: nn.Module) -> PreTrainedModel:
        return merge_lora(module) if self.lora else module


class FeatureTask(FinetuneTask):
    """Fine-tuning of the classifier of a model, on features of its frozen backbone."""

    def __init__(
        self,
        model: PreTrainedModel,
        backbone: FrozenBackbone,
        dataset: DatasetDict,
        optimization: FinetuneOptimizationSpec,
        augmentation: FinetuneAugmentation | None,
        views: int,
    ):
        self.model, self.backbone, self.dataset = model, backbone, dataset
        features = backbone.features(dataset["train"], augmentation, views)
        self.precision = backbone.precision
        batches = _build_batches(optimization, backbone.accelerator, backbone.num_workers)
        loader = FeatureLoader(features, dataset["train"], batches)
        super().__init__(FeatureClassifier(model, features), loader, optimization)

    def compute_loss(self, module: nn.Module, batch: dict, step: StepKey) -> Tensor:  # noqa: ARG002
        return module(batch["pixel_values"], labels=batch["labels"]).loss

    def eval_batches(self, split: str) -> Iterable[dict]:
        images, batches = self.dataset[split], build_eval_batches(1024, self.backbone.accelerator)
        return FeatureLoader(self.backbone.features(images), images, batches).in_order()

    def assemble_model(self, module: nn.Module) -> PreTrainedModel:
        module.unstandardise()
        get_classifier(self.model).load_state_dict(module.classifier.state_dict())
        self.model.config.long_tail = module.config.long_tail  # a moving average has a config of its own
        return self.model


def build_finetune_task(
    model: PreTrainedModel,
    processor: BaseImageProcessor,
    dataset: DatasetDict,
    spec: FinetuneModelSpec,
    optimization: FinetuneOptimizationSpec,
    augmentation: FinetuneAugmentationSpec,
    accelerator: Accelerator,
    num_workers: int = 0,
) -> FinetuneTask:
    """Build the task of a fine-tuning: loaders, augmentation, trainable parameters and loss."""
    if optimization.keep_ratio < 1 and (spec.tune == "head" or not isinstance(model, LiViTForImageClassification)):
        raise LiVTError(
            f"keep_ratio is {optimization.keep_ratio}, but only a LiViT that learns from images can leave out "
            "patches; set keep_ratio 1.",
            argument="keep_ratio",
        )
    if spec.tune != "head":
        return ImageTask(model, processor, dataset, spec, optimization, augmentation, accelerator, num_workers)
    backbone = FrozenBackbone(model, processor, accelerator, optimization.seed, num_workers, spec.precision)
    views = build_augmentation(augmentation, processor, spec.framing) if spec.views > 1 else None
    return FeatureTask(model, backbone, dataset, optimization, views, spec.views)


def _build_batches(spec: FinetuneOptimizationSpec, accelerator: Accelerator, num_workers: int) -> Batches:
    sampler = Sampler(spec.sampler, spec.epochs)
    return build_train_batches(spec.batch_size, spec.accumulation, spec.seed, accelerator, num_workers, sampler)


def compute_metrics(
    model: nn.Module,
    loader: Iterable[dict],
    accelerator: Accelerator,
    counts: np.ndarray,
    store: Callable | None = None,
) -> dict:
    """Evaluate a model under its standard decision rules.

    Args:
        model: the classifier.
        loader: images of this process.
        accelerator: of all processes.
        counts: training images of each class, which make the shot groups.
        store: writes the logits that pass through it: takes batches and what is known of the model, and yields the
            batches again; `keep_predictions` makes one.

    Returns:
        Metrics by the names of the rules, the default rule first.
    """
    info, batches = PredictionsInfo.from_model(model), predict_batches(model, loader, accelerator)
    batches = batches if store is None else store(batches, info)
    return measure_batches(batches, info, counts, accelerator)


def compute_record_metrics(folder: Path, counts: np.ndarray) -> dict:
    """Evaluate the predictions that a run kept, as `compute_metrics` does."""
    evaluator = Evaluator(folder, counts)
    if evaluator.info.multi_label:
        return {PER_LABEL: evaluator.measure_multi_label().compute()}
    metrics = evaluator.measure(evaluator.info.rules)
    return {name: metric.compute() for name, metric in metrics.items()}


def keep_predictions(folder: Path, test: Dataset, accelerator: Accelerator, precision: str = FLOAT32) -> Callable:
    """Return a `store` for `compute_metrics` that writes predictions of the test images to the folder of a run."""

    def store(batches, info: PredictionsInfo):
        named = replace(info, models=(replace(info.models[0], name=str(folder)),), precision=precision)
        return store_batches(batches, named, folder / FOLDER, describe_images(test, "test"), accelerator)

    return store


class EpochEvaluator:
    """Evaluates every few epochs, prints the metrics, and keeps the best weights where `select` is "best"."""

    def __init__(self, task: FinetuneTask, dataset: DatasetDict, spec: FinetuneCheckpointSpec):
        self.task, self.dataset, self.spec = task, dataset, spec
        self.metric = choose_selection_metric(spec, is_multi_label(dataset["train"]))
        self.split = "validation" if "validation" in dataset else "test"
        self.solution: dict | None = None  # of an exact head, what `solve_head` returned

    def __call__(self, loop: TrainingLoop, epoch: int) -> dict | None:
        if (epoch + 1) % self.spec.eval_epochs and loop.progress.update != loop.total:
            return None
        batches, counts = self.task.eval_batches(self.split), shot_counts(self.dataset)
        rules = compute_metrics(loop.final_model, batches, loop.accelerator, counts)
        rule, metrics = next(iter(rules.items()))
        if self.spec.select == "best":
            keep_if_best(loop, epoch + 1, metrics[self.metric])
        if loop.accelerator.is_main_process:
            text = f"epoch {epoch + 1}, {self.split}, {LABELS[rule]}: {format_accuracy(metrics)}"
            tqdm.write(text, file=sys.stderr)  # above the progress bar
        return metrics

    def evaluate_test(self, loop: TrainingLoop) -> dict:
        """Evaluate the final model on the test images and keep their predictions in the folder of the run."""
        batches, counts = self.task.eval_batches("test"), shot_counts(self.dataset)
        store = keep_predictions(loop.run.folder, self.dataset["test"], loop.accelerator, self.task.precision)
        return compute_metrics(loop.final_model, batches, loop.accelerator, counts, store)

    def restore_best(self, loop: TrainingLoop) -> None:
        """Load the best weights into the final model where `select` is "best"."""
        if self.spec.select == "best":
            loop.accelerator.wait_for_everyone()
            load_best(loop.run, loop.final_model, loop.progress.best_epoch)


def keep_if_best(loop: TrainingLoop, epoch: int, value: float) -> None:
    """Save the weights of an epoch if its metric is better than the best one so far, for `select best`."""
    progress = loop.progress
    if progress.best_accuracy is None or value > progress.best_accuracy:
        progress.best_epoch, progress.best_accuracy = epoch, value
        if loop.accelerator.is_main_process:
            save_best(loop.run, loop.final_model, epoch)


def write_framing_trial(folder: Path, trial: FramingTrial) -> None:
    """Write the trial that chose the framing to the folder of a run: a resumed run makes none."""
    write_values(folder / FRAMING, asdict(trial))


def build_finetune_results(
    loop: TrainingLoop,
    evaluator: EpochEvaluator,
    model: PreTrainedModel,
    processor: BaseImageProcessor,
    metrics: dict,
    data: DataSpec,
    spec: FinetuneModelSpec,
    preparation_seconds: float,
) -> Results:
    """Collect the results of a fine-tuning; `metrics` are those of `EpochEvaluator.evaluate_test`, by rule."""
    dataset, long_tail, best = evaluator.dataset, model.config.long_tail, loop.progress.best_epoch
    held_out = is_made_split(dataset, "validation")
    split = "held-out training images" if held_out else "the validation split"
    selection = "last epoch" if best is None else f"epoch of the best {evaluator.metric} on {split}"
    common, solution = build_common_results("finetune", data, spec.model_size, loop, model), evaluator.solution
    trial, calibration = loop.run.folder / FRAMING, long_tail.calibration or {}
    if solution is not None:
        selection = f"exact solution, L2 strength {solution['strength']:g} by cross-validated likelihood"
        common["epochs"] = 0
    common["precision"] = evaluator.task.precision
    return Results(
        **common,
        rules=metrics,
        head=solution,
        framing=read_values(trial) if trial.exists() else {"chosen": read_framing(processor).name},
        preparation_seconds=preparation_seconds,
        image_size=read_input_spec(processor).size,
        default_rule=PredictionsInfo.from_model(model).default_rule.name,
        split="test",
        test_carved=is_made_split(dataset, "test"),
        validation_carved=held_out,
        num_images=next(iter(metrics.values()))["num_images"],
        num_train_images=long_tail.num_images,
        num_classes=model.config.num_labels,
        class_counts=summarize_class_counts(shot_counts(dataset)),
        loss=long_tail.loss,
        tau=long_tail.tau,
        epoch=loop.progress.update / loop.per_epoch if best is None else best,
        selection=selection,
        pretrained=spec.pretrained,
        pretrained_local=is_local(spec.pretrained),
        pretrained_own=is_own(spec.pretrained),
        calibrated_on=calibration.get("num_images"),
        calibration_split=calibration.get("split"),
        trade_off=long_tail.trade_off,
    )
