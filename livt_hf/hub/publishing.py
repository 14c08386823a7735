"""From a finished run to a repository on the Hub, and to a Gradio Space: what is uploaded, in one commit each."""

import logging
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.repocard import SpaceCard, SpaceCardData
from transformers import PreTrainedModel

from livt_hf.classifiers import class_names, get_head, is_multi_label, load_model, load_processor
from livt_hf.conversion import save_timm, to_beit
from livt_hf.errors import LiVTError, did_you_mean
from livt_hf.files import read_record
from livt_hf.hub.cards import TAGS, eval_result_files, model_card, render
from livt_hf.hub.facts import hub_ids, loss_spec, needs_plugin
from livt_hf.hub.publication import Publication, asking_the_hub
from livt_hf.hub.scrubbing import TEXTS, Scrubber, named_places, refuse_secrets
from livt_hf.metrics import THRESHOLDS
from livt_hf.modeling_livit import LiViTForImageClassification
from livt_hf.reports.biases import class_distribution
from livt_hf.reports.comparison import NUMBERS
from livt_hf.reports.evaluation import WITHOUT_IMAGES
from livt_hf.results import EACH_LABEL, Results
from livt_hf.runs import ARGUMENTS, LOG, RESULTS, Run
from livt_hf.text import shell_line
from livt_hf.version import __version__

logger = logging.getLogger(__name__)

MAX_SHARD_SIZE = "5GB"
PICTURES = (".png", ".svg", ".jpg")
COUNTS_PICTURE = "class_counts.png"
MEASURED = Path("report", NUMBERS)
ROUNDED = 0.02  # by how much two measurements of one model may differ
# What a publication replaces as a whole: a smaller model must not leave shards of its predecessor behind, and pictures
# that are no longer asked for must go.
REPLACED = ("model.safetensors", "model-", ".eval_results/", "report/", "reconstructions.png")
SDK_VERSION = "6.31.0"  # of Gradio: the newest in which the demo was tried
APP = '''"""The demo of {model}. On your own machine: pip install -r requirements.txt, then python app.py."""

from livt_hf.demo.app import serve, show, start

serve(start([show("{model}")]))
'''


def _finished_results(run: Path) -> Results:
    """What a run came to; a folder is refused unless everything that a publication is made from is there."""
    if Run(run).fold(1).finished:
        raise LiVTError(
            f"{run} is a cross-validation, which has no model of its own; publish one of its folds, such as "
            f"{Run(run).fold(1).folder}, or a run without --folds."
        )
    if not run.exists():
        raise LiVTError(f"{run} does not exist; give the folder of a finished run.{did_you_mean(run)}")
    missing = [name for name in ("config.json", RESULTS, ARGUMENTS) if not (run / name).is_file()]
    if missing:
        raise LiVTError(
            f"{run} is not a finished run: it has no {', no '.join(missing)}; give the folder of a finished run, or "
            "finish this one with --resume."
        )
    return Run(run).results


def _make_empty(folder: Path) -> None:
    """Make a folder, or be sure that it holds nothing that was not meant to be uploaded."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise LiVTError(f"{folder} is not empty; give an empty or a new folder.")


def prepare_publication(run: str | Path, folder: str | Path, publication: Publication) -> Path:
    """Write to `folder` exactly what `publish` would upload: no optimiser state, no absolute path, no token.

    A classifier becomes a stock BEiT that plain transformers serves, or a timm model; a pretraining is a stock ViTMAE.
    Pictures that are made of images of the dataset are left out unless the publication asks for them.
    """
    run, folder = Path(run), Path(folder)
    results = _finished_results(run)
    publication = publication.licensed(results)
    _make_empty(folder)
    model = _write_model(run, folder, results, publication.form)
    head = get_head(model)
    counts, names = (None, []) if head is None else (head.settings.class_counts, class_names(model))
    records = _chosen_records(run, results, publication.with_pictures)
    _copy_records(run, folder, records, hub_ids(results), names)
    if counts:
        class_distribution(counts, folder / COUNTS_PICTURE, names, biases=not is_multi_label(model))
    # The card is made from the scrubbed copies, so that no path reaches it.
    copies = Run(folder)
    pictures = [name for name in records if name.suffix in PICTURES]
    drawn = COUNTS_PICTURE if counts else None
    card = model_card(copies.results, copies.arguments, publication, head, pictures, drawn)
    card.save(folder / "README.md")
    for name, text in eval_result_files(copies.results, copies.arguments).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    places = (Path.home(), Path.cwd(), run.resolve().parent, folder.resolve())
    private = {str(place) for place in places if place != place.parent}  # the root of a disk is no secret
    refuse_secrets(folder, [get_token() or "", *private])
    return folder


def listing(folder: Path) -> str:
    """The files of a publication with their sizes, one per line."""
    files = _published_files(folder)
    sizes = {name: f"{path.stat().st_size:,}" for name, path in files.items()}
    width = max(map(len, sizes.values()))
    return "\n".join(f"{size:>{width}} bytes  {name}" for name, size in sizes.items())


def _published_files(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def publish(run: str | Path, publication: Publication, api: HfApi | None = None) -> CommitInfo:
    """Upload a finished run as one commit: all of it becomes visible at once, or nothing does."""
    api = api or HfApi(library_name="livt_hf")
    with tempfile.TemporaryDirectory() as temporary:
        folder = prepare_publication(run, Path(temporary) / "publication", publication)
        logger.info("to the %s repository %s:\n%s", publication.visibility, publication.repo_id, listing(folder))
        before = None
        with asking_the_hub(
            lambda why: (
                f"{publication.repo_id} was not published ({why}): {publication.visible(api, before)}. "
                f"The run itself is complete; publish it later with: {publication.command(run)}"
            )
        ):
            before = publication.open(api)
            commit = _upload(api, folder, publication)
    if publication.tag:
        with asking_the_hub(
            lambda why: (
                f"{publication.repo_id} is published and {publication.visibility} ({commit.commit_url}), but "
                f"the tag {publication.tag} was not set ({why}); set it with: "
                f"hf repos tag create {publication.repo_id} {publication.tag} --revision {commit.oid}"
            )
        ):
            api.create_tag(publication.repo_id, tag=publication.tag, revision=commit.oid)
    return commit


def _upload(api: HfApi, folder: Path, publication: Publication, repo_type: str = "model") -> CommitInfo:
    """All files of a folder as one commit: not `upload_folder`, which may make several of it."""
    repo_id, files = publication.repo_id, _published_files(folder)
    there = api.list_repo_files(repo_id, repo_type=repo_type)
    operations = [CommitOperationAdd(name, path) for name, path in files.items()]
    operations += [CommitOperationDelete(name) for name in there if name.startswith(REPLACED) and name not in files]
    message = f"Publish with livt_hf {__version__}"
    return api.create_commit(repo_id, operations, repo_type=repo_type, commit_message=message)


def _write_model(run: Path, folder: Path, results: Results, form: str) -> PreTrainedModel:
    """The weights in the form others can load. They are read for it, so that nothing damaged is published."""
    if results.stage == "finetune":
        loss_spec(results)  # a loss that is not registered is refused before the model asks for it
    model, processor = load_model(str(run)), load_processor(str(run))
    livit = isinstance(model, LiViTForImageClassification)
    if form == "timm":
        if not livit:
            raise LiVTError(f"{run} holds a {type(model).__name__}; only a LiViT classifier has a form for timm.")
        save_timm(model, folder, processor)
    else:
        # Every other model is of a stock class already.
        (to_beit(model) if livit else model).save_pretrained(folder, max_shard_size=MAX_SHARD_SIZE)
        processor.save_pretrained(folder)
    return model


def _chosen_records(run: Path, results: Results, with_pictures: bool) -> dict[Path, Path]:
    """The records and the report of a run: the files by the names that they are published under.

    Without `with_pictures` only files are chosen of which it is known that they show numbers.
    """
    report = _report_on(run, results)
    shown = [] if report is None else sorted(report.glob("*"))
    chosen = [run / name for name in (RESULTS, ARGUMENTS, LOG)]
    chosen += [path for path in shown if any(map(path.match, WITHOUT_IMAGES))]
    if with_pictures:  # everything that a browser shows; the counts picture is drawn anew
        found = [*sorted(run.glob("*")), *shown]
        chosen += [path for path in found if path.suffix in (*PICTURES, ".html") and path.name != COUNTS_PICTURE]
    return {
        (MEASURED.parent / path.name if path.parent == report else path.relative_to(run)): path
        for path in chosen
        if path.is_file()
    }


def _report_on(run: Path, results: Results) -> Path | None:
    """The newest report on the model as it is published: of the same images, and with the numbers of its results.

    One from before a calibration, on other images, or of other shot groups would contradict the card.
    """
    reports = Run(run).reports(MEASURED.name)
    for path in reports:
        summary = read_record(path)
        rules = summary.get("rules", {})
        alike = (summary.get("dataset"), summary.get("split")) == (results.dataset, results.split)
        alike &= summary.get("thresholds", THRESHOLDS) == THRESHOLDS
        alike &= next(iter(rules), None) in (results.headline, EACH_LABEL)
        if results.stage == "pretrain" or alike and _agree(rules, results.rules):
            return path.parent
    if reports:
        command = shell_line(["livt", "eval", run])
        logger.warning("%s has no report on the model as it is now, so none is published; write one: %s", run, command)
    return None


def _agree(rules: Mapping, results: Mapping) -> bool:
    """Whether two measurements of a model are the same, but for what another batch or machine rounds differently."""
    numbers = ("accuracy", "map", "ece")
    pairs = [(rules[r].get(name), results[r].get(name)) for r in rules.keys() & results.keys() for name in numbers]
    return bool(pairs) and all(a == b or None not in (a, b) and abs(a - b) < ROUNDED for a, b in pairs)


def _copy_records(run: Path, folder: Path, files: dict[Path, Path], known: set[str], names: list[str]) -> None:
    """Copy files of a run, texts without the places on this machine that they name."""
    places = named_places(Run(run).arguments, known)
    if MEASURED in files:  # an evaluation may have been told other places than the training
        places |= named_places(read_record(files[MEASURED]), known)
    scrubber = Scrubber(places)
    scrubber = Scrubber(places, known | {name for name in names if scrubber.value(name) != name})
    for name, path in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        if name.suffix in TEXTS:
            scrubber.file(path, folder / name)
        else:
            shutil.copyfile(path, folder / name)


def check_space(run: str | Path, publication: Publication) -> Results:
    """Refuse what no Space can serve, before anything is uploaded. Returns the results of the run."""
    results = _finished_results(Path(run))
    if publication.form != "transformers":
        raise LiVTError(f"a Space serves the transformers form of a model, not {publication.form}; leave --form out.")
    if needs_plugin(results):
        raise LiVTError(f"a Space does not have the plugin that registers the loss {results.loss}; leave --space out.")
    return results


def prepare_space(run: str | Path, folder: str | Path, publication: Publication) -> Path:
    """Write to `folder` exactly what `publish_space` would upload: an app, what it needs, a card. It runs as it is."""
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
    words = {"repo_id": publication.repo_id, "private": not publication.public}
    render("space", data, SpaceCard, **words).save(folder / "README.md")
    return folder


def publish_space(run: str | Path, publication: Publication, api: HfApi | None = None) -> CommitInfo:
    """Upload the Space of a model that is published under the same name, as one commit."""
    api, repo_id = api or HfApi(library_name="livt_hf"), publication.repo_id
    with tempfile.TemporaryDirectory() as temporary:
        folder = prepare_space(run, Path(temporary) / "space", publication)
        logger.info("to the %s Space %s:\n%s", publication.visibility, repo_id, listing(folder))
        with asking_the_hub(
            lambda why: (
                f"the Space {repo_id} was not published ({why}), the model is; publish the Space later with: "
                f"{publication.command(run)} --space"
            )
        ):
            publication.open(api, "space")
            return _upload(api, folder, publication, "space")
