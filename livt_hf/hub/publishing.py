"""Publish a finished run to a repository on the Hub, or to a Gradio Space, in one commit each."""

import csv
import json
import logging
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import yaml
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.repocard import SpaceCard, SpaceCardData
from transformers import PreTrainedModel

from livt_hf.classifiers import class_names, get_head, is_multi_label, load_model, load_processor
from livt_hf.conversion import save_timm, to_beit
from livt_hf.errors import LiVTError, did_you_mean
from livt_hf.files import read_record, read_records, replace_text, write_values
from livt_hf.hub.card import TAGS, eval_result_files, find_loss, model_card, needs_plugin, render
from livt_hf.hub.contents import (
    CLASS_COLUMNS,
    PROCESSOR_TEXTS,
    check_no_secrets,
    public_arguments,
    public_config,
    public_evaluation,
    public_results,
    select_numbers,
)
from livt_hf.hub.publication import Publication, asking_the_hub
from livt_hf.metrics import THRESHOLDS
from livt_hf.modeling_livit import LiViTForImageClassification
from livt_hf.predictions.evaluate import upgrade_summary
from livt_hf.processors import to_portable_processor
from livt_hf.reports import files
from livt_hf.reports.classes import class_distribution
from livt_hf.results import Results
from livt_hf.version import __version__

logger = logging.getLogger(__name__)

MAX_SHARD_SIZE = "5GB"
COUNTS_PICTURE = "class_counts.png"
TOLERANCE = 0.02  # between two measurements of one model: batches and machines round differently
# A publication replaces these as a whole: no shard of a larger predecessor, and no picture that is no longer wanted.
REPLACED = ("model.safetensors", "model-", ".eval_results/", "report/", "reconstructions.png")
SDK_VERSION = "6.31.0"  # of Gradio: the newest with which the demo was tested
APP = '''"""The demo of {model}. On your own machine: pip install -r requirements.txt, then python app.py."""

from livt_hf.demo.app import serve, show, start

serve(start([show("{model}")]))
'''


def prepare_publication(run: str | Path, folder: str | Path, publication: Publication) -> Path:
    """Write to `folder` exactly what `publish` would upload.

    A classifier becomes a stock BEiT that plain transformers serves, or a timm model; a pretraining is a stock ViTMAE.
    Everything else is composed from a whitelist (`livt_hf.hub.contents`): results, hyperparameters, training log and
    report in numbers, and the card. Pictures of the dataset's images are added if the publication asks for them.

    Args:
        run: folder of a finished run.
        folder: new or empty folder.
        publication: repository, licence and form.

    Returns:
        The folder.
    """
    run, folder = Path(run), Path(folder)
    results = _read_results(run)
    publication = publication.licensed(results)
    _make_empty(folder)
    model = _write_model(run, folder, results, publication.form)
    head = get_head(model)
    report = _find_report(run, results)
    arguments = public_arguments(read_record(run / "arguments.yaml"), results)
    results = public_results(results)
    _write_records(run, folder, results, arguments)
    if report is not None:
        _write_report(report, folder / "report", results)
    pictures = _copy_pictures(run, folder, report, publication.with_pictures)
    counts = None if head is None else head.settings.class_counts
    if counts:
        class_distribution(counts, folder / COUNTS_PICTURE, class_names(model), biases=not is_multi_label(model))
    card = model_card(results, arguments, publication, head, pictures, COUNTS_PICTURE if counts else None)
    card.save(folder / "README.md")
    for name, text in eval_result_files(results, arguments).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    private = {str(path) for path in (Path.home(), run.resolve().parent) if path != path.parent}
    check_no_secrets(folder, {get_token() or "", *private})
    return folder


def _read_results(run: Path) -> Results:
    """Return the results of a finished run; raise an error where a file is missing that a publication needs."""
    if (run / "fold-1" / "results.json").exists():
        raise LiVTError(
            f"{run} is a cross-validation, which has no model of its own; publish one of its folds, such as "
            f"{run / 'fold-1'}, or a run without --folds.",
            argument="run",
        )
    if not run.exists():
        raise LiVTError(f"{run} does not exist; give the folder of a finished run.{did_you_mean(run)}", argument="run")
    missing = [name for name in ("config.json", "results.json", "arguments.yaml") if not (run / name).is_file()]
    if missing:
        raise LiVTError(
            f"{run} is not a finished run: it has no {', no '.join(missing)}; give the folder of a finished run, or "
            "finish this one with --resume.",
            argument="run",
        )
    return Results.read(run / "results.json")


def _make_empty(folder: Path) -> None:
    """Create a folder, or raise an error if it holds anything."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise LiVTError(f"{folder} is not empty; give an empty or a new folder.", argument="folder")


def _write_model(run: Path, folder: Path, results: Results, form: str) -> PreTrainedModel:
    """Write weights, config and processor in the published form, and return the model of the run."""
    if results.stage == "finetune":
        find_loss(results)  # an unregistered loss is reported before the model asks for it
    model, processor = load_model(str(run)), load_processor(str(run))
    livit = isinstance(model, LiViTForImageClassification)
    if form == "timm":
        if not livit:
            raise LiVTError(
                f"{run} holds a {type(model).__name__}; only a LiViT classifier has a form for timm.", argument="form"
            )
        save_timm(model, folder, processor)
        return model
    published = to_beit(model) if livit else model  # every other model is of a stock class already
    published.save_pretrained(folder, max_shard_size=MAX_SHARD_SIZE)
    processor.save_pretrained(folder)
    write_values(folder / "config.json", public_config(read_record(folder / "config.json"), published.config))
    prepared = folder / "preprocessor_config.json"
    if prepared.exists():  # timm's models have it in their config
        write_values(prepared, select_numbers(to_portable_processor(read_record(prepared)), PROCESSOR_TEXTS))
    return model


def _write_records(run: Path, folder: Path, results: Results, arguments: Mapping) -> None:
    """Write results, hyperparameters and the numbers of the training log."""
    replace_text(folder / "results.json", results.to_json())
    replace_text(folder / "arguments.yaml", yaml.safe_dump(dict(arguments), sort_keys=False, allow_unicode=True))
    if (run / "log.jsonl").exists():
        lines = (json.dumps(select_numbers(line)) + "\n" for line in read_records(run / "log.jsonl"))
        replace_text(folder / "log.jsonl", "".join(lines))


def _copy_pictures(run: Path, folder: Path, report: Path | None, with_images: bool) -> list[Path]:
    """Copy plots, and pictures of the dataset's images where asked for; return their names in the publication."""
    shown = [run / "reconstructions.png"] * with_images
    if report is not None:
        patterns = files.PLOTS + files.PICTURES_OF_IMAGES * with_images
        shown += sorted(path for pattern in patterns for path in report.glob(pattern))
    names = []
    for path in filter(Path.is_file, shown):
        names.append(Path(path.name) if path.parent == run else Path("report", path.name))
        shutil.copyfile(path, folder / names[-1])
    return names


def _write_report(report: Path, folder: Path, results: Results) -> None:
    """Write the numbers of a report, and the names and numbers of its table of classes."""
    folder.mkdir()
    write_values(folder / files.NUMBERS, public_evaluation(read_record(report / files.NUMBERS), results))
    source, target = report / files.CLASSES, folder / files.CLASSES
    if not source.exists():
        return
    with source.open(encoding="utf-8", newline="") as file, target.open("w", encoding="utf-8", newline="") as copy:
        rows = csv.DictReader(file)
        columns = [name for name in rows.fieldnames or () if name in CLASS_COLUMNS]
        table = csv.DictWriter(copy, columns, extrasaction="ignore")
        table.writeheader()
        table.writerows(rows)


def _find_report(run: Path, results: Results) -> Path | None:
    """Return the newest report on the model as it is published: on the same images, with the numbers of its results.

    One from before a calibration, on other images, or with other shot groups would contradict the card.
    """
    reports = files.find_reports(run, files.NUMBERS)
    for path in reports:
        summary = upgrade_summary(read_record(path))
        rules = summary.get("rules", {})
        same_images = (summary.get("dataset"), summary.get("split")) == (results.dataset, results.split)
        same_groups = summary.get("thresholds", THRESHOLDS) == THRESHOLDS
        same_rule = summary.get("default_rule") == results.default_rule
        if results.stage == "pretrain" or same_images and same_groups and same_rule and _agree(rules, results.rules):
            return path.parent
    if reports:
        command = shlex.join(["livt", "eval", str(run)])
        logger.warning("%s has no report on the model as it is now, so none is published; write one: %s", run, command)
    return None


def _agree(rules: Mapping, results: Mapping) -> bool:
    """Return True if two measurements of a model are equal up to rounding."""
    names = ("accuracy", "map", "ece")
    pairs = [(rules[r].get(name), results[r].get(name)) for r in rules.keys() & results.keys() for name in names]
    return bool(pairs) and all(a == b or None not in (a, b) and abs(a - b) < TOLERANCE for a, b in pairs)


def list_files(folder: Path) -> str:
    """Return the files of a publication with their sizes, one per line."""
    sizes = {name: f"{path.stat().st_size:,}" for name, path in _published_files(folder).items()}
    width = max(map(len, sizes.values()))
    return "\n".join(f"{size:>{width}} bytes  {name}" for name, size in sizes.items())


def _published_files(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def publish(run: str | Path, publication: Publication, api: HfApi | None = None) -> CommitInfo:
    """Upload a finished run as one commit: all of it becomes visible at once, or nothing does.

    Args:
        run: folder of a finished run.
        publication: repository, licence and form.
        api: client of the Hub; default: that of the logged-in user.

    Returns:
        The commit.

    Example:
        >>> publish("runs/finetune-birds-base/1", Publication("me/birds", license="mit")).commit_url
        'https://huggingface.co/me/birds/commit/...'
    """
    api = api or HfApi(library_name="livt_hf")
    with tempfile.TemporaryDirectory() as temporary:
        folder = prepare_publication(run, Path(temporary) / "publication", publication)
        logger.info("to the %s repository %s:\n%s", publication.visibility, publication.repo_id, list_files(folder))
        before = None
        with asking_the_hub(
            lambda reason: (
                f"{publication.repo_id} was not published ({reason}): {publication.describe_state(api, before)}. "
                f"The run itself is complete; publish it later with: {publication.command(run)}"
            )
        ):
            before = publication.open(api)
            commit = _upload(api, folder, publication)
    if publication.tag:
        with asking_the_hub(
            lambda reason: (
                f"{publication.repo_id} is published and {publication.visibility} ({commit.commit_url}), but "
                f"the tag {publication.tag} was not set ({reason}); set it with: "
                f"hf repos tag create {publication.repo_id} {publication.tag} --revision {commit.oid}"
            )
        ):
            api.create_tag(publication.repo_id, tag=publication.tag, revision=commit.oid)
    return commit


def _upload(api: HfApi, folder: Path, publication: Publication, repo_type: str = "model") -> CommitInfo:
    """Upload all files of a folder as one commit; `upload_folder` may split them into several."""
    repo_id, files_by_name = publication.repo_id, _published_files(folder)
    existing = api.list_repo_files(repo_id, repo_type=repo_type)
    operations = [CommitOperationAdd(name, path) for name, path in files_by_name.items()]
    stale = [name for name in existing if name.startswith(REPLACED) and name not in files_by_name]
    operations += map(CommitOperationDelete, stale)
    message = f"Publish with livt_hf {__version__}"
    return api.create_commit(repo_id, operations, repo_type=repo_type, commit_message=message)


def check_space(run: str | Path, publication: Publication) -> Results:
    """Return the results of a run; raise an error, before any upload, where no Space can serve its model."""
    results = _read_results(Path(run))
    if publication.form != "transformers":
        raise LiVTError(
            f"a Space serves the transformers form of a model, not {publication.form}; leave --form out.",
            argument="form",
        )
    if needs_plugin(results):
        raise LiVTError(
            f"a Space does not have the plugin that registers the loss {results.loss}; leave --space out.",
            argument="space",
        )
    return results


def prepare_space(run: str | Path, folder: str | Path, publication: Publication) -> Path:
    """Write to `folder` exactly what `publish_space` would upload: an app, its requirements and a card."""
    folder, results = Path(folder), check_space(run, publication)
    _make_empty(folder)
    (folder / "app.py").write_text(APP.format(model=publication.repo_id), encoding="utf-8")
    (folder / "requirements.txt").write_text(f"livt-hf[demo]>={__version__}\n", encoding="utf-8")
    data = SpaceCardData(
        title=publication.name,
        sdk="gradio",
        sdk_version=SDK_VERSION,
        python_version="3.11",
        app_file="app.py",
        license=publication.licensed(results).license,
        models=[publication.repo_id],
        tags=["image-classification"] * (results.stage == "finetune") + TAGS,
    )
    card = render("space", data, SpaceCard, repo_id=publication.repo_id, private=not publication.public)
    card.save(folder / "README.md")
    return folder


def publish_space(run: str | Path, publication: Publication, api: HfApi | None = None) -> CommitInfo:
    """Upload the Space of a model that is published under the same name, as one commit."""
    api, repo_id = api or HfApi(library_name="livt_hf"), publication.repo_id
    with tempfile.TemporaryDirectory() as temporary:
        folder = prepare_space(run, Path(temporary) / "space", publication)
        logger.info("to the %s Space %s:\n%s", publication.visibility, repo_id, list_files(folder))
        with asking_the_hub(
            lambda reason: (
                f"the Space {repo_id} was not published ({reason}), the model is; publish the Space later with: "
                f"{publication.command(run)} --space"
            )
        ):
            publication.open(api, "space")
            return _upload(api, folder, publication, "space")
