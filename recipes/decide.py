"""Decide saved predictions anew: by another prior, or for another objective, without an image.

    livt decide RUN --prior training                       # the test images of a run
    livt decide report/predictions --objective macro_f1 --output decided.parquet
    livt decide RECORD --objective macro_f1 --choose_on VALIDATION_RECORD
    livt decide logits.npz --class_counts counts.json --prior prior.json --output decided.csv
    livt decide RECORD --prior prior.json --boxes coco.json --output answers.json    # back into the file of the boxes

Reads the record part by part. Where it has labels, accuracy, mean class accuracy and macro F1 are printed.
"""

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from livt_hf.cli.console import run_command
from livt_hf.cli.inherit import resolve_settings
from livt_hf.cli.settings import DecideSettings
from livt_hf.errors import LiVTError
from livt_hf.predictions.decisions import read_rule, rule_for_objective
from livt_hf.predictions.evaluate import Evaluator
from livt_hf.predictions.logit_files import is_logit_file, read_logit_file
from livt_hf.predictions.record import FOLDER, Predictions, PredictionsInfo, Source, read_parts, write_part
from livt_hf.predictions.rules import DecisionRule
from livt_hf.predictions.tables import AnswersWriter, TableWriter, check_output
from livt_hf.text import format_percent


def main(argv: Sequence[str] | None = None) -> None:
    settings = resolve_settings(DecideSettings, argv)
    is_table = check_output(settings.output, [".json"])
    source = open_predictions(settings.predictions, settings)
    first = next(read_parts(source))
    info, is_labelled = first.info, first.labels is not None
    rule = choose_rule(info, settings)
    if settings.output is None and not is_labelled:
        raise LiVTError(f"{settings.predictions} has no labels to measure by; name a file with output.", "output")
    if is_table:
        with open_table(settings, rule) as table:
            for part in read_parts(source):
                table.write(part)
    elif settings.output is not None:
        write_record(settings.output, source, rule)
    if is_labelled:
        splits = first.column("split")
        which = "All images" if splits is None or not len(splits) else f"Split {splits[0]}"
        print(f"{which}, {measure(source, info, rule)} (decision rule: {rule.label})")
    else:
        print(f"Decision rule: {rule.label}")
    if settings.output is not None:
        print(f"Predictions: {settings.output}")


def open_predictions(path: str, settings: DecideSettings) -> Source:
    """Return the record of a file of logits, or the folder of a record, which may lie in a run or a report."""
    given = settings.foreign
    if is_logit_file(path):
        return read_logit_file(path, given.class_counts, given.trained_with or "ce", settings.values)
    if given.class_counts is not None or settings.values is not None:
        name = "class_counts" if given.class_counts is not None else "values"
        raise LiVTError(f"{name} is for a file of logits, and a record knows its own; leave it out.", name)
    folders = (Path(path), Path(path, FOLDER))
    return next((folder for folder in folders if any(folder.glob("part-*.parquet"))), Path(path))


def open_table(settings: DecideSettings, rule: DecisionRule) -> AbstractContextManager:
    """Return what writes the table, or the answers into a copy of the file of the boxes."""
    if settings.boxes is None:
        return TableWriter(settings.output, [rule])
    return AnswersWriter(settings.output, settings.boxes, rule)


def choose_rule(info: PredictionsInfo, settings: DecideSettings) -> DecisionRule:
    """Return the rule of the options, by default that of the record."""
    if settings.prior is not None:
        return read_rule(settings.prior, info)
    if settings.objective is None:
        return info.default_rule
    if settings.choose_on is None:
        return rule_for_objective(info, settings.objective)
    source, other = (open_predictions(path, settings) for path in (settings.choose_on, settings.predictions))
    if isinstance(source, Path) and isinstance(other, Path) and source.resolve() == other.resolve():
        message = f"choose_on {settings.choose_on} is what is decided on; choose on other images."
        raise LiVTError(message, argument="choose_on")
    return rule_for_objective(info, settings.objective, source)


def write_record(folder: str, source: Source, rule: DecisionRule) -> None:
    """Write a record whose default rule is the given one."""
    total, start = sum(map(len, read_parts(source))), 0
    for part in read_parts(source):
        decided = Predictions(part.table, dataclasses.replace(part.info, default_rule=rule))
        write_part(folder, decided, start, total)
        start += len(part)


def measure(source: Source, info: PredictionsInfo, rule: DecisionRule) -> str:
    """Return accuracies of a labelled record as text, counted as `livt eval` does."""
    counts = None if info.long_tail is None else info.long_tail.class_counts
    metrics = Evaluator(source, counts or [1] * info.num_classes).measure([rule])[rule.name].compute()
    shown = {"accuracy": "accuracy", "mean class accuracy": "mean_class_accuracy", "macro F1": "macro_f1"}
    shown["mean average precision"] = "map"
    numbers = (f"{name} {format_percent(metrics[key])} %" for name, key in shown.items() if key in metrics)
    missing = f"; {metrics['num_nan']:,} without numbers as logits count as wrong" if metrics["num_nan"] else ""
    return f"{metrics['num_images']:,} images: {', '.join(numbers)}{missing}"


if __name__ == "__main__":
    run_command(main)
