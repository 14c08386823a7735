"""Exact linear heads on frozen features.

The loss of a linear classifier on frozen features is convex for `CONVEX_LOSSES`, so there is nothing to schedule: the
head is the minimiser of

    sum_i v_i loss(W x_i + b, y_i) / sum_i v_i + strength / 2 ||W||^2

with standardised features x and weights v by class, solved by preconditioned L-BFGS along a path of strengths from
strong to weak. Cross-validation on the training images chooses the strength, and leaves an out-of-fold logit of every
training image to calibrate on and to choose a deployment prior by. `head_solver` is the numerical part.

The bias b is not penalised, so the logit bias of a balanced loss only moves b: Bal-CE has the weights of CE, and
Bal-BCE those of BCE.
"""

import contextlib
import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from livt_hf.errors import LiVTError
from livt_hf.files import replacing
from livt_hf.long_tail.head import LongTailHead
from livt_hf.long_tail.loss_table import CONVEX_LOSSES
from livt_hf.long_tail.objectives import decide, score_predictions
from livt_hf.training.head_solver import OFF, Design, HeadProblem, Targets

STRENGTHS = tuple(round(10 ** (1 - step / 3), 7) for step in range(19))  # 10, 4.64, 2.15, 1, ... 1e-5
_PATH_TOLERANCE, _TOLERANCE = 1e-5, 1e-11  # of the loss above its minimum, in nats per image: on the path, at its end
_PATIENCE = 2  # strengths without a better score after which the path ends
# Of the deployment prior pi^t for each objective: those of the theory, and half way between for the others.
EXPONENTS = {"mean_class_accuracy": 0.0, "macro_f1": 0.5, "balanced": 0.5, "accuracy": 1.0}
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
        shrunk: weight and bias of a head of a larger strength that was trained without fold 0, if it was asked for.
            The bias is that of the fitted posterior, with the logit bias of the loss.
    """

    weight: Tensor
    bias: Tensor
    strength: float
    path: list[dict[str, float]]
    out_of_fold: Tensor
    unseen: Tensor
    fold: np.ndarray
    shrunk: tuple[Tensor, Tensor] | None = None


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
    shrinkage: float | None = None,
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
        shrinkage: also fit a head of so many times the chosen strength without fold 0.
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
    targets = Targets(labels, class_counts, loss, long_tail)
    allowed = ("nll", "macro_f1") if targets.multi_label else ("nll", *EXPONENTS)
    if select not in allowed:
        raise LiVTError(f"select {select!r} is not a score here; use one of {', '.join(allowed)}.", "select")
    fold = assign_folds(labels.numpy(), folds, groups, seed) if isinstance(folds, int) else np.asarray(folds)
    state = None if cache is None else Path(cache) / _STATE
    path = _RegularizationPath(Design(features), targets, fold, sorted(strengths, reverse=True), select, state)
    path.run(callback)
    return path.finish(shrinkage)


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


@dataclass
class _RegularizationPath:
    """The heads of all folds along the strengths, with the state that lets an interrupted path continue."""

    design: Design
    targets: Targets
    fold: np.ndarray
    strengths: list[float]
    select: str
    state: Path | None
    scores: list[dict[str, float]] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self):
        self.trained = torch.from_numpy(self.fold[:, None] != np.arange(self.fold.max() + 1))  # (N, folds)

    def run(self, callback: Callable[[dict[str, float]], None] | None = None) -> None:
        """Solve one strength after another until two in a row improve no score."""
        self._load()
        if self._ended():
            return
        # Folds are solved together as far as their logits fit into memory.
        together = HeadProblem.most_heads(len(self.fold), self.targets.num_classes)
        problems = [HeadProblem(self.design, self.targets, part) for part in self.trained.split(together, dim=1)]
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

    def finish(self, shrinkage: float | None = None) -> ExactHead:
        """Solve the head of all images at the chosen strength."""
        strength = self.scores[_choose(self.scores, self.select)]["strength"]
        weight, bias = self._solve_one(torch.ones(len(self.fold), 1, dtype=torch.bool), strength, _TOLERANCE)
        shrunk = None
        if shrinkage is not None:
            shrunk = self._solve_one(self.trained[:, :1], shrinkage * strength, _PATH_TOLERANCE)
        if self.targets.softmax:
            bias = bias - bias.mean()  # the loss does not depend on the mean
        return ExactHead(
            weight,
            bias - self.targets.head.logit_bias,
            strength,
            path=self.scores,
            out_of_fold=self.tensors["out_of_fold"],
            unseen=self._unseen(),
            fold=self.fold,
            shrunk=shrunk,
        )

    def _solve_one(self, trained: Tensor, strength: float, tolerance: float) -> tuple[Tensor, Tensor]:
        """Return weight and bias of the head of the images `trained`, (N, 1), near those of the folds."""
        problem = HeadProblem(self.design, self.targets, trained)
        mean = self.tensors["mean"][:, None].clone()
        mean[-1] = torch.where(problem.start[-1].abs() < -OFF, mean[-1], problem.start[-1])
        return self.design.classifier(problem.solve(mean, strength, tolerance)[:, 0])

    def _take_out_of_fold(self, problem: HeadProblem, first: int, logits: Tensor) -> None:
        """Copy the logits z of the images that each head of `problem` was not trained on into `logits`.

        A class that a head knows no image of gets its prior as probability, which says nothing about the image.
        """
        targets = self.targets
        prior = targets.head.training_prior().float()
        for head in range(problem.heads):
            rows = torch.from_numpy(np.flatnonzero(self.fold == first + head))
            z = problem.logits[rows, head]
            off = problem.start[-1, head].abs() >= -OFF
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
        self.tensors["theta"] = theta
        if len(self.scores) > 1:  # the start is on no line with the solutions
            self.tensors["before"] = before
        if _choose(self.scores, self.select) == len(self.scores) - 1:
            # Over the folds that know the class: the bias of the others is not a number of this head.
            known = (theta[-1].abs() < -OFF).float()  # (folds, C)
            self.tensors |= {"mean": (theta * known).sum(1) / known.sum(0).clamp_min(1), "out_of_fold": logits}

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
        if self.state is None:
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
    for name, exponent in EXPONENTS.items():
        predicted = decide(posterior, head.prior, 1.0 if head.no_posterior else exponent)
        scores[name] = score_predictions(predicted.numpy(), labels.numpy(), logits.shape[1])[name]
    return scores


def _choose(scores: list[dict[str, float]], select: str) -> int:
    """Return the index of the best strength; of equals the strongest."""
    values = [row[select] for row in scores]
    return values.index(min(values) if select == "nll" else max(values))
