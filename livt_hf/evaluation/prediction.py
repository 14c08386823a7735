"""Image files to class probabilities, under the prior of the place where a model serves."""

import glob
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from transformers.image_processing_backends import TorchvisionBackend

from livt_hf.classifiers import choose_device, class_names, load_classifier, load_processor
from livt_hf.data.decoding import DAMAGED, decode_rgb, image_suffixes
from livt_hf.data.readers.folder import is_hidden
from livt_hf.evaluation.rules import BY_LOGIT, label_thresholds, posterior_rule, standard_rules
from livt_hf.evaluation.running import scores_under
from livt_hf.long_tail.priors import Prior
from livt_hf.predictions import PredictionsInfo
from livt_hf.runs import is_in_runs_folder
from livt_hf.text import format_error

BATCHES_AHEAD = 2  # read while the model works on an earlier one


class Predictor:
    """A classifier with its image processor and the rule that turns logits into scores.

    `training` is what `load_classifier` is told of a model from elsewhere.
    """

    def __init__(self, model: str, prior: Prior = None, device: str | None = None, **training: str | None):
        self.device = choose_device(device)
        self.model = load_classifier(model, **training).to(self.device)
        self.processor = load_processor(model)
        # Whether the processor does what transformers' do by default, so that its steps may be called singly.
        standard = isinstance(self.processor, TorchvisionBackend) and not self.processor.do_pad
        self.stepwise = standard and type(self.processor)._preprocess is TorchvisionBackend._preprocess
        self.labels = class_names(self.model)
        self.serve_under(prior)

    def serve_under(self, prior: Prior, words: str = "the given prior") -> None:
        """Give probabilities for a world with these class frequencies; None leaves the model's own rule."""
        self.thresholds = label_thresholds(self.model)
        if prior is None:
            self.rule_name, self.rule = next(iter(standard_rules(self.model).items()))
            return
        self.rule_name, self.rule = f"posterior, {words}", posterior_rule(self.model, prior)
        if self.thresholds is not None:  # they were chosen under the model's own prior
            self.thresholds.fill_(0.5)

    @property
    def explanation(self) -> str:
        """The rule behind the scores, and what the scores are."""
        given = ""
        if self.thresholds is not None:
            given = f"; labels are given, which a star marks in lines of text, at {self._threshold_words}"
        if self.rule is not None and self.rule_name != BY_LOGIT:
            doubt = PredictionsInfo.from_model(self.model).uncalibrated_because
            if doubt is None and not PredictionsInfo.from_model(self.model).is_calibrated:
                doubt = "they are not calibrated; `livt calibrate` does that"
            doubt = f"; beware: {doubt}" if doubt else ""
            return f"{self.rule_name}: scores are class probabilities{given}{doubt}"
        kind = "softmax" if self.rule is None else "sigmoid"
        why = PredictionsInfo.from_model(self.model).no_posterior
        why = why or "the model is not calibrated; `livt calibrate` does that"
        return f"{self.rule_name}: scores are the {kind} of the logits and no class probabilities ({why}){given}"

    def given(self, scores: Tensor) -> list[str]:
        """The labels that an image with these scores (C,) is given: one, or those that reach their thresholds."""
        chosen = scores.argmax()[None] if self.thresholds is None else (scores >= self.thresholds).nonzero()[:, 0]
        return [self.labels[label] for label in chosen.tolist()]

    @property
    def _threshold_words(self) -> str:
        low, high = self.thresholds.min().item(), self.thresholds.max().item()
        return f"scores of {low:.2f}" if low == high else f"scores of {low:.2f} to {high:.2f}, chosen for each class"

    def read(self, path: Path) -> Tensor | str:
        """A file to the pixels the model sees (3, H, W), as bytes where `finish` can do the rest; or what is wrong."""
        processor = self.processor
        try:
            image = decode_rgb(path.read_bytes())
        except DAMAGED as error:
            return format_error(error)
        if not self.stepwise:
            # In a list: the processor of timm models takes a single tensor for one that is rescaled already.
            return processor([image], return_tensors="pt")["pixel_values"][0]
        # The processor as a whole would first copy the image to another memory layout, in which resizing is slow.
        if processor.do_resize:
            image = processor.resize(image, processor.size, processor.resample)
        return processor.center_crop(image, processor.crop_size) if processor.do_center_crop else image

    def finish(self, pixels: Tensor) -> Tensor:
        """Rescaling and normalisation of a whole batch, on the model's device."""
        processor, pixels = self.processor, pixels.to(self.device)
        if not self.stepwise:
            return pixels
        names = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
        return processor.rescale_and_normalize(pixels, **{name: getattr(processor, name) for name in names})

    @torch.inference_mode()
    def scores(self, pixels: Sequence[Tensor]) -> Tensor:
        """Class probabilities (B, C). Images that the processor leaves at their own size go through size by size."""
        result = torch.empty(len(pixels), len(self.labels))
        for shape in {tuple(image.shape) for image in pixels}:
            chosen = [i for i, image in enumerate(pixels) if tuple(image.shape) == shape]
            batch = torch.stack([pixels[i] for i in chosen])
            result[chosen] = scores_under(self.rule, self.model(self.finish(batch)).logits.float()).cpu()
        return result

    def predict(
        self, paths: Sequence[Path], batch_size: int = 32, workers: int | None = None
    ) -> Iterator[tuple[Path, Tensor | str]]:
        """Each file with its class probabilities or the reason why it has none, in order."""
        with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
            waiting: deque = deque()
            for start in range(0, len(paths), batch_size):
                waiting.append([(path, pool.submit(self.read, path)) for path in paths[start : start + batch_size]])
                if len(waiting) > BATCHES_AHEAD:
                    yield from self._classify(waiting.popleft())
            while waiting:
                yield from self._classify(waiting.popleft())

    def _classify(self, batch: list) -> Iterator[tuple[Path, Tensor | str]]:
        read = [(path, future.result()) for path, future in batch]
        good = [image for _, image in read if isinstance(image, Tensor)]
        scores = iter(self.scores(good))
        for path, image in read:
            yield path, (next(scores) if isinstance(image, Tensor) else image)


def find_images(arguments: Sequence[str]) -> list[Path]:
    """Files as named (also those that do not exist), every image below a folder, and what a pattern matches."""
    suffixes = image_suffixes()
    found: dict[Path, None] = {}
    for argument in arguments:
        pattern = glob.has_magic(argument) and not Path(argument).exists()
        matches = sorted(glob.glob(argument, recursive=True)) if pattern else [argument]
        for match in map(Path, matches):
            if not match.is_dir():
                found[match] = None
                continue
            images = [path for path in match.rglob("*") if path.suffix.lower() in suffixes]
            of_runs = {folder for folder in {path.parent for path in images} if is_in_runs_folder(folder, match)}
            for path in sorted(images):
                if path.parent not in of_runs and not any(map(is_hidden, path.relative_to(match).parts)):
                    found[path] = None
    return list(found)
