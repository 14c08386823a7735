"""Measure a checkpoint and write a report.

    accelerate launch recipes/eval.py                                   # the newest finished fine-tuning under runs/
    accelerate launch recipes/eval.py --model org/name --dataset inat18 --source FOLDER
    accelerate launch recipes/eval.py --model RUN --prior prior.json    # the class frequencies it will meet
    accelerate launch recipes/eval.py --model RUN --adapt_prior         # the same, estimated from the images alone
    accelerate launch recipes/eval.py --model PRETRAINING_RUN           # kNN and a linear probe on frozen features

The paper's rule ranks by the logits z. The posterior rule gives P(j|x) ~ p_j q_j / pi_j, with p_j the posterior under
the training prior pi and q the prior of the images to come: see livt_hf/priors.py.
"""

import json
import sys
from pathlib import Path

from accelerate import Accelerator

from livt_hf import LiViTForPreTraining
from livt_hf.commands import accuracy_line, load_data, percent, run_command
from livt_hf.data import class_counts
from livt_hf.data.labels import class_feature
from livt_hf.data.loading import eval_loader
from livt_hf.evaluation.running import (
    check_data,
    check_options,
    encoder_features,
    estimated_prior,
    evaluate_classifier,
    evaluate_multi_label,
    inherited_eval_options,
    knn_scores,
    linear_probe_scores,
    load_checkpoint_and_processor,
    no_posterior,
    serving_prior,
)
from livt_hf.metrics import long_tail_metrics
from livt_hf.reports.evaluation import choose_folder, write_report
from livt_hf.runs import provenance
from livt_hf.settings import EvalArguments, parse
from livt_hf.training.machine import check_processes, use_all_cores


def main():
    arguments = parse(EvalArguments, inherited_eval_options(sys.argv[1:]) + sys.argv[1:])
    accelerator = Accelerator()
    check_processes(accelerator.num_processes)
    use_all_cores(accelerator.device, arguments.threads)
    folder = choose_folder(arguments)
    model, processor = load_checkpoint_and_processor(arguments.model)
    check_options(model, arguments, accelerator.num_processes)
    prior = None if arguments.prior is None else serving_prior(arguments.prior, model)
    model.to(accelerator.device)
    with accelerator.main_process_first():
        data = load_data(arguments)
    check_data(model, data, arguments)

    def loader(split):
        return eval_loader(
            data[split],
            processor,
            batch_size=arguments.batch_size,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            num_workers=arguments.num_workers,
        )

    progress = accelerator.is_main_process and sys.stderr.isatty()
    counts = class_counts(data["train"])
    summary = {"model": arguments.model, "dataset": arguments.dataset, "split": arguments.split} | provenance()
    if isinstance(model, LiViTForPreTraining):
        train, test = (
            encoder_features(model, loader(split), accelerator, progress) for split in ("train", arguments.split)
        )
        scores = {
            "kNN": knn_scores(train, test, len(counts)),
            "linear probe": linear_probe_scores(train, test, len(counts), seed=arguments.seed),
        }
        for name, score in scores.items():
            summary[name] = long_tail_metrics(score, test.labels, counts)
            print(f"{name:14s} {accuracy_line(summary[name])}")
        folder.mkdir(parents=True)
        (folder / "evaluation.json").write_text(json.dumps(summary, indent=2) + "\n")
        print(f"Numbers: {folder / 'evaluation.json'}")
        return

    if model.config.problem_type == "multi_label_classification":
        summary["macro and group mAP"] = evaluate_multi_label(
            model, loader(arguments.split), accelerator, counts, progress
        ).compute()
        accelerator.print(json.dumps(summary["macro and group mAP"], indent=2))
        if accelerator.is_main_process:
            folder.mkdir(parents=True)
            (folder / "evaluation.json").write_text(json.dumps(summary, indent=2) + "\n")
        return

    rules = {"paper (argmax z)": None}
    if no_posterior(model) is None:
        rules["posterior, uniform prior"] = lambda logits: model.head.posterior(logits, "uniform")
    if prior is not None:
        rules[f"posterior, prior of {Path(arguments.prior).name}"] = lambda logits: model.head.posterior(logits, prior)
    if arguments.adapt_prior:
        adapted = estimated_prior(model, loader(arguments.split), accelerator, progress)
        summary["estimated_prior"] = adapted.tolist()
        rules["posterior, estimated prior"] = lambda logits: model.head.posterior(logits, adapted)
    measured, pairs = evaluate_classifier(model, loader(arguments.split), accelerator, counts, rules, progress)
    if not accelerator.is_main_process:
        return
    summary["rules"] = {name: metric.compute() for name, metric in measured.items()}
    print(f"{data[arguments.split].num_rows:,} images of {arguments.dataset} ({arguments.split})")
    for name, metrics in summary["rules"].items():
        print(f"  {name:32s} {accuracy_line(metrics)}")
    bad = summary["rules"]["paper (argmax z)"]["num_nan"]
    if bad:
        print(f"  {bad} images gave NaN logits and count as wrong ({percent(bad / data[arguments.split].num_rows)} %)")
    write_report(folder, arguments, summary, measured, pairs, data[arguments.split])
    print(f"Report: {folder / 'report.html'}")
    if arguments.adapt_prior:
        by_name = dict(zip(class_feature(data["train"]).names, summary["estimated_prior"], strict=True))
        (folder / "prior.json").write_text(json.dumps(by_name, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"Estimated prior: {folder / 'prior.json'}  (serve under it: python -m livt_hf.predict --prior)")


if __name__ == "__main__":
    run_command(main)
