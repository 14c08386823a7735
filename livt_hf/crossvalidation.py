"""Cross-validation of fine-tuning: a run of its own for each fold, and what all folds say together.

Every image is predicted once, by a model that saw neither it nor its group. A fold leaves its predictions beside its
model, so the numbers of all images together need no second look at the images.
"""

import dataclasses
import logging
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from accelerate import Accelerator
from datasets import Dataset, DatasetDict, concatenate_datasets
from torch import nn

from livt_hf.data import class_counts
from livt_hf.data.labels import class_feature, group_codes, is_multi_label, labels_of
from livt_hf.data.readers.table import reading_table
from livt_hf.evaluation.exam import Exam, Findings, examine
from livt_hf.evaluation.rules import standard_rules
from livt_hf.evaluation.running import Outputs, Rule, run_model
from livt_hf.evaluation.tables import ANSWERS, write_predictions
from livt_hf.metrics import MultiLabelMetrics
from livt_hf.reports import markdown_table
from livt_hf.reports.evaluation import fold_rows, write_report
from livt_hf.results import EACH_LABEL, OWN, PAPER, UNIFORM, provenance
from livt_hf.runs import Run, place_of
from livt_hf.settings import EvalSettings, FinetuneSettings
from livt_hf.training.results import summarize_class_counts

logger = logging.getLogger(__name__)

# How the columns begin that hold the scores of all classes under a rule, and the labels that are given.
_SCORES, _LABELS = "scores (", "labels ("


def fold_settings(settings: FinetuneSettings, number: int) -> FinetuneSettings:
    """Those of one fold, from those of the whole cross-validation."""
    own = {"folds": None, "fold": f"{number}/{settings.folds}", "push_to_hub": False}
    return dataclasses.replace(settings, **own, output_dir=None, resume=None)


def say_what_was_seen(settings: FinetuneSettings) -> None:
    """Warn of a pretraining on the images that are tested."""
    start = Run(Path(settings.pretrained))
    if start.finished and place_of(start.arguments["dataset"]) == place_of(settings.dataset):
        logger.warning(
            "the pretraining has seen test images of all folds, though not their labels; to rule that out, pretrain "
            "and fine-tune fold by fold with --fold 1/%d and so on",
            settings.folds,
        )


def write_fold(run: Run, model: nn.Module, batches, data: DatasetDict, accelerator: Accelerator) -> None:
    """What a fold's model says of the images that it has not seen."""
    outputs = run_model(model, batches, accelerator).gathered(accelerator)
    if accelerator.is_main_process:
        path = run.folder / ANSWERS
        path.unlink(missing_ok=True)  # of a run that was killed before it had results
        write_predictions(path, model, outputs, standard_rules(model), data["test"], "test")


def examine_folds(run: Run, parts: Sequence[DatasetDict], accelerator: Accelerator) -> tuple[Findings, Dataset]:
    """The numbers of each fold and of all test images together, and these images. `parts` are the data of all folds.

    Groups of classes are those of the mean number of training images.
    """
    tables = [_answers_of(run, number) for number in range(1, len(parts) + 1)]
    # A fold that could spare no image to calibrate has its rules in another order, and perhaps fewer of them.
    shared = [name for name in tables[0].column_names if all(name in table.column_names for table in tables)]
    answers = pa.concat_tables(table.select(shared) for table in tables)
    if accelerator.is_main_process:
        pq.write_table(answers, run.folder / ANSWERS)
    tested = concatenate_datasets([part["test"] for part in parts])
    counts = np.mean([class_counts(part["train"]) for part in parts], axis=0).round().astype(np.int64)
    rules, scores = _pooled_scores(answers, len(counts))
    summary = {"model": str(run.folder), "split": f"{len(parts)} folds"} | provenance()
    if is_multi_label(tested):
        return _examine_several(answers, scores, tested, counts, summary), tested
    mine = torch.arange(len(tested)).tensor_split(accelerator.num_processes)[accelerator.process_index]
    outputs = Outputs(scores[mine], torch.from_numpy(labels_of(tested).values)[mine], mine, accelerator.device)
    clusters = group_codes(tested) if "group" in tested.column_names else None
    exam = Exam(None, outputs, counts, accelerator, clusters=clusters)
    found = examine(exam, rules, class_feature(tested).names, summary)
    name = next(iter(rules))
    of_folds = [exam.metrics({name: rules[name]}, rows[mine].nonzero()[:, 0]) for rows in _rows_of_folds(answers)]
    summary["folds"] = _spread([metrics[name].compute() for metrics in of_folds])
    return found, tested


def _answers_of(run: Run, number: int) -> pa.Table:
    """What one fold predicted, with its number."""
    path = run.fold(number).folder / ANSWERS
    with reading_table(path):
        table = pq.read_table(path)
    return table.append_column("fold", pa.array([number] * len(table)))


def _rows_of_folds(answers: pa.Table) -> list[torch.Tensor]:
    """For each fold, which rows are its own. (N,)"""
    fold = torch.tensor(answers["fold"].to_numpy())
    return [fold == number for number in range(1, int(fold.max()) + 1)]


def _examine_several(
    answers: pa.Table, scores: torch.Tensor, tested: Dataset, counts: np.ndarray, summary: dict
) -> Findings:
    """The same where images may have several labels, of which each fold's model gives some by its own thresholds."""
    names = class_feature(tested).names
    (column,) = [name for name in answers.column_names if name.startswith(_LABELS)]
    texts = answers[column].to_pylist()
    given, place = torch.zeros(len(texts), len(names), dtype=torch.bool), {name: i for i, name in enumerate(names)}
    for row, labels in enumerate(texts):
        given[row, [place[name] for name in labels or ()]] = True  # none for an image without scores
    targets = torch.from_numpy(labels_of(tested).targets(range(len(tested)), len(names)))

    def measured(rows: slice | torch.Tensor) -> MultiLabelMetrics:
        metrics = MultiLabelMetrics(counts)
        metrics.update(scores[rows], targets[rows], given[rows])
        return metrics

    pooled, folds = measured(slice(None)), _spread([measured(rows).compute() for rows in _rows_of_folds(answers)])
    summary |= {"rules": {EACH_LABEL: pooled.compute()}, "folds": folds}
    return Findings(summary, {}, None, pooled.per_class(names))


def _pooled_scores(answers: pa.Table, classes: int) -> tuple[dict[str, Rule], torch.Tensor]:
    """The scores under all rules side by side, (N, rules x C), and for each rule what picks its own."""
    columns = [name for name in answers.column_names if name.startswith(_SCORES)]
    scores = [answers[name].combine_chunks().flatten().to_numpy(zero_copy_only=False) for name in columns]

    def pick(place: int) -> Rule:
        return lambda rows: rows[:, place * classes : (place + 1) * classes]

    rules = {name.removeprefix(_SCORES)[:-1]: pick(place) for place, name in enumerate(columns)}
    return rules, torch.from_numpy(np.concatenate([part.reshape(-1, classes) for part in scores], axis=1))


def _spread(each: list[dict]) -> dict:
    """Mean and standard deviation over folds; a number that some folds lack is that of the others."""
    values = {name: [row[name] for row in each if row[name] is not None] for name in each[0]}
    mean = {name: statistics.mean(some) if some else None for name, some in values.items()}
    deviation = {name: statistics.stdev(some) if len(some) > 1 else None for name, some in values.items()}
    return {"each": each, "mean": mean, "deviation": deviation}


def write_whole(run: Run, settings: FinetuneSettings, found: Findings, tested: Dataset) -> Path:
    """The report of all folds, and last of all the results that mark the run as finished. Returns the report."""
    summary, report = found.summary, run.folder / "report"
    summary["dataset"] = settings.dataset
    shutil.rmtree(report, ignore_errors=True)  # of a run that was killed before it had results
    named = EvalSettings(model=str(run.folder), dataset=settings.dataset, split=summary["split"])
    page = write_report(report, named, found, tested)
    folds = [run.fold(number).results for number in range(1, settings.folds + 1)]
    counts = np.array([row["count"] for row in found.per_class])
    rules = summary["rules"]
    whole = dict(
        metrics=rules.get(PAPER, next(iter(rules.values()))),
        posterior=rules.get(UNIFORM),
        own_prior=rules.get(OWN),
        folds=summary["folds"],
        split=summary["split"],
        num_images=len(tested),
        trained_on=None,  # by all folds together on all images
        num_train_images=round(statistics.mean(fold.num_train_images for fold in folds)),
        class_counts=summarize_class_counts(counts),
        updates=sum(fold.updates for fold in folds),
        seconds=sum(fold.seconds for fold in folds),
    )
    run.write_results(dataclasses.replace(folds[0], **whole))
    return page


def format_folds(run: Run, settings: FinetuneSettings, findings: Findings, report: Path) -> str:
    """Return the table of all folds and where their report and predictions are."""
    batch_size = run.fold(1).settings_of(FinetuneSettings)["batch_size"]
    batch = "" if batch_size == settings.batch_size else f", with --batch_size {batch_size} as here"
    return (
        f"\nCross-validated {settings.model_size} with {settings.loss} on {settings.dataset}, in percent, by the "
        f"rule “{next(iter(findings.summary['rules']))}”; many, medium and few by the training images of a fold:\n"
        f"{markdown_table(fold_rows(findings.summary))}"
        f"Report: {report}\nPredictions: {run.folder / ANSWERS}\n"
        f"Next, train the model to use: the same command without --folds{batch}."
    )
