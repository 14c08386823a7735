"""Train a pretrained backbone in a given time: `livt train FOLDER --hours H --pretrained MODEL`.

Its parts, each of which a stopped training resumes:

1. Features and the exact head, on all training images: a calibrated model, saved after seconds.
2. The whole network for the time left, from a head of a larger L2 strength that has not seen the held-out images.
3. The choice: what is best on the held-out images is kept, evaluated and saved.

plan.json in the folder of the training holds what was planned and measured, `finetune` beside it the model.
"""

import logging
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from datasets import DatasetDict
from safetensors.torch import load_file
from torch import Tensor
from transformers import BaseImageProcessor, PreTrainedModel

from livt_hf.classifiers import load_classifier
from livt_hf.cli.copies import warn_about_copies
from livt_hf.cli.inherit import inherit_from_checkpoint
from livt_hf.cli.options import CONFIGS
from livt_hf.cli.training_settings import FinetuneSettings, TrainSettings
from livt_hf.data import eval_loader, shot_counts
from livt_hf.data.batches import build_eval_batches
from livt_hf.data.benchmarks import PUBLIC
from livt_hf.data.labels import digest_of, is_multi_label, labels_of, number_of_classes
from livt_hf.data.load import ImagePool, check_several_classes, load_pool
from livt_hf.data.splitting import choose_validation, is_made_split
from livt_hf.errors import LiVTError
from livt_hf.files import read_values, replacing, write_values
from livt_hf.long_tail.calibration import MIN_IMAGES
from livt_hf.modeling_livit import LiViTForImageClassification
from livt_hf.predictions.calibrate import calibrate_logits, collect_logits
from livt_hf.predictions.evaluate import Evaluator
from livt_hf.predictions.metrics import THRESHOLDS
from livt_hf.predictions.record import FOLDER, open_source
from livt_hf.processors import read_input_spec
from livt_hf.recipes.eval import choose_folder
from livt_hf.recipes.eval import format_summary as format_evaluation
from livt_hf.recipes.train import stage_options
from livt_hf.reports.report import write_report
from livt_hf.results import provenance
from livt_hf.runs import PLAN, Run, check_same_images, claim_file, next_run, runs_folder
from livt_hf.text import format_duration, format_percent
from livt_hf.training import autotune, recipe
from livt_hf.training.anytime import (
    Rates,
    TuningPlan,
    UpdateFitter,
    choose_held_out_fraction,
    choose_weights,
    measure_rates,
    plan_tuning,
    score_held_out,
    start_from_head,
    work_clock,
)
from livt_hf.training.exact_head import CONVEX_LOSSES
from livt_hf.training.finetune import (
    EpochEvaluator,
    build_finetune_results,
    build_finetune_task,
    choose_objective,
    compute_metrics,
    keep_predictions,
)
from livt_hf.training.framing import FRAMING, TRIAL_SHARE, try_framings
from livt_hf.training.loop import TrainingLoop, finish_run, make_accelerator, open_run
from livt_hf.training.solve import HELD_OUT_LOGITS, START_HEAD, save_held_out_logits, solve_head
from livt_hf.training.start import apply_framing, build_classifier, build_processor, store_shot_counts

logger = logging.getLogger(__name__)

BUSY = 1.2  # times the work that a training may take by the wall clock before that is said
HEAD = "head.json"  # in the folder of checkpoints, once the model of the first part is saved
PARTS = {"head": "exact head", "tuned": "whole network", "average": "average of network and start"}


@dataclass
class Session:
    """What all parts of a training share: options, images, processes and the clock.

    Attributes:
        settings: options of `livt train`.
        accelerator: processes and devices.
        clock, began: what the time is counted by, and its first value.
        opened: the first value of the wall clock.
        whole: the splits with all training images.
        split: the splits with "validation" held out of the training images, or the dataset's own; without it where
            no image can be held out.
        held_out: True for the training images of `whole` (N,) that are held out; None where none are.
        fraction: the share of them.
        framing: what the network sees of an image; "auto" until that is tried.
        network: learning rate and size of the crops that fit the kind of network.
        changes: options that replace those of the recipe, for benchmarks.
    """

    settings: TrainSettings
    accelerator: Accelerator
    clock: Callable[[], float]
    began: float
    whole: DatasetDict
    split: DatasetDict
    held_out: np.ndarray | None = None
    fraction: float = 0.0
    framing: str = "auto"
    network: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    opened: float = field(default_factory=time.perf_counter)

    def choose_objective(self, settings: FinetuneSettings) -> str | None:
        """Return what the model is served for."""
        return choose_objective(settings.loss, settings.data, is_multi_label(self.whole["train"]))

    @classmethod
    def open(cls, settings: TrainSettings, pool: ImagePool | None = None) -> "Session":
        """Set up the processes, and load the images unless they are given as a pool, and split them."""
        optimization = FinetuneSettings.build(threads=settings.threads, seed=settings.seed).optimization
        accelerator = make_accelerator(optimization)
        clock = work_clock(accelerator.device, settings.data.num_workers)
        began = clock()
        with accelerator.main_process_first():
            pool = pool or load_pool(settings.data)
        whole = pool.split(settings.data.replace(validation_fraction=0.0))
        check_several_classes(whole["train"])
        if accelerator.is_main_process:
            warn_about_copies(whole, settings.data, is_made_split(whole, "test"))
        fraction = settings.data.validation_fraction
        if fraction is None:
            fraction = choose_held_out_fraction(len(whole["train"]))
        if "validation" in whole or fraction == 0:
            return cls(settings, accelerator, clock, began, whole, whole)
        spec = settings.data.replace(validation_fraction=fraction)
        try:
            held_out = choose_validation(whole["train"], spec, len(whole["train"]))
        except LiVTError:
            if settings.data.validation_fraction is not None:
                raise
            return cls(settings, accelerator, clock, began, whole, whole)
        return cls(settings, accelerator, clock, began, whole, pool.split(spec), held_out, fraction)

    def finetune_settings(self, **chosen: Any) -> FinetuneSettings:
        """Return the settings of a part of the training."""
        options = stage_options(self.settings, "finetune") | {"pretrained": self.settings.pretrained}
        options |= {"threads": self.settings.threads, "save_minutes": 3.0, "framing": self.framing}
        options |= {"precision": "float32"} | chosen
        known = {name: value for name, value in options.items() if value is not None}
        return FinetuneSettings.parse(known, CONFIGS, inherit_from_checkpoint)

    def tuned_settings(self, updates: int) -> FinetuneSettings:
        """Return the settings of the second part."""
        options = recipe.build_options(max(updates, 1), len(self.split["train"]), **self.network) | self.changes
        return self.finetune_settings(**options, validation_fraction=self.fraction)

    @property
    def held_out_labels(self) -> Tensor:
        """Return the labels of the held-out images: class ids, or rows of 0 and 1."""
        images = self.split["validation"]
        return torch.from_numpy(labels_of(images).targets(range(len(images)), number_of_classes(images)))

    @property
    def head_settings(self) -> FinetuneSettings:
        """Return the settings of the first part; a loss that is not convex gives way to the balanced softmax."""
        loss = self.settings.loss if self.settings.loss in CONVEX_LOSSES else "bal_ce"
        batch_size = autotune.limit_batch_size(len(self.whole["train"]))  # of the loader, not of the exact solution
        return self.finetune_settings(tune="head", loss=loss, validation_fraction=0.0, batch_size=batch_size)

    def build(self, settings: FinetuneSettings, data: DatasetDict) -> tuple[PreTrainedModel, BaseImageProcessor]:
        """Build model and processor at the start of a part."""
        torch.manual_seed(self.settings.seed)
        parts = settings.model, settings.loss, settings.optimization, settings.augmentation
        model = build_classifier(data["train"], *parts)
        store_shot_counts(model, data)
        processor = build_processor(model, data["train"], settings.model, settings.data.dataset)
        return model, apply_framing(model, processor, settings.model.framing)

    def build_loop(
        self, settings: FinetuneSettings, model: PreTrainedModel, processor: BaseImageProcessor, data: DatasetDict, run
    ) -> TrainingLoop:
        """Build the task of a part and its loop."""
        options = settings.model, settings.optimization, settings.augmentation
        task = build_finetune_task(model, processor, data, *options, self.accelerator, settings.data.num_workers)
        return TrainingLoop(task, settings.optimization, settings.checkpoints, self.accelerator, run)

    def batches(self, split: str, processor: BaseImageProcessor) -> Iterable[dict]:
        """Return the images of a split as the model is served."""
        batches = build_eval_batches(64, self.accelerator, self.settings.data.num_workers)
        return eval_loader(self.split[split], processor, batches)


def start_training(session: Session) -> Path:
    """Measure the speed, say what the time buys, and write the plan to a new folder; errors leave no folder."""
    settings, accelerator, trial = session.settings, session.accelerator, None
    model, processor = session.build(session.head_settings, session.whole)
    side = read_input_spec(processor).size
    crop_size = recipe.choose_crop_size(model.to(accelerator.device), side)
    session.network = {"learning_rate": recipe.choose_learning_rate(model), "crop_size": crop_size}
    rates = measure_rates(model, processor, session.whole["train"], session.clock, crop_size)
    why = _describe_plan(session, rates, side)
    accelerator.print(why, flush=True)
    if not isinstance(model, LiViTForImageClassification) and settings.data.dataset not in PUBLIC:
        seconds = TRIAL_SHARE * 3600 * settings.hours if settings.hours else None
        options = {"objective": session.choose_objective(session.head_settings), "seconds": seconds}
        options |= {"seed": settings.seed, "num_workers": settings.data.num_workers}
        trial = try_framings(model, processor, session.whole["train"], accelerator, **options)
    session.framing = trial.chosen if trial else "own"
    folder: list[str | None] = [None]
    if accelerator.is_main_process:
        name = f"train-{Path(settings.data.dataset).name}"
        output = settings.output_dir
        folder = [str(next_run(runs_folder() / name).folder if output is None else Path(output))]
        with claim_file(Path(folder[0]) / PLAN) as path:
            plan: dict[str, Any] = {"why": why, "train": settings.to_dict(), "rates": asdict(rates)}
            plan |= {"framing": session.framing, "network": session.network}
            write_values(path, plan | ({"framing_trial": asdict(trial)} if trial else {}))
    broadcast_object_list(folder)
    return Path(str(folder[0]))


def train_backbone(session: Session, folder: Path) -> Run:
    """Train a backbone by the plan in a folder, or resume it, and return the finished run."""
    accelerator, plan = session.accelerator, read_values(folder / PLAN)
    session.framing, session.network = plan["framing"], plan["network"]
    settings = session.head_settings
    run = open_run(accelerator, lambda: _begin(Run(folder / "finetune"), settings), settings.to_dict())
    if "framing_trial" in plan:
        _write(accelerator, run.folder / FRAMING, plan["framing_trial"])
    head = solve_first_head(session, settings, run)
    if "tuning" not in plan:
        seconds = 3600 * session.settings.hours - (session.clock() - session.began)
        counts = len(session.split["train"]), len(session.split.get("validation", ()))
        plan["tuning"] = asdict(plan_tuning(seconds, Rates(**plan["rates"]), *counts))
        _write(accelerator, folder / PLAN, plan)
    tuning = TuningPlan(**plan["tuning"])
    accelerator.print(_describe_head(session, head, tuning), flush=True)
    tuned_settings, loop, processor, parts = tune_network(session, run, tuning, head)
    kept = next(part for part in parts if part["kept"])
    return finish(session, run, loop, processor, settings if kept["part"] == "head" else tuned_settings, head, parts)


def _begin(run: Run, settings: FinetuneSettings) -> Run:
    if not run.started:
        run.begin(settings.to_dict())
    return run


def _write(accelerator: Accelerator, path: Path, values: Any) -> None:
    if accelerator.is_main_process:
        write_values(path, values)
    accelerator.wait_for_everyone()


def solve_first_head(session: Session, settings: FinetuneSettings, run: Run) -> dict:
    """Solve the head on all training images and save its model; return what is known of it, as in head.json."""
    accelerator, path = session.accelerator, run.checkpoints / HEAD
    images = digest_of(session.whole["train"])
    if path.exists():
        head = read_values(path)
        check_same_images(run, head["images"], images)
        return head
    began = session.clock()
    model, processor = session.build(settings, session.whole)
    loop = session.build_loop(settings, model, processor, session.whole, run)
    run.checkpoints.mkdir(exist_ok=True)
    solution = solve_head(loop, session.choose_objective(settings), session.held_out, recipe.START_SHRINKAGE)
    model = loop.task.assemble_model(loop.final_model)  # type: ignore[attr-defined]  # of a `FinetuneTask`
    if session.held_out is None and "validation" in session.split:  # the dataset's own images, which no head has seen
        logits, _ = collect_logits(model, session.batches("validation", processor), accelerator)
        if accelerator.is_main_process:
            save_held_out_logits(run, logits)
    if accelerator.is_main_process:
        model.save_pretrained(run.folder)
        processor.save_pretrained(run.folder)
        scores = None
        if "validation" in session.split:
            logits = load_file(run.checkpoints / HELD_OUT_LOGITS)["logits"]
            scores = score_held_out(model.head.cpu(), logits, session.held_out_labels)
        head = {"solution": solution, "seconds": session.clock() - began, "scores": scores, "images": images}
        write_values(path, head)
    accelerator.wait_for_everyone()
    return read_values(path)


def tune_network(
    session: Session, run: Run, tuning: TuningPlan, head: dict
) -> tuple[FinetuneSettings, TrainingLoop, BaseImageProcessor, list[dict]]:
    """Train the whole network as planned, and choose between it and the head on the held-out images.

    Returns:
        The settings of this part, its loop with the kept weights of the network, the image processor, and the parts
        with their scores, of which one is kept.
    """
    train, began = session.split["train"], session.clock()
    settings = session.tuned_settings(tuning.updates)
    model, processor = session.build(settings, session.split)
    parts = [{"part": "head", "share": 0.0, "seconds": head["seconds"], "scores": head["scores"], "kept": True}]
    if tuning.updates:
        start_from_head(model, **load_file(run.checkpoints / START_HEAD))
        if session.accelerator.is_main_process:
            run.update(settings.to_dict())
    loop = session.build_loop(settings, model, processor, session.split, run)
    start = {name: value.detach().clone() for name, value in loop.bare_model.state_dict().items()}
    loop.resume(digest_of(train))
    if not tuning.updates:
        return settings, loop, processor, parts
    fitter = UpdateFitter(tuning.seconds, session.clock)
    try:
        loop.fit(refit=fitter)
        trained, held_out = session.clock() - began, lambda: session.batches("validation", processor)
        found = choose_weights(loop.bare_model, start, held_out, session.accelerator, tuning.averages)
    except LiVTError as error:
        if error.argument != "base_lr":
            raise
        logger.warning("%s The head is kept.", error)  # it diverged
        return settings, loop, processor, parts
    for one in sorted(found, key=lambda one: -one.share):
        name = "tuned" if one.share == 1 else "average"
        seconds = trained if one.share == 1 else (session.clock() - began - trained) / len(found)
        parts.append({"part": name, "share": one.share, "seconds": seconds, "scores": dict(one.scores), "kept": False})
    best = min(parts, key=lambda part: part["scores"]["nll"])  # of equals the head
    for part in parts:
        part["kept"] = part is best
    if best["part"] != "head" and loop.bare_model.head.no_posterior is None and len(found[0].labels) >= MIN_IMAGES:
        logits = found[0].logits.to(session.accelerator.device)
        fingerprint = digest_of(session.split["validation"])
        labels, objective = found[0].labels, session.choose_objective(settings)
        calibrate_logits(loop.bare_model, logits, labels, "validation", fingerprint, objective)
    return settings, loop, processor, parts


def finish(
    session: Session,
    run: Run,
    loop: TrainingLoop,
    processor: BaseImageProcessor,
    settings: FinetuneSettings,
    head: dict,
    parts: list[dict],
) -> Run:
    """Evaluate what was kept on the test images, and write it with its results."""
    kept = next(part for part in parts if part["kept"])
    data = session.whole if kept["part"] == "head" else session.split
    model = loop.bare_model
    evaluator = EpochEvaluator(loop.task, data, settings.checkpoints)  # type: ignore[arg-type]
    if kept["part"] == "head":
        model = load_classifier(str(run.folder)).to(session.accelerator.device)
        evaluator.solution, loop.progress.trained_on = head["solution"], digest_of(data["train"])
    store = keep_predictions(run.folder, data["test"], session.accelerator)
    batches, counts = session.batches("test", processor), shot_counts(session.whole)
    metrics = compute_metrics(model, batches, session.accelerator, counts, store)
    results = build_finetune_results(
        loop, evaluator, model, processor, metrics, settings.data, settings.model, head["seconds"]
    )
    if kept["part"] != "head":
        held_out = len(session.split["validation"])
        results.selection = f"{PARTS[kept['part']]}, best of {len(parts)} on {held_out} held-out images"
    results.parts = parts
    if session.accelerator.is_main_process:
        run.update(settings.to_dict())
    finish_run(loop, model, processor, results)
    return run


def _describe_plan(session: Session, rates: Rates, size: int) -> str:
    """Return what will be done, and what more time would buy."""
    hours, num_images = session.settings.hours, len(session.whole["train"])
    features = num_images * rates.feature
    held_out = len(session.split.get("validation", ()))

    def epochs(seconds: float) -> float:
        num_train = len(session.split["train"])
        plan = plan_tuning(seconds - features, rates, num_train, held_out)
        return plan.updates * recipe.choose_batch_size(num_train) / num_train

    first = f"{session.settings.pretrained}: the features of {num_images:,} images at {size} pixels take about "
    lines = [f"{first}{format_duration(features)}, then its classifier is solved exactly."]
    if features > 3600 * hours > 0:
        lines[0] += f" That is longer than {format_duration(3600 * hours)}; a smaller backbone or fewer images fit."
    now, more = epochs(3600 * hours), epochs(2 * 3600 * hours)
    if held_out == 0:
        lines.append(
            "The whole network is not trained, for no image is held out to compare it with the classifier by."
        )
    elif now == 0:
        enough = features + held_out * rates.feature + num_images * rates.step
        lines.append(f"That leaves no time for the whole network; an epoch of it fits into {format_duration(enough)}.")
    else:
        lines.append(
            f"From there the whole network is trained for the time left, about {now:.1f} epochs; twice the time holds "
            f"about {more:.1f}."
        )
        lines += filter(None, [autotune.describe_few_epochs(now, hours)])
        lines.append(
            f"What is best on {held_out:,} held-out training images is kept, so never worse than the classifier."
        )
    return "\n  ".join(lines)


def _describe_head(session: Session, head: dict, tuning: TuningPlan) -> str:
    scores = "" if head["scores"] is None else f": {_format_scores(head['scores'])}"
    done = f"Exact head, saved after {format_duration(head['seconds'])}{scores}."
    if tuning.updates == 0:
        return f"{done}\nThe whole network is not trained: {tuning.why}."
    epochs = tuning.updates * recipe.choose_batch_size(len(session.split["train"])) / len(session.split["train"])
    planned = f"{tuning.updates} updates, {epochs:.1f} epochs, planned for {format_duration(tuning.seconds)}"
    return f"{done}\nThe whole network: {planned}."


def _format_scores(scores: dict[str, float]) -> str:
    named = {"accuracy": "accuracy", "mean_class_accuracy": "mean class accuracy", "macro_f1": "macro F1"}
    shown = [f"{text} {format_percent(scores[name])}" for name, text in named.items() if name in scores]
    return f"{', '.join(shown)} %, NLL {scores['nll']:.3f} on held-out images"


def format_summary(session: Session, run: Run) -> str:
    """Return the parts with their time and scores, what was kept and why, and how to load it."""
    results, lines = run.results, []
    worked, passed = session.clock() - session.began, time.perf_counter() - session.opened
    if passed > BUSY * worked:
        times = f"{format_duration(passed)} for {format_duration(worked)} of work"
        lines.append(f"This took {times}: other programs used the machine.")
    for part in results.parts or []:
        name = PARTS[part["part"]] + (f" ({part['share']:.0%} network)" if part["part"] == "average" else "")
        scores = "" if part["scores"] is None else f"  {_format_scores(part['scores'])}"
        lines.append(
            f"  {name:42s}{format_duration(part['seconds']):>14s}{scores}{'  <- kept' if part['kept'] else ''}"
        )
    epochs = results.updates * recipe.choose_batch_size(results.num_train_images) / results.num_train_images
    lines += filter(None, [autotune.describe_few_epochs(epochs, session.settings.hours)])
    lines += [
        f"Kept: {results.selection}." + (" The training ended with its hours." if results.updates else ""),
        "To load it:",
        "  from pathlib import Path",
        "  from livt_hf.predictions.predict import Predictor",
        f"  predictions = next(Predictor({str(run.folder)!r}).predict([Path('IMAGE.jpg')]))",
    ]
    return "\n".join(lines)


def write_run_report(session: Session, run: Run) -> Path:
    """Write the report of the kept predictions of a run; no image goes through the model again."""
    folder, test = choose_folder(None, str(run.folder), is_comparison=False), session.whole["test"]
    counts = shot_counts(session.whole)
    named = {"model": str(run.folder), "dataset": session.settings.data.dataset, "split": "test"}
    named |= {"thresholds": THRESHOLDS} | provenance()
    with replacing(folder) as writing:
        shutil.rmtree(writing, ignore_errors=True)  # of a report that was cut off
        writing.mkdir(parents=True)
        shutil.copytree(run.folder / FOLDER, writing / FOLDER)
        evaluator = Evaluator(open_source(writing / FOLDER), counts)
        report = evaluator.evaluate(None, **named)
        page = write_report(writing, report, test)
    print(format_evaluation(report, evaluator.info))
    return folder / page.name
