"""Exact linear heads on frozen features.

The loss of a linear classifier on frozen features is convex for `CONVEX_LOSSES`, so there is nothing to schedule: the
head is the minimiser of

    sum_i v_i loss(W x_i + b, y_i) / sum_i v_i + strength / 2 ||W||^2

with standardised features x and weights v by class, solved by preconditioned L-BFGS along a path of strengths from
strong to weak. Cross-validation on the training images chooses the strength, and leaves an out-of-fold logit of every
training image to calibrate on and to choose a deployment prior by. Three facts make it fast:

- In the basis of the features' principal components the Hessian is nearly diagonal, which gives the preconditioner;
  fewer images than features leave as many components as images.
- Logits are linear in the weights, so a line search costs no product with the features.
- All folds are solved side by side, one product with the features for all of them.

The bias b is not penalised, so the logit bias of a balanced loss only moves b: Bal-CE has the weights of CE, and
Bal-BCE those of BCE.
"""

import contextlib
import hashlib
import json
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from livt_hf.errors import LiVTError
from livt_hf.files import replacing
from livt_hf.long_tail.config import LongTailConfig
from livt_hf.long_tail.head import LongTailHead
from livt_hf.long_tail.loss_table import CONVEX_LOSSES
from livt_hf.long_tail.losses import class_weighted
from livt_hf.long_tail.objectives import OBJECTIVES, decide, score_predictions

STRENGTHS = tuple(round(10 ** (1 - step / 3), 7) for step in range(19))  # 10, 4.64, 2.15, 1, ... 1e-5
_PATH_TOLERANCE, _TOLERANCE = 1e-5, 1e-11  # of the loss above its minimum, in nats per image: on the path, at its end
_PATIENCE = 2  # strengths without a better score after which the path ends
_HISTORY, _MAX_ITERATIONS = 10, 500
_CURVATURE = 0.3  # a line search ends where the slope is this share of the slope it began with
_OFF = -1e4  # the bias of a class that a fold has no image of
_IN_MEMORY = 2**28  # numbers that one array may hold in memory
_STATE, _FORMAT = "exact_head.safetensors", 2


@dataclass(frozen=True)
class ExactHead:
    """A solved head: `features @ weight.T + bias` are its logits z, on features as they were given.

    Attributes:
        weight, bias: of the linear classifier, (C, D) and (C,).
        strength: the chosen L2 strength.
        path: one dictionary per strength tried: `strength` and the cross-validated scores.
        out_of_fold: logits z (N, C) of every training image by a head that was trained without its fold.
        unseen: (N,), True for images whose class has no image outside of their fold: no head could know it.
        fold: the fold of each image (N,).
        first_fold: weight and bias of the head that was trained without fold 0. Its bias is that of the fitted
            posterior, with the logit bias of the loss.
    """

    weight: Tensor
    bias: Tensor
    strength: float
    path: list[dict[str, float]]
    out_of_fold: Tensor
    unseen: Tensor
    fold: np.ndarray
    first_fold: tuple[Tensor, Tensor]


def fit_exact_head(
    features: np.ndarray,
    labels: np.ndarray,
    class_counts: Sequence[int] | None = None,
    *,
    loss: str = "bal_bce",
    groups: np.ndarray | None = None,
    strengths: Sequence[float] = STRENGTHS,
    folds: int | np.ndarray = 5,
    select: str = "nll",
    seed: int = 0,
    cache: Path | None = None,
    callback: Callable[[dict[str, float]], None] | None = None,
    **long_tail,
) -> ExactHead:
    """Fit an L2-regularised linear head to convergence, its strength chosen by cross-validation.

    Args:
        features: (N, D), in memory or memory-mapped; read in blocks.
        labels: class ids (N,), or 0 and 1 (N, C) where an image may have several labels.
        class_counts: training images per class, counted from `labels` where left out.
        loss: one of `CONVEX_LOSSES`.
        groups: (N,), what must not be divided between folds, such as a patient.
        strengths: L2 strengths to try, on the scale of standardised features and the mean loss of an image.
        folds: how many, or the fold of each image (N,). There are fewer where groups or images of a class are few.
        select: cross-validated score that chooses the strength: "nll", the negative log likelihood, which has the
            least noise and was as good for every objective, or "mean_class_accuracy", "accuracy", "macro_f1",
            "balanced".
        seed: of the folds.
        cache: folder for the state of an unfinished path. A call that finds it continues after the last strength done.
        callback: called with the scores of every strength once its state is saved.
        **long_tail: fields of `LongTailConfig`, such as `tau`, `test_prior`, `class_weights`, `label_smoothing`.

    Returns:
        The head, its path and out-of-fold logits. The same arguments give the same numbers, interrupted or not.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> labels = np.repeat([0, 1, 2], [50, 20, 5])
        >>> features = rng.normal(size=(75, 8)) + 3 * np.eye(8)[labels]
        >>> head = fit_exact_head(features, labels, loss="bal_ce")
        >>> (features @ head.weight.numpy().T + head.bias.numpy()).shape
        (75, 3)
    """
    if loss not in CONVEX_LOSSES:
        raise LiVTError(f"loss {loss!r} is not convex; use one of {', '.join(CONVEX_LOSSES)}.", "loss")
    labels = torch.as_tensor(np.asarray(labels))
    targets = _Targets.build(labels, class_counts, loss, long_tail)
    allowed = ("nll", "macro_f1") if targets.multi_label else ("nll", *OBJECTIVES)
    if select not in allowed:
        raise LiVTError(f"select {select!r} is not a score here; use one of {', '.join(allowed)}.", "select")
    fold = assign_folds(labels.numpy(), folds, groups, seed) if isinstance(folds, int) else np.asarray(folds)
    design = _Design(features)
    path = _RegularizationPath(design, targets, fold, sorted(strengths, reverse=True), select)
    path.run(None if cache is None else Path(cache) / _STATE, callback)
    return path.finish()


def assign_folds(labels: np.ndarray, folds: int, groups: np.ndarray | None = None, seed: int = 0) -> np.ndarray:
    """Return the fold of each image (N,): groups stay together, classes are spread as evenly as that allows.

    Rows of several labels are spread by their rarest label. A class of fewer images than folds is missing in some.
    """
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold  # imports scipy

    if labels.ndim == 2:
        rarity = np.where(labels > 0, 1 / np.maximum(labels.sum(0), 1), 0)
        labels = np.where(labels.any(1), rarity.argmax(1), labels.shape[1])
    counts = np.bincount(labels)
    units = len(labels) if groups is None else len(np.unique(groups))
    folds = min(folds, int(counts.max()), units)
    if folds < 2:
        message = "cross-validation needs two groups, and two images of some class; add images, or leave groups out."
        raise LiVTError(message, "folds")
    kind = StratifiedKFold if groups is None else StratifiedGroupKFold
    fold = np.full(len(labels), -1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The least populated class")  # it is missing in some folds
        for number, (_, rows) in enumerate(kind(folds, shuffle=True, random_state=seed).split(labels, labels, groups)):
            fold[rows] = number
    return fold


class _Targets:
    """Labels as targets and weights of rows, and what the head makes of logits."""

    def __init__(self, labels: Tensor, head: LongTailHead):
        self.labels, self.head = labels, head
        self.config: LongTailConfig = head.settings
        self.num_classes = len(head.prior)
        self.multi_label = head.multi_label
        self.softmax = head.definition.activation == "softmax"

    @classmethod
    def build(cls, labels: Tensor, class_counts: Sequence[int] | None, loss: str, long_tail: dict) -> "_Targets":
        several = labels.ndim == 2
        if class_counts is None:
            class_counts = (labels.sum(0) if several else torch.bincount(labels)).tolist()
        if several:
            long_tail = {"num_train_images": len(labels), "test_prior": None} | long_tail
        kind = "multi_label_classification" if several else "single_label_classification"
        config = LongTailConfig(loss=loss, class_counts=class_counts, **long_tail)
        config.check_labels(len(class_counts), several)
        model_config = SimpleNamespace(num_labels=len(class_counts), problem_type=kind, long_tail=config)
        return cls(labels, LongTailHead(model_config))

    def rows(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return targets (B, C) and weights (B,) of a block of images."""
        if self.multi_label:
            return self.labels[rows].float(), torch.ones(len(self.labels[rows]))
        targets = F.one_hot(self.labels[rows].long(), self.num_classes).float()
        smooth = self.config.label_smoothing
        if smooth:
            targets = targets * (1 - smooth) + smooth / self.num_classes
        if self.config.weighted_from is None:
            return targets, torch.ones(len(targets))
        return class_weighted(targets, self.head.class_weight)

    def class_presence(self, trained: Tensor) -> tuple[Tensor, Tensor]:
        """Return which classes the rows `trained` have an image of, and an image without. (C,) each"""
        labels = self.labels[trained]
        counts = labels.sum(0) if self.multi_label else torch.bincount(labels.long(), minlength=self.num_classes)
        return counts > 0, counts < len(labels)


class _Design:
    """Standardised features in the basis of their principal components, with a column of ones, read in blocks.

    The components of features that fit into memory are kept; of others, weights are turned into the features' own
    coordinates for every product, and blocks are read from where the features are.
    """

    def __init__(self, features: np.ndarray):
        if features.ndim != 2 or len(features) < 2:
            raise LiVTError(f"features have shape {features.shape}; they must be (images, features).", "features")
        self.features, (self.num_rows, width) = features, features.shape
        self.block = max(256, _IN_MEMORY // 32 // width)
        total, square = np.zeros(width), np.zeros(width)
        for rows in self.slices(self.block):
            block = np.asarray(features[rows], dtype=np.float64)
            if not np.isfinite(block).all():
                raise LiVTError("features contain NaN or infinity; drop those images.", "features")
            total += block.sum(0)
            square += np.einsum("nd,nd->d", block, block)
        self.mean = total / self.num_rows
        variance = square / self.num_rows - self.mean**2
        # A constant feature says nothing: scaled by zero, it gets the weight zero.
        constant = variance <= 1e-12 * np.maximum(1, self.mean**2)
        self.scale = np.where(constant, 0, 1 / np.sqrt(np.where(constant, 1, variance)))
        self.basis, spectrum, self.matrix = self._principal_components()
        self.spectrum = torch.cat([spectrum, torch.ones(1)])  # mean square of each column

    def slices(self, size: int) -> Iterator[slice]:
        for start in range(0, self.num_rows, size):
            yield slice(start, min(start + size, self.num_rows))

    def standardised(self, rows: slice) -> Tensor:
        block = (np.asarray(self.features[rows], dtype=np.float64) - self.mean) * self.scale
        return torch.from_numpy(block.astype(np.float32))

    def _principal_components(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the basis (D, R), the mean square of each component (R,), and the components (N, R + 1) if small."""
        width = self.features.shape[1]
        if self.num_rows <= width:
            x = self.standardised(slice(None)).double()
            values, vectors = torch.linalg.eigh(x @ x.T)
            kept = values > 1e-12 * values.max()
            components = vectors[:, kept] * values[kept].sqrt()
            basis, values = (x.T @ vectors[:, kept]) / values[kept].sqrt(), values[kept]
        else:
            covariance = torch.zeros(width, width, dtype=torch.float64)
            for rows in self.slices(self.block):
                x = self.standardised(rows)
                covariance += x.T @ x
            values, basis = torch.linalg.eigh(covariance)
            components = None
        spectrum, basis = (values.clamp_min(0) / self.num_rows).float(), basis.float()
        if self.num_rows * (len(spectrum) + 1) > _IN_MEMORY:
            return basis, spectrum, None
        matrix = torch.ones(self.num_rows, len(spectrum) + 1)
        for rows in self.slices(self.block):
            matrix[rows, :-1] = self.standardised(rows) @ basis if components is None else components[rows].float()
        return basis, spectrum, matrix

    def rows(self, rows: slice) -> Tensor:
        """Return the columns of some rows that `to_columns` has coefficients for."""
        if self.matrix is not None:
            return self.matrix[rows]
        return F.pad(self.standardised(rows), (0, 1), value=1.0)

    def to_columns(self, theta: Tensor) -> Tensor:
        return theta if self.matrix is not None else torch.cat([self.basis @ theta[:-1], theta[-1:]])

    def from_columns(self, gradient: Tensor) -> Tensor:
        return gradient if self.matrix is not None else torch.cat([self.basis.T @ gradient[:-1], gradient[-1:]])

    def multiply(self, theta: Tensor, out: Tensor) -> None:
        """Write the logits of `theta` (R + 1, K, C) into `out` (N, K, C)."""
        columns = self.to_columns(theta.flatten(1))
        for rows in self.slices(self.block):
            out[rows] = (self.rows(rows) @ columns).view(-1, *theta.shape[1:])

    def classifier(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return weight (C, D) and bias (C,) on the features as they were given, from `theta` (R + 1, C)."""
        theta = theta.double()
        weight = (self.basis.double() @ theta[:-1]).T * torch.from_numpy(self.scale)
        return weight.float(), (theta[-1] - weight @ torch.from_numpy(self.mean)).float()


class _Problem:
    """K heads on the same images with their own weights of images, solved side by side by L-BFGS.

    `theta` (R + 1, K, C) holds the coefficients of the principal components and, in the last row, the bias.
    """

    def __init__(self, design: _Design, targets: _Targets, trained: Tensor):
        self.design, self.targets = design, targets
        self.heads, self.classes = trained.shape[1], targets.num_classes
        weight = trained.double()  # (N, K)
        self.block = max(64, min(design.block, 2**20 // (self.heads * self.classes)))
        for rows in design.slices(self.block):
            weight[rows] *= targets.rows(rows)[1].double()[:, None]
        self.weight = (weight / weight.sum(0)).float()
        # Logits and their change along a direction.
        self.logits, self.change = (_allocate(design.num_rows, self.heads, self.classes) for _ in range(2))
        self.start = self._start(trained)

    def _start(self, trained: Tensor) -> Tensor:
        """Return weights of zero and the bias that predicts the prior; classes without an image are switched off."""
        prior = self.targets.head.training_prior().clamp_min(1e-12)
        theta = torch.zeros(len(self.design.spectrum), self.heads, self.classes)
        theta[-1] = (prior.log() if self.targets.softmax else torch.logit(prior)).float()
        if not self.targets.config.label_smoothing:
            for head in range(self.heads):
                present, lacking = self.targets.class_presence(trained[:, head])
                theta[-1, head, ~present] = _OFF
                theta[-1, head, ~lacking] = -_OFF
        return theta

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1) if self.targets.softmax else logits.sigmoid()

    def gradient(self, theta: Tensor, strength: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient at `theta`, whose logits are known, and the mean p (1 - p) of each class (K, C)."""
        total = torch.zeros_like(self.design.to_columns(theta.flatten(1)))
        curvature = torch.zeros(self.heads, self.classes)
        for rows in self.design.slices(self.block):
            targets, _ = self.targets.rows(rows)
            p, weight = self.probabilities(self.logits[rows]), self.weight[rows, :, None]
            curvature += (p * (1 - p) * weight).sum(0)
            residual = (p - targets[:, None]) * weight
            total += self.design.rows(rows).T @ residual.flatten(1)
        return self.design.from_columns(total).view_as(theta) + strength * theta, curvature

    def slope(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """Return slope and curvature of the loss after `step` (K,) along the direction of `change`. (K,) each"""
        slope, curvature = torch.zeros(2, self.heads, dtype=torch.float64)
        for rows in self.design.slices(self.block):
            targets, _ = self.targets.rows(rows)
            change = self.change[rows]
            p = self.probabilities(torch.addcmul(self.logits[rows], step.float()[:, None], change))
            weighted = p * change
            first = weighted.sum(-1)  # (B, K)
            against = torch.einsum("bc,bkc->bk", targets, change)
            second = (weighted * change).sum(-1)
            second -= first**2 if self.targets.softmax else (weighted**2).sum(-1)
            slope += ((first - against) * self.weight[rows]).sum(0, dtype=torch.float64)
            curvature += (second * self.weight[rows]).sum(0, dtype=torch.float64)
        return slope, curvature

    def search(self, theta: Tensor, direction: Tensor, strength: Tensor, begin: Tensor | None = None) -> Tensor:
        """Minimise along `direction`, whose logits are `change`, by safeguarded Newton steps; return the steps (K,).

        `begin` is the slope at `theta` where it is known.
        """
        linear, square = _dot(strength * direction, theta).double(), _dot(strength * direction, direction).double()
        step, low = torch.ones(self.heads, dtype=torch.float64), torch.zeros(self.heads, dtype=torch.float64)
        high = torch.full_like(low, torch.inf)
        begin = self.slope(low)[0] + linear if begin is None else begin
        for _ in range(20):
            slope, curvature = self.slope(step)
            slope, curvature = slope + linear + step * square, curvature + square
            if (done := slope.abs() <= _CURVATURE * begin.abs()).all():
                break
            low, high = torch.where(slope < 0, step, low), torch.where(slope > 0, step, high)
            newton = step - slope / curvature.clamp_min(1e-30)
            fallback = torch.where(high.isinf(), 4 * step, (low + high) / 2)
            inside = (newton > low) & (newton < high) & (newton < 10 * step)
            step = torch.where(done, step, torch.where(inside, newton, fallback))
        return torch.where(begin < 0, step, 0).float()

    def move(
        self, theta: Tensor, direction: Tensor, strength: Tensor, begin: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return `theta` at the minimum along `direction`, and the step taken; the logits follow."""
        step = self.search(theta, direction, strength, begin)
        for rows in self.design.slices(self.block):
            self.logits[rows] += step[:, None] * self.change[rows]
        taken = step[:, None] * direction
        return theta + taken, taken

    def solve(self, theta: Tensor, strength: float, tolerance: float, before: Tensor | None = None) -> Tensor:
        """Return the minimiser at `strength`, begun at `theta`, the solution of the strength before.

        The line through `before`, the solution of the strength before that, leads most of the way.
        """
        penalty = torch.full((len(theta), 1, 1), strength)
        penalty[-1] = 0
        self.design.multiply(theta, self.logits)
        if before is not None:
            direction = theta - before
            self.design.multiply(direction, self.change)
            theta, _ = self.move(theta, direction, penalty)
        gradient, curvature = self.gradient(theta, penalty)
        inverse = 1 / (self.design.spectrum[:, None, None] * curvature + penalty + 1e-9)
        history: list[tuple[Tensor, Tensor, Tensor]] = []
        scale, best, since = torch.ones(self.heads), math.inf, 0
        for _ in range(_MAX_ITERATIONS):
            direction = -_two_loops(gradient, history, inverse, scale)
            slope = _dot(gradient, direction)
            # Two estimates of the loss above its minimum: by the preconditioner, and by the curvature met on the way.
            gap = torch.maximum(_dot(gradient, inverse * gradient), -slope).max().item() / 2
            best, since = (gap, 0) if gap < 0.8 * best else (best, since + 1)
            if gap < tolerance or since > 10:  # float32 can do no better
                break
            self.design.multiply(direction, self.change)
            theta, taken = self.move(theta, direction, penalty, slope.double())
            old, (gradient, _) = gradient, self.gradient(theta, penalty)
            turned = gradient - old
            product = _dot(taken, turned)
            known = product > 1e-30
            history = [*history, (taken, turned, torch.where(known, 1 / product, 0))][-_HISTORY:]
            scale = torch.where(known, product / _dot(turned, inverse * turned).clamp_min(1e-30), scale)
        return theta


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the scalar product for each head (K,)."""
    return (a * b).sum((0, 2))


def _two_loops(gradient: Tensor, history: list, inverse: Tensor, scale: Tensor) -> Tensor:
    """Multiply the gradient by L-BFGS' estimate of the inverse Hessian."""
    result, factors = gradient.clone(), []
    for taken, turned, rho in reversed(history):
        factor = (rho * _dot(taken, result))[:, None]
        factors.append(factor)
        result -= factor * turned
    result *= inverse * scale[:, None]
    for (taken, turned, rho), factor in zip(history, reversed(factors), strict=True):
        result += (factor - (rho * _dot(turned, result))[:, None]) * taken
    return result


def _allocate(*shape: int) -> Tensor:
    """Return a float32 tensor, in a temporary file where it is large."""
    if math.prod(shape) <= _IN_MEMORY:
        return torch.zeros(shape)
    with tempfile.TemporaryFile() as file:  # the mapping outlives its name
        return torch.from_numpy(np.memmap(file, dtype=np.float32, mode="w+", shape=shape))


class _RegularizationPath:
    """The heads of all folds along the strengths, with the state that lets an interrupted path continue."""

    def __init__(self, design: _Design, targets: _Targets, fold: np.ndarray, strengths: list[float], select: str):
        self.design, self.targets, self.fold, self.strengths, self.select = design, targets, fold, strengths, select
        self.state: Path | None = None
        self.trained = torch.from_numpy(fold[:, None] != np.arange(fold.max() + 1))  # (N, folds)
        self.scores: list[dict[str, float]] = []
        self.tensors: dict[str, Tensor] = {}

    def run(self, state: Path | None, callback: Callable[[dict[str, float]], None] | None = None) -> None:
        """Solve one strength after another until two in a row improve no score; `state` is the file to resume from."""
        self.state = state
        self._load()
        if self._ended():
            return
        # Folds are solved together as far as their logits fit into memory.
        together = max(1, _IN_MEMORY // (len(self.fold) * self.targets.num_classes))
        problems = [_Problem(self.design, self.targets, part) for part in self.trained.split(together, dim=1)]
        start = torch.cat([problem.start for problem in problems], dim=1)
        while not self._ended():
            strength = self.strengths[len(self.scores)]
            theta, before = self.tensors.get("theta", start), self.tensors.get("before")
            solved, logits = [], torch.empty(len(self.fold), self.targets.num_classes)
            for first, problem in zip(range(0, start.shape[1], together), problems, strict=True):
                part = slice(first, first + problem.heads)
                line = None if before is None else before[:, part]
                solved.append(problem.solve(theta[:, part].contiguous(), strength, _PATH_TOLERANCE, line))
                self._take_out_of_fold(problem, first, logits)
            self._record(strength, theta, torch.cat(solved, dim=1), logits)
            self._save()
            if callback is not None:
                callback(self.scores[-1])

    def finish(self) -> ExactHead:
        """Solve the head of all images at the chosen strength."""
        chosen = _choose(self.scores, self.select)
        problem = _Problem(self.design, self.targets, torch.ones(len(self.fold), 1, dtype=torch.bool))
        theta = problem.solve(self.tensors["mean"][:, None].contiguous(), self.scores[chosen]["strength"], _TOLERANCE)
        weight, bias = self.design.classifier(theta[:, 0])
        if self.targets.softmax:
            bias = bias - bias.mean()  # the loss does not depend on the mean
        return ExactHead(
            weight,
            bias - self.targets.head.logit_bias,
            self.scores[chosen]["strength"],
            self.scores,
            self.tensors["out_of_fold"],
            self._unseen(),
            self.fold,
            self.design.classifier(self.tensors["first_fold"]),
        )

    def _take_out_of_fold(self, problem: _Problem, first: int, logits: Tensor) -> None:
        """Copy the logits z of the images that each head of `problem` was not trained on into `logits`.

        A class that a head knows no image of gets its prior as probability, which says nothing about the image.
        """
        targets = self.targets
        prior = targets.head.training_prior().float()
        for head in range(problem.heads):
            rows = torch.from_numpy(np.flatnonzero(self.fold == first + head))
            z = problem.logits[rows, head]
            off = problem.start[-1, head].abs() >= -_OFF
            if targets.softmax:
                z = z - z[:, ~off].mean(-1, keepdim=True)  # the loss does not depend on the mean
                known = z[:, ~off].logsumexp(-1, keepdim=True) - torch.log1p(-prior[off].sum())
                z[:, off] = known + prior[off].log()
            else:
                z[:, off] = torch.logit(prior[off]).expand(len(z), -1)
            logits[rows] = z - targets.head.logit_bias

    def _unseen(self) -> Tensor:
        """Return which images have a class that no image of another fold has. (N,)"""
        if self.targets.multi_label:
            return torch.zeros(len(self.fold), dtype=torch.bool)
        known = torch.stack([self.targets.class_presence(part)[0] for part in self.trained.T])  # (folds, C)
        return ~known[torch.from_numpy(self.fold), self.targets.labels.long()]

    def _record(self, strength: float, before: Tensor, theta: Tensor, logits: Tensor) -> None:
        self.scores.append({"strength": strength} | score_logits(self.targets.head, logits, self.targets.labels))
        self.tensors |= {"before": before, "theta": theta}
        if len(self.scores) == 1:
            del self.tensors["before"]  # the start is on no line with the solutions
        if _choose(self.scores, self.select) == len(self.scores) - 1:
            # Over the folds that know the class: the bias of the others is not a number of this head.
            known = (theta[-1].abs() < -_OFF).float()  # (folds, C)
            self.tensors |= {"mean": (theta * known).sum(1) / known.sum(0).clamp_min(1), "out_of_fold": logits}
            self.tensors["first_fold"] = theta[:, 0]

    def _ended(self) -> bool:
        if len(self.scores) in (0, len(self.strengths)):
            return len(self.scores) > 0
        best = max(_choose(self.scores, self.select), _choose(self.scores, "nll"))
        return len(self.scores) - 1 - best >= _PATIENCE

    def _key(self) -> str:
        """Return a digest of everything that the solutions depend on."""
        problem = [_FORMAT, dict(self.targets.config), self.strengths, self.select]
        digest = hashlib.sha256(json.dumps(problem).encode())
        for array in (self.design.mean, self.design.scale, self.targets.labels.numpy(), self.fold):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def _save(self) -> None:
        if self.state is None:
            return
        self.state.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"key": self._key(), "scores": json.dumps(self.scores)}
        with replacing(self.state) as writing:
            save_file({name: value.contiguous() for name, value in self.tensors.items()}, writing, metadata)

    def _load(self) -> None:
        """Take over the state of the same problem; another's, or a damaged one, is ignored."""
        if self.state is None or not self.state.exists():
            return
        with contextlib.suppress(SafetensorError, OSError, KeyError, ValueError), safe_open(self.state, "pt") as file:
            metadata = file.metadata()
            if metadata["key"] == self._key():
                self.tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                self.scores = json.loads(metadata["scores"])


def score_logits(head: LongTailHead, logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the scores of logits z that choose a strength.

    The negative log likelihood is that of the training posterior. Accuracy is that of decisions under the training
    prior, mean class accuracy that under the uniform one, the others that half way between, under pi^0.5. A head that
    estimates no posterior decides by the largest logit.
    """
    if head.multi_label:
        scores = F.binary_cross_entropy_with_logits(logits + head.logit_bias, labels.float())
        given, labels = (logits + head.logit_bias).sigmoid() > 0.5, labels.bool()
        f1 = 2 * (given & labels).sum(0) / (given.sum(0) + labels.sum(0)).clamp_min(1)
        return {"nll": scores.item() * logits.shape[1], "macro_f1": f1.mean().item()}
    adjusted, rows = logits + head.logit_bias, torch.arange(len(labels))
    fitted = adjusted.log_softmax(-1) if head.definition.activation == "softmax" else F.logsigmoid(adjusted)
    posterior = logits if head.no_posterior else head.training_posterior(logits)
    scores = {"nll": -fitted.log_softmax(-1)[rows, labels.long()].mean().item()}
    for name in OBJECTIVES:
        exponent = 1.0 if head.no_posterior else {"accuracy": 1.0, "mean_class_accuracy": 0.0}.get(name, 0.5)
        predicted = decide(posterior, head.prior, exponent)
        scores[name] = score_predictions(predicted.numpy(), labels.numpy(), logits.shape[1])[name]
    return scores


def _choose(scores: list[dict[str, float]], select: str) -> int:
    """Return the index of the best strength; of equals the strongest."""
    values = [row[select] for row in scores]
    return values.index(min(values) if select == "nll" else max(values))
