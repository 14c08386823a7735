"""Classifiers over the images of a loader: metrics under every decision rule, on any number of processes."""

from collections.abc import Callable, Iterable, Iterator

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from tqdm.auto import tqdm

from livt_hf.metrics import ConfusionPairs, LongTailMetrics, MultiLabelMetrics

# A decision rule turns logits into class probabilities; None is the paper's: rank by the logits, softmax for
# confidence.
Rule = Callable[[Tensor], Tensor] | None


@torch.no_grad()
def logits_of(model: nn.Module, loader: Iterable[dict], accelerator: Accelerator) -> Iterator[tuple[Tensor, dict]]:
    """Pairs (logits, batch), a batch at a time."""
    model.eval()
    for batch in progress(loader, "evaluating", accelerator):
        yield model(batch["pixel_values"].to(accelerator.device)).logits.float(), batch


def progress(loader: Iterable[dict], words: str, accelerator: Accelerator) -> Iterable[dict]:
    """The batches, counted on the terminal of the main process; a log file is left alone."""
    return tqdm(loader, desc=words, unit="batch", leave=False, disable=None if accelerator.is_main_process else True)


def evaluate_classifier(
    model: nn.Module,
    loader: Iterable[dict],
    accelerator: Accelerator,
    class_counts,
    rules: dict[str, Rule],
) -> tuple[dict[str, LongTailMetrics], ConfusionPairs]:
    """Metrics under every rule and the confusions of the first one, over all processes, each image counted once.

    Streams: memory grows with the classes and not with the images.
    """
    metrics = {
        name: LongTailMetrics(class_counts, confidence="softmax" if rule is None else "given")
        for name, rule in rules.items()
    }
    pairs = ConfusionPairs(class_counts)
    for logits, batch in logits_of(model, loader, accelerator):
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
    model: nn.Module, loader: Iterable[dict], accelerator: Accelerator, class_counts
) -> MultiLabelMetrics:
    """Average precision by class; scores of all images are kept, as a ranking needs them."""
    metrics = MultiLabelMetrics(class_counts)
    for logits, batch in logits_of(model, loader, accelerator):
        metrics.update(logits, batch["labels"])
    return _merged(metrics) if accelerator.num_processes > 1 else metrics
