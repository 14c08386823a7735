"""What a run tells the commands that measure its model: the model, its data, and whether they are still the same."""

from pathlib import Path

from datasets import Dataset, DatasetDict

from livt_hf.data.labels import digest_of
from livt_hf.data.readers.split_names import SPLIT_FOLDER, SPLIT_OF_WORD
from livt_hf.data.splitting import is_made_split
from livt_hf.errors import LiVTError
from livt_hf.results import Results
from livt_hf.runs import Run, lent_data, lent_plugin, newest_finished, place_of, runs_folder
from livt_hf.settings import DataSettings, FinetuneSettings


def was_trained_on(model: str, dataset: str) -> bool:
    """Return True if a model is a run here and, by their paths, a dataset contains images of its training.

    A folder for testing or validation in that of the training has none of them.
    """
    run = Run(Path(model))
    if not run.started:
        return False
    one, other = place_of(run.arguments.get("dataset", DataSettings.dataset)), place_of(dataset)
    if one == other or not (isinstance(one, Path) and isinstance(other, Path)):
        return one == other
    if not other.is_relative_to(one):
        return one.is_relative_to(other)
    split = SPLIT_FOLDER.fullmatch(other.relative_to(one).parts[0])
    return split is None or SPLIT_OF_WORD[split[1].lower()] == "train"


def settings_from_run(explicit_options: dict) -> dict:
    """Return what an evaluation takes from a run where no option says so: the model, its data, its plugin.

    The run's own data are divided as they were in training, also where they are named.
    """
    inherited = {}
    if explicit_options.get("model", "auto") == "auto":
        run = newest_finished(FinetuneSettings, folds=None)  # a cross-validation has no model of its own
        if run is None:
            raise LiVTError(f"there is no finished fine-tuning under {runs_folder()}; name a checkpoint with --model.")
        inherited["model"] = str(run.folder)
    else:
        run = Run(Path(explicit_options["model"]))
    if "dataset" not in explicit_options:
        if run.folder.is_dir() and not run.started and not (run.folder / "config.json").exists():
            raise LiVTError(f"{run.folder} holds no model: it has no config.json; name a run or a checkpoint.")
        if not run.finished:
            raise LiVTError(f"{run.folder} is not a finished run here; say what to measure it on with --dataset.")
    if "dataset" not in explicit_options or run.started:
        inherited |= lent_data(run, explicit_options)
    if "plugin" not in explicit_options:
        inherited["plugin"] = lent_plugin(run.folder)
    return inherited


def check_split_unseen(settings, data: DatasetDict) -> None:
    """Raise an error where a split was split off from images that should not be divided, or no longer in the same way.

    `settings` name the model and the split. Which images are split off depends on all of them.
    """
    if not is_made_split(data, settings.split):
        return
    run, stored = Run(Path(settings.model)), SPLIT_OF_WORD.get(str(data["train"].split))
    names = set(DataSettings.names()) - set(DataSettings.names("may_change_on_resume"))
    same_options = run.finished and all(run.arguments.get(name) == getattr(settings, name) for name in names)
    if not same_options and stored in ("validation", "test"):
        raise LiVTError(
            f"{settings.dataset} has no other split than {stored}, of which a part would be set aside as in training: "
            "pass --split all to measure on all its images."
        )
    if same_options and _has_changed(run.results, data["train"]):
        raise LiVTError(
            f"{settings.dataset} has changed since {settings.model} was trained on it, so training images may be in "
            f"its {settings.split} split: put its images back as they were, measure on others with --dataset OTHER "
            "--split all, or train again."
        )


def _has_changed(results: Results, train: Dataset) -> bool:
    """Return True if a run was trained on other images. A run without a digest tells their number alone."""
    if results.trained_on is None:
        return results.num_train_images not in (None, len(train))
    return results.trained_on != digest_of(train)
