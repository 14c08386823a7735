"""Classify image files with a run, a checkpoint or a model of the Hub.

    livt predict MODEL IMAGE...                       # files, folders (searched below), quoted patterns 'a/**/*.jpg'
    livt predict MODEL FOLDER --prior training        # where classes are as frequent as they were in training
    livt predict MODEL FOLDER --prior prior.json --format jsonl
    livt predict MODEL FOLDER --prior prior.json --class_counts counts.json    # a model trained elsewhere
    livt predict MODEL detections.json --output classified.json    # the boxes of a file of COCO or MegaDetector
    livt predict MODEL FOLDER --output predictions    # a prediction record, to decide again without the images

Prints one line per file or, with `--output` and no `--format`, the number of files of each class. A file that cannot
be read gets a line on stderr that says why, and the exit code is then 1.
"""

import contextlib
import csv
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pyarrow as pa
from torch import Tensor
from tqdm import tqdm

from livt_hf.cli.console import run_command
from livt_hf.cli.inherit import resolve_settings
from livt_hf.cli.settings import PredictSettings
from livt_hf.data.decoding import image_suffixes
from livt_hf.data.labels import BOX, CORNERS
from livt_hf.data.spec import DataSpec
from livt_hf.errors import LiVTError
from livt_hf.predictions.decisions import read_rule
from livt_hf.predictions.predict import Predictor, as_table, find_images
from livt_hf.predictions.record import LOGITS, Predictions, PredictionsInfo
from livt_hf.predictions.rules import DecisionRule
from livt_hf.predictions.tables import SEPARATOR, AnswersWriter, TableWriter, check_output
from livt_hf.threads import configure_threads

LISTED = 10  # classes whose files are counted


def main(argv: Sequence[str] | None = None) -> None:
    settings = resolve_settings(PredictSettings, argv)
    is_table = check_output(settings.output, [".json"] if settings.images[0].endswith(".json") else [])
    images = list_images(settings)
    given = dict(device=settings.device, precision=settings.precision)
    predictor = Predictor(settings.model, **given, **settings.foreign.to_dict())
    configure_threads(predictor.device, settings.threads)
    info, rule = predictor.info, predictor.info.default_rule
    if settings.prior is not None:
        rule = read_rule(settings.prior, info)
    thresholds = info.thresholds(rule) if info.multi_label else None
    print(explain_scores(info, rule, thresholds), file=sys.stderr)
    shown = min(settings.top_k, len(predictor.labels))
    kind = settings.format or ("table" if settings.output is None else None)
    print_answer = make_printer(kind, images, shown, info.multi_label)
    table = contextlib.nullcontext()
    if settings.output is None or is_table:
        parts = predictor.predict(images, settings.batch_size)
    else:
        parts = predictor.predict_to(settings.output, images, settings.batch_size)
    if is_table and settings.output.endswith(".json"):
        table = AnswersWriter(settings.output, settings.images[0], rule, shown)
    elif is_table:
        table = TableWriter(settings.output, [rule])
    unreadable, counts = 0, Counter()
    with table as writer, tqdm(total=len(images), unit="image", disable=None) as progress:
        for part in parts:
            for answer in describe(part, rule, thresholds, shown):
                if answer.error is None:
                    counts.update([answer.best[0][0]] if answer.labels is None else answer.labels)
                else:
                    unreadable += 1
                    tqdm.write(f"cannot read {answer.path}: {answer.error}", file=sys.stderr)
                print_answer(answer)
            if writer is not None:
                writer.write(part)
            progress.update(len(part))
    unit = "boxes" if BOX in images.column_names else "files"
    if kind is None:
        print(f"{len(images) - unreadable:,} {unit}: {format_counts(counts)}")
    if settings.output is not None:
        print(f"Predictions: {settings.output}", file=sys.stderr)
    if unreadable:
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


class Answer(NamedTuple):
    """The answer to a file: (label, score) pairs, the best first, or why it could not be read.

    `labels` are those that it is given where it may have several, else None.
    """

    path: str
    box: list[float] | None
    best: list[tuple[str, float]]
    labels: list[str] | None
    error: str | None


def describe(part: Predictions, rule: DecisionRule, thresholds: Tensor | None, top_k: int) -> Iterator[Answer]:
    """Yield the answers to a part of the files."""
    names, rows = part.class_names, part.table.drop_columns(LOGITS).to_pylist()
    for row, scores in zip(rows, part.scores(rule), strict=True):
        top = scores.topk(top_k)
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        best = [] if row["error"] else [(names[label], round(score, 4)) for label, score in pairs]
        labels = None
        if thresholds is not None:
            labels = [names[label] for label in (scores >= thresholds).nonzero()[:, 0].tolist()]
        yield Answer(row["path"], row.get(BOX), best, labels, row["error"])


def make_printer(kind: str | None, images: pa.Table, top_k: int, several: bool) -> Callable[[Answer], None]:
    """Return what prints the line of an answer, if any; the header of a CSV is printed now."""
    if kind == "csv":
        table = csv.writer(SimpleNamespace(write=partial(tqdm.write, end="")), lineterminator="\n")
        columns = [f"{name}_{place}" for place in range(1, top_k + 1) for name in ("label", "score")]
        table.writerow(["file", *CORNERS * (BOX in images.column_names), "error", *["labels"] * several, *columns])
        return lambda answer: table.writerow(csv_row(answer, top_k))
    if kind == "jsonl":
        return lambda answer: tqdm.write(json_line(answer))
    width = max(map(len, images["path"].to_pylist()))
    return lambda answer: tqdm.write(text_line(answer, width)) if kind and answer.best else None


def text_line(answer: Answer, width: int) -> str:
    parts = (f"{label} {score:.3f}{'*' * (label in (answer.labels or ()))}" for label, score in answer.best)
    box = "" if answer.box is None else f"  {' '.join(f'{side:>7.5g}' for side in answer.box)}"
    return f"{answer.path:<{width}}{box}  {'  '.join(parts)}".replace("\n", "\\n")


def json_line(answer: Answer) -> str:
    values = {} if answer.labels is None else {"labels": answer.labels}
    values["predictions"] = [{"label": label, "score": score} for label, score in answer.best]
    values = {"error": answer.error} if answer.error else values
    box = {} if answer.box is None else {"box": answer.box}
    return json.dumps({"file": answer.path} | box | values, ensure_ascii=False)


def csv_row(answer: Answer, top_k: int) -> list:
    labels = [] if answer.labels is None else [SEPARATOR.join(answer.labels)]
    scores = [value for pair in answer.best for value in pair] or [None] * (2 * top_k)
    return [answer.path, *(answer.box or ()), answer.error, *labels, *scores]


def format_counts(counts: Counter) -> str:
    """Return how many files each class got, the most frequent classes first."""
    listed = ", ".join(f"{label} {count:,}" for label, count in counts.most_common(LISTED))
    return listed + (f" and {len(counts) - LISTED:,} more classes" if len(counts) > LISTED else "")


if __name__ == "__main__":
    run_command(main)
