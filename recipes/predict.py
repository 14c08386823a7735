"""Classify image files with a run, a checkpoint or a model of the Hub.

    livt predict MODEL IMAGE...                       # files, folders (searched below), quoted patterns 'a/**/*.jpg'
    livt predict MODEL FOLDER --prior training        # where classes are as frequent as they were in training
    livt predict MODEL FOLDER --prior prior.json --format jsonl

Prints one line per file. A file that cannot be read gets a line on stderr that says why, and the exit code is then 1.
"""

import contextlib
import csv
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from livt_hf.commands import run_command
from livt_hf.errors import LiVTError
from livt_hf.evaluation.prediction import Predictor, find_images
from livt_hf.evaluation.rules import prior_words, serving_prior
from livt_hf.evaluation.tables import SEPARATOR, PredictionTable, check_table
from livt_hf.recipes.settings import PredictSettings
from livt_hf.runs import lent_plugin_of
from livt_hf.training.machine import use_all_cores


def main(argv: Sequence[str] | None = None) -> None:
    settings = PredictSettings.parse(argv, inherit=lent_plugin_of("model"))
    if settings.output is not None:
        check_table(settings.output)
    paths = find_images(settings.images)
    if not paths:
        raise LiVTError(f"there is no image in {' '.join(settings.images)}; name files, folders or quoted patterns.")
    predictor = Predictor(settings.model, device=settings.device)
    use_all_cores(predictor.device, settings.threads)
    if settings.prior is not None:
        predictor.serve_under(serving_prior(settings.prior, predictor.model), prior_words(settings.prior))
    print(predictor.explanation, file=sys.stderr)
    several, shown = predictor.thresholds is not None, min(settings.top_k, len(predictor.labels))
    line = FORMATS[settings.format](paths, shown, several)
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
            text = line(path, named, predictor.given(scores), error)
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


# A format is made for some paths, a number of classes, and whether images may have several labels. It turns a path,
# its (label, score) pairs, the labels that are given and what is wrong with the file into a line.
Line = Callable[[Path, list[tuple[str, float]], list[str], str | None], str | None]


def table(paths: list[Path], _top_k: int, several: bool) -> Line:
    width = max(len(str(path)) for path in paths)

    def line(path, named, given, error):
        stars = {label: "*" for label in given} if several else {}
        answers = "  ".join(f"{label} {score:.3f}{stars.get(label, '')}" for label, score in named)
        return f"{path!s:<{width}}  {answers}" if error is None else None

    return line


def jsonl(_paths: list[Path], _top_k: int, several: bool) -> Line:
    def line(path, named, given, error):
        answers = {"labels": given} if several else {}
        answers["predictions"] = [{"label": label, "score": score} for label, score in named]
        return json.dumps({"file": str(path)} | ({"error": error} if error else answers), ensure_ascii=False)

    return line


def comma_separated(_paths: list[Path], top_k: int, several: bool) -> Line:
    columns = [f"{name}_{place}" for place in range(1, top_k + 1) for name in ("label", "score")]
    tqdm.write(_csv_row(["file", "error", *["labels"] * several, *columns]))

    def line(path, named, given, error):
        labels = [SEPARATOR.join(given)] * several
        answers = [value for pair in named for value in pair] or [None] * len(columns)
        return _csv_row([path, error, *labels, *answers])

    return line


def _csv_row(values: list) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(values)
    return text.getvalue()


FORMATS = {"table": table, "jsonl": jsonl, "csv": comma_separated}


if __name__ == "__main__":
    run_command(main)
