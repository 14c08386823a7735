"""Model cards and results files, made from a run's `results.json`, its `arguments.yaml` and the head of its model."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path, PurePosixPath

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml
from huggingface_hub.repocard import CardData, RepoCard

from livt_hf.errors import LiVTError
from livt_hf.hub.facts import (
    TITLES,
    data_choices,
    dataset_names,
    hub_ids,
    is_vit,
    loss_spec,
    needs_plugin,
    published_split,
)
from livt_hf.hub.paper import paper_result
from livt_hf.hub.publication import Publication
from livt_hf.long_tail.head import LongTailHead
from livt_hf.metrics import GROUPS
from livt_hf.results import PAPER, Results
from livt_hf.text import format_count, format_duration, format_percent

TAGS = ["livt", "long-tailed-recognition", "imbalanced-data"]
PAPER_URL = "https://arxiv.org/abs/2212.02015"
CITATION = """\
@inproceedings{xu2023livt,
  title     = {Learning Imbalanced Data with Vision Transformers},
  author    = {Xu, Zhengzhuo and Liu, Ruikang and Yang, Shuo and Chai, Zenghao and Yuan, Chun},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)},
  year      = {2023}
}"""
# Settings in which the paper's rows agree, by their names in arguments.yaml: a run that differs is another experiment.
PAPER_SETTINGS = {
    "tune": (None, "full"),
    "pooling": ("mean",),
    "bias": ("bce",),
    "test_prior": ("uniform", "none"),
    "sampler": ("natural",),
    "class_weights": (None,),
    "normalised_classifier": (False,),
    "drw_start": (None,),
}
PAPER_TAUS = {"places-lt": (1.0, 1.05)}  # 1.05 is the appendix's; everywhere else 1
LOSS_TITLES = {"bal_bce": "balanced binary cross-entropy", "bce": "binary cross-entropy", "ce": "cross-entropy"}
LOSS_TITLES |= {"bal_ce": "balanced cross-entropy"}
EQUAL = "every class is equally frequent"
ACCURACY_COLUMNS = (*GROUPS, "accuracy")
# The settings that a card lists.
TOLD = ("model_size", "patch_size", "tune", "epochs", "batch_size", "optimizer", "base_lr", "weight_decay")
TOLD += ("layer_decay", "drop_path", "keep_ratio", "mask_ratio", "decode_ratio", "loss", "tau", "test_prior", "mixup")
TOLD += ("cutmix", "seed")
# metric -> (type in model-index, name in words)
METRIC_TITLES = {
    "accuracy": ("accuracy", "Top-1 accuracy"),
    "top5": ("accuracy", "Top-5 accuracy"),
    "many": ("accuracy", "Many-shot accuracy"),
    "medium": ("accuracy", "Medium-shot accuracy"),
    "few": ("accuracy", "Few-shot accuracy"),
    "mean_class_accuracy": ("accuracy", "Mean per-class accuracy"),
    "worst_class_accuracy": ("accuracy", "Worst per-class accuracy"),
    "ece": ("ece", "Expected calibration error"),
    "mce": ("mce", "Maximum calibration error"),
}
MULTI_LABEL_TITLES = {"map": ("mean_average_precision", "Mean average precision")} | {
    group: ("mean_average_precision", f"{group.capitalize()}-shot mean average precision") for group in GROUPS
}


def measured(results: Results) -> dict[str, tuple[str, str, float]]:
    """The metrics that were measured, with type and name; a group without classes is left out."""
    rule, metrics = next(iter(results.rules.items()))
    known = MULTI_LABEL_TITLES if "map" in metrics else METRIC_TITLES
    suffix = "" if rule == PAPER else f", {rule}"
    found = {key: (kind, name + suffix, metrics.get(key)) for key, (kind, name) in known.items()}
    return {key: fact for key, fact in found.items() if fact[-1] is not None}


def eval_results(results: Results, chosen: str, **source) -> list[EvalResult]:
    """The measured metrics for the card's `model-index`; `chosen` are the options by which the data were chosen."""
    title, hub_id = dataset_names(results)
    split = published_split(results)
    return [
        EvalResult(
            task_type="image-classification",
            dataset_type=hub_id or PurePosixPath(results.dataset).name,
            dataset_name=title,
            dataset_split=f"{split}, chosen by {chosen}" if chosen else split,
            metric_type=kind,
            metric_name=name,
            metric_value=value,
            **source,
        )
        for kind, name, value in measured(results).values()
    ]


def eval_result_files(results: Results, arguments: Mapping) -> dict[str, str]:
    """`.eval_results/*.yaml`, the Hub's newer form of the same numbers, which it compares with those of other models.

    Only for a split that others can measure on: that of a dataset with an id on the Hub, as it was published.
    """
    title, hub_id = dataset_names(results)
    if hub_id is None or results.stage != "finetune" or results.test_carved or data_choices(arguments):
        return {}
    entries = [
        EvalResultEntry(
            dataset_id=hub_id,
            task_id=metric,
            value=value,
            notes=f"{name} on {_measured_on(results)} after training on {title}, as a fraction",
        )
        for metric, (_, name, value) in measured(results).items()
    ]
    text = yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False, allow_unicode=True)
    return {f".eval_results/{hub_id.split('/')[-1]}.yaml": text}


def count_row(results: Results) -> list[str]:
    counts = results.class_counts or {}
    gamma = counts.get("imbalance")
    row = [format_count(results.num_train_images), format_count(results.num_classes)]
    row += [format_count(counts.get("max")), format_count(counts.get("min")), "-" if gamma is None else f"{gamma:g}"]
    return row + [format_count(counts.get(group)) for group in GROUPS]


def model_card(
    results: Results,
    arguments: Mapping,
    publication: Publication,
    head: LongTailHead | None = None,
    pictures: Sequence[str | Path] = (),
    counts_picture: str | None = None,
) -> ModelCard:
    """The card of a finished run, with the head of its model if that is a classifier.

    The pictures are paths inside the repository.
    """
    _refuse_gaps(results)
    chosen = data_choices(arguments)
    publication = publication.licensed(results)
    common = dict(repo_id=publication.repo_id, title=publication.name, citation=CITATION, terms=None)
    common |= dict(counts=count_row(results), counts_picture=counts_picture, data=_data(results, chosen))
    common |= dict(pictures=[PurePosixPath(picture) for picture in pictures], training=_training(results, arguments))
    common |= dict(summary=_summary(results), limits=_limits(results))
    base_model = results.pretrained if results.pretrained in hub_ids(results) else None  # a local folder is nobody's
    data = card_data(results, publication.name, chosen, license=publication.license, base_model=base_model)
    data.library_name = publication.form
    if results.stage == "pretrain":
        return render("pretraining", data, evaluation=_pretraining_evaluation(results), **common)
    common |= dict(form=publication.form, livit=is_vit(results), **_outputs(head, publication.form))
    common |= dict(timm_inside=results.model_type == "timm_wrapper")
    common |= dict(loss_of_plugin=results.loss if needs_plugin(results) else None)
    return render("classifier", data, **common, **_results_sections(results, arguments))


def _refuse_gaps(results: Results) -> None:
    """Every finished run has said what a card is made of; a file that does not was damaged."""
    said = vars(results) | results.metrics  # where the loss of a pretraining is
    needed = ("mask_ratio", "zero_prediction_loss") if results.stage == "pretrain" else ("tau", "epoch", "epochs")
    needed = ("model_size", "parameters", "image_size", "loss", *needed)
    missing = [name for name in needed if said.get(name) is None]
    if missing:
        raise LiVTError(f"the results of the run do not say its {missing[0]}; put back a copy of its results.json.")


def render(name: str, data: CardData, kind: type[RepoCard] = ModelCard, /, **context) -> RepoCard:
    """Fill a template; parsing the result checks the metadata (model-index included) as the Hub's client does."""
    template = (files("livt_hf.hub") / "templates" / f"{name}.md").read_text(encoding="utf-8")
    return kind(f"{str(kind.from_template(data, template_str=template, **context)).rstrip()}\n")


def card_data(
    results: Results, model_name: str, chosen: str = "", source: Mapping | None = None, **extra
) -> ModelCardData:
    """The metadata of a card; `source` says who measured, where it was not the run itself."""
    classifier = results.stage == "finetune"
    hub_id = dataset_names(results)[1]
    tags = TAGS + (["vit"] if is_vit(results) else [])
    tags += [] if classifier else ["vit_mae", "mae"]
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="image-classification" if classifier else "image-feature-extraction",
        tags=tags + [f"arxiv:{PAPER_URL.rsplit('/', 1)[-1]}"],
        datasets=[hub_id] if hub_id else None,
        metrics=[kind for kind, *_ in measured(results).values()][:1] if classifier else None,
        model_name=model_name,
        eval_results=eval_results(results, chosen, **(source or {})) if classifier else None,
        **extra,
    )


def _summary(results: Results) -> str:
    name = f"ViT-{results.model_size.capitalize()}" if is_vit(results) else results.model_size
    size = f"{name} ({results.parameters / 1e6:.1f} M parameters)"
    title = dataset_names(results)[0]
    if results.stage == "pretrain":
        return (
            f"A {size} pretrained from scratch on {title} at {results.image_size} px by masked generative "
            f"pretraining, the first stage of [LiVT]({PAPER_URL}). It is a stock ViTMAE checkpoint."
        )
    name = f"`{results.loss}`, tau {results.tau:g}" if loss_spec(results).balanced else f"`{results.loss}`"
    loss = f"{LOSS_TITLES[results.loss]} loss ({name})" if results.loss in LOSS_TITLES else f"loss {name},"
    return (
        f"A {size} for image classification, fine-tuned on {title} at {results.image_size} px with the {loss} "
        f"after [LiVT]({PAPER_URL})."
    )


def _data(results: Results, chosen: str) -> str:
    title, hub_id = dataset_names(results)
    uses = {"testing": results.test_carved, "validation": results.validation_carved}
    aside = " and ".join(use for use, carved in uses.items() if carved)
    part = "training split" + (f" without the images that were set aside for {aside}" if aside else "")
    choice = f" Images and labels of all splits were chosen by `{chosen}`." if chosen else ""
    return f"{title}, {part}" + (f", from `{hub_id}`." if hub_id else ".") + choice


def _outputs(head: LongTailHead, form: str) -> dict:
    """What the logits and the probabilities mean, which the settings of the head decide."""
    settings, spec = head.settings, head.definition
    shares = "of the training data" if settings.seen_counts is None else "that the sampler showed in training"
    bias = spec.balanced and settings.tau > 0
    told = dict(bias=bias, sigmoid=spec.activation == "sigmoid", shares=shares, no_posterior=head.no_posterior)
    calibrated_on = None if settings.calibration is None else settings.calibration["num_images"]
    return told | dict(world=_world(head, shares, form), calibrated_on=calibrated_on)


def _world(head: LongTailHead, shares: str, form: str) -> str | None:
    """Where argmax z is right: the share tau of the prior's logarithm that the loss has taken out is not in z."""
    prior, tau = head.settings.test_prior, head.settings.tau if head.definition.balanced else 0.0
    place = "" if form == "timm" else " (`test_prior` in `config.json`)"
    own = prior not in (None, "uniform")
    if head.no_posterior:
        return None
    if tau == 0:
        return f"the classes have the shares {shares}"
    if tau != 1:
        weight = f" q_j^{tau:g}, with q the test prior of the training{place}, and" if own else ","
        return f"class j has a share in proportion to pi_j^{1 - tau:.4g}{weight} pi the class shares {shares}"
    return f"the classes are as frequent as the test prior of the training says{place}" if own else EQUAL


def _results_sections(results: Results, arguments: Mapping) -> dict:
    sections = dict(evaluation=_evaluation(results))
    if "map" in results.metrics:
        rows = [["this model", *_percents(results.metrics, (*GROUPS, "map"))]]
        return sections | dict(measure="mean average precision", accuracy_rows=rows, multi_label=True)
    rows = [[f"this model, {rule}", *_percents(values, ACCURACY_COLUMNS)] for rule, values in results.rules.items()]
    scored = {PAPER: "softmax(z), the authors' convention"}
    calibration = [
        [scored.get(rule, f"class probabilities, {rule}"), *_percents(values, ("ece", "mce"))]
        for rule, values in results.rules.items()
    ]
    paper = _paper_row(results, arguments)
    if paper:
        printed = fractions(paper)
        label = f"the paper, ViT-{paper['model_size'].capitalize()} at {paper['image_size']} px"
        rows.append([label, *_percents(printed, ACCURACY_COLUMNS)])
        if "ece" in printed:
            calibration.append(["the paper, softmax(z)", *_percents(printed, ("ece", "mce"))])
    sections |= dict(measure="top-1 accuracy", accuracy_rows=rows, calibration_rows=calibration)
    return sections | dict(paper_note=_paper_note(paper) if paper else None)


def _percents(metrics: Mapping, names: Sequence[str]) -> list[str]:
    return [format_percent(metrics.get(name)) for name in names]


def fractions(paper: Mapping) -> dict[str, float]:
    """The numbers of a row of the paper, which prints percent."""
    return {name: round(paper[name] / 100, 4) for name in (*ACCURACY_COLUMNS, "ece", "mce") if name in paper}


def _measured_on(results: Results) -> str:
    if results.test_carved and results.split == "test":
        return "images that were set aside from the training split"
    return f"the {published_split(results)} split"


def _evaluation(results: Results) -> str:
    weights = "exponential moving average of the weights" if results.weights == "ema" else "plain weights"
    return (
        f"Measured on {_measured_on(results)} ({format_count(results.num_images)} images) after epoch "
        f"{round(results.epoch, 2):g} of {results.epochs:g}. "
        f"Selection: {results.selection}; {weights}; seed {results.seed}."
    )


def _paper_row(results: Results, arguments: Mapping) -> dict | None:
    """The paper's numbers where this run is the paper's method: a ViT in two stages, and its pooling, bias and tau."""
    if results.pretrained in (None, "none") or not is_vit(results):
        return None
    if any(name in arguments and arguments[name] not in values for name, values in PAPER_SETTINGS.items()):
        return None
    taus = PAPER_TAUS.get(results.dataset, (1.0,))
    if loss_spec(results).balanced and results.tau not in taus:  # other losses do not use tau
        return None
    wanted = {name: getattr(results, name) for name in ("imbalance_factor", "loss", "model_size", "image_size")}
    return paper_result(results.dataset, **wanted)


def _paper_note(paper: Mapping) -> str:
    note = f"The paper's row is from its table `{paper['table']}`"
    if "pretrain_dataset" in paper:
        note += f", with pretraining on {TITLES[paper['pretrain_dataset']]}"
    return note + (f". {paper['note']}" if "note" in paper else ".")


def _pretraining_evaluation(results: Results) -> str:
    metrics = results.metrics
    return (
        f"The reconstruction loss on hidden patches (per-patch normalised pixels, mask ratio {results.mask_ratio:g}) "
        f"is {metrics['loss']:.3f} on held-out images; predicting zero everywhere gives "
        f"{metrics['zero_prediction_loss']:.3f}. This loss says little about classification: `livt eval` of livt_hf "
        "measures the features with a kNN and a linear probe."
    )


def _limits(results: Results) -> str:
    metrics, lines = next(iter(results.rules.values()), {}), []
    if results.stage == "pretrain":
        lines.append("This is a starting point, not a classifier: its features are meant to be fine-tuned.")
    else:
        worst, few = metrics.get("worst_class_accuracy"), metrics.get("few")
        if "map" not in metrics:
            lines.append("It always names one of its classes, also for images of something else.")
            if few is not None:
                lines.append(f"Few-shot classes are right {format_percent(few)} % of the time: check them before use.")
        if worst is not None:
            lines.append(f"The worst class reaches {format_percent(worst)} %.")
        lines.append("The numbers were measured on images from the same source as the training data.")
    other = "other sizes interpolate positions and were" if is_vit(results) else "other sizes were"
    lines.append(f"Trained at {results.image_size} px; {other} not measured.")
    if results.seed is not None:
        lines.append("One run with one seed.")
    return "\n".join(f"- {line}" for line in lines)


def _training(results: Results, arguments: Mapping) -> str:
    lines = [f"- `{name}`: {arguments[name]}" for name in TOLD if arguments.get(name) is not None]
    if results.pretrained not in (None, "none"):
        lines.append(f"- started from: `{results.pretrained}`")
    if results.seconds:
        lines.append(f"- duration: {format_duration(results.seconds)}")
    lines += [f"- {name} {version}" for name, version in (results.versions or {}).items()]
    if results.git_revision:
        lines.append(f"- livt_hf revision: `{results.git_revision}`")
    return "\n".join(lines) + "\n\nEverything else is in `arguments.yaml`, every step in `log.jsonl`."
