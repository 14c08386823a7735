"""Classify image files with a run, a checkpoint or a model of the Hub.

    livt predict MODEL IMAGE...                       # files, folders (searched below), quoted patterns 'a/**/*.jpg'
    livt predict MODEL FOLDER --prior training        # where classes are as frequent as they were in training
    livt predict MODEL FOLDER --prior prior.json --format jsonl
    livt predict MODEL FOLDER --prior prior.json --class_counts counts.json    # a model trained elsewhere
    livt predict MODEL detections.json --output classified.json    # the boxes of a file of COCO or MegaDetector
    livt predict MODEL FOLDER --output predictions    # a prediction record, to decide again without the images

Prints one line per file. A file that cannot be read gets a line on stderr that says why, and the exit code is then 1.
"""

import contextlib
import csv
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import torch
from torch import Tensor
from tqdm import tqdm

from livt_hf.cli.console import run_command
from livt_hf.cli.inherit import resolve_settings
from livt_hf.cli.settings import PredictSettings
from livt_hf.data.decoding import image_suffixes
from livt_hf.data.labels import BOX, CORNERS
from livt_hf.data.spec import DataSpec
from livt_hf.errors import LiVTError
from livt_hf.predictions.decisions import load_prior
from livt_hf.predictions.predict import Predictor, as_table, find_images
from livt_hf.predictions.record import LOGITS, Predictions, PredictionsInfo
from livt_hf.predictions.rules import DecisionRule, rule_for_prior
from livt_hf.predictions.tables import SEPARATOR, TableWriter, check_output
from livt_hf.threads import configure_threads


def main(argv: Sequence[str] | None = None) -> None:
    settings = resolve_settings(PredictSettings, argv)
    is_table = check_output(settings.output, [".json"] if settings.images[0].endswith(".json") else [])
    images = list_images(settings)
    given = dict(device=settings.device, precision=settings.precision)
    predictor = Predictor(settings.model, **given, **settings.foreign.to_dict())
    configure_threads(predictor.device, settings.threads)
    info, rule = predictor.info, predictor.info.default_rule
    thresholds = info.thresholds() if info.multi_label else None
    if settings.prior is not None:
        rule = rule_for_prior(settings.prior, load_prior(settings.prior, info).tolist())
        thresholds = None if thresholds is None else torch.full_like(thresholds, 0.5)  # others hold for its own prior
    print(explain_scores(info, rule, thresholds), file=sys.stderr)
    shown = min(settings.top_k, len(predictor.labels))
    formats = {
        "table": partial(text_line, width=max(map(len, images["path"].to_pylist()))),
        "jsonl": json_line,
        "csv": partial(csv_line, top_k=shown),
    }
    print_header(settings.format, shown, info.multi_label, BOX in images.column_names)
    table = contextlib.nullcontext()
    if settings.output is None or is_table:
        parts = predictor.predict(images, settings.batch_size)
    else:
        parts = predictor.predict_to(settings.output, images, settings.batch_size)
    if is_table and settings.output.endswith(".json"):
        from livt_hf.predictions.answers import AnswersWriter

        table = AnswersWriter(settings.output, settings.images[0], rule, shown)
    elif is_table:
        table = TableWriter(settings.output, [rule], thresholds)
    unreadable = 0
    with table as writer, tqdm(total=len(images), unit="image", disable=None) as progress:
        for part in parts:
            for prediction in describe(part, rule, thresholds, shown):
                unreadable += prediction.error is not None
                print_prediction(prediction, formats[settings.format])
            if writer is not None:
                writer.write(part)
            progress.update(len(part))
    if settings.output is not None:
        print(f"Predictions: {settings.output}", file=sys.stderr)
    if unreadable:
        unit = "boxes" if BOX in images.column_names else "files"
        print(f"{unreadable} of {len(images)} {unit} could not be read", file=sys.stderr)
        sys.exit(1)


def list_images(settings: PredictSettings) -> pa.Table:
    """Return the files to classify, or the boxes of one file."""
    file = Path(settings.images[0])
    if len(settings.images) == 1 and file.is_file() and file.suffix.lower() not in image_suffixes():
        from livt_hf.data.readers.table import read_unlabelled_boxes  # few predictions need it

        spec = DataSpec(dataset=str(file), source=settings.source, **settings.boxes.to_dict())
        return read_unlabelled_boxes(file, spec)
    paths = find_images(settings.images)
    if not paths:
        raise LiVTError(f"there is no image in {' '.join(settings.images)}; name files, folders or quoted patterns.")
    return as_table(paths)


def explain_scores(info: PredictionsInfo, rule: DecisionRule, thresholds: Tensor | None) -> str:
    """Return the rule behind the scores, and what the scores are."""
    given = ""
    if thresholds is not None:
        low, high = thresholds.min().item(), thresholds.max().item()
        bounds = f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}, chosen for each class"
        given = f"; labels are given, which a star marks in lines of text, at scores of {bounds}"
    uncalibrated = "the model is not calibrated; `livt calibrate` does that"
    if rule.prior is not None:
        doubt = info.uncalibrated_because or (None if info.is_calibrated else uncalibrated)
        doubt = f"; beware: {doubt}" if doubt else ""
        return f"Decision rule: {rule.label}; scores are class probabilities{given}{doubt}"
    kind = "sigmoid" if info.multi_label else "softmax"
    reason = info.no_posterior or uncalibrated
    return (
        f"Decision rule: {rule.label}; scores are the {kind} of the logits, not class probabilities ({reason}){given}"
    )


class Prediction(NamedTuple):
    """Return the answer for a file: (label, score) pairs, the best first, or why it could not be read.

    `given` are the labels that it is given where it may have several, else None.
    """

    path: str
    box: list[float] | None
    best: list[tuple[str, float]]
    given: list[str] | None
    error: str | None


def describe(part: Predictions, rule: DecisionRule, thresholds: Tensor | None, top_k: int) -> Iterator[Prediction]:
    """Yield the predictions of a part of the files."""
    names, rows = part.class_names, part.table.drop_columns(LOGITS).to_pylist()
    for row, scores in zip(rows, part.scores(rule), strict=True):
        error = row["error"]
        top = scores.topk(top_k)
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        best = [] if error else [(names[label], round(score, 4)) for label, score in pairs]
        given = None
        if thresholds is not None:
            given = [names[label] for label in (scores >= thresholds).nonzero()[:, 0].tolist()]
        yield Prediction(row["path"], row.get(BOX), best, given, error)


def print_prediction(prediction: Prediction, line: Callable[[Prediction], str | None]) -> None:
    if prediction.error is not None:
        tqdm.write(f"cannot read {prediction.path}: {prediction.error}", file=sys.stderr)
    text = line(prediction)
    if text is not None:
        tqdm.write(text)


def text_line(prediction: Prediction, width: int) -> str | None:
    if prediction.error is not None:
        return None
    parts = (f"{label} {score:.3f}{'*' * (label in (prediction.given or ()))}" for label, score in prediction.best)
    box = "" if prediction.box is None else f"  {' '.join(f'{side:>7.5g}' for side in prediction.box)}"
    return f"{prediction.path:<{width}}{box}  {'  '.join(parts)}".replace("\n", "\\n")


def json_line(prediction: Prediction) -> str:
    values = {} if prediction.given is None else {"labels": prediction.given}
    values["predictions"] = [{"label": label, "score": score} for label, score in prediction.best]
    values = {"error": prediction.error} if prediction.error else values
    box = {} if prediction.box is None else {"box": prediction.box}
    return json.dumps({"file": prediction.path} | box | values, ensure_ascii=False)


def print_header(kind: str, top_k: int, several: bool, has_boxes: bool) -> None:
    if kind == "csv":
        columns = [f"{name}_{place}" for place in range(1, top_k + 1) for name in ("label", "score")]
        tqdm.write(_csv_row(["file", *CORNERS * has_boxes, "error", *["labels"] * several, *columns]))


def csv_line(prediction: Prediction, top_k: int) -> str:
    labels = [] if prediction.given is None else [SEPARATOR.join(prediction.given)]
    scores = [value for pair in prediction.best for value in pair] or [None] * (2 * top_k)
    return _csv_row([prediction.path, *(prediction.box or ()), prediction.error, *labels, *scores])


def _csv_row(values: list) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)  # which it quotes where a name has it
    return text.getvalue().removesuffix("\n")


if __name__ == "__main__":
    run_command(main)
