"""The head of a long-tailed classifier: from logits to the configured loss, and from logits to probabilities."""

import torch
from torch import Tensor, nn

from livt_hf.configuration_livit import LiViTConfig
from livt_hf.errors import LiVTError
from livt_hf.long_tail.losses import (
    LOSSES,
    balanced_bce_bias,
    balanced_ce_bias,
    effective_number_weights,
    ldam_margins,
)
from livt_hf.long_tail.priors import Prior, as_prior, class_prior, log_training_posterior, shift_odds, shift_prior


class LongTailHead(nn.Module):
    """The configured loss with the tensors it needs, and the way from logits to probabilities."""

    def __init__(self, config: LiViTConfig):
        super().__init__()
        self.config = config
        self.spec = LOSSES[config.loss]
        # IB starts with plain cross-entropy; the training loop switches it on after the warm-up.
        self.ib_active = True
        with torch.device("cpu"):  # transformers builds models on the meta device, where no prior can be checked
            constants = self.constants()
        for name, value in constants.items():
            self.register_buffer(name, value, persistent=False)

    def constants(self) -> dict[str, Tensor]:
        """Everything the class counts determine: never saved, always derived."""
        config, counts = self.config, self.config.class_counts
        if counts is None:
            return {"logit_bias": torch.zeros(config.num_labels)}
        if not self.spec.balanced:
            bias = torch.zeros(config.num_labels)
        elif self.spec.activation == "sigmoid" and config.bias == "bce":
            bias = balanced_bce_bias(counts, config.test_prior, num_images=config.num_images)
        else:
            bias = balanced_ce_bias(counts, config.test_prior)
        constants = {"logit_bias": config.tau * bias, "prior": class_prior(counts, config.num_images).float()}
        constants["class_weight"] = effective_number_weights(counts, config.cb_beta)
        constants["margin"] = ldam_margins(counts, config.ldam_max_margin)
        return constants

    def _apply(self, fn, recurse=True):
        """Follow the model to its device but not to half precision: priors of one in ten million must survive."""
        super()._apply(fn, recurse)
        for name, value in self.constants().items():
            setattr(self, name, value.to(getattr(self, name).device))
        return self

    def classifier_start(self) -> Tensor:
        """The classifier bias before training: logit(pi_t) under a sigmoid loss, unless told to start at zero."""
        config = self.config
        start = torch.zeros(config.num_labels)
        if self.spec.activation == "sigmoid" and config.head_start == "prior" and config.test_prior is not None:
            start += torch.logit(as_prior(config.test_prior, config.num_labels, multi_label=config.multi_label))
        return start

    def forward(self, logits: Tensor, labels: Tensor, features: Tensor) -> Tensor:
        config = self.config
        if self.spec.uses_counts and config.class_counts is None:
            raise LiVTError(f"loss {config.loss!r} needs class_counts; pass them to the config or from_pretrained.")
        targets = self._targets(labels, len(logits))
        if self.training and config.label_smoothing:
            targets = targets * (1 - config.label_smoothing) + config.label_smoothing / config.num_labels
        logits = logits.float()
        return self.spec.function(logits + self.logit_bias, targets, self, logits, features)

    def _targets(self, labels: Tensor, images: int) -> Tensor:
        """Class ids, soft labels or multi-hot labels as (B, C) floats, checked where looking does not stall a GPU."""
        config, classes = self.config, self.config.num_labels
        look = labels.device.type == "cpu" and not torch.compiler.is_compiling()
        ids = not (config.multi_label or labels.is_floating_point())
        if labels.shape != (images, classes) and not (ids and labels.shape == (images,)):
            kind = "multi-hot" if config.multi_label else f"integer class ids ({images},) or soft"
            raise LiVTError(
                f"labels are {labels.dtype} of shape {tuple(labels.shape)}; "
                f"expected {kind} labels ({images}, {classes})."
            )
        if labels.ndim == 1:
            if look and images and not 0 <= labels.min() <= labels.max() < classes:
                raise LiVTError(f"labels span {labels.min()} to {labels.max()}; the classes are 0 to {classes - 1}.")
            return nn.functional.one_hot(labels.long(), classes).float()
        if not self.spec.soft_labels:
            raise LiVTError(f"loss {config.loss!r} is defined for class ids only; turn mixup and cutmix off.")
        labels = labels.float()
        if look and not ((labels >= 0) & (labels <= 1)).all():
            raise LiVTError("soft labels lie between 0 and 1, but some are NaN or outside; check how they were mixed.")
        if look and not config.multi_label and not ((labels.sum(-1) - 1).abs() < 0.01).all():
            raise LiVTError(
                "soft labels sum to 1 in every image, but some do not; if an image may have several labels, set "
                "problem_type='multi_label_classification'."
            )
        return labels

    def training_posterior(self, logits: Tensor) -> Tensor:
        """log P_s(j|x) under the training prior (log-odds for multi-label); refuses losses that do not estimate it."""
        config = self.config
        if config.no_posterior:
            raise LiVTError(f"loss {config.loss!r} gives no probabilities: {config.no_posterior}; rank by the logits.")
        if config.class_counts is None:
            raise LiVTError("probabilities need the training prior; pass class_counts to from_pretrained.")
        if config.multi_label:
            return logits.float() + self.logit_bias
        log_posterior = log_training_posterior(logits, self.logit_bias, self.spec.activation)
        if config.label_smoothing:
            # Training fitted (1 - s) p + s / C; the share s / C would swamp a rare class once divided by its prior.
            smooth = config.label_smoothing
            posterior = (log_posterior.exp() - smooth / config.num_labels) / (1 - smooth)
            log_posterior = posterior.clamp_min(torch.finfo(posterior.dtype).tiny).log()
        return log_posterior

    def posterior(self, logits: Tensor, prior: Prior = None) -> Tensor:
        """P(j|x) under a serving prior; None is the config's `test_prior`, or uniform where it has none."""
        config = self.config
        log_posterior = self.training_posterior(logits)
        if prior is None:
            prior = config.test_prior
        if prior is None:
            prior = class_prior(config.class_counts, config.num_images) if config.multi_label else "uniform"
        prior = as_prior(prior, config.num_labels, multi_label=config.multi_label)
        shift = shift_odds if config.multi_label else shift_prior
        return shift(log_posterior, class_prior(config.class_counts, config.num_images), prior)
