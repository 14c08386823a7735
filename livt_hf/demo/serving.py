"""A classifier behind the demo: an image costs one forward pass, and every prior after that a softmax."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from livt_hf.data.decoding import BrokenImageError
from livt_hf.demo.bars import Bar, panels
from livt_hf.demo.classes import Classes
from livt_hf.evaluation.models import head_of, is_multi_label, why_no_posterior, why_uncalibrated
from livt_hf.evaluation.prediction import Predictor
from livt_hf.long_tail.anatomy import pooled_features
from livt_hf.long_tail.priors import Prior

TOP = 5
ARGMAX, UNIFORM, YOURS = "argmax z", "All classes equal", "Your world"
WORDS = {
    ARGMAX: "The paper's rule: rank by the logits z. Bars are a score, not a probability.",
    UNIFORM: "Probabilities where every class is as frequent as any other.",
    YOURS: "Probabilities where classes are as frequent as you say.",
}


class ServedClassifier:
    """A classifier with its image processor, and its classes where it gives probabilities under a prior."""

    def __init__(self, path: str, device: str | None = None):
        self.path = path
        self.predictor = Predictor(path, device=device)
        self.predictor.rule = lambda logits: logits  # kept as they are: priors come later
        self.model, self.names = self.predictor.model, self.predictor.labels
        missing, self.doubt = why_no_posterior(self.model), why_uncalibrated(self.model)
        # What the page says of a model that lacks something.
        self.caveat = missing and f"No prior can be chosen: scores are no class probabilities, because {missing}."
        if self.doubt:
            self.caveat = f"Beware of the probabilities: {self.doubt}; `livt calibrate` does that."
        self.classes = None if missing else Classes.of(self.model)

    def logits(self, path: str | Path) -> Tensor:
        """Of one image file. (C,)"""
        pixels = self.predictor.read(Path(path))
        if isinstance(pixels, str):
            raise BrokenImageError(f"{Path(path).name} is not an image that can be read ({pixels}); choose another.")
        return self.predictor.scores([pixels])[0]

    @torch.inference_mode()
    def features(self, images: Sequence[Tensor]) -> Tensor:
        """What the classifier sees of decoded images, as directions of length 1. (B, D)"""
        pixels = self.predictor.processor(list(images), return_tensors="pt")["pixel_values"]
        seen = pooled_features(self.model, pixels.to(self.predictor.device))
        return torch.nn.functional.normalize(seen.float(), dim=-1).cpu()

    def posterior(self, logits: Tensor, prior: Prior) -> Tensor:
        """Class probabilities (B, C) of logits (B, C) under a prior."""
        return head_of(self.model).posterior(logits.to(self.predictor.device), prior).cpu()

    def training_posterior(self, logits: Tensor) -> Tensor:
        """P_s(j|x) under the training prior. (B, C)"""
        return head_of(self.model).training_posterior(logits.to(self.predictor.device)).exp().cpu()

    def scores(self, logits: Tensor, frequencies: np.ndarray | None) -> dict[str, Tensor]:
        """What each rule says of one image's logits (C,); without classes only the paper's rule can be asked."""
        several, row = is_multi_label(self.model), logits[None]
        scores = {ARGMAX: row.sigmoid() if several else row.softmax(-1)}
        if self.classes is not None:
            if not several:
                scores[UNIFORM] = self.posterior(row, "uniform")
            scores[YOURS] = self.posterior(row, self.classes.prior(frequencies))
        return {rule: answer[0] for rule, answer in scores.items()}

    def panels(self, logits: Tensor | None, frequencies: np.ndarray | None) -> str:
        """The most probable classes of an image under each rule, as HTML."""
        if logits is None:
            return "<p>Drop an image, or pick one of the examples.</p>"
        scores = self.scores(logits, frequencies)
        return panels({rule: (WORDS[rule], self._bars(answer)) for rule, answer in scores.items()})

    def _bars(self, scores: Tensor) -> list[Bar]:
        best = scores.topk(min(TOP, len(scores)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        if self.classes is None:
            return [Bar(self.names[label], value) for label, value in pairs]
        groups, counts = self.classes.groups, self.classes.counts
        return [Bar(self.names[i], p, groups[i], f"{groups[i]}: {int(counts[i]):,} in training") for i, p in pairs]
