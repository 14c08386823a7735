"""Classify image files with a published or local model: `python -m livt_hf.predict MODEL IMAGE...`.

Prints one line a file, as a table or as JSON lines. A file that cannot be read gets a line on stderr that says why,
and the exit code is then 1.
"""

import argparse
import glob
import json
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from PIL import Image
from tqdm import tqdm
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification
from transformers.image_processing_backends import TorchvisionBackend
from transformers.utils.logging import disable_progress_bar

from livt_hf.data.decoding import DAMAGED, decode_rgb
from livt_hf.errors import LiVTError
from livt_hf.long_tail.priors import Prior, read_prior
from livt_hf.modeling_livit import LiViTForImageClassification

BATCHES_AHEAD = 2  # read while the model works on an earlier one


class Predictor:
    """A classifier with its image processor and, for a LiViT, a serving prior."""

    def __init__(self, model: str, prior: Prior = None, device: str | None = None):
        config = AutoConfig.from_pretrained(model)
        if config.model_type == "vit_mae":
            raise LiVTError(f"{model} is a pretraining, which knows no classes; fine-tune it first.")
        self.ours = config.model_type == "livit" or "livit" in config.to_dict()
        kind = LiViTForImageClassification if self.ours else AutoModelForImageClassification
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.model = kind.from_pretrained(model).eval().to(self.device)
        self.processor = AutoImageProcessor.from_pretrained(model)
        # Whether the processor does what transformers' do by default, so that its steps may be called singly.
        standard = isinstance(self.processor, TorchvisionBackend) and not self.processor.do_pad
        self.stepwise = standard and type(self.processor)._preprocess is TorchvisionBackend._preprocess
        self.labels = [self.model.config.id2label[i] for i in range(self.model.config.num_labels)]
        self.serve_under(prior)

    def serve_under(self, prior: Prior) -> None:
        """Give probabilities for a world with these class frequencies; None leaves the model's own choice."""
        if prior is not None and not self.ours:
            kind = self.model.config.model_type
            raise LiVTError(
                f"this is a stock {kind} classifier, whose training prior is unknown; leave the prior out."
            )
        self.prior = prior

    def read(self, path: Path) -> torch.Tensor | str:
        """A file to the pixels the model sees (3, H, W), as bytes where `finish` can do the rest; or what is wrong."""
        processor = self.processor
        try:
            image = decode_rgb(path.read_bytes())
        except DAMAGED as error:
            return f"{type(error).__name__}: {error}"
        if not self.stepwise:
            return processor(image, return_tensors="pt")["pixel_values"][0]
        # The processor as a whole would first copy the picture to another memory layout, in which resizing is slow.
        if processor.do_resize:
            image = processor.resize(image, processor.size, processor.resample)
        return processor.center_crop(image, processor.crop_size) if processor.do_center_crop else image

    def finish(self, pixels: torch.Tensor) -> torch.Tensor:
        """Rescaling and normalisation of a whole batch, on the model's device."""
        processor, pixels = self.processor, pixels.to(self.device)
        if not self.stepwise:
            return pixels
        names = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
        return processor.rescale_and_normalize(pixels, **{name: getattr(processor, name) for name in names})

    @torch.inference_mode()
    def scores(self, pixels: Sequence[torch.Tensor]) -> torch.Tensor:
        """Class probabilities (B, C). Pictures that the processor leaves at their own size go through size by size."""
        result = torch.empty(len(pixels), len(self.labels))
        for shape in {tuple(image.shape) for image in pixels}:
            chosen = [i for i, image in enumerate(pixels) if tuple(image.shape) == shape]
            result[chosen] = self._batch_scores(self.finish(torch.stack([pixels[i] for i in chosen]))).cpu()
        return result

    def _batch_scores(self, batch: torch.Tensor) -> torch.Tensor:
        config = self.model.config
        if self.ours and (self.prior is not None or self.model.head.no_posterior is None):
            return self.model.probabilities(batch, prior=self.prior).float()
        logits = self.model(batch).logits.float()
        return logits.sigmoid() if config.problem_type == "multi_label_classification" else logits.softmax(-1)

    def predict(
        self, paths: Sequence[Path], batch_size: int = 32, workers: int | None = None
    ) -> Iterator[tuple[Path, torch.Tensor | str]]:
        """Each file with its class probabilities or the reason why it has none, in order."""
        with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
            waiting: deque = deque()
            for start in range(0, len(paths), batch_size):
                waiting.append([(path, pool.submit(self.read, path)) for path in paths[start : start + batch_size]])
                if len(waiting) > BATCHES_AHEAD:
                    yield from self._classify(waiting.popleft())
            while waiting:
                yield from self._classify(waiting.popleft())

    def _classify(self, batch: list) -> Iterator[tuple[Path, torch.Tensor | str]]:
        read = [(path, future.result()) for path, future in batch]
        good = [image for _, image in read if isinstance(image, torch.Tensor)]
        scores = iter(self.scores(good))
        for path, image in read:
            yield path, (next(scores) if isinstance(image, torch.Tensor) else image)


def find_images(arguments: Sequence[str]) -> list[Path]:
    """Files as named (also those that do not exist), every picture below a folder, and what a pattern matches."""
    Image.init()
    suffixes = set(Image.registered_extensions())
    found: dict[Path, None] = {}
    for argument in arguments:
        matches = sorted(glob.glob(argument, recursive=True)) if glob.has_magic(argument) else [argument]
        for match in map(Path, matches):
            below = (
                sorted(path for path in match.rglob("*") if path.suffix.lower() in suffixes)
                if match.is_dir()
                else [match]
            )
            found.update(dict.fromkeys(below))
    return list(found)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m livt_hf.predict", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, or a model on the Hub")
    parser.add_argument(
        "images", nargs="+", help="files, folders (searched below) or quoted patterns such as 'a/**/*.jpg'"
    )
    parser.add_argument("--prior", help="JSON or YAML file: how frequent each class is where the model serves")
    parser.add_argument("--top_k", type=int, default=5, help="classes to print a picture")
    parser.add_argument("--format", choices=("table", "jsonl"), default="table")
    parser.add_argument("--batch_size", type=int, default=32)
    options = parser.parse_args(arguments)
    if not sys.stderr.isatty():  # a log file gets plain lines
        disable_progress_bar()
    paths = find_images(options.images)
    if not paths:
        parser.error(f"no picture in {' '.join(options.images)}")
    try:
        predictor = Predictor(options.model)
        if options.prior:
            several = predictor.model.config.problem_type == "multi_label_classification"
            predictor.serve_under(read_prior(options.prior, predictor.labels, multi_label=several))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    width, broken = max(len(str(path)) for path in paths), 0
    results = tqdm(predictor.predict(paths, options.batch_size), total=len(paths), unit="image", disable=None)
    for path, scores in results:
        if isinstance(scores, str):
            broken += 1
            tqdm.write(f"cannot read {path}: {scores}", file=sys.stderr)
            if options.format == "jsonl":
                tqdm.write(json.dumps({"file": str(path), "error": scores}))
            continue
        top = scores.topk(min(options.top_k, len(scores)))
        named = [
            (predictor.labels[i], round(s, 4)) for i, s in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ]
        if options.format == "jsonl":
            tqdm.write(json.dumps({"file": str(path), "predictions": [{"label": n, "score": s} for n, s in named]}))
        else:
            tqdm.write(f"{path!s:<{width}}  " + "  ".join(f"{label} {score:.3f}" for label, score in named))
    if broken:
        print(f"{broken} of {len(paths)} files could not be read", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
