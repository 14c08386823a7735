"""From a finished run to a repository on the Hub: what is uploaded, in which form, in one commit."""

import shlex
import shutil
import tempfile
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, get_token

# The base class of the client's network errors, from whichever of httpx's generations it is built on.
from huggingface_hub.errors import HTTPError
from transformers import AutoImageProcessor

from livt_hf.conversion import save_timm, to_beit
from livt_hf.errors import LiVTError
from livt_hf.hub.cards import eval_result_files, hub_ids, model_card
from livt_hf.hub.scrubbing import refuse_secrets, scrub_file
from livt_hf.modeling_livit import LiViTForImageClassification
from livt_hf.reports.biases import class_distribution
from livt_hf.runs import ARGUMENTS, LOG, RESULTS, Run
from livt_hf.version import __version__

MAX_SHARD_SIZE = "5GB"
PICTURES = (".png", ".svg", ".jpg")
TEXTS = (".md", ".html", ".json", ".jsonl", ".csv", ".yaml", ".txt")
COUNTS_PICTURE = "class_counts.png"
# What a publication replaces as a whole: a smaller model must not leave shards of its predecessor behind.
REPLACED = ("model.safetensors", "model-", ".eval_results/", "report/")


class PublishError(LiVTError):
    """The Hub could not be reached or refused; the run itself is untouched."""


def finished_run(folder: str | Path) -> Run:
    """The run in a folder, refused unless everything a publication is made from is there."""
    missing = [name for name in ("config.json", RESULTS, ARGUMENTS) if not (Path(folder) / name).is_file()]
    if missing:
        raise LiVTError(
            f"{folder} is not a finished run: {', '.join(missing)} missing; finish it, or name its folder."
        )
    return Run(Path(folder))


def prepare_publication(
    run: str | Path, folder: str | Path, repo_id: str, *, license: str = "apache-2.0", form: str = "transformers"
) -> Path:
    """Write to `folder` exactly what `publish` would upload: no optimiser state, no absolute path, no token.

    A classifier becomes a stock BEiT that plain transformers serves (`form="transformers"`) or a timm model ("timm").
    """
    results, run, folder = finished_run(run).results, Path(run), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise LiVTError(f"{folder} is not empty; give an empty or a new folder for the publication.")
    counts = _write_model(run, folder, results["stage"], form)
    known = hub_ids(results)
    for name in (RESULTS, ARGUMENTS, LOG):
        if (run / name).is_file():
            scrub_file(run / name, folder / name, known)
    pictures = [_copy(path, run, folder, known) for path in _report_files(run)]
    if counts:
        class_distribution(counts, folder / COUNTS_PICTURE)
    # The card is made from the scrubbed copies, so that no path reaches it.
    copies = Run(folder)
    card = model_card(
        copies.results,
        copies.arguments,
        repo_id,
        license=license,
        counts_picture=COUNTS_PICTURE if counts else None,
        pictures=[path for path in pictures if path.suffix in PICTURES],
        form=form,
    )
    card.save(folder / "README.md")
    for name, text in eval_result_files(copies.results).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def publish(
    run: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    license: str = "apache-2.0",
    form: str = "transformers",
    tag: str | None = None,
    token: str | None = None,
    endpoint: str | None = None,
) -> CommitInfo:
    """Upload a finished run as one commit: all of it becomes visible at once, or nothing does."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = prepare_publication(run, Path(temporary) / "publication", repo_id, license=license, form=form)
        private_places = [str(Path.home()), str(Path.cwd()), str(Path(run).resolve().parent), temporary]
        refuse_secrets(folder, [token or get_token() or "", *(place for place in private_places if place != "/")])
        api = HfApi(token=token, endpoint=endpoint, library_name="livt_hf")
        try:
            return _upload(api, folder, repo_id, private, tag)
        except (HTTPError, OSError, RuntimeError) as error:
            # All that was asked for, the licence also where it is the default: the command must not change it.
            command = ["python", "recipes/publish.py", str(run), repo_id, "--license", license]
            command += ["--private"] * private + ["--timm"] * (form == "timm") + (["--tag", tag] if tag else [])
            raise PublishError(
                f"{repo_id} was not published ({_reason(error)}). The run is complete; publish it later with: "
                f"{shlex.join(command)}"
            ) from error


def _upload(api: HfApi, folder: Path, repo_id: str, private: bool, tag: str | None) -> CommitInfo:
    api.create_repo(repo_id, private=private, exist_ok=True)
    if private and not api.model_info(repo_id).private:
        raise LiVTError(f"{repo_id} exists and is public; make it private on the Hub first, or choose another name.")
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    stale = [name for name in api.list_repo_files(repo_id) if name.startswith(REPLACED) and name not in paths]
    operations = [CommitOperationAdd(name, path) for name, path in paths.items()]
    operations += [CommitOperationDelete(name) for name in stale]
    # Not upload_folder, which may split a folder into several commits.
    commit = api.create_commit(repo_id, operations, commit_message=f"Publish with livt_hf {__version__}")
    if tag:
        api.create_tag(repo_id, tag=tag, revision=commit.oid)
    return commit


def _reason(error: BaseException) -> str:
    """The innermost cause in one line: a client's own errors wrap the one that tells something."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _write_model(run: Path, folder: Path, stage: str, form: str) -> list[int] | None:
    """The weights in the form others can load; returns the class counts if the model knows them."""
    if stage == "pretrain":
        if form != "transformers":
            raise LiVTError(f"a pretraining run has no {form} form; publish the fine-tuned classifier instead.")
        for pattern in ("config.json", "preprocessor_config.json", "model*.safetensors", "model*.index.json"):
            for path in run.glob(pattern):
                shutil.copyfile(path, folder / path.name)
        return None
    model, processor = LiViTForImageClassification.from_pretrained(run), AutoImageProcessor.from_pretrained(run)
    if form == "timm":
        save_timm(model, folder, processor)
    else:
        to_beit(model).save_pretrained(folder, max_shard_size=MAX_SHARD_SIZE)
        processor.save_pretrained(folder)
    return model.config.long_tail.class_counts


def _report_files(run: Path) -> list[Path]:
    """Pictures of the run and everything readable in its report; nothing else of the folder is looked at."""
    pictures = [path for path in sorted(run.glob("*")) if path.suffix in PICTURES]
    report = [path for path in sorted((run / "report").rglob("*")) if path.suffix in PICTURES + TEXTS]
    return [path for path in pictures + report if path.is_file() and path.name != COUNTS_PICTURE]


def _copy(path: Path, run: Path, folder: Path, known: set[str]) -> Path:
    name = path.relative_to(run)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in TEXTS:
        scrub_file(path, folder / name, known)
    else:
        shutil.copyfile(path, folder / name)
    return name
