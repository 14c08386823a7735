"""Measure a checkpoint and write a report.

    livt eval                                   # the newest finished fine-tuning under runs/
    livt eval --model org/name --dataset inat18 --source FOLDER
    livt eval --model RUN --prior prior.json    # the class frequencies it will meet
    livt eval --model RUN --adapt_prior         # the same, estimated from the images alone
    livt eval --model PRETRAINING_RUN           # kNN and a linear probe on frozen features
    livt eval --compare RUN_A RUN_B             # the newest reports of two runs side by side

`accelerate launch recipes/eval.py` takes the same options in a checkout.
"""

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from accelerate import Accelerator
from datasets import DatasetDict
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from livt_hf import LiViTForPreTraining
from livt_hf.commands import accuracy_line, run_command
from livt_hf.data import class_counts, eval_loader, load_data
from livt_hf.data.labels import is_multi_label as has_several_labels
from livt_hf.errors import LiVTError
from livt_hf.evaluation.estimation import estimated_prior
from livt_hf.evaluation.models import (
    check_classes_match,
    check_posterior,
    class_names,
    is_multi_label,
    lent_by_run,
    load_checkpoint,
    load_processor,
    why_uncalibrated,
)
from livt_hf.evaluation.probes import encoder_features, knn_scores, linear_probe_scores
from livt_hf.evaluation.rules import ESTIMATED, PAPER, posterior_rule, prior_words, serving_prior, standard_rules
from livt_hf.evaluation.running import evaluate_classifier, evaluate_multi_label
from livt_hf.long_tail.priors import PriorEstimate
from livt_hf.metrics import long_tail_metrics
from livt_hf.reports.comparison import compare
from livt_hf.reports.evaluation import choose_folder, write_report
from livt_hf.results import percent, provenance
from livt_hf.settings import EvalSettings
from livt_hf.stages import shared_batches
from livt_hf.training.machine import check_processes, use_all_cores

Loaders = Callable[[str], DataLoader]


def main(argv: Sequence[str] | None = None) -> None:
    settings = EvalSettings.parse(argv, inherit=lambda asked: {} if "compare" in asked else lent_by_run(asked))
    accelerator = Accelerator()
    if settings.compare is not None:
        if accelerator.is_main_process:
            print(f"Comparison: {compare(*settings.compare, choose_folder(settings))}")
        return
    check_processes(accelerator.num_processes)
    use_all_cores(accelerator.device, settings.threads)
    folder = choose_folder(settings)
    model, processor = load_checkpoint(settings.model), load_processor(settings.model)
    check_options(model, settings, accelerator.num_processes)
    prior = None if settings.prior is None else serving_prior(settings.prior, model)
    model.to(accelerator.device)
    with accelerator.main_process_first():
        data = load_data(settings)
    check_data(model, data, settings)

    def loader(split: str) -> DataLoader:
        batches = shared_batches(settings.batch_size, accelerator, settings.num_workers)
        return eval_loader(data[split], processor, batches)

    summary = {"model": settings.model, "dataset": settings.dataset, "split": settings.split} | provenance()
    counts = class_counts(data["train"])
    if isinstance(model, LiViTForPreTraining):
        summary |= measure_encoder(model, loader, accelerator, counts, settings)
        write_numbers(folder, summary, accelerator)
        return
    if is_multi_label(model):
        measured = evaluate_multi_label(model, loader(settings.split), accelerator, counts)
        summary["macro and group mAP"] = measured.compute()
        accelerator.print(json.dumps(summary["macro and group mAP"], indent=2))
        write_numbers(folder, summary, accelerator)
        return

    rules = standard_rules(model)
    if prior is not None:
        rules[f"posterior, {prior_words(settings.prior)}"] = posterior_rule(model, prior)
    if settings.adapt_prior:
        estimate = estimated_prior(model, loader(settings.split), accelerator)
        summary["estimated_prior"] = describe_estimate(estimate, accelerator)
        if estimate.reliable:
            rules[ESTIMATED] = posterior_rule(model, estimate.prior)
    measured, pairs = evaluate_classifier(model, loader(settings.split), accelerator, counts, rules)
    if not accelerator.is_main_process:
        return
    summary["rules"] = {name: metric.compute() for name, metric in measured.items()}
    print_rules(summary)
    if why_uncalibrated(model):
        print(f"  Beware of the posterior: {why_uncalibrated(model)}; `livt calibrate` does that.")
    write_report(folder, settings, summary, measured, pairs, data[settings.split])
    print(f"Report: {folder / 'report.html'}")
    if ESTIMATED in rules:
        path = folder / "prior.json"
        write_prior(path, dict(zip(class_names(model), estimate.prior.tolist(), strict=True)))
        command = ["livt", "predict", settings.model, "IMAGE...", "--prior", str(path)]
        print(f"Estimated prior: {path}; to serve under it:\n  {shlex.join(command)}")


def check_options(model: PreTrainedModel, settings: EvalSettings, num_processes: int) -> None:
    """What cannot be measured is refused before the data are read."""
    if settings.prior is not None or settings.adapt_prior:
        check_posterior(model)
        if is_multi_label(model):
            raise LiVTError("a prior changes no mean average precision; leave --prior and --adapt_prior out.")
    if settings.adapt_prior and why_uncalibrated(model):
        raise LiVTError(
            f"no prior can be estimated by {settings.model}: {why_uncalibrated(model)}; calibrate it first "
            f"(livt calibrate {shlex.quote(settings.model)}), or leave --adapt_prior out."
        )
    if num_processes > 1 and isinstance(model, LiViTForPreTraining):
        raise LiVTError("kNN and the linear probe look at all images at once; run it on one process.")


def check_data(model: PreTrainedModel, data: DatasetDict, settings: EvalSettings) -> None:
    """Refuse data that a checkpoint cannot be measured on."""
    if settings.split not in data:
        raise LiVTError(f"{settings.dataset} has no split {settings.split!r}; it has {', '.join(data)}.")
    if not isinstance(model, LiViTForPreTraining):
        check_classes_match(model, data["train"])
    elif has_several_labels(data["train"]):
        raise LiVTError(
            f"images of {settings.dataset} have several labels, and kNN and the linear probe answer with one; "
            "fine-tune the checkpoint and evaluate that."
        )


def measure_encoder(
    model: LiViTForPreTraining, loader: Loaders, accelerator: Accelerator, counts, settings: EvalSettings
) -> dict:
    train, test = (encoder_features(model, loader(split), accelerator) for split in ("train", settings.split))
    scores = {
        "kNN": knn_scores(train, test, len(counts)),
        "linear probe": linear_probe_scores(train, test, len(counts), seed=settings.seed),
    }
    measured = {name: long_tail_metrics(score, test.labels, counts) for name, score in scores.items()}
    for name, metrics in measured.items():
        print(f"{name:14s} {accuracy_line(metrics)}")
    return measured


def describe_estimate(estimate: PriorEstimate, accelerator: Accelerator) -> dict:
    """For the summary; an estimate that should not be used is not offered."""
    numbers = {"shift": estimate.shift, "variation": estimate.variation}
    if estimate.reliable:
        return numbers | {"prior": estimate.prior.tolist()}
    accelerator.print(
        f"No prior is offered: the estimate lies {estimate.shift:.2f} from the uniform one and moves by "
        f"{estimate.variation:.2f} where the evidence is disturbed by as much as calibration leaves open. Keep the "
        "uniform prior, or measure the prior on some labelled images and pass --prior."
    )
    return numbers | {"prior": None}


def print_rules(summary: dict) -> None:
    rules = summary["rules"]
    images, bad = (rules[PAPER][name] for name in ("num_images", "num_nan"))
    print(f"{images:,} images of {summary['dataset']} ({summary['split']})")
    for name, metrics in rules.items():
        print(f"  {name:32s} {accuracy_line(metrics)}")
    if bad:
        print(f"  {bad} images gave NaN logits and count as wrong ({percent(bad / images)} %)")


def write_numbers(folder: Path, summary: dict, accelerator: Accelerator) -> None:
    if accelerator.is_main_process:
        folder.mkdir(parents=True)
        (folder / "evaluation.json").write_text(json.dumps(summary, indent=2) + "\n")
        print(f"Numbers: {folder / 'evaluation.json'}")


def write_prior(path: Path, prior: dict[str, float]) -> None:
    path.write_text(json.dumps(prior, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
