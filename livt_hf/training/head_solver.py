"""Solve linear heads on the same features side by side, by preconditioned L-BFGS.

- In the basis of the features' principal components the Hessian is nearly diagonal, which gives the preconditioner;
  fewer images than features leave as many components as images.
- Logits are linear in the weights, so a line search costs no product with the features.
- All folds are solved together, one product with the features for all of them.
"""

import math
import tempfile
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from livt_hf.errors import LiVTError
from livt_hf.long_tail.config import LongTailConfig
from livt_hf.long_tail.head import LongTailHead
from livt_hf.long_tail.losses import class_weighted

OFF = -1e4  # the bias of a class that a fold has no image of
_HISTORY, _MAX_ITERATIONS = 10, 500
_CURVATURE = 0.3  # a line search ends where the slope is this share of the slope it began with
_IN_MEMORY = 2**28  # numbers that one array may hold in memory


class Targets:
    """Labels as targets and weights of images, and the long-tail head that makes a loss of them."""

    def __init__(self, labels: Tensor, class_counts: Sequence[int] | None, loss: str, long_tail: dict):
        self.labels, self.multi_label = labels, labels.ndim == 2
        if class_counts is None:
            class_counts = (labels.sum(0) if self.multi_label else torch.bincount(labels)).tolist()
        if self.multi_label:
            long_tail = {"num_train_images": len(labels), "test_prior": None} | long_tail
        kind = "multi_label_classification" if self.multi_label else "single_label_classification"
        self.num_classes = len(class_counts)
        self.config = LongTailConfig(loss=loss, class_counts=class_counts, **long_tail)
        model_config = SimpleNamespace(num_labels=self.num_classes, problem_type=kind, long_tail=self.config)
        self.head = LongTailHead(model_config)
        self.softmax = self.head.definition.activation == "softmax"

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


class Design:
    """Standardised features in the basis of their principal components.

    Attributes:
        matrix: the components of each image and a column of ones, (N, R + 1).
        spectrum: the mean square of each column (R + 1,).
        basis: the components in the standardised features (D, R).
        mean, scale: of the features as they were given (D,).
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
        self.basis, self.spectrum, self.matrix = self._principal_components()

    def slices(self, size: int) -> Iterator[slice]:
        for start in range(0, self.num_rows, size):
            yield slice(start, min(start + size, self.num_rows))

    def _standardised(self, rows: slice) -> Tensor:
        block = (np.asarray(self.features[rows], dtype=np.float64) - self.mean) * self.scale
        return torch.from_numpy(block.astype(np.float32))

    def _principal_components(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the basis, the mean square of each column, and the matrix of components."""
        width = self.features.shape[1]
        if self.num_rows <= width:
            x = self._standardised(slice(None)).double()
            values, vectors = torch.linalg.eigh(x @ x.T)
            kept = values > 1e-12 * values.max()
            values, vectors = values[kept], vectors[:, kept]
            components, basis = (vectors * values.sqrt()).float(), ((x.T @ vectors) / values.sqrt()).float()
        else:
            covariance = torch.zeros(width, width, dtype=torch.float64)
            for rows in self.slices(self.block):
                x = self._standardised(rows)
                covariance += x.T @ x
            values, vectors = torch.linalg.eigh(covariance)
            components, basis = None, vectors.float()
        matrix = _allocate(self.num_rows, len(values) + 1)
        for rows in self.slices(self.block):
            matrix[rows, :-1] = self._standardised(rows) @ basis if components is None else components[rows]
        matrix[:, -1] = 1
        spectrum = (values.clamp_min(0) / self.num_rows).float()
        return basis, torch.cat([spectrum, torch.ones(1)]), matrix

    def classifier(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return weight (C, D) and bias (C,) on the features as they were given, from `theta` (R + 1, C)."""
        theta = theta.double()
        weight = (self.basis.double() @ theta[:-1]).T * torch.from_numpy(self.scale)
        return weight.float(), (theta[-1] - weight @ torch.from_numpy(self.mean)).float()


class HeadProblem:
    """K heads on the same images with their own weights of images, which `trained` (N, K) tells.

    `theta` (R + 1, K, C) holds the coefficients of the principal components and, in the last row, the bias.
    """

    def __init__(self, design: Design, targets: Targets, trained: Tensor):
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

    @staticmethod
    def most_heads(num_rows: int, num_classes: int) -> int:
        """Return how many heads can be solved together so that their logits fit into memory."""
        return max(1, _IN_MEMORY // (num_rows * num_classes))

    def _start(self, trained: Tensor) -> Tensor:
        """Return weights of zero and the bias that predicts the prior; classes without an image are switched off."""
        prior = self.targets.head.training_prior().clamp_min(1e-12)
        theta = torch.zeros(len(self.design.spectrum), self.heads, self.classes)
        theta[-1] = (prior.log() if self.targets.softmax else torch.logit(prior)).float()
        if not self.targets.config.label_smoothing:
            for head in range(self.heads):
                present, lacking = self.targets.class_presence(trained[:, head])
                theta[-1, head, ~present] = OFF
                if not self.targets.softmax:  # in which the only class there needs nothing
                    theta[-1, head, ~lacking] = -OFF
        return theta

    def _probabilities(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1) if self.targets.softmax else logits.sigmoid()

    def _multiply(self, theta: Tensor, out: Tensor) -> None:
        """Write the logits of `theta` into `out` (N, K, C)."""
        for rows in self.design.slices(self.design.block):
            out[rows] = (self.design.matrix[rows] @ theta.flatten(1)).view(-1, *theta.shape[1:])

    def _gradient(self, theta: Tensor, strength: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient at `theta`, whose logits are known, and the mean p (1 - p) of each class (K, C)."""
        total, curvature = torch.zeros_like(theta), torch.zeros(self.heads, self.classes)
        for rows in self.design.slices(self.block):
            targets, _ = self.targets.rows(rows)
            p, weight = self._probabilities(self.logits[rows]), self.weight[rows, :, None]
            curvature += (p * (1 - p) * weight).sum(0)
            residual = (p - targets[:, None]) * weight
            total += (self.design.matrix[rows].T @ residual.flatten(1)).view_as(total)
        return total + strength * theta, curvature

    def _slope(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """Return slope and curvature of the loss after `step` (K,) along the direction of `change`. (K,) each"""
        slope, curvature = torch.zeros(2, self.heads, dtype=torch.float64)
        for rows in self.design.slices(self.block):
            targets, _ = self.targets.rows(rows)
            change = self.change[rows]
            p = self._probabilities(torch.addcmul(self.logits[rows], step.float()[:, None], change))
            weighted = p * change
            first = weighted.sum(-1)  # (B, K)
            against = torch.einsum("bc,bkc->bk", targets, change)
            second = (weighted * change).sum(-1)
            second -= first**2 if self.targets.softmax else (weighted**2).sum(-1)
            slope += ((first - against) * self.weight[rows]).sum(0, dtype=torch.float64)
            curvature += (second * self.weight[rows]).sum(0, dtype=torch.float64)
        return slope, curvature

    def _move(self, theta: Tensor, direction: Tensor, strength: Tensor, begin: Tensor | None = None) -> Tensor:
        """Return the change of `theta` that minimises along `direction`, whose logits are `change`; logits follow.

        `begin` is the slope at `theta` where it is known.
        """
        step = self._search(_dot(strength * direction, theta), _dot(strength * direction, direction), begin)
        for rows in self.design.slices(self.block):
            self.logits[rows] += step[:, None] * self.change[rows]
        return step[:, None] * direction

    def _search(self, linear: Tensor, square: Tensor, begin: Tensor | None) -> Tensor:
        """Return the steps (K,) to the minimum, by safeguarded Newton steps; the penalty is a parabola."""
        linear, square = linear.double(), square.double()
        step, low = torch.ones(self.heads, dtype=torch.float64), torch.zeros(self.heads, dtype=torch.float64)
        high = torch.full_like(low, torch.inf)
        begin = self._slope(low)[0] + linear if begin is None else begin
        for _ in range(20):
            slope, curvature = self._slope(step)
            slope, curvature = slope + linear + step * square, curvature + square
            if (done := slope.abs() <= _CURVATURE * begin.abs()).all():
                break
            low, high = torch.where(slope < 0, step, low), torch.where(slope > 0, step, high)
            newton = step - slope / curvature.clamp_min(1e-30)
            fallback = torch.where(high.isinf(), 4 * step, (low + high) / 2)
            inside = (newton > low) & (newton < high) & (newton < 10 * step)
            step = torch.where(done, step, torch.where(inside, newton, fallback))
        return torch.where(begin < 0, step, 0).float()

    def solve(self, theta: Tensor, strength: float, tolerance: float, before: Tensor | None = None) -> Tensor:
        """Return the minimiser at `strength`, begun at `theta`, the solution of the strength before.

        The line through `before`, the solution of the strength before that, leads most of the way.
        """
        penalty = torch.full((len(theta), 1, 1), strength)
        penalty[-1] = 0
        self._multiply(theta, self.logits)
        if before is not None:
            direction = theta - before
            self._multiply(direction, self.change)
            theta = theta + self._move(theta, direction, penalty)
        gradient, curvature = self._gradient(theta, penalty)
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
            self._multiply(direction, self.change)
            taken = self._move(theta, direction, penalty, slope.double())
            theta = theta + taken
            old, (gradient, _) = gradient, self._gradient(theta, penalty)
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
    """Return a float32 tensor of zeros, in a temporary file where it is large."""
    if math.prod(shape) <= _IN_MEMORY:
        return torch.zeros(shape)
    with tempfile.TemporaryFile() as file:  # the mapping outlives its name
        return torch.from_numpy(np.memmap(file, dtype=np.float32, mode="w+", shape=shape))
