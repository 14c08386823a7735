"""The contents of a published run, composed from a whitelist of files and fields.

Numbers may be published. Text is published only in the fields named here, so a path, token or file name that a record
holds elsewhere stays on this machine.
"""

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from transformers import PreTrainedConfig

from livt_hf.errors import LiVTError
from livt_hf.hub.names import COLUMN_OPTIONS, SELECTION_OPTIONS, find_hub_ids, shorten_path
from livt_hf.predictions.rules import GIVEN, rule_name
from livt_hf.results import Results

# Options of either stage whose values are text; those in PATH_OPTIONS may be paths and are shortened.
TEXT_OPTIONS = (
    *SELECTION_OPTIONS, *COLUMN_OPTIONS, "rule", "group_column", "fold", "model_size", "mixed_precision", "compile",
    "tune", "optimizer", "pooling", "loss", "bias", "head_start", "sampler", "augmentation", "select", "select_metric",
    "solver", "objective", "framing", "precision",
)  # fmt: skip
PATH_OPTIONS = ("dataset", "pretrained", "test_prior", "class_weights")
EVALUATION_FIELDS = ("split", "default_rule", "thresholds", "versions", "git_revision", "rankings", "folds", "classes")
VERSIONS = ("torch", "python", "livt-hf", "torchvision", "transformers", "datasets", "accelerate", "timm")
EVALUATION_TEXTS = ("split", "default_rule", "name", "group", "git_revision", *VERSIONS)
# Text of results.json: the fields that are declared as text, and these of its records.
RESULT_TEXTS = ("solver", "objective", "split", "part", "chosen", "own", "tried", "metric", *VERSIONS)
RESULT_TEXTS += tuple(name for name, kind in get_type_hints(Results).items() if kind in (str, str | None))
CLASS_COLUMNS = ("class", "name", "count", "group", "images", "accuracy", "precision", "recall", "f1", "auroc")
CLASS_COLUMNS += ("average_precision", "confidence")
PROCESSOR_TEXTS = ("image_processor_type", "data_format", "input_data_format", "processor_class")
# Fields of a config besides those that its class declares.
CONFIG_FIELDS = ("architectures", "dtype", "id2label", "label2id", "livit", "long_tail", "model_type", "num_labels")
CONFIG_FIELDS += ("problem_type", "transformers_version", "num_classes", "label_names", "label_descriptions")
CONFIG_FIELDS += ("num_features", "global_pool", "pretrained_cfg")
TIMM_FIELDS = ("architecture", "tag", "num_classes", "input_size", "test_input_size", "min_input_size", "mean", "std")
TIMM_FIELDS += ("interpolation", "crop_pct", "test_crop_pct", "crop_mode", "pool_size", "fixed_input_size", "license")
TIMM_FIELDS += ("first_conv", "classifier", "label_names", "label_descriptions", "custom_load")


def select_numbers(value: Any, texts: Collection[str] = (), name: str = "") -> Any:
    """Return a copy of nested values without text, except in the fields named in `texts`."""
    if isinstance(value, Mapping):
        return {key: select_numbers(item, texts, key) for key, item in value.items() if _is_kept(item, texts, key)}
    if isinstance(value, list | tuple):
        return [select_numbers(item, texts, name) for item in value if _is_kept(item, texts, name)]
    return value


def _is_kept(value: Any, texts: Collection[str], name: str) -> bool:
    return not isinstance(value, str) or name in texts


def public_results(results: Results) -> Results:
    """Return results whose dataset and starting weights are a benchmark, a Hub id, or the last part of a path."""
    kept = select_numbers(dataclasses.asdict(results), RESULT_TEXTS)
    for name in ("dataset", "pretrained"):
        if kept[f"{name}_local"] and set(kept[name] or "") & set("/\\"):
            kept[name] = shorten_path(kept[name])
    return Results(**kept)


def public_arguments(arguments: Mapping, results: Results) -> dict:
    """Return the options of a run: numbers, and text in the fields of the whitelist."""
    hub_ids = find_hub_ids(results)
    kept = select_numbers(arguments, (*TEXT_OPTIONS, *PATH_OPTIONS))
    paths = {n: v for n, v in kept.items() if n in PATH_OPTIONS and isinstance(v, str) and v not in hub_ids}
    return kept | {name: shorten_path(value) for name, value in paths.items() if set(value) & set("/\\")}


def public_evaluation(summary: Mapping, results: Results) -> dict:
    """Return the numbers of an evaluation under the standard decision rules."""

    def standard(rules: Mapping) -> dict:
        return {rule: select_numbers(values) for rule, values in rules.items() if rule_name(rule) != GIVEN}

    kept = {"dataset": public_results(results).dataset}
    kept |= select_numbers({name: summary[name] for name in EVALUATION_FIELDS if name in summary}, EVALUATION_TEXTS)
    kept |= {name: standard(summary[name]) for name in ("rules", "intervals") if name in summary}
    if "shifted" in summary:
        kept["shifted"] = [select_numbers(one) | {"rules": standard(one["rules"])} for one in summary["shifted"]]
    return kept


def public_config(written: Mapping, config: PreTrainedConfig) -> dict:
    """Return the fields of a written config that its class declares, or that serving the model needs."""
    declared = {field.name for field in dataclasses.fields(config)} | set(CONFIG_FIELDS)
    kept = {name: value for name, value in written.items() if name in declared}
    if "pretrained_cfg" in kept:
        kept["pretrained_cfg"] = {n: v for n, v in kept["pretrained_cfg"].items() if n in TIMM_FIELDS}
    return kept


def check_no_secrets(folder: Path, secrets: Collection[str]) -> None:
    """Raise an error if a composed text contains a secret, for instance in a class that is named by a path."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".md", ".json", ".jsonl", ".yaml", ".csv"):
            text = path.read_text(encoding="utf-8")
            found = next((secret for secret in secrets if secret and secret in text), None)
            if found is not None:
                raise LiVTError(
                    f"{path.relative_to(folder)} would publish {found!r}; remove it from the names of classes or "
                    "columns of the run."
                )
