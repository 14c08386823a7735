"""Measure a checkpoint and write a report.

    livt eval                            # the newest finished fine-tuning under runs/
    livt eval org/name --dataset inat18 --source FOLDER
    livt eval RUN --prior prior.json     # the class frequencies it will meet
    livt eval RUN --adapt_prior          # the same, estimated from the images alone
    livt eval RUN --test_imbalance       # test sets whose classes are frequent and rare, in both directions
    livt eval RUN --predictions p.csv    # what each rule says of each image
    livt eval RUN --dataset FOLDER --split all    # every image of another place, which needs no split
    livt eval org/any-classifier --dataset FOLDER --class_counts counts.json    # one trained elsewhere
    livt eval PRETRAINING_RUN            # kNN and a linear probe on frozen features
    livt eval org/any-backbone --dataset FOLDER --probe    # the same for any model, before anyone trains it
    livt eval --compare RUN_A RUN_B      # the newest reports of two runs side by side

`accelerate launch recipes/eval.py` takes the same options in a checkout.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from accelerate import Accelerator
from datasets import DatasetDict
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from livt_hf.classifiers import (
    check_classes_match,
    check_posterior,
    class_names,
    is_multi_label,
    is_pretraining,
    known_counts,
    load_classifier,
    load_model,
    load_processor,
    training_counts,
)
from livt_hf.commands import run_command
from livt_hf.data import class_counts, eval_loader, load_evaluation_data
from livt_hf.data.batches import build_eval_batches
from livt_hf.data.labels import group_codes, labels_of
from livt_hf.data.labels import is_multi_label as has_several_labels
from livt_hf.errors import LiVTError
from livt_hf.evaluation.exam import Exam, Findings, accuracy_under_prior, examine
from livt_hf.evaluation.probes import Features, frozen_features, knn_scores, linear_probe_scores
from livt_hf.evaluation.rules import (
    ESTIMATED,
    given_labels,
    posterior_rule,
    prior_words,
    serving_prior,
    standard_rules,
)
from livt_hf.evaluation.running import Rule, evaluate_multi_label, run_model
from livt_hf.evaluation.shifts import measure_shift, shifted_sets
from livt_hf.evaluation.tables import check_table, write_predictions
from livt_hf.files import write_values
from livt_hf.long_tail.priors import numbers_by_name
from livt_hf.metrics import long_tail_metrics, shot_groups
from livt_hf.predictions import PredictionsInfo
from livt_hf.pretrained import load_backbone
from livt_hf.reports import markdown_table
from livt_hf.reports.comparison import compare
from livt_hf.reports.curves import shift_rows
from livt_hf.reports.evaluation import choose_folder, write_report
from livt_hf.results import EACH_LABEL, provenance
from livt_hf.run_data import check_split_unseen, settings_from_run, was_trained_on
from livt_hf.settings import EvalSettings
from livt_hf.text import format_accuracy, format_percent, shell_line
from livt_hf.training.device import LONG_TIMEOUT, check_processes, configure_threads


def main(argv: Sequence[str] | None = None) -> None:
    settings = EvalSettings.parse(argv, inherit=lambda asked: {} if "compare" in asked else settings_from_run(asked))
    accelerator = Accelerator(kwargs_handlers=LONG_TIMEOUT)
    if settings.compare is not None:
        if accelerator.is_main_process:
            sentence, page = compare(*settings.compare, choose_folder(settings))
            print(f"{sentence}\nComparison: {page}")
        return
    check_processes(accelerator.num_processes)
    configure_threads(accelerator.device, settings.threads)
    folder = choose_folder(settings)
    model, processor = open_model(settings), load_processor(settings.model)
    check_options(model, settings, accelerator.num_processes)
    prior = None if settings.prior is None else serving_prior(settings.prior, model)
    model.to(accelerator.device)
    with accelerator.main_process_first():
        data = load_evaluation_data(settings, settings.split)
    check_data(model, data, settings)
    check_split_unseen(settings, data)

    def loader(split: str) -> DataLoader:
        batches = build_eval_batches(settings.batch_size, accelerator, settings.num_workers)
        return eval_loader(data[split], processor, batches)

    thresholds = {"many_above": settings.many_above, "few_below": settings.few_below}
    summary = {"model": settings.model, "dataset": settings.dataset, "split": settings.split}
    summary |= {"thresholds": thresholds} | provenance()
    if settings.probe:
        # A probe learns the classes of the data, whatever the model was trained on.
        train, test = (frozen_features(model, loader(split), accelerator) for split in ("train", settings.split))
        summary |= measure_features(train, test, class_counts(data["train"]), settings.seed, thresholds)
        folder.mkdir(parents=True)
        write_values(folder / "evaluation.json", summary)
        print(f"Numbers: {folder / 'evaluation.json'}")
        return
    dataset, counts, shifted = data[settings.split], training_counts(model, data["train"]), []
    if settings.test_imbalance is not None:
        shifted = shifted_sets(settings.test_imbalance, labels_of(dataset).values, counts, settings.seed)
    clusters = group_codes(dataset) if "group" in dataset.column_names else None
    outputs = run_model(model, loader(settings.split), accelerator)
    exam = Exam(model, outputs, counts, accelerator, thresholds, clusters)
    rules = chosen_rules(exam, settings, prior, summary)
    found = (examine_several if is_multi_label(model) else examine)(exam, rules, class_names(model), summary)
    if prior is not None:
        summary["under_prior"] = {"prior": prior_words(settings.prior)} | accuracy_under_prior(found.measured, prior)
    if shifted:
        summary["shifted"] = [measure_shift(exam, one) for one in shifted]
    if accelerator.is_main_process:
        print(several_labels_in_words(summary) if is_multi_label(model) else findings_in_words(found, exam))
        print(f"Report: {write_report(folder, settings, found, dataset)}")
        if settings.predictions is not None:
            write_predictions(settings.predictions, model, outputs, rules, dataset, settings.split)
            print(f"Predictions: {settings.predictions}")
        if ESTIMATED in rules:
            write_prior(folder / "prior.json", summary, exam)


def open_model(settings: EvalSettings) -> PreTrainedModel:
    """The model to measure. A pretraining, which has no classifier of its own, is always probed."""
    pretraining = is_pretraining(settings.model)
    if settings.probe and not pretraining:
        return load_backbone(settings.model)
    settings.probe = pretraining
    return load_model(settings.model) if pretraining else load_classifier(settings.model, **settings.training)


def check_options(model: PreTrainedModel, settings: EvalSettings, num_processes: int) -> None:
    """What cannot be measured is refused before the data are read."""
    if settings.probe:
        check_probe(settings, num_processes)
    if settings.prior is not None or settings.adapt_prior:
        check_posterior(model)
        if is_multi_label(model):
            raise LiVTError("a prior changes no mean average precision; leave --prior and --adapt_prior out.")
    if settings.test_imbalance is not None and is_multi_label(model):
        raise LiVTError("long tails are cut out of images of one label each; leave --test_imbalance out.")
    if settings.split == "all" and not settings.probe and known_counts(model) is None:
        raise LiVTError(
            f"{settings.model} does not know how many images of each class it was trained on, and with --split all no "
            "images are training images: pass --class_counts, or measure it on a dataset that has its training split."
        )
    if settings.split == "all" and was_trained_on(settings.model, settings.dataset):
        raise LiVTError(
            f"{settings.model} was trained on images of {settings.dataset}; leave --split all out, or name images of "
            "another place with --dataset."
        )
    uncalibrated = PredictionsInfo.from_model(model).uncalibrated_because
    if settings.adapt_prior and uncalibrated:
        raise LiVTError(
            f"no prior can be estimated by {settings.model}: {uncalibrated}; calibrate it first "
            f"(livt calibrate {shell_line([settings.model])}), or leave --adapt_prior out."
        )
    if settings.predictions is not None:
        if num_processes > 1:
            raise LiVTError("--predictions are written by one process; leave them out, or evaluate on one.")
        check_table(settings.predictions)
    shot_groups([1], settings.many_above, settings.few_below)


def check_probe(settings: EvalSettings, num_processes: int) -> None:
    names = ("prior", "adapt_prior", "test_imbalance", "predictions", "class_counts")
    asked = [name for name in names if getattr(settings, name)]
    if asked:
        raise LiVTError(f"kNN and the linear probe measure features and know no prior; leave --{asked[0]} out.")
    if settings.split == "all":
        raise LiVTError("kNN and the linear probe learn from the training images; leave --split all out.")
    if num_processes > 1:
        raise LiVTError("kNN and the linear probe look at all images at once; run it on one process.")


def check_data(model: PreTrainedModel, data: DatasetDict, settings: EvalSettings) -> None:
    """Refuse data that a checkpoint cannot be measured on."""
    if settings.split not in data:
        raise LiVTError(f"{settings.dataset} has no split {settings.split!r}; it has {', '.join(data)}.")
    if not settings.probe:
        check_classes_match(model, data["train"])
    elif has_several_labels(data["train"]):
        raise LiVTError(
            f"images of {settings.dataset} have several labels, and kNN and the linear probe answer with one; "
            "fine-tune the checkpoint and evaluate that."
        )


def measure_features(
    train: Features, test: Features, counts: np.ndarray, seed: int, thresholds: dict[str, int]
) -> dict[str, dict]:
    scores = {
        "kNN": knn_scores(train, test, len(counts)),
        "linear probe": linear_probe_scores(train, test, len(counts), seed=seed),
    }
    measured = {name: long_tail_metrics(score, test.labels, counts, **thresholds) for name, score in scores.items()}
    for name, metrics in measured.items():
        print(f"{name:14s} {format_accuracy(metrics)}")
    return measured


def examine_several(exam: Exam, _rules: dict[str, Rule], names: Sequence[str], summary: dict) -> Findings:
    """All numbers where images may have several labels."""
    given = partial(given_labels, exam.model)
    measured = evaluate_multi_label(exam.outputs.batches(), exam.train_counts, given, **exam.thresholds)
    summary["rules"] = {EACH_LABEL: measured.compute()}
    return Findings(summary, {}, None, measured.per_class(names))


def chosen_rules(exam: Exam, settings: EvalSettings, prior: Tensor | None, summary: dict) -> dict[str, Rule]:
    """The standard rules and those that were asked for. An estimated prior that should not be used is not offered."""
    rules = standard_rules(exam.model)
    if prior is not None:
        rules[f"posterior, {prior_words(settings.prior)}"] = posterior_rule(exam.model, prior)
    if not settings.adapt_prior:
        return rules
    estimate = exam.estimated_prior()
    numbers = {"shift": estimate.shift, "variation": estimate.variation}
    if estimate.reliable:
        summary["estimated_prior"] = numbers | {"prior": estimate.prior.tolist()}
        return rules | {ESTIMATED: posterior_rule(exam.model, estimate.prior)}
    summary["estimated_prior"] = numbers | {"prior": None}
    exam.accelerator.print(
        f"No prior is offered: the estimate lies {estimate.shift:.2f} from the uniform one and moves by "
        f"{estimate.variation:.2f} where the evidence is disturbed by as much as calibration leaves open. Keep the "
        "uniform prior, or measure the prior on some labelled images and pass --prior."
    )
    return rules


def measured_in_words(summary: dict, images: int) -> str:
    return f"{summary['model']} on {images:,} images of {summary['dataset']} ({summary['split']})"


def findings_in_words(found: Findings, exam: Exam) -> str:
    summary, rules = found.summary, found.summary["rules"]
    first = next(iter(rules))
    images, bad = (rules[first][name] for name in ("num_images", "num_nan"))
    lines = [measured_in_words(summary, images)]
    lines += [f"  {name:32s} {format_accuracy(metrics)}" for name, metrics in rules.items()]
    intervals = {name: found for name, found in summary["intervals"][first].items() if found is not None}
    shown = (f"{name} {format_percent(low)} to {format_percent(high)}" for name, (low, high) in intervals.items())
    over = "over images" if exam.clusters is None else "over groups"
    if intervals:
        lines.append(f"  {first}, 95 % intervals {over}: {', '.join(shown)}")
    if "under_prior" in summary:
        (_, words), *accuracies = summary["under_prior"].items()
        shown = (
            ", ".join(f"{rule} {format_percent(accuracy)}" for rule, accuracy in accuracies)
            or "no class has test images"
        )
        lines.append(f"  Accuracy where classes are as frequent as the {words} says (percent): {shown}")
    if bad:
        lines.append(f"  {bad} images gave NaN logits and count as wrong ({format_percent(bad / images)} %)")
    uncalibrated = PredictionsInfo.from_model(exam.model).uncalibrated_because
    if uncalibrated:
        lines.append(f"  Beware of the posterior: {uncalibrated}; `livt calibrate` does that.")
    if "shifted" in summary:
        lines.append(f"Accuracy on shifted test sets (percent):\n{markdown_table(shift_rows(summary['shifted']))}")
    return "\n".join(lines)


def several_labels_in_words(summary: dict) -> str:
    """The mean over classes of what each is measured by, as a question of its own."""
    (metrics,) = summary["rules"].values()
    shown = {"AUROC": "auroc", "macro F1": "macro_f1"}
    others = (f"{word} {format_percent(metrics[name])}" for word, name in shown.items() if name in metrics)
    began = measured_in_words(summary, metrics["num_images"])
    return f"{began}\n  {format_accuracy(metrics)}\n  mean over classes: {', '.join(others)}"


def write_prior(path: Path, summary: dict, exam: Exam) -> None:
    write_values(path, numbers_by_name(summary["estimated_prior"]["prior"], class_names(exam.model)))
    command = ["livt", "predict", summary["model"], "IMAGE...", "--prior", str(path)]
    print(f"Estimated prior: {path}; to serve under it:\n  {shell_line(command)}")


if __name__ == "__main__":
    run_command(main)
