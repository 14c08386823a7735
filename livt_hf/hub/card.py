"""Model cards and results files, rendered from the published records of a run and the head of its model."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path, PurePosixPath

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml
from huggingface_hub.repocard import CardData, RepoCard
from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined

from livt_hf.errors import LiVTError
from livt_hf.hub.names import DATASET_TITLES, dataset_title, find_hub_ids, format_options, split_title
from livt_hf.hub.paper import paper_result
from livt_hf.hub.publication import Publication
from livt_hf.long_tail.config import LongTailConfig
from livt_hf.long_tail.head import LongTailHead
from livt_hf.long_tail.losses import LOSSES, PACKAGED, LossDefinition
from livt_hf.metrics import GROUPS
from livt_hf.predictions.rules import ARGMAX, describe_objective
from livt_hf.results import Results
from livt_hf.text import format_count, format_duration, format_percent

TAGS = ["livt", "long-tailed-recognition", "imbalanced-data"]
PAPER_URL = "https://arxiv.org/abs/2212.02015"
# Options in which the rows of the paper agree: a run with other values is another experiment.
PAPER_OPTIONS = {
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
ACCURACY_COLUMNS = (*GROUPS, "accuracy")
TRADE_OFF_COLUMNS = ("accuracy", "mean_class_accuracy", "macro_f1")
HYPERPARAMETERS = ("model_size", "patch_size", "tune", "epochs", "batch_size", "optimizer", "base_lr", "weight_decay")
HYPERPARAMETERS += ("layer_decay", "drop_path", "keep_ratio", "mask_ratio", "decode_ratio", "loss", "tau")
HYPERPARAMETERS += ("test_prior", "mixup", "cutmix", "seed")
# metric -> (type in model-index, name)
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


def model_card(
    results: Results,
    arguments: Mapping,
    publication: Publication,
    head: LongTailHead | None = None,
    pictures: Sequence[str | Path] = (),
    counts_picture: str | None = None,
) -> ModelCard:
    """Render the card of a finished run.

    Args:
        results: the results as they are published.
        arguments: the options of the run as they are published.
        publication: repository, licence and form of the weights.
        head: the long-tail head, where the model is a classifier.
        pictures: paths of pictures inside the repository.
        counts_picture: path of the picture of class counts inside the repository.

    Returns:
        The card; its metadata were checked as the Hub checks them.
    """
    _check_complete(results)
    publication = publication.licensed(results)
    options = format_options(arguments)
    base_model = results.pretrained if results.pretrained in find_hub_ids(results) else None
    data = card_data(results, publication.name, options, license=publication.license, base_model=base_model)
    data.library_name = publication.form
    context = dict(repo_id=publication.repo_id, title=publication.name, options=options)
    context |= dict(pictures=[PurePosixPath(picture) for picture in pictures], counts_picture=counts_picture)
    context |= dict(hyperparameters={n: arguments[n] for n in HYPERPARAMETERS if arguments.get(n) is not None})
    if results.stage == "finetune":
        context |= dict(form=publication.form, loss=find_loss(results), needs_plugin=needs_plugin(results))
        context |= _describe_outputs(head) | _result_tables(results, arguments)
    return render(results.stage, data, results=results, **context)


def _check_complete(results: Results) -> None:
    """Raise an error if a field is missing that every finished run has recorded."""
    known = vars(results) | results.metrics  # which hold the loss of a pretraining
    needed = ("mask_ratio", "zero_prediction_loss") if results.stage == "pretrain" else ("tau", "epoch", "epochs")
    missing = [n for n in ("model_size", "parameters", "image_size", "loss", *needed) if known.get(n) is None]
    if missing:
        raise LiVTError(f"the results of the run have no {missing[0]}; put back a copy of its results.json.")


@cache
def _environment(*folders: Path) -> Environment:
    loader = ChoiceLoader([FileSystemLoader(folders), PackageLoader("livt_hf.hub")])
    environment = Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters |= {"percent": format_percent, "number": format_count, "duration": format_duration}
    environment.globals |= {"paper_url": PAPER_URL, "dataset_title": dataset_title, "is_vit": is_vit}
    environment.globals |= {"measured_on": describe_split}
    return environment


def render(template: str, data: CardData, kind: type[RepoCard] = ModelCard, *folders: Path, **context) -> RepoCard:
    """Render a template of this package, or of `folders`, and parse it, which checks its metadata as the Hub does."""
    text = _environment(*folders).get_template(f"{template}.md").render(card_data=data.to_yaml(), **context)
    return kind(f"{text.rstrip()}\n")


def is_vit(results: Results) -> bool:
    """Return True if a run trained a ViT of this package, pretrained or fine-tuned, and no other backbone."""
    return results.model_type in (None, "livit", "vit_mae")


def find_loss(results: Results) -> LossDefinition:
    """Return the loss of a run. A loss of the user's own is known once its plugin is loaded."""
    if results.loss not in LOSSES:
        raise LiVTError(
            f"the run was trained with the loss {results.loss!r}, which is not registered; "
            "name the file or module that registers it with --plugin.",
            argument="plugin",
        )
    return LOSSES[results.loss]


def needs_plugin(results: Results) -> bool:
    """Return True if livt_hf can load the model only after the plugin that registers its loss was imported."""
    return results.loss is not None and results.loss not in PACKAGED


def card_data(results: Results, model_name: str, options: str = "", **extra) -> ModelCardData:
    """Return the metadata of a card."""
    classifier = results.stage == "finetune"
    hub_id = dataset_title(results)[1]
    tags = TAGS + (["vit"] if is_vit(results) else [])
    tags += [] if classifier else ["vit_mae", "mae"]
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="image-classification" if classifier else "image-feature-extraction",
        tags=tags + [f"arxiv:{PAPER_URL.rsplit('/', 1)[-1]}"],
        datasets=[hub_id] if hub_id else None,
        metrics=[kind for kind, *_ in _measured_metrics(results).values()][:1] if classifier else None,
        model_name=model_name,
        eval_results=_eval_results(results, options) if classifier else None,
        **extra,
    )


def _measured_metrics(results: Results) -> dict[str, tuple[str, str, float]]:
    """Return type, name and value of each measured metric under the default rule."""
    rule, metrics = next(iter(results.rules.items()))
    titles = MULTI_LABEL_TITLES if "map" in metrics else METRIC_TITLES
    suffix = "" if rule == ARGMAX or "map" in metrics else f", {results.rule_labels[rule]}"
    found = {key: (kind, name + suffix, metrics.get(key)) for key, (kind, name) in titles.items()}
    return {key: metric for key, metric in found.items() if metric[-1] is not None}


def _eval_results(results: Results, options: str) -> list[EvalResult]:
    """Return the measured metrics for the card's `model-index`."""
    title, hub_id = dataset_title(results)
    split = split_title(results)
    return [
        EvalResult(
            task_type="image-classification",
            dataset_type=hub_id or PurePosixPath(results.dataset).name,
            dataset_name=title,
            dataset_split=f"{split}, selected by {options}" if options else split,
            metric_type=kind,
            metric_name=name,
            metric_value=round(value, 4),
        )
        for kind, name, value in _measured_metrics(results).values()
    ]


def eval_result_files(results: Results, arguments: Mapping) -> dict[str, str]:
    """Return `.eval_results/*.yaml`, from which the Hub compares models, by file name.

    There is one only for a split on which others can measure: that of a Hub dataset as it was published.
    """
    title, hub_id = dataset_title(results)
    if hub_id is None or results.stage != "finetune" or results.test_carved or format_options(arguments):
        return {}
    entries = [
        EvalResultEntry(
            dataset_id=hub_id,
            task_id=metric,
            value=round(value, 4),
            notes=f"{name} on {describe_split(results)} after training on {title}, as a fraction",
        )
        for metric, (_, name, value) in _measured_metrics(results).items()
    ]
    text = yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False, allow_unicode=True)
    return {f".eval_results/{hub_id.split('/')[-1]}.yaml": text}


def describe_split(results: Results) -> str:
    """Return the measured split for use in a sentence."""
    if results.test_carved and results.split == "test":
        return "images that were held out of the training split"
    return f"the {split_title(results)} split"


def _describe_outputs(head: LongTailHead) -> dict:
    """Return facts about the meaning of logits and probabilities, which the settings of the head decide."""
    settings, loss = head.settings, head.definition
    calibration = settings.calibration or {}
    return dict(
        tau=settings.tau if loss.balanced else 0.0,
        sigmoid=loss.activation == "sigmoid",
        resampled=settings.seen_counts is not None,
        own_test_prior=settings.test_prior not in (None, "uniform"),
        no_posterior=head.no_posterior,
        calibrated_on=calibration.get("num_images"),
        calibration_split=calibration.get("split"),
        trade_off=_trade_off_rows(settings),
    )


def _trade_off_rows(settings: LongTailConfig) -> dict | None:
    """Describe the deployment prior: its objective, and the trade-off curve in rows of text."""
    found = settings.trade_off
    if found is None:
        return None
    marks: dict[float, list[str]] = {0.0: ["uniform prior"], 1.0: ["training prior"]}
    for objective, exponent in found["exponents"].items():
        marks.setdefault(exponent, []).append(describe_objective(objective))
    rows = [
        [f"{row['exponent']:g}", ", ".join(marks[row["exponent"]]), *_percents(row, TRADE_OFF_COLUMNS)]
        for row in found["curve"]
        if row["exponent"] in marks
    ]
    return found | {"rows": rows}


def _result_tables(results: Results, arguments: Mapping) -> dict:
    """Return the rows of the tables of accuracy and calibration."""
    if "map" in results.metrics:
        rows = [["this model", *_percents(results.metrics, (*GROUPS, "map"))]]
        return dict(multi_label=True, accuracy_rows=rows, calibration_rows=[], paper=None)
    rules = results.rules
    rows = [[f"this model, {results.rule_labels[rule]}", *_percents(m, ACCURACY_COLUMNS)] for rule, m in rules.items()]
    scores = {ARGMAX: "softmax(z), the authors' convention"}
    calibration = [
        [scores.get(rule, f"class probabilities, {results.rule_labels[rule]}"), *_percents(metrics, ("ece", "mce"))]
        for rule, metrics in rules.items()
    ]
    paper = _paper_row(results, arguments)
    if paper:
        printed = fractions(paper)
        label = f"the paper, ViT-{paper['model_size'].capitalize()} at {paper['image_size']} px"
        rows.append([label, *_percents(printed, ACCURACY_COLUMNS)])
        calibration += [["the paper, softmax(z)", *_percents(printed, ("ece", "mce"))]] if "ece" in printed else []
        pretrained_on = DATASET_TITLES.get(paper.get("pretrain_dataset"))
        paper = dict(table=paper["table"], note=paper.get("note"), pretrained_on=pretrained_on)
    return dict(multi_label=False, accuracy_rows=rows, calibration_rows=calibration, paper=paper)


def _percents(metrics: Mapping, names: Sequence[str]) -> list[str]:
    return [format_percent(metrics.get(name)) for name in names]


def fractions(paper: Mapping) -> dict[str, float]:
    """Return the numbers of a row of the paper, which prints percent, as fractions."""
    return {name: round(paper[name] / 100, 4) for name in (*ACCURACY_COLUMNS, "ece", "mce") if name in paper}


def _paper_row(results: Results, arguments: Mapping) -> dict | None:
    """Return the paper's numbers where a run is the paper's method: a ViT in two stages with its options."""
    if results.pretrained in (None, "none") or not is_vit(results):
        return None
    if any(name in arguments and arguments[name] not in values for name, values in PAPER_OPTIONS.items()):
        return None
    taus = PAPER_TAUS.get(results.dataset, (1.0,))
    if find_loss(results).balanced and results.tau not in taus:  # other losses do not use tau
        return None
    wanted = {name: getattr(results, name) for name in ("imbalance_factor", "loss", "model_size", "image_size")}
    return paper_result(results.dataset, **wanted)
