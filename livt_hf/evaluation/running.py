"""Classifiers over the images of a loader: metrics under every decision rule, on any number of processes."""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from tqdm.auto import tqdm

from livt_hf.metrics import LongTailMetrics, MultiLabelMetrics

# A decision rule turns logits into class probabilities; None is the paper's: rank by the logits, softmax for
# confidence.
Rule = Callable[[Tensor], Tensor] | None
Batches = Iterable[tuple[Tensor, dict]]  # logits (B, C) with what else is known about their images
_BLOCK = 2**20  # logits looked at in one piece


def scores_under(rule: Rule, logits: Tensor) -> Tensor:
    """What a rule says of every class: probabilities, or for the paper's rule the softmax of the logits. (B, C)"""
    return logits.softmax(-1) if rule is None else rule(logits)


@torch.no_grad()
def logits_of(model: nn.Module, loader: Iterable[dict], accelerator: Accelerator) -> Iterator[tuple[Tensor, dict]]:
    """Pairs (logits, batch), a batch at a time."""
    model.eval()
    for batch in progress(loader, "evaluating", accelerator):
        yield model(batch["pixel_values"].to(accelerator.device)).logits.float(), batch


def progress(loader: Iterable[dict], words: str, accelerator: Accelerator) -> Iterable[dict]:
    """The batches, counted on the terminal of the main process; a log file is left alone."""
    return tqdm(loader, desc=words, unit="batch", leave=False, disable=None if accelerator.is_main_process else True)


def on_disk(rows: Iterable[Tensor], columns: int) -> Tensor:
    """Rows of float32 numbers as one tensor (N, columns), mapped from a temporary file that goes away with it."""
    with tempfile.TemporaryFile() as file:
        for row in rows:
            file.write(row.detach().cpu().float().numpy().tobytes())
        file.flush()
        number = file.tell() // (4 * columns)
        if number == 0:  # of which no file can be mapped
            return torch.zeros(0, columns)
        return torch.from_numpy(np.memmap(file, np.float32, "r+", shape=(number, columns)))


@dataclass
class Outputs:
    """What one pass of a model gave for the images of this process.

    The logits lie in a temporary file of 4 bytes per image and class; memory holds a block of them at a time.
    """

    logits: Tensor  # (N, C)
    labels: Tensor  # (N,)
    index: Tensor  # (N,) rows of the dataset
    device: torch.device

    def batches(self, chosen: Tensor | None = None) -> Iterator[tuple[Tensor, dict]]:
        """The logits again, of all images or of those chosen by their numbers here."""
        chosen = torch.arange(len(self.labels)) if chosen is None else chosen
        for rows in chosen.split(max(1, _BLOCK // self.logits.shape[1])):
            yield self.logits[rows].to(self.device), {"labels": self.labels[rows], "index": self.index[rows]}

    def gathered(self, accelerator: Accelerator) -> "Outputs":
        """Those of all processes, in the order of the images."""
        if accelerator.num_processes == 1:
            return self
        parts = gather_object([(self.logits.clone(), self.labels, self.index)])
        return Outputs(*(torch.cat(column) for column in zip(*parts, strict=True)), self.device)


def run_model(model: nn.Module, loader: Iterable[dict], accelerator: Accelerator) -> Outputs:
    labels, index = [torch.zeros(0, dtype=torch.long)], [torch.zeros(0, dtype=torch.long)]

    def rows() -> Iterator[Tensor]:
        for logits, batch in logits_of(model, loader, accelerator):
            labels.append(batch["labels"])
            index.append(batch["index"])
            yield logits

    stored = on_disk(rows(), model.config.num_labels)
    return Outputs(stored, torch.cat(labels), torch.cat(index), accelerator.device)


def evaluate_rules(
    batches: Batches, accelerator: Accelerator, class_counts, rules: dict[str, Rule], **thresholds: int
) -> dict[str, LongTailMetrics]:
    """Metrics under every rule, over all processes, each image counted once.

    Memory grows with the classes and not with the images. `thresholds` are those of the shot groups: `many_above` and
    `few_below`.
    """
    metrics = {
        name: LongTailMetrics(class_counts, confidence="softmax" if rule is None else "given", **thresholds)
        for name, rule in rules.items()
    }
    for logits, batch in batches:
        labels = batch["labels"].to(logits.device)
        for name, rule in rules.items():
            metrics[name].update(logits if rule is None else rule(logits), labels)
    for metric in metrics.values():
        metric.load_state_tensor(accelerator.reduce(metric.state_tensor().to(accelerator.device), "sum").cpu())
    return metrics


def evaluate_multi_label(
    batches: Batches, class_counts, given: Callable[[Tensor], Tensor], **thresholds: int
) -> MultiLabelMetrics:
    """Average precision by class, and F1 of the labels that are `given` to logits, over all processes.

    Scores of all images are kept, as a ranking needs them. `thresholds` are those of the shot groups.
    """
    metrics = MultiLabelMetrics(class_counts, **thresholds)
    parts = [(logits.cpu(), batch["labels"].bool(), given(logits)) for logits, batch in batches]
    for part in gather_object(parts):
        metrics.update(*part)
    return metrics
