"""The head of a long-tailed classifier: from logits to the configured loss, and from logits to probabilities."""

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor  # of vmap, where values cannot be looked at
from transformers import PreTrainedConfig

from livt_hf.errors import LiVTError
from livt_hf.long_tail.calibration import Calibration, apply_calibration, calibrate_odds, saturation_trace
from livt_hf.long_tail.config import LongTailConfig, check_labels
from livt_hf.long_tail.losses import (
    ClassStatistics,
    LossDefinition,
    LossInputs,
    balanced_bce_bias,
    balanced_ce_bias,
    class_weighted,
    effective_number_weights,
    inverse_count_weights,
    ldam_margins,
    normalize_class_weights,
)
from livt_hf.long_tail.priors import Prior, as_prior, class_prior, log_odds, shift_odds, shift_prior

logger = logging.getLogger(__name__)

UNKNOWN_PRIOR = "it does not know its training prior, so pass class_counts"


class CosineClassifier(nn.Linear):
    """Classifier whose logits are cosines of features and class weights, as in Cao et al."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        unit = nn.functional.normalize
        return nn.functional.linear(unit(features, dim=-1), unit(self.weight, dim=-1))


def classifier_init_std(classifier: nn.Linear) -> float:
    """Return the std of the weights of a fresh classifier: almost 0, or for length 1 where they are normalised."""
    return classifier.in_features**-0.5 if isinstance(classifier, CosineClassifier) else 2e-5


class LongTailHead(nn.Module):
    """Head that computes the loss of `config.long_tail`, and probabilities from logits.

    `config` is that of the model: it says how many labels there are and whether an image may have several.
    """

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        check_labels(config)  # num_labels and problem_type may have changed since the config was made
        self.config = config
        self.warns_without_labels = True
        # How much of the training is done, from 0 to 1. Losses with two phases are in their second one when nobody
        # says otherwise.
        self.progress = 1.0
        self.features: Tensor | None = None
        self.update_buffers("cpu")

    @property
    def settings(self) -> LongTailConfig:
        return self.config.long_tail

    @property
    def definition(self) -> LossDefinition:
        return self.settings.definition

    @property
    def calibration(self) -> Calibration | None:
        return None if self.settings.calibration is None else Calibration(**self.settings.calibration)

    @property
    def multi_label(self) -> bool:
        return self.config.problem_type == "multi_label_classification"

    @property
    def no_posterior(self) -> str | None:
        """Return why this head gives no class probabilities, or None if it does."""
        if self.settings.class_counts is None:
            return UNKNOWN_PRIOR
        why = self.definition.why_no_posterior(self.settings)
        return why and f"it was trained with loss {self.settings.loss!r}: {why}"

    def set_epoch(self, epoch: int, epochs: int) -> None:
        """Tell the head that `epoch` of `epochs` begins, for losses that change during training."""
        self.progress = epoch / epochs

    def capture_features(self, _classifier: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Keep the input of the classifier, as its forward pre-hook, for losses that use features."""
        if self.definition.uses_features:
            self.features = inputs[0]

    def release_features(self, *_) -> None:
        """Drop the features, as a forward hook of the model: they would keep the graph alive."""
        self.features = None

    def update_buffers(self, device: torch.device | str) -> None:
        """Compute the tensors that follow from the settings again."""
        with torch.device("cpu"):  # the default may be meta, where no prior can be checked, or one without float64
            buffers = self.compute_buffers()
        for name, value in buffers.items():
            self.register_buffer(name, value.to(device), persistent=False)

    def compute_buffers(self) -> dict[str, Tensor]:
        """Compute everything the class counts determine; it is never saved."""
        settings, bias = self.settings, torch.tensor([0.0] * self.config.num_labels)
        counts = settings.prior_counts
        if counts is None:
            return {"logit_bias": bias}
        if self.definition.balanced and self.definition.activation == "sigmoid" and settings.bias == "bce":
            images = settings.num_images if self.multi_label else None
            bias = balanced_bce_bias(counts, settings.test_prior, num_images=images)
        elif self.definition.balanced:
            bias = balanced_ce_bias(counts, settings.test_prior)
        return {
            "logit_bias": settings.tau * bias,
            "prior": class_prior(counts, settings.num_images).float(),
            "class_weight": self._class_weights(counts),
            "inverse_count": inverse_count_weights(counts),
            "margin": ldam_margins(settings.class_counts, settings.ldam_max_margin),  # repeated images count once
        }

    def _class_weights(self, counts: Sequence[float]) -> Tensor:
        """Return per-class loss weights that sum to the number of classes.

        Uses `class_weights` of the config where given, else the effective number of samples (Cui et al., 2019).
        """
        if self.settings.class_weights is None:
            return effective_number_weights(counts, self.settings.cb_beta)
        return normalize_class_weights(torch.tensor(self.settings.class_weights, dtype=torch.float64))

    def _apply(self, fn, recurse=True):
        """Follow the model to its device but not to half precision: priors of one in ten million must survive."""
        super()._apply(fn, recurse)
        self.update_buffers(self.logit_bias.device)
        return self

    def initial_classifier_bias(self) -> Tensor:
        """Return the initial bias of the classifier: a fresh sigmoid head predicts the training prior (at tau 1).

        The bias of a class of two images hardly moves in a short training. Started higher, its sigmoid would stay far
        above its prior, and the posterior rule, which divides by that prior, would answer with this class alone.
        """
        settings, classes = self.settings, self.config.num_labels
        zero = torch.zeros(classes)
        if self.definition.activation == "softmax" or settings.head_start == "zero":
            return zero
        if not self.definition.balanced and settings.class_counts is not None:
            return log_odds(settings.prior_counts, settings.num_images).float()
        if settings.test_prior is None:  # the bias of the loss is logit(pi_s) itself
            return zero
        return torch.logit(as_prior(settings.test_prior, classes, multi_label=self.multi_label)).float()

    def forward(self, logits: Tensor, labels: Tensor, features: Tensor | None = None) -> Tensor:
        settings, statistics = self.settings, None
        if settings.class_counts is not None:
            statistics = ClassStatistics(self.prior, self.class_weight, self.inverse_count, self.margin)
        elif self.definition.uses_counts or settings.weighted_from is not None:
            raise LiVTError(
                f"loss {settings.loss!r} needs class_counts; pass them to the config or from_pretrained, or "
                "train with loss='ce', which needs none."
            )
        targets = self._make_targets(labels, len(logits))
        if self.training and settings.label_smoothing:
            targets = targets * (1 - settings.label_smoothing) + settings.label_smoothing / self.config.num_labels
        weight = 1.0
        if settings.weighted_from is not None and self.progress >= settings.weighted_from:
            targets, weight = class_weighted(targets, self.class_weight)
        logits = logits.float()
        adjusted = logits + self.logit_bias
        inputs = LossInputs(logits, adjusted, targets, features, statistics, settings, self.progress)
        losses = self.definition.function(inputs)
        if losses.shape not in ((), logits.shape[:1]):
            raise LiVTError(
                f"loss {settings.loss!r} returned a tensor of shape {tuple(losses.shape)} for {len(logits)} images: "
                "it must return one number per image, or their mean."
            )
        return (weight * losses).mean()

    def note_missing_labels(self) -> None:
        """Warn once about a training step whose loss cannot be that of the head."""
        if (
            self.warns_without_labels
            and self.training
            and torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
        ):
            self.warns_without_labels = False
            logger.warning(
                "a forward in training mode got no labels, so the loss is not %r; if TrainingArguments have a "
                "label_smoothing_factor, set it to 0 and pass label_smoothing to balance or the config instead.",
                self.settings.loss,
            )

    def _make_targets(self, labels: Tensor, images: int) -> Tensor:
        """Return class ids, soft or multi-hot labels as (B, C) floats, checked where that does not stall a GPU."""
        classes = self.config.num_labels
        may_check = (
            labels.device.type == "cpu"
            and not torch.compiler.is_compiling()
            and not is_functorch_wrapped_tensor(labels)
        )
        ids = not (self.multi_label or labels.is_floating_point())
        if labels.shape != (images, classes) and not (ids and labels.shape == (images,)):
            kind = "multi-hot" if self.multi_label else f"integer class ids ({images},) or soft"
            raise LiVTError(
                f"labels are {labels.dtype} of shape {tuple(labels.shape)}; "
                f"expected {kind} labels ({images}, {classes})."
            )
        if labels.ndim == 1:
            if may_check and images and not 0 <= labels.min() <= labels.max() < classes:
                raise LiVTError(f"labels span {labels.min()} to {labels.max()}; the classes are 0 to {classes - 1}.")
            # not one_hot, which looks at the labels
            return self.logit_bias.new_zeros(images, classes).scatter(1, labels.long()[:, None], 1.0)
        if not self.definition.soft_labels:
            raise LiVTError(f"loss {self.settings.loss!r} is defined for class ids only; turn mixup and cutmix off.")
        labels = labels.float()
        if may_check and not ((labels >= 0) & (labels <= 1)).all():
            raise LiVTError("soft labels lie between 0 and 1, but some are NaN or outside; check how they were mixed.")
        if may_check and not self.multi_label and not ((labels.sum(-1) - 1).abs() < 0.01).all():
            raise LiVTError(
                "the soft labels of each image sum to 1, but some do not; if an image may have several labels, set "
                "problem_type='multi_label_classification'."
            )
        return labels

    def fitted_posterior(self, logits: Tensor) -> Tensor:
        """Return log p_j, the uncalibrated posterior under the training prior (log-odds for multi-label)."""
        if self.no_posterior:
            raise LiVTError(f"this head gives no probabilities ({self.no_posterior}); rank by the logits.")
        adjusted = logits.float() + self.logit_bias  # as in training
        if self.multi_label:
            return adjusted
        return (
            adjusted.log_softmax(-1) if self.definition.activation == "softmax" else nn.functional.logsigmoid(adjusted)
        )

    def fitted_log_odds(self, logits: Tensor) -> Tensor:
        """Return log p_j - log (1 - p_j) of the fitted posterior, exact also where p_j was rounded to 1."""
        adjusted = logits.float() + self.logit_bias
        if self.multi_label or self.definition.activation == "sigmoid":
            return adjusted
        log_posterior = adjusted.log_softmax(-1)
        best = log_posterior.argmax(-1, keepdim=True)  # only the largest can be close to 1
        others = log_posterior.scatter(-1, best, -torch.inf).logsumexp(-1, keepdim=True)
        log_odds = log_posterior - torch.log1p(-log_posterior.exp().clamp(max=0.75))
        return log_odds.scatter(-1, best, log_posterior.gather(-1, best) - others)

    def training_posterior(self, logits: Tensor) -> Tensor:
        """Return log P_s(j|x) under the training prior, calibrated if possible (log-odds for multi-label)."""
        fitted, smooth = self.fitted_posterior(logits), self.settings.label_smoothing
        calibration = self.calibration
        if calibration is not None:
            if self.multi_label:
                return calibrate_odds(fitted, calibration, self.prior)
            return apply_calibration(fitted, calibration, self.prior, self.fitted_log_odds(logits))
        if smooth:
            # Training fitted (1 - s) p + s / C; the share s / C would swamp a rare class once divided by its prior.
            posterior = (fitted.exp() - smooth / self.config.num_labels) / (1 - smooth)
            # Where less than that share was fitted, a trace of it stays, so that the order of such classes does too.
            return torch.maximum(posterior.clamp_min(0).log(), fitted + math.log(1e-6))
        sigmoids = self.definition.activation == "sigmoid" and not self.multi_label
        return fitted + saturation_trace(self.fitted_log_odds(logits)) if sigmoids else fitted

    def posterior(self, logits: Tensor, prior: Prior = None) -> Tensor:
        """Return P(j|x) under a deployment prior; None is the config's `deployment_prior`, or uniform without one.

        Where an image may have several labels and there is no test prior, None is the training prior.
        """
        log_posterior = self.training_posterior(logits)
        if prior is None:
            prior = self.settings.deployment_prior
        if prior is None:
            prior = self.training_prior() if self.multi_label else "uniform"
        return self.shift_posterior(
            log_posterior, as_prior(prior, self.config.num_labels, multi_label=self.multi_label)
        )

    def training_prior(self) -> Tensor:
        """Return the training prior as float64 probabilities of shape (C,)."""
        return class_prior(self.settings.prior_counts, self.settings.num_images)

    def shift_posterior(self, log_posterior: Tensor, target: Tensor) -> Tensor:
        """Return probabilities under a deployment prior, from the result of `training_posterior`. (B, C)"""
        return (shift_odds if self.multi_label else shift_prior)(log_posterior, self.training_prior(), target)
