"""Model cards and results files, made from a run's `results.json` and `arguments.yaml`."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path, PurePosixPath

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml

from livt_hf.data.benchmarks import BENCHMARKS
from livt_hf.hub.paper import paper_result

PAPER_URL = "https://arxiv.org/abs/2212.02015"
CITATION = """\
@inproceedings{xu2023livt,
  title     = {Learning Imbalanced Data with Vision Transformers},
  author    = {Xu, Zhengzhuo and Liu, Ruikang and Yang, Shuo and Chai, Zenghao and Yuan, Chun},
  booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)},
  year      = {2023}
}"""

# How a benchmark is called in prose.
TITLES = {
    "glyphs": "glyphs (drawn by livt_hf itself)",
    "cifar10-lt": "CIFAR-10-LT",
    "cifar100-lt": "CIFAR-100-LT",
    "imagenet-lt": "ImageNet-LT",
    "imagenet-bal": "ImageNet-BAL",
    "imagenet-1k": "ImageNet-1K",
    "inat18": "iNaturalist 2018",
    "places-lt": "Places-LT",
}
IMAGENET = BENCHMARKS["imagenet-1k"].hub
# Settings in which the paper's rows agree, by their names in arguments.yaml: a run that differs is another experiment.
PAPER_SETTINGS = {"pooling": ("mean",), "bias": ("bce",), "test_prior": ("uniform", "none")}
PAPER_TAUS = {"places-lt": (1.0, 1.05)}  # 1.05 is the appendix's; everywhere else 1
LOSSES = {"bal_bce": "balanced binary cross-entropy", "bce": "binary cross-entropy", "ce": "cross-entropy"}
LOSSES |= {"bal_ce": "balanced cross-entropy"}
GROUPS = ("many", "medium", "few", "accuracy")
MULTI_LABEL_GROUPS = ("many", "medium", "few", "map")
# metric -> (type in model-index, name in words)
METRICS = {
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
MULTI_LABEL_METRICS = {
    "map": ("mean_average_precision", "Mean average precision"),
    "many": ("mean_average_precision", "Many-shot mean average precision"),
    "medium": ("mean_average_precision", "Medium-shot mean average precision"),
    "few": ("mean_average_precision", "Few-shot mean average precision"),
}


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def number(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def template(name: str) -> str:
    return (files("livt_hf.hub") / "templates" / f"{name}.md").read_text(encoding="utf-8")


def dataset_names(results: Mapping) -> tuple[str, str | None]:
    """The data set in words, and its id on the Hub or None."""
    name = str(results["dataset"])
    if name in BENCHMARKS:
        title, hub_id = TITLES[name], BENCHMARKS[name].hub
    elif name in hub_ids(results):
        title, hub_id = name, name.partition(":")[0]  # what follows is one of its configurations
    else:
        title, hub_id = PurePosixPath(name).name, None
    gamma = results.get("imbalance_factor")
    return (f"{title} (imbalance {gamma:g})" if gamma else title), hub_id


def hub_ids(results: Mapping) -> set[str]:
    """Which names in the results are ids on the Hub: those the run did not find on its disk.

    Nothing is claimed for a run that did not record it.
    """
    names = {results.get(name) for name in ("dataset", "pretrained") if not results.get(f"{name}_local", True)}
    return names - {None, "none"}


def published_split(results: Mapping) -> str | None:
    """The measured split as its publisher calls it.

    `test` is what the paper reports on: the validation images of ILSVRC, whose test labels are secret, and of
    iNaturalist.
    """
    benchmark = BENCHMARKS.get(results["dataset"])
    if results.get("split") == "test" and benchmark and (benchmark.reports_validation or benchmark.hub == IMAGENET):
        return "validation"
    return results.get("split")


def measured(results: Mapping) -> dict[str, tuple[str, str, float]]:
    """The metrics that were measured, with type and name; a group without classes is left out."""
    metrics = results["metrics"]
    known = MULTI_LABEL_METRICS if "map" in metrics else METRICS
    return {key: (*names, metrics[key]) for key, names in known.items() if metrics.get(key) is not None}


def eval_results(results: Mapping, **source) -> list[EvalResult]:
    """The measured metrics for the card's `model-index`."""
    title, hub_id = dataset_names(results)
    return [
        EvalResult(
            task_type="image-classification",
            dataset_type=hub_id or PurePosixPath(str(results["dataset"])).name,
            dataset_name=title,
            dataset_split=published_split(results),
            metric_type=kind,
            metric_name=name,
            metric_value=value,
            **source,
        )
        for kind, name, value in measured(results).values()
    ]


def eval_result_files(results: Mapping) -> dict[str, str]:
    """`.eval_results/*.yaml`, the Hub's newer form of the same numbers; only for data that has an id on the Hub."""
    title, hub_id = dataset_names(results)
    if hub_id is None or results["stage"] != "finetune":
        return {}
    entries = [
        EvalResultEntry(
            dataset_id=hub_id,
            task_id=metric,
            value=value,
            notes=f"{name} on the {published_split(results)} split after training on {title}, as a fraction",
        )
        for metric, (_, name, value) in measured(results).items()
    ]
    text = yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False, allow_unicode=True)
    return {f".eval_results/{hub_id.split('/')[-1]}.yaml": text}


def count_row(results: Mapping) -> list[str]:
    counts = results.get("class_counts") or {}
    gamma = counts.get("imbalance")
    row = [number(results.get("num_train_images")), number(results.get("num_classes"))]
    row += [number(counts.get("max")), number(counts.get("min")), "–" if gamma is None else f"{gamma:g}"]
    return row + [number(counts.get(group)) for group in ("many", "medium", "few")]


def model_card(
    results: Mapping,
    arguments: Mapping,
    repo_id: str,
    *,
    license: str = "apache-2.0",
    counts_picture: str | None = None,
    pictures: Sequence[str | Path] = (),
    form: str = "transformers",
) -> ModelCard:
    """The card of a finished run, as "transformers" or "timm" weights; `pictures` are paths inside the repository."""
    common = dict(repo_id=repo_id, counts=count_row(results), counts_picture=counts_picture, citation=CITATION)
    common |= dict(pictures=[PurePosixPath(picture) for picture in pictures], training=_training(results, arguments))
    common |= dict(title=repo_id.split("/")[-1], terms=None, limits=_limits(results), data=_data(results))
    common["summary"] = _summary(results)
    pretrained = results.get("pretrained")
    base_model = pretrained if pretrained in hub_ids(results) else None  # a local folder is nobody's
    data = card_data(results, repo_id, license=license, base_model=base_model)
    data.library_name = form
    if results["stage"] == "pretrain":
        return render("pretraining", data, evaluation=_pretraining_evaluation(results), **common)
    common |= dict(form=form, balanced=results["loss"].startswith("bal_"))
    return render("classifier", data, **common, **_results_sections(results, arguments))


def render(name: str, data: ModelCardData, /, **context) -> ModelCard:
    """Fill a template; parsing the result checks the metadata (model-index included) as the Hub's client does."""
    card = ModelCard.from_template(data, template_str=template(name), **context)
    return ModelCard(f"{str(card).rstrip()}\n")


def card_data(
    results: Mapping, repo_id: str, *, license: str, source: Mapping | None = None, **extra
) -> ModelCardData:
    classifier = results["stage"] == "finetune"
    hub_id = dataset_names(results)[1]
    tags = ["livt", "long-tailed-recognition", "imbalanced-data", "vit"] + ([] if classifier else ["vit_mae", "mae"])
    return ModelCardData(
        license=license,
        library_name="transformers",
        pipeline_tag="image-classification" if classifier else "image-feature-extraction",
        tags=tags + [f"arxiv:{PAPER_URL.rsplit('/', 1)[-1]}"],
        datasets=[hub_id] if hub_id else None,
        metrics=[next(iter(measured(results).values()))[0]] if classifier else None,
        model_name=repo_id.split("/")[-1],
        eval_results=eval_results(results, **(source or {})) if classifier and results.get("metrics") else None,
        **extra,
    )


def _summary(results: Mapping) -> str:
    size = f"ViT-{str(results['model_size']).capitalize()} ({results['parameters'] / 1e6:.1f} M parameters)"
    title, image_size = dataset_names(results)[0], results["image_size"]
    if results["stage"] == "pretrain":
        return (
            f"A {size} pretrained from scratch on {title} at {image_size} px by masked generative pretraining, the "
            f"first stage of [LiVT]({PAPER_URL}). A stock ViTMAE checkpoint."
        )
    loss = LOSSES.get(results["loss"], results["loss"])
    return (
        f"A {size} for image classification, fine-tuned on {title} at {image_size} px with the {loss} loss "
        f"(`{results['loss']}`, tau {results['tau']:g}) after [LiVT]({PAPER_URL})."
    )


def _data(results: Mapping) -> str:
    title, hub_id = dataset_names(results)
    return f"{title}, training split" + (f", from `{hub_id}`." if hub_id else ".")


def _results_sections(results: Mapping, arguments: Mapping) -> dict:
    metrics, posterior = results["metrics"], results.get("posterior")
    if "map" in metrics:
        rows = [["this model", *(percent(metrics[group]) for group in MULTI_LABEL_GROUPS)]]
        return dict(
            evaluation=_evaluation(results),
            measure="mean average precision",
            accuracy_rows=rows,
            multi_label=True,
            posterior=True,
        )
    rows = [["this model, argmax z (the paper's rule)", *(percent(metrics.get(group)) for group in GROUPS)]]
    calibration = [["softmax(z), the authors' convention", percent(metrics.get("ece")), percent(metrics.get("mce"))]]
    if posterior:
        rows.append(["this model, posterior rule, uniform prior", *(percent(posterior.get(name)) for name in GROUPS)])
        calibration.append(["`probabilities`, uniform prior", percent(posterior["ece"]), percent(posterior["mce"])])
    paper, note = _paper_row(results, arguments), None
    if paper:
        printed = [paper.get(group) for group in GROUPS]
        label = f"the paper, ViT-{paper['model_size'].capitalize()} at {paper['image_size']} px"
        rows.append([label, *("–" if value is None else f"{value:.1f}" for value in printed)])
        note = f"The paper's row is from its table `{paper['table']}`"
        if "pretrain_dataset" in paper:
            note += f", with pretraining on {TITLES[paper['pretrain_dataset']]}"
        note += f". {paper['note']}" if "note" in paper else "."
        if "ece" in paper:
            calibration.append(["the paper, softmax(z)", f"{paper['ece']:.1f}", f"{paper['mce']:.1f}"])
    return dict(
        evaluation=_evaluation(results),
        measure="top-1 accuracy",
        posterior=bool(posterior),
        accuracy_rows=rows,
        paper_note=note,
        calibration_rows=calibration,
    )


def _evaluation(results: Mapping) -> str:
    return (
        f"Measured on the {published_split(results)} split, {number(results['num_images'])} images; epoch "
        f"{results['epoch']:.3g} of {results['epochs']:g}, selection: {results['selection']}; "
        f"{'exponential moving average of the weights' if results['weights'] == 'ema' else 'plain weights'}; "
        f"seed {results['seed']}."
    )


def _paper_row(results: Mapping, arguments: Mapping) -> dict | None:
    """The paper's numbers where this run is the paper's method: two stages, and its pooling, bias and tau."""
    if results.get("pretrained") in (None, "none"):
        return None
    if any(name in arguments and arguments[name] not in values for name, values in PAPER_SETTINGS.items()):
        return None
    taus = PAPER_TAUS.get(results["dataset"], (1.0,))
    if results["loss"].startswith("bal_") and results["tau"] not in taus:  # other losses have none
        return None
    wanted = {name: results.get(name) for name in ("imbalance_factor", "loss", "model_size", "image_size")}
    return paper_result(results["dataset"], **wanted)


def _pretraining_evaluation(results: Mapping) -> str:
    metrics = results["metrics"]
    return (
        f"Reconstruction loss on hidden patches (per-patch normalised pixels, mask ratio {results['mask_ratio']:g}): "
        f"{metrics['loss']:.3f}; predicting zero everywhere gives {metrics['zero_prediction_loss']:.3f}. "
        "The loss says little about classification; `recipes/eval.py` of livt_hf gives a kNN and a linear probe."
    )


def _limits(results: Mapping) -> str:
    lines = []
    if results["stage"] == "pretrain":
        lines.append("This is a starting point, not a classifier: its features are meant to be fine-tuned.")
    else:
        metrics = results["metrics"]
        worst = metrics.get("worst_class_accuracy")
        if "map" not in metrics:
            lines.append("It always names one of its classes, also for pictures of something else.")
        if metrics.get("few") is not None and "map" not in metrics:
            lines.append(f"Few-shot classes are right {percent(metrics['few'])} % of the time: check them before use.")
        if worst is not None:
            lines.append(f"The worst class reaches {percent(worst)} %.")
        lines.append("The numbers were measured on pictures from the same source as the training data.")
    lines.append(f"Trained at {results['image_size']} px; other sizes interpolate positions and were not measured.")
    if results.get("seed") is not None:
        lines.append("One run with one seed.")
    return "\n".join(f"- {line}" for line in lines)


def _training(results: Mapping, arguments: Mapping) -> str:
    names = ("model_size", "epochs", "batch_size", "base_lr", "weight_decay", "layer_decay", "drop_path", "mask_ratio")
    names += ("loss", "tau", "test_prior", "mixup", "cutmix", "seed")
    lines = [f"- `{name}`: {arguments[name]}" for name in names if arguments.get(name) is not None]
    if results.get("pretrained") not in (None, "none"):
        lines.append(f"- started from: `{results['pretrained']}`")
    if results.get("seconds"):
        lines.append(f"- duration: {results['seconds'] / 60:.1f} minutes")
    lines += [f"- {name} {version}" for name, version in (results.get("versions") or {}).items()]
    if results.get("git_revision"):
        lines.append(f"- livt_hf revision: `{results['git_revision']}`")
    return "\n".join(lines) + "\n\nEverything else is in `arguments.yaml`, every step in `log.jsonl`."
