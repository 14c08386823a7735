"""Measure a checkpoint and write a report.

    livt eval                            # the newest finished fine-tuning under runs/
    livt eval org/name --dataset inat18 --source FOLDER
    livt eval RUN --prior prior.json     # the class frequencies it will meet
    livt eval RUN --adapt_prior          # the same, estimated from the images alone
    livt eval RUN --test_imbalance       # test sets whose classes are frequent and rare, in both directions
    livt eval RUN --predictions p.csv    # what each rule says of each image
    livt eval RUN --dataset FOLDER --split all    # every image of another place, which needs no split
    livt eval org/any-classifier --dataset FOLDER --class_counts counts.json    # one trained elsewhere
    livt eval logits.csv --class_counts counts.json    # logits or probabilities of any framework
    livt eval PRETRAINING_RUN            # kNN and a linear probe on frozen features
    livt eval org/any-backbone --dataset FOLDER --probe    # the same for any model, before anyone trains it
    livt eval --compare RUN_A RUN_B      # the newest reports of two runs side by side

`accelerate launch recipes/eval.py` takes the same options in a checkout.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset, DatasetDict
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from livt_hf.classifiers import (
    check_classes_match,
    is_pretraining,
    known_counts,
    load_classifier,
    load_model,
    load_processor,
    training_counts,
)
from livt_hf.cli.console import run_command
from livt_hf.cli.inherit import resolve_settings
from livt_hf.cli.options import format_words
from livt_hf.cli.settings import EvalSettings
from livt_hf.data import class_counts, eval_loader, load_evaluation_data
from livt_hf.data.batches import build_eval_batches
from livt_hf.data.labels import digest_of, is_multi_label, labels_of
from livt_hf.data.loading import read_first_pixels
from livt_hf.errors import LiVTError
from livt_hf.files import check_writable, replacing, write_values
from livt_hf.long_tail.priors import numbers_by_name
from livt_hf.precision import TRIAL_IMAGES, agree_on_precision, resolve_precision, similarity_posterior
from livt_hf.predictions.decisions import read_rule
from livt_hf.predictions.evaluate import EvaluationReport, Evaluator, accuracy_under_prior
from livt_hf.predictions.logit_files import is_logit_file, read_logit_file
from livt_hf.predictions.metrics import long_tail_metrics, shot_groups
from livt_hf.predictions.predict import describe_images, predict
from livt_hf.predictions.probes import extract, extract_frozen_features, knn_scores, linear_probe_scores
from livt_hf.predictions.record import FOLDER, PredictionsInfo, Source, iterate_blocks, open_source
from livt_hf.predictions.rules import ESTIMATED, LABELS, DecisionRule, prior_label
from livt_hf.predictions.shifts import ShiftedSet, build_shifted_sets, estimate_record_prior, measure_shift
from livt_hf.predictions.tables import TableWriter, check_table_path
from livt_hf.pretrained import load_backbone
from livt_hf.reports import markdown_table
from livt_hf.reports.comparison import compare
from livt_hf.reports.curves import shift_rows
from livt_hf.reports.files import PAGE
from livt_hf.reports.report import write_report
from livt_hf.results import provenance
from livt_hf.run_data import check_split_unseen, was_trained_on
from livt_hf.runs import Run, runs_folder
from livt_hf.text import format_accuracy, format_percent, shell_line
from livt_hf.threads import configure_threads
from livt_hf.training.device import LONG_TIMEOUT, check_processes


def main(argv: Sequence[str] | None = None) -> None:
    settings = resolve_settings(EvalSettings, argv)
    accelerator = Accelerator(kwargs_handlers=LONG_TIMEOUT)
    accelerator.wait_for_everyone()  # an error of the first process must not end it while others still connect
    folder = choose_folder(settings.report, settings.model, settings.compare is not None)
    if settings.compare is not None:
        if accelerator.is_main_process:
            sentence, page = compare(*settings.compare, folder)
            print(f"{sentence}\nComparison: {page}")
        return
    check_processes(accelerator.num_processes)
    configure_threads(accelerator.device, settings.threads)
    shot_groups([1], **thresholds_of(settings))
    if is_logit_file(settings.model):
        evaluate_file(settings, accelerator, folder)
    elif settings.probe or is_pretraining(settings.model):
        probe(settings, accelerator, folder)
    else:
        evaluate_model(settings, accelerator, folder)


def evaluate_model(settings: EvalSettings, accelerator: Accelerator, folder: Path) -> None:
    """Run a classifier over the images of a split and measure its logits."""
    model = load_classifier(settings.model, **settings.foreign.to_dict()).to(accelerator.device)
    info = PredictionsInfo.from_model(model, settings.model)
    check_options(info, settings, known_counts(model) is not None)
    info = use_prior(info, settings)
    data = load_splits(settings, accelerator)
    images = data[settings.split]
    check_classes_match(model, data["train"])
    check_split_unseen(settings.model, settings.data, settings.split, data)
    counts = training_counts(model, data["train"])
    shifted = choose_shifts(settings, labels_of(images).values, counts)
    loader = make_loader(settings, images, accelerator)
    posterior = partial(info.scores, rule=info.default_rule)
    info = replace(info, precision=choose_precision(settings, model, images, accelerator, posterior))
    with new_folder(folder, accelerator) as writing:
        predict(model, loader, accelerator, writing / FOLDER, info, describe_images(images, settings.split))
        if not accelerator.is_main_process:
            return
        facts, predictions = describe(settings, info.precision), open_source(writing / FOLDER)
        report = write_evaluation(settings, facts, predictions, info, counts, shifted, writing, images)
    print_evaluation(settings, report, info, folder)


def evaluate_file(settings: EvalSettings, accelerator: Accelerator, folder: Path) -> None:
    """Measure the logits of any framework, as those of a model are measured."""
    if settings.probe or settings.data.dataset is not None:
        name = "probe" if settings.probe else "dataset"
        raise LiVTError(f"{name} needs a model, and {settings.model} holds its logits alone; leave it out.", name)
    given = settings.foreign
    if given.class_counts is None:
        raise LiVTError(
            f"{settings.model} does not say how many training images each class had, by which classes are many-, "
            "medium- and few-shot; pass class_counts.",
            "class_counts",
        )
    predictions = read_logit_file(settings.model, given.class_counts, given.trained_with or "ce")
    check_options(predictions.info, settings, counts_known=True)
    info = use_prior(predictions.info, settings)
    counts = np.asarray(info.long_tail.class_counts)
    shifted = choose_shifts(settings, predictions.labels, counts)
    if not accelerator.is_main_process:
        return
    predictions, split = replace(predictions, info=info), predictions.column("split")
    facts = describe(settings, info.precision) | {"dataset": settings.model}
    facts |= {} if split is None else {"split": str(split[0])}
    with new_folder(folder, accelerator) as writing:
        predictions.save(writing / FOLDER)
        report = write_evaluation(settings, facts, predictions, info, counts, shifted, writing)
    print_evaluation(settings, report, info, folder)
    print("Pictures of images and measures of features need the model itself: livt eval MODEL.")


def use_prior(info: PredictionsInfo, settings: EvalSettings) -> PredictionsInfo:
    """Return the facts of a record with the rule of the requested prior, if any, as the default rule."""
    return info if settings.prior is None else replace(info, default_rule=read_rule(settings.prior, info))


def choose_shifts(settings: EvalSettings, labels: np.ndarray, counts: np.ndarray) -> list[ShiftedSet]:
    """Return the requested shifted test sets."""
    if settings.test_imbalance is None:
        return []
    return build_shifted_sets(settings.test_imbalance, labels, counts, settings.seed)


def write_evaluation(
    settings: EvalSettings,
    facts: dict,
    predictions: Source,
    info: PredictionsInfo,
    counts: np.ndarray,
    shifted: list[ShiftedSet],
    folder: Path,
    dataset: Dataset | None = None,
) -> EvaluationReport:
    """Write the report on a record, with pictures of its images where there is a dataset."""
    rules, estimated = choose_rules(predictions, info, settings)
    evaluator = Evaluator(predictions, counts, **thresholds_of(settings))
    seen = {} if dataset is None else seen_in_calibration(info, dataset)
    report = evaluator.evaluate(rules, **facts, **estimated, **seen)
    if settings.prior is not None:
        prior = torch.tensor(info.default_rule.prior, dtype=torch.float64)
        accuracy = accuracy_under_prior(report.metrics, prior)
        report.summary["under_prior"] = {"prior": prior_label(settings.prior), "accuracy": accuracy}
    if shifted:
        report.summary["shifted"] = [measure_shift(evaluator, one) for one in shifted]
    write_report(folder, report, dataset)
    if settings.predictions is not None:
        with TableWriter(settings.predictions, rules) as table:
            for block in iterate_blocks(predictions):
                table.write(block)
    if ESTIMATED in report.summary["rules"]:
        values = estimated["estimated_prior"]["prior"]
        write_values(folder / "prior.json", numbers_by_name(values, info.class_names))
    return report


def print_evaluation(settings: EvalSettings, report: EvaluationReport, info: PredictionsInfo, folder: Path) -> None:
    """Print the numbers of an evaluation and where its files are."""
    print(f"{format_summary(report, info)}\nReport: {folder / PAGE}")
    if settings.predictions is not None:
        print(f"Predictions: {settings.predictions}")
    if ESTIMATED in report.summary["rules"]:
        command = shell_line(["livt", "predict", settings.model, "IMAGE...", "--prior", folder / "prior.json"])
        print(f"Estimated prior: {folder / 'prior.json'}; to serve under it:\n  {command}")


def choose_folder(report: str | None, model: str, is_comparison: bool) -> Path:
    """Return where a report goes: `report`, which must not exist, or report, report-2, ... in the folder of a run.

    The report on any other model, which may be a download, goes where runs go.
    """
    if report is not None:
        if Path(report).exists():
            raise LiVTError(f"the report folder {report} exists; pass another --report.", "report")
        check_writable(report, "report")
        return Path(report)
    if is_comparison:
        folder = runs_folder() / "comparison"
    else:
        is_run = Run(Path(model)).started
        folder = Path(model, "report") if is_run else runs_folder() / f"report-{Path(model).name}"
    numbered = (folder.with_name(f"{folder.name}-{n}") for n in itertools.count(2))
    return next(path for path in itertools.chain([folder], numbered) if not path.exists())


def seen_in_calibration(info: PredictionsInfo, images: Dataset) -> dict[str, bool]:
    """Return what evaluation.json says where a model was calibrated on the images it is measured on."""
    calibration = (info.long_tail or {}).get("calibration") or {}
    fingerprint = calibration.get("fingerprint")
    return {"calibrated_on_these_images": True} if fingerprint and fingerprint == digest_of(images) else {}


def thresholds_of(settings: EvalSettings) -> dict[str, int]:
    """Return the training images of many- and few-shot classes."""
    return {"many_above": settings.many_above, "few_below": settings.few_below}


def describe(settings: EvalSettings, precision: str | None) -> dict:
    """Return what evaluation.json says of the evaluation itself."""
    options = {name: value for name, value in settings.non_defaults().items() if name != "model"}
    return {
        "model": settings.model,
        "dataset": settings.data.dataset,
        "split": settings.split,
        "precision": precision,
        "command": shell_line(["livt", "eval", settings.model, *format_words(options)]),
        "thresholds": thresholds_of(settings),
    } | provenance()


@contextlib.contextmanager
def new_folder(folder: Path, accelerator: Accelerator) -> Iterator[Path]:
    """Give all processes a folder to write to, which takes its name when the main process has finished."""
    if not accelerator.is_main_process:
        yield folder.with_name(f".writing-{folder.name}")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing(folder) as writing:
        yield writing


def load_splits(settings: EvalSettings, accelerator: Accelerator) -> DatasetDict:
    """Load the data, and check that they have the split to measure on."""
    with accelerator.main_process_first():
        data = load_evaluation_data(settings.data, settings.split)
    if settings.split not in data:
        raise LiVTError(f"{settings.data.dataset} has no split {settings.split!r}; it has {', '.join(data)}.", "split")
    return data


def make_loader(settings: EvalSettings, dataset: Dataset, accelerator: Accelerator) -> DataLoader:
    """Return the images of this process as the model's own processor prepares them."""
    batches = build_eval_batches(settings.batch_size, accelerator, settings.data.num_workers)
    return eval_loader(dataset, load_processor(settings.model), batches)


def choose_precision(
    settings: EvalSettings,
    model: PreTrainedModel,
    images: Dataset,
    accelerator: Accelerator,
    posterior: Callable[[Tensor], Tensor] | None = None,
) -> str:
    """Return the precision of all processes, compared by posteriors of logits or, without, by features."""
    read_batch = partial(read_first_pixels, images, load_processor(settings.model), accelerator, TRIAL_IMAGES)
    forward = partial(extract, model) if posterior is None else lambda pixels: model(pixels).logits
    compared = resolve_precision(
        settings.precision, model.eval(), len(images), read_batch, forward, posterior or similarity_posterior
    )
    return agree_on_precision(compared)


def check_options(info: PredictionsInfo, settings: EvalSettings, counts_known: bool) -> None:
    """Raise an error for what cannot be measured, before the data are read."""
    prior = "prior" if settings.prior is not None else "adapt_prior" if settings.adapt_prior else None
    if prior and info.no_posterior is not None:
        reason = f"{settings.model} gives no probabilities under a prior ({info.no_posterior})"
        raise LiVTError(f"{reason}; leave --{prior} out to rank by logits.", prior)
    if prior and info.multi_label:
        raise LiVTError(f"a prior changes no mean average precision; leave --{prior} out.", prior)
    if settings.test_imbalance is not None and info.multi_label:
        message = "long tails are cut out of images of one label each; leave --test_imbalance out."
        raise LiVTError(message, "test_imbalance")
    if settings.split == "all" and not counts_known:
        raise LiVTError(
            f"{settings.model} does not know how many images of each class it was trained on, and with --split all no "
            "images are training images: pass --class_counts, or measure it on a dataset that has its training split.",
            "class_counts",
        )
    if settings.split == "all" and was_trained_on(settings.model, settings.data.dataset):
        raise LiVTError(
            f"{settings.model} was trained on images of {settings.data.dataset}; leave --split all out, or name other "
            "images with --dataset.",
            "split",
        )
    if settings.adapt_prior and info.uncalibrated_because:
        raise LiVTError(
            f"no prior can be estimated by {settings.model}: {info.uncalibrated_because}; calibrate it first "
            f"(livt calibrate {shell_line([settings.model])}), or leave --adapt_prior out.",
            "adapt_prior",
        )
    if settings.predictions is not None:
        check_table_path(settings.predictions, "predictions")


def choose_rules(
    predictions: Source, info: PredictionsInfo, settings: EvalSettings
) -> tuple[list[DecisionRule], dict]:
    """Return the rules to measure, the default rule first, and what evaluation.json says of an estimated prior.

    An estimated prior that should not be used is not offered.
    """
    rules = list(dict.fromkeys([info.default_rule, *info.rules]))
    if not settings.adapt_prior:
        return rules, {}
    estimate = estimate_record_prior(predictions)
    names = ("shift", "variation", "p_uniform", "p_training", "gain")
    numbers = {name: getattr(estimate, name) for name in names} | {"prior": None}
    if estimate.reliable:
        numbers["prior"] = estimate.prior.tolist()
        rules.append(DecisionRule.named(ESTIMATED, tuple(numbers["prior"])))
    else:
        print(
            f"No prior is offered: the images exclude neither chance nor what calibration leaves open (p-value of the "
            f"uniform prior {estimate.p_uniform:.2f}, of the training prior {estimate.p_training:.2f}; worst gain in "
            f"accuracy {100 * estimate.gain:+.1f} points). Use more images, --prior training, or measure the prior on "
            "some labelled images and pass --prior FILE."
        )
    return rules, {"estimated_prior": numbers}


def format_summary(report: EvaluationReport, info: PredictionsInfo) -> str:
    """Return the numbers of an evaluation as a few lines of text."""
    summary, default = report.summary, report.summary["default_rule"]
    metrics, images = summary["rules"][default], summary["rules"][default]["num_images"]
    lines = [f"{summary['model']} on {summary['dataset']} ({summary['split']})"]
    if info.multi_label:
        lines.append(f"Mean average precision {format_percent(metrics['map'])} % on {images:,} images")
        shown = {"AUROC": "auroc", "macro F1": "macro_f1"}
        means = ", ".join(f"{name} {format_percent(metrics[key])}" for name, key in shown.items() if key in metrics)
        return "\n".join([*lines, f"  {format_accuracy(metrics)}", f"  mean over classes: {means}"])
    lines.append(
        f"Accuracy {format_percent(metrics['accuracy'])} % on {images:,} images ({summary['split']}), mean class "
        f"accuracy {format_percent(metrics['mean_class_accuracy'])} % (decision rule: {info.default_rule.label})"
    )
    labels = summary["rule_labels"]
    measured = {labels[name]: values for name, values in summary["rules"].items()}
    measured |= {LABELS[name]: values for name, values in summary["baselines"].items() if LABELS[name] not in measured}
    lines += [f"  {label:32s} {format_accuracy(values)}" for label, values in measured.items()]
    found = {name: bounds for name, bounds in summary["intervals"][default].items() if bounds is not None}
    if found:
        shown = (f"{name} {format_percent(low)} to {format_percent(high)}" for name, (low, high) in found.items())
        over = "images" if report.groups is None else "groups"
        lines.append(f"  {labels[default]}, 95 % intervals over {over}: {', '.join(shown)}")
    if "under_prior" in summary:
        under = summary["under_prior"]
        shown = ", ".join(f"{labels[name]} {format_percent(value)}" for name, value in under["accuracy"].items())
        lines.append(f"  Accuracy under the {under['prior']} (percent): {shown or 'no class has test images'}")
    if bad := metrics["num_nan"]:
        lines.append(f"  {bad} images gave NaN logits and count as wrong ({format_percent(bad / images)} %)")
    if info.uncalibrated_because:
        lines.append(f"  Beware of the posterior: {info.uncalibrated_because}; `livt calibrate` does that.")
    if "calibrated_on_these_images" in summary:
        lines.append("  The model was calibrated on these very images: its posterior looks better than it is.")
    if "shifted" in summary:
        lines.append(f"Accuracy on shifted test sets (percent):\n{markdown_table(shift_rows(summary['shifted']))}")
    return "\n".join(lines)


def probe(settings: EvalSettings, accelerator: Accelerator, folder: Path) -> None:
    """Measure frozen features by kNN and a linear classifier, on the classes of the data."""
    named = ("prior", "adapt_prior", "test_imbalance", "predictions", "class_counts")
    values = settings.to_dict()
    wrong = next((name for name in named if values[name]), None)
    if wrong:
        raise LiVTError(f"kNN and the linear probe measure features and know no prior; leave --{wrong} out.", wrong)
    if settings.split == "all":
        raise LiVTError("kNN and the linear probe learn from the training images; leave --split all out.", "split")
    if accelerator.num_processes > 1:
        raise LiVTError("kNN and the linear probe look at all images at once; run it on one process.")
    model = load_model(settings.model) if is_pretraining(settings.model) else load_backbone(settings.model)
    data = load_splits(settings, accelerator)
    if is_multi_label(data["train"]):
        raise LiVTError(
            f"images of {settings.data.dataset} have several labels, and kNN and the linear probe choose one; "
            "fine-tune the checkpoint and evaluate that."
        )
    model, counts = model.to(accelerator.device), torch.from_numpy(class_counts(data["train"]))
    loaders = [make_loader(settings, data[split], accelerator) for split in ("train", settings.split)]
    precision = choose_precision(settings, model, data["train"], accelerator)
    train, test = (extract_frozen_features(model, loader, accelerator, precision) for loader in loaders)
    summary = describe(settings, precision)
    scores = {"kNN": knn_scores(train, test, len(counts))}
    scores["linear probe"] = linear_probe_scores(train, test, len(counts), seed=settings.seed)
    for name, values in scores.items():
        summary[name] = long_tail_metrics(values, test.labels, counts, **thresholds_of(settings))
        print(f"{name:14s} {format_accuracy(summary[name])}")
    folder.mkdir(parents=True)
    write_values(folder / "evaluation.json", summary)
    print(f"Numbers: {folder / 'evaluation.json'}")


if __name__ == "__main__":
    run_command(main)
