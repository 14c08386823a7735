"""Exact heads against scikit-learn's logistic regression on the same frozen features and folds.

    python recipes/benchmarks/heads.py --features FOLDER [--datasets hospital plantdoc glyphs cifar100-lt-third]

Writes recipes/results/heads.json: for each dataset and objective accuracy, mean class accuracy and macro F1 in
percent, the negative log likelihood of the training posterior, and processor seconds of one thread from features to
predictions. The baseline chooses C, and ours the L2 strength and the exponent of the deployment prior, by
cross-validation on the training images. Balanced test sets are weighted to the training distribution, which is what
accuracy, macro F1 and `balanced` are about; mean class accuracy does not depend on it. `minus` has the differences to
each baseline at the same objective with standard errors, from paired resamplings of the test images or patients.
`margin` looks at the whole trade-off curve of ours: how far the nearest point falls short of a point of the baseline
in the worst of the three scores (negative), or exceeds it.
"""

import argparse
import dataclasses
import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from frozen_features import FeatureSet, load_features, make_hospital
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold
from sklearn.preprocessing import StandardScaler
from transformers import PreTrainedConfig

from livt_hf.long_tail.calibration import fit_calibration
from livt_hf.long_tail.config import LongTailConfig
from livt_hf.long_tail.head import LongTailHead
from livt_hf.long_tail.objectives import EXPONENTS, OBJECTIVES, choose_exponents, decide, score_predictions
from livt_hf.training.exact_head import assign_folds, fit_exact_head

RESULTS = Path(__file__).parents[1] / "results" / "heads.json"
STRENGTHS_C = np.logspace(-5, 1, 7)
HOSPITALS = range(100, 106)  # seeds of made-up exports, whose scores are averaged
REPLICATES = 200  # resamplings of the test images, for standard errors
THIRD = "-third"  # of the classes, every third: what a baseline of minutes needs seconds for
FOLDS = 5
Scores = dict[str, float]


def split_outer(name: str, cache: Path) -> list[list[FeatureSet]]:
    """Return the splits of each repetition of a dataset: one train and test split, or five folds."""
    if name == "hospital":
        return [list(split_folds(*make_hospital(seed))) for seed in HOSPITALS]
    loaded = load_features(name.removesuffix(THIRD), cache)
    if name.endswith(THIRD):
        kept = loaded.train_labels % 3 == 0, loaded.test_labels % 3 == 0
        train, test = (
            labels[rows] // 3 for labels, rows in zip((loaded.train_labels, loaded.test_labels), kept, strict=True)
        )
        return [[FeatureSet(loaded.train[kept[0]], train, loaded.test[kept[1]], test)]]
    if name == "plantdoc":
        return [list(split_folds(loaded.train, loaded.train_labels, None))]
    return [[loaded]]


def split_folds(features: np.ndarray, labels: np.ndarray, groups: np.ndarray | None) -> Iterator[FeatureSet]:
    kind = StratifiedKFold if groups is None else StratifiedGroupKFold
    for train, test in kind(FOLDS, shuffle=True, random_state=1).split(features, labels, groups):
        own, others = (None if groups is None else groups[rows] for rows in (train, test))
        yield FeatureSet(features[train], labels[train], features[test], labels[test], own, others)


def fit_ours(split: FeatureSet, loss: str) -> tuple[dict[str, np.ndarray], np.ndarray, dict]:
    """Return predicted classes for each objective, the log posterior of the test images, and what was chosen."""
    known, labels = np.unique(split.train_labels, return_inverse=True)  # a fold may lack a class
    solved = fit_exact_head(split.train, labels, loss=loss, groups=split.groups)
    config = LongTailConfig(loss=loss, class_counts=np.bincount(labels).tolist())
    head = LongTailHead(PreTrainedConfig(num_labels=len(known), long_tail=config))
    prior, truth, seen = head.training_prior(), torch.from_numpy(labels), ~solved.unseen
    logits = solved.out_of_fold
    calibration = fit_calibration(
        head.fitted_posterior(logits[seen]), truth[seen], prior, head.fitted_log_odds(logits[seen])
    )
    head.config.long_tail = LongTailConfig(**{**config, "calibration": dataclasses.asdict(calibration)})
    test = torch.from_numpy(split.test) @ solved.weight.T + solved.bias
    out_of_fold, own = head.training_posterior(logits), head.training_posterior(test)
    choices = choose_exponents(out_of_fold, truth, prior, groups=split.groups)
    predicted = {name: known[decide(own, prior, choice.exponent).numpy()] for name, choice in choices.items()}
    predicted["argmax_z"] = known[test.argmax(-1).numpy()]
    predicted |= {f"t={t:g}": known[decide(own, prior, t).numpy()] for t in EXPONENTS}
    chosen = {name: choice.exponent for name, choice in choices.items()} | {"strength": solved.strength}
    return predicted, spread(own.numpy(), known), chosen


def fit_sklearn(split: FeatureSet, class_weight: str | None) -> tuple[dict[str, np.ndarray], np.ndarray, dict]:
    """Return the same of LogisticRegression with C by cross-validation, chosen by the score of each objective."""
    scaler = StandardScaler().fit(split.train)
    train, test, labels = scaler.transform(split.train), scaler.transform(split.test), split.train_labels
    fold = assign_folds(labels, FOLDS, split.groups)
    out_of_fold = np.zeros((len(STRENGTHS_C), len(labels)), dtype=labels.dtype)
    likelihood = np.zeros(len(STRENGTHS_C))
    for number in range(fold.max() + 1):
        model = LogisticRegression(class_weight=class_weight, warm_start=True, max_iter=200)
        out = fold == number
        for index, c in enumerate(STRENGTHS_C):
            model.set_params(C=c).fit(train[~out], labels[~out])
            log_posterior = spread(model.predict_log_proba(train[out]), model.classes_)
            out_of_fold[index, out] = log_posterior.argmax(1)
            likelihood[index] += log_posterior[np.arange(out.sum()), labels[out]].sum()
    scores = [score_predictions(row, labels, int(labels.max()) + 1) for row in out_of_fold]
    model = LogisticRegression(class_weight=class_weight, warm_start=True, max_iter=200)
    fitted = []
    for c in STRENGTHS_C:
        fitted.append(spread(model.set_params(C=c).fit(train, labels).predict_log_proba(test), model.classes_))
    best = {name: int(np.argmax([row[name] for row in scores])) for name in OBJECTIVES}
    predicted = {name: fitted[index].argmax(1) for name, index in best.items()}
    chosen = {name: float(STRENGTHS_C[index]) for name, index in best.items()}
    return predicted, fitted[int(likelihood.argmax())], chosen


def spread(log_posterior: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Return log posteriors (N, C) of all classes; those that a fold lacks get next to nothing."""
    full = np.full((len(log_posterior), 200), -20.0)
    full[:, classes] = np.maximum(log_posterior, -20.0)
    return full


def test_weights(split: FeatureSet, is_fold: bool) -> np.ndarray:
    """Return weights of the test images that give every class its share of the training images; 1 in a fold."""
    if is_fold:
        return np.ones(len(split.test_labels))
    classes = split.train_labels.max() + 1
    train, test = (np.bincount(labels, minlength=classes) for labels in (split.train_labels, split.test_labels))
    return (train / np.maximum(test, 1))[split.test_labels]


def run_method(repetitions: list[list[FeatureSet]], fit) -> dict:
    """Return predictions per objective, pooled over folds, for each repetition, with NLL, seconds and choices."""
    pooled, likelihoods, seconds, chosen = [], [], 0.0, []
    for splits in repetitions:
        parts = []
        for split in splits:
            began = time.process_time()
            predicted, posterior, choice = fit(split)
            seconds += time.process_time() - began
            weight = test_weights(split, len(splits) > 1)
            own = posterior[np.arange(len(weight)), split.test_labels]
            likelihoods.append(-(own * weight).sum() / weight.sum())
            parts.append(predicted)
            chosen.append(choice)
        pooled.append({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
    return {
        "predicted": pooled,
        "nll": round(float(np.mean(likelihoods)), 4),
        "seconds": round(seconds / sum(map(len, repetitions)), 2),
        "chosen": {key: round(float(np.mean([row[key] for row in chosen])), 5) for key in chosen[0]},
    }


def resample(splits: list[FeatureSet], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return labels of the test images of all folds, and their weights (1 + B, N): as they are, then resampled.

    Whole groups are drawn where there are groups.
    """
    labels = np.concatenate([split.test_labels for split in splits])
    weights = np.concatenate([test_weights(split, len(splits) > 1) for split in splits])
    units = np.arange(len(labels))
    if splits[0].test_groups is not None:
        units = np.unique(np.concatenate([split.test_groups for split in splits]), return_inverse=True)[1]
    rng, number = np.random.default_rng(seed), units.max() + 1
    drawn = [np.bincount(rng.integers(number, size=number), minlength=number)[units] for _ in range(REPLICATES)]
    return labels, np.stack([np.ones(len(labels)), *drawn]) * weights


def measure(repetitions: list[list[FeatureSet]], results: dict[str, dict]) -> dict:
    """Return the scores of each method in percent, and differences to the baselines with standard errors."""
    scores: dict[tuple[str, str], list[dict[str, np.ndarray]]] = {}
    for seed, splits in enumerate(repetitions):
        labels, weights = resample(splits, seed)
        for method, result in results.items():
            for name, predicted in result["predicted"][seed].items():
                row = score_predictions(predicted, labels, int(labels.max()) + 1, weights)
                scores.setdefault((method, name), []).append({key: 100 * value for key, value in row.items()})

    def stack(method: str, name: str, metric: str) -> np.ndarray:
        return np.stack([row[metric] for row in scores[method, name]])  # (repetitions, 1 + B)

    def mean(method: str, name: str) -> dict[str, float]:
        return {metric: round(float(stack(method, name, metric)[:, 0].mean()), 2) for metric in METRICS}

    def difference(one: tuple[str, str], other: tuple[str, str], metric: str) -> list[float]:
        gap = stack(*one, metric) - stack(*other, metric)
        error = (gap[:, 1:].var(axis=1).sum() ** 0.5) / len(gap)
        return [round(float(gap[:, 0].mean()), 2), round(float(error), 2)]

    ours, baselines = (tuple(m for m in results if m.startswith(kind)) for kind in ("exact", "Logistic"))
    named = ("argmax_z", *OBJECTIVES)
    rows = {}
    for method, result in results.items():
        rows[method] = {key: value for key, value in result.items() if key != "predicted"}
        rows[method]["scores"] = {name: mean(method, name) for name in named if (method, name) in scores}
    for method in ours:
        rows[method]["curve"] = {f"{t:g}": mean(method, f"t={t:g}") for t in EXPONENTS}
        rows[method]["minus"] = {
            baseline: {
                name: {metric: difference((method, name), (baseline, name), metric) for metric in METRICS}
                for name in OBJECTIVES
            }
            for baseline in baselines
        }
        points = [mean(method, name) for m, name in scores if m == method]
        rows[method]["margin"] = {
            f"{baseline}, {name}": round(max(worst_gap(point, mean(baseline, name)) for point in points), 2)
            for baseline in baselines
            for name in OBJECTIVES
        }
    return rows


def worst_gap(one: Scores, other: Scores) -> float:
    """Return by how much the worst of three scores exceeds another point's."""
    return min(one[metric] - other[metric] for metric in METRICS[:3])


METRICS = ("accuracy", "mean_class_accuracy", "macro_f1", "balanced")
METHODS = {
    "exact bal_ce": lambda split: fit_ours(split, "bal_ce"),
    "exact bal_bce": lambda split: fit_ours(split, "bal_bce"),
    "LogisticRegression": lambda split: fit_sklearn(split, None),
    "LogisticRegression balanced": lambda split: fit_sklearn(split, "balanced"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--features", type=Path, required=True, help="folder of cached features")
    parser.add_argument("--datasets", nargs="+", default=["hospital", "plantdoc", "glyphs", "cifar100-lt-third"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # scikit-learn's, of classes in few folds and of iterations
    for name in options.datasets:
        repetitions = split_outer(name, options.features)
        rows = measure(repetitions, {method: run_method(repetitions, fit) for method, fit in METHODS.items()})
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps(results | {name: rows}, indent=2) + "\n")
        print(name, json.dumps(rows), flush=True)


if __name__ == "__main__":
    main()
