"""Classify image files with a run, a checkpoint or a model of the Hub.

    livt predict MODEL IMAGE...                       # files, folders (searched below), quoted patterns 'a/**/*.jpg'
    livt predict MODEL FOLDER --prior training        # where classes are as frequent as they were in training
    livt predict MODEL FOLDER --prior prior.json --format jsonl
    livt predict MODEL FOLDER --prior prior.json --class_counts counts.json    # a model trained elsewhere

Prints one line per file. A file that cannot be read gets a line on stderr that says why, and the exit code is then 1.
"""

import contextlib
import csv
import io
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from livt_hf.commands import run_command
from livt_hf.errors import LiVTError
from livt_hf.evaluation.prediction import Predictor, find_images
from livt_hf.evaluation.rules import prior_words, serving_prior
from livt_hf.evaluation.tables import SEPARATOR, PredictionTable, check_table
from livt_hf.recipes.settings import PredictSettings
from livt_hf.runs import lent_plugin_of
from livt_hf.training.device import configure_threads


def main(argv: Sequence[str] | None = None) -> None:
    settings = PredictSettings.parse(argv, inherit=lent_plugin_of("model"))
    if settings.output is not None:
        check_table(settings.output)
    paths = find_images(settings.images)
    if not paths:
        raise LiVTError(f"there is no image in {' '.join(settings.images)}; name files, folders or quoted patterns.")
    predictor = Predictor(settings.model, device=settings.device, **settings.training)
    configure_threads(predictor.device, settings.threads)
    if settings.prior is not None:
        predictor.serve_under(serving_prior(settings.prior, predictor.model), prior_words(settings.prior))
    print(predictor.explanation, file=sys.stderr)
    several, shown = predictor.thresholds is not None, min(settings.top_k, len(predictor.labels))
    width = max(len(str(path)) for path in paths)
    line = {"table": partial(text_line, width=width), "jsonl": json_line, "csv": partial(csv_line, top_k=shown)}
    if settings.format == "csv":
        tqdm.write(csv_header(shown, several))
    broken = 0
    output = contextlib.nullcontext()
    if settings.output is not None:
        output = PredictionTable(settings.output, predictor.labels, predictor.thresholds)
    with output as table:
        answers = predictor.predict(paths, settings.batch_size)
        for path, scores in tqdm(answers, total=len(paths), unit="image", disable=None):
            error = scores if isinstance(scores, str) else None
            if error is not None:
                broken += 1
                tqdm.write(f"cannot read {path}: {error}", file=sys.stderr)
                scores = torch.full((len(predictor.labels),), torch.nan)
            named = [] if error else best(scores, predictor.labels, shown)
            given = predictor.given(scores) if several else None
            text = line[settings.format](Answer(path, named, given, error))
            if text is not None:
                tqdm.write(text)
            if table is not None:
                table.write({"file": [str(path)], "error": [error]}, {predictor.rule_name: scores[None]})
    if settings.output is not None:
        print(f"Predictions: {settings.output}", file=sys.stderr)
    if broken:
        print(f"{broken} of {len(paths)} files could not be read", file=sys.stderr)
        sys.exit(1)


def best(scores: torch.Tensor, labels: list[str], top_k: int) -> list[tuple[str, float]]:
    top = scores.topk(top_k)
    return [(labels[i], round(score, 4)) for i, score in zip(top.indices.tolist(), top.values.tolist(), strict=True)]


class Answer(NamedTuple):
    """What is said of a file: (label, score) pairs, the best first, or what is wrong with it.

    `given` are the labels that it is given where it may have several, else None.
    """

    path: Path
    named: list[tuple[str, float]]
    given: list[str] | None
    error: str | None


def text_line(answer: Answer, width: int) -> str | None:
    if answer.error is not None:
        return None
    words = (f"{label} {score:.3f}{'*' * (label in (answer.given or ()))}" for label, score in answer.named)
    return f"{answer.path!s:<{width}}  {'  '.join(words)}"


def json_line(answer: Answer) -> str:
    said = {} if answer.given is None else {"labels": answer.given}
    said["predictions"] = [{"label": label, "score": score} for label, score in answer.named]
    said = {"error": answer.error} if answer.error else said
    return json.dumps({"file": str(answer.path)} | said, ensure_ascii=False)


def csv_header(top_k: int, several: bool) -> str:
    columns = [f"{name}_{place}" for place in range(1, top_k + 1) for name in ("label", "score")]
    return _csv_row(["file", "error", *["labels"] * several, *columns])


def csv_line(answer: Answer, top_k: int) -> str:
    labels = [] if answer.given is None else [SEPARATOR.join(answer.given)]
    answers = [value for pair in answer.named for value in pair] or [None] * (2 * top_k)
    return _csv_row([answer.path, answer.error, *labels, *answers])


def _csv_row(values: list) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(values)
    return text.getvalue()


if __name__ == "__main__":
    run_command(main)
