"""Running models over test images: classifiers under several decision rules, encoders by kNN and a linear probe."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset, DatasetDict
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    BaseImageProcessor,
    PreTrainedConfig,
    PreTrainedModel,
)

from livt_hf.data.labels import class_feature, is_multi_label
from livt_hf.errors import LiVTError
from livt_hf.long_tail.priors import as_prior, estimate_prior, has_collapsed, read_prior
from livt_hf.metrics import ConfusionPairs, LongTailMetrics, MultiLabelMetrics
from livt_hf.modeling_livit import LiViTForImageClassification
from livt_hf.modeling_livit_mae import LiViTForPreTraining
from livt_hf.runs import Run, newest_finished, runs_folder
from livt_hf.settings import DataArguments, EvalArguments, words_of, yaml_argv

logger = logging.getLogger(__name__)

# The options of a run that say which data it was trained on.
_DATA_OPTIONS = [option.name for option in fields(DataArguments)]
# A rule turns logits into class probabilities; None is the paper's: rank by the logits, softmax for confidence.
Rule = Callable[[Tensor], Tensor] | None


def inherited_eval_options(argv: list[str]) -> list[str]:
    """Which model, where none is named, and which data, where the model is a run: as command-line words."""
    words = words_of(argv)
    if {"--help", "-h"} & set(words):
        return []
    if "--config" in words[:-1]:  # what the file says counts as said
        words = words_of(yaml_argv(words[words.index("--config") + 1], EvalArguments)) + words
    said = dict(zip(words, words[1:], strict=False))
    if said.get("--model", "auto") != "auto":
        run, named = Run(Path(said["--model"])), []
    else:
        run = newest_finished("finetune")
        if run is None:
            raise LiVTError(f"there is no finished fine-tuning under {runs_folder()}; name a checkpoint with --model.")
        named = ["--model", str(run.folder)]
    if "--dataset" in said:
        return named
    if not run.finished:
        raise LiVTError(f"{run.folder} is not a finished run here; say what to measure it on with --dataset.")
    saved = run.arguments
    given = [name for name in _DATA_OPTIONS if saved[name] is not None and f"--{name}" not in said]
    return named + [word for name in given for word in (f"--{name}", str(saved[name]))]


def load_checkpoint_and_processor(path: str) -> tuple[PreTrainedModel, BaseImageProcessor]:
    """A LiViT in either of its forms, a ViTMAE, or any other image classifier, with the processor saved beside it."""
    try:
        config, _ = PreTrainedConfig.get_config_dict(path)
    except OSError as error:
        raise LiVTError(f"{path} is neither a checkpoint folder nor a model the Hub has: {error}") from error
    kind = config.get("model_type")
    if kind is None:
        raise LiVTError(f"{path} holds no model: it has no config.json with a model_type.")
    try:
        processor = AutoImageProcessor.from_pretrained(path)
    except OSError as error:
        raise LiVTError(
            f"{path} has no image processor (preprocessor_config.json), so it is unknown how its pictures are "
            "prepared; save the one it was trained with beside it."
        ) from error
    if kind == "vit_mae":
        return LiViTForPreTraining.from_pretrained(path).eval(), processor
    if kind == "livit" or "livit" in config:
        return LiViTForImageClassification.from_pretrained(path).eval(), processor
    return AutoModelForImageClassification.from_pretrained(path, use_safetensors=True).eval(), processor


def no_posterior(model: PreTrainedModel) -> str | None:
    """Why a checkpoint gives no class probabilities under a prior, or None where it does."""
    if isinstance(model, LiViTForPreTraining):
        return "it is no classifier"
    if not isinstance(model, LiViTForImageClassification):
        return "it does not know its training prior"
    if model.head.multi_label:
        return "its images may have several labels"
    return model.head.no_posterior


def check_options(model: PreTrainedModel, arguments: EvalArguments, num_processes: int) -> None:
    """What cannot be measured is refused before the data are read."""
    if arguments.prior is not None or arguments.adapt_prior:
        why = no_posterior(model)
        if why is not None:
            raise LiVTError(
                f"{arguments.model} gives no probabilities under a prior ({why}); leave --prior and --adapt_prior out."
            )
    if arguments.adapt_prior and model.head.settings.label_smoothing:
        raise LiVTError(
            f"{arguments.model} was trained with label_smoothing {model.head.settings.label_smoothing}, which "
            "flattens its posteriors, so no prior can be estimated from them; leave --adapt_prior out."
        )
    if num_processes > 1 and (arguments.adapt_prior or isinstance(model, LiViTForPreTraining)):
        what = "--adapt_prior looks" if arguments.adapt_prior else "kNN and the linear probe look"
        raise LiVTError(f"{what} at all images at once; run it on one process.")


def serving_prior(path: str, model: PreTrainedModel) -> Tensor:
    """The prior in a file, for the classes of a model. A class with a zero will never be predicted."""
    names = [model.config.id2label[label] for label in range(model.config.num_labels)]
    return as_prior(read_prior(path, names), len(names), what=f"the prior in {path}")


def check_data(model: PreTrainedModel, data: DatasetDict, arguments: EvalArguments) -> None:
    """Refuse data a checkpoint cannot be measured on."""
    if arguments.split not in data:
        raise LiVTError(f"{arguments.dataset} has no split {arguments.split!r}; it has {', '.join(data)}.")
    if not isinstance(model, LiViTForPreTraining):
        check_labels_match(model, data["train"])
    elif is_multi_label(data["train"]):
        raise LiVTError(
            f"images of {arguments.dataset} have several labels, and kNN and the linear probe answer with one; "
            "fine-tune the checkpoint and evaluate that."
        )


def check_labels_match(model: PreTrainedModel, dataset: Dataset) -> None:
    """Refuse to measure a model on classes that are not its own."""
    names, known = class_feature(dataset).names, [model.config.id2label[i] for i in range(model.config.num_labels)]
    if len(names) != len(known):
        raise LiVTError(f"the model has {len(known)} classes and the data {len(names)}; fine-tune it on them first.")
    unnamed = known == [f"LABEL_{i}" for i in range(len(known))]
    if not unnamed and known != names:
        first = next(i for i in range(len(names)) if names[i] != known[i])
        raise LiVTError(
            f"class {first} is {known[first]!r} to the model and {names[first]!r} in the data; "
            "bring the classes into the order of the model's id2label."
        )


@torch.no_grad()
def logits_of(model: nn.Module, loader: Iterable[dict], device: torch.device, progress: bool = False):
    """Pairs (logits, batch), a batch at a time."""
    model.eval()
    for batch in tqdm(loader, desc="evaluating", unit="batch", disable=not progress, leave=False):
        yield model(batch["pixel_values"].to(device)).logits.float(), batch


def evaluate_classifier(
    model: nn.Module,
    loader: Iterable[dict],
    accelerator: Accelerator,
    class_counts,
    rules: dict[str, Rule],
    progress: bool = False,
) -> tuple[dict[str, LongTailMetrics], ConfusionPairs]:
    """Metrics under every rule and the confusions of the first one, over all processes, each image counted once.

    Streams: memory grows with the classes and not with the images.
    """
    metrics = {
        name: LongTailMetrics(class_counts, confidence="softmax" if rule is None else "given")
        for name, rule in rules.items()
    }
    pairs = ConfusionPairs(class_counts)
    for logits, batch in logits_of(model, loader, accelerator.device, progress):
        labels = batch["labels"].to(logits.device)
        for position, (name, rule) in enumerate(rules.items()):
            scores = logits if rule is None else rule(logits)
            metrics[name].update(scores, labels)
            if position == 0:
                pairs.update(scores.argmax(-1), labels)
    if accelerator.num_processes > 1:
        for metric in metrics.values():
            metric.load_state_tensor(accelerator.reduce(metric.state_tensor().to(accelerator.device), "sum").cpu())
        pairs = _merged(pairs)
    return metrics, pairs


def _merged(mine):
    """The union of what every process counted."""
    first, *others = gather_object([mine])
    for other in others:
        first.merge(other)
    return first


def evaluate_multi_label(
    model: nn.Module, loader: Iterable[dict], accelerator: Accelerator, class_counts, progress: bool = False
) -> MultiLabelMetrics:
    """Average precision by class; scores of all images are kept, as a ranking needs them."""
    metrics = MultiLabelMetrics(class_counts)
    for logits, batch in logits_of(model, loader, accelerator.device, progress):
        metrics.update(logits, batch["labels"])
    return _merged(metrics) if accelerator.num_processes > 1 else metrics


def estimated_prior(
    model: nn.Module, loader: Iterable[dict], accelerator: Accelerator, progress: bool = False
) -> Tensor:
    """The class prior of the loader's images by EM on the model's training posteriors, labels unseen. (C,)"""
    batches = logits_of(model, loader, accelerator.device, progress)
    posterior = torch.cat([model.head.training_posterior(logits).exp().cpu() for logits, _ in batches])
    source = model.head.prior.cpu()
    estimate = estimate_prior(posterior, source)
    if has_collapsed(estimate, posterior, source):
        logger.warning(
            "the estimated prior has collapsed onto few classes, as it does where a model is surer than it is right: "
            "do not serve under it; train longer, or measure the prior on some labelled images and pass --prior."
        )
    return estimate


@dataclass
class Features:
    features: Tensor  # (N, D)
    labels: Tensor  # (N,)


@torch.no_grad()
def encoder_features(
    model: nn.Module, loader: Iterable[dict], accelerator: Accelerator, progress: bool = False
) -> Features:
    """The mean patch token of a ViTMAE encoder that sees the whole picture, for every image of the loader."""
    vit = model.vit.eval()
    features, labels = [], []
    for batch in tqdm(loader, desc="encoding", unit="batch", disable=not progress, leave=False):
        pixels = batch["pixel_values"].to(accelerator.device)
        embeddings = vit.embeddings
        x = embeddings.patch_embeddings(pixels) + embeddings.position_embeddings[:, 1:]
        cls_token = (embeddings.cls_token + embeddings.position_embeddings[:, :1]).expand(len(x), -1, -1)
        x = torch.cat([cls_token, x], dim=1)  # (B, 1 + patches, D): nothing is masked
        for layer in vit.layers:
            x = layer(x, None)
        features.append(vit.layernorm(x)[:, 1:].mean(dim=1).float())
        labels.append(batch["labels"].to(accelerator.device))
    return Features(torch.cat(features), torch.cat(labels))


def knn_scores(train: Features, test: Features, num_classes: int, k: int = 20, temperature: float = 0.07) -> Tensor:
    """Class logits by the vote of the k most similar training images: log shares of the similarities. (N, C)"""
    bank = nn.functional.normalize(train.features, dim=-1)
    scores = torch.zeros(len(test.features), num_classes, device=bank.device)
    for rows in torch.arange(len(test.features)).split(1024):
        similarity, index = (nn.functional.normalize(test.features[rows], dim=-1) @ bank.T).topk(min(k, len(bank)))
        scores[rows] = scores[rows].scatter_add(1, train.labels[index], (similarity / temperature).exp())
    return (scores / scores.sum(-1, keepdim=True)).log()


def linear_probe_scores(
    train: Features, test: Features, num_classes: int, *, steps: int = 500, weight_decay: float = 1e-4, seed: int = 0
) -> Tensor:
    """Class scores of a linear classifier (balanced softmax) on standardised, frozen features. (N, C)"""
    mean, std = train.features.mean(0), train.features.std(0).clamp_min(1e-6)
    prior = torch.bincount(train.labels, minlength=num_classes).clamp_min(1).float()
    log_prior = (prior / prior.sum()).log()
    generator = torch.Generator().manual_seed(seed)
    probe = nn.Linear(train.features.shape[1], num_classes).to(train.features.device)
    nn.init.zeros_(probe.weight)
    nn.init.zeros_(probe.bias)
    optimizer = torch.optim.AdamW(probe.parameters(), lr=1e-2, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = torch.randint(len(train.labels), (1024,), generator=generator).to(train.labels.device)
        logits = probe((train.features[rows] - mean) / std)
        nn.functional.cross_entropy(logits + log_prior, train.labels[rows]).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return probe((test.features - mean) / std)
