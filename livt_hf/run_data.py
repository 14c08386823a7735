"""What a run tells the commands that measure its model: the model, its data, and whether they are still the same."""

from pathlib import Path

from datasets import Dataset, DatasetDict

from livt_hf.data.benchmarks import locate_dataset
from livt_hf.data.labels import digest_of
from livt_hf.data.readers.split_names import SPLIT_FOLDER, SPLIT_OF_WORD
from livt_hf.data.spec import DataSpec
from livt_hf.data.splitting import is_made_split
from livt_hf.errors import LiVTError
from livt_hf.results import Results
from livt_hf.runs import Run


def was_trained_on(model: str, dataset: str) -> bool:
    """Return True if a model is a run here and, by their paths, a dataset contains images of its training.

    A folder for testing or validation in that of the training has none of them.
    """
    run = Run(Path(model))
    if not run.started:
        return False
    one, other = locate_dataset(run.arguments.get("dataset", DataSpec.dataset)), locate_dataset(dataset)
    if one == other or not (isinstance(one, Path) and isinstance(other, Path)):
        return one == other
    if not other.is_relative_to(one):
        return one.is_relative_to(other)
    split = SPLIT_FOLDER.fullmatch(other.relative_to(one).parts[0])
    return split is None or SPLIT_OF_WORD[split[1].lower()] == "train"


def data_spec_from_run(run: Run) -> DataSpec:
    """Return the data that a run was trained on, split as they were in training."""
    if not run.finished:
        raise LiVTError(f"{run.folder} is not a finished run here; name the dataset.", argument="dataset")
    return DataSpec(**{name: value for name, value in run.arguments.items() if name in DataSpec.names()})


def check_split_unseen(model: str, spec: DataSpec, split: str, data: DatasetDict) -> None:
    """Raise an error where a split was split off from images that should not be divided, or no longer in the same way.

    Args:
        model: path of the model, perhaps of a run.
        spec: the data it is measured on; which images are split off depends on all options.
        split: name of the split it is measured on.
        data: the splits.
    """
    if not is_made_split(data, split):
        return
    run, stored = Run(Path(model)), SPLIT_OF_WORD.get(str(data["train"].split))
    names = set(DataSpec.names()) - set(DataSpec.names("may_change_on_resume"))
    same_options = run.finished and all(run.arguments.get(name) == getattr(spec, name) for name in names)
    if not same_options and stored in ("validation", "test"):
        raise LiVTError(
            f"{spec.dataset} has no other split than {stored}, of which a part would be set aside as in training: "
            "pass --split all to measure on all its images."
        )
    if same_options and _has_changed(run.results, data["train"]):
        raise LiVTError(
            f"{spec.dataset} has changed since {model} was trained on it, so training images may be in "
            f"its {split} split: put its images back as they were, measure on others with --dataset OTHER "
            "--split all, or train again."
        )


def _has_changed(results: Results, train: Dataset) -> bool:
    """Return True if a run was trained on other images. A run without a digest tells their number alone."""
    if results.trained_on is None:
        return results.num_train_images not in (None, len(train))
    return results.trained_on != digest_of(train)
