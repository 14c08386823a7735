"""Exact heads against scikit-learn's logistic regression on the same frozen features and folds.

    python recipes/benchmarks/heads.py --features FOLDER [--datasets hospital plantdoc cifar100-lt glyphs]

Writes recipes/results/heads.json: for each dataset and objective accuracy, mean class accuracy and macro F1 in
percent, the negative log likelihood of the training posterior, and processor seconds of one thread from features to
predictions. The baseline chooses C, and ours the L2 strength and the exponent of the deployment prior, by
cross-validation on the training images. Balanced test sets are weighted to the training distribution, which is what
accuracy, macro F1 and `balanced` are about; mean class accuracy does not depend on it.
"""

import argparse
import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from frozen_features import FeatureSet, load_features, make_hospital
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score, recall_score
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold
from sklearn.preprocessing import StandardScaler

from livt_hf.long_tail.calibration import apply_calibration, fit_calibration
from livt_hf.long_tail.objectives import OBJECTIVES, choose_exponent, decide
from livt_hf.training.exact_head import assign_folds, fit_exact_head

RESULTS = Path(__file__).parents[1] / "results" / "heads.json"
STRENGTHS_C = np.logspace(-5, 1, 7)
HOSPITALS = 6  # made-up exports, whose scores are averaged
FOLDS = 5
Scores = dict[str, float]


def split_outer(name: str, cache: Path) -> list[list[FeatureSet]]:
    """Return the splits of each repetition of a dataset: one train and test split, or five folds."""
    if name == "hospital":
        return [list(split_folds(*make_hospital(seed))) for seed in range(HOSPITALS)]
    loaded = load_features(name, cache)
    if name == "plantdoc":
        return [list(split_folds(loaded.train, loaded.train_labels, None))]
    return [[loaded]]


def split_folds(features: np.ndarray, labels: np.ndarray, groups: np.ndarray | None) -> Iterator[FeatureSet]:
    kind = StratifiedKFold if groups is None else StratifiedGroupKFold
    for train, test in kind(FOLDS, shuffle=True, random_state=1).split(features, labels, groups):
        own = None if groups is None else groups[train]
        yield FeatureSet(features[train], labels[train], features[test], labels[test], own)


def fit_ours(split: FeatureSet, loss: str) -> tuple[dict[str, np.ndarray], np.ndarray, dict]:
    """Return predicted classes for each objective, the log posterior of the test images, and what was chosen."""
    known, labels = np.unique(split.train_labels, return_inverse=True)  # a fold may lack a class
    head = fit_exact_head(split.train, labels, loss=loss, groups=split.groups)
    prior = torch.from_numpy(np.bincount(labels) / len(labels))
    truth, seen = torch.from_numpy(labels), ~head.unseen
    test = torch.from_numpy(split.test) @ head.weight.T + head.bias

    def posterior(logits: torch.Tensor) -> torch.Tensor:
        if loss == "bal_ce":
            return (logits.double() + prior.log()).log_softmax(-1)
        bias = torch.logit(prior) + np.log(len(prior) - 1)
        return torch.nn.functional.logsigmoid(logits.double() + bias)

    out_of_fold, own = posterior(head.out_of_fold), posterior(test)
    calibration = fit_calibration(out_of_fold[seen], truth[seen], prior)
    out_of_fold, own = (apply_calibration(value, calibration, prior) for value in (out_of_fold, own))
    predicted, chosen = {"argmax_z": known[test.argmax(-1).numpy()]}, {"strength": head.strength}
    for objective in OBJECTIVES:
        choice = choose_exponent(out_of_fold, truth, prior, objective, groups=split.groups)
        predicted[objective] = known[decide(own, prior, choice.exponent).numpy()]
        chosen[objective] = choice.exponent
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
    scores = [score(row, labels) for row in out_of_fold]
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


def score(predicted: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None) -> Scores:
    """Return the scores in percent, by scikit-learn."""
    fixed = {"average": "macro", "labels": np.unique(labels), "sample_weight": weights, "zero_division": 0}
    accuracy = 100 * accuracy_score(labels, predicted, sample_weight=weights)
    recall = 100 * recall_score(labels, predicted, **fixed)
    f1 = 100 * f1_score(labels, predicted, **fixed)
    return {"accuracy": accuracy, "mean_class_accuracy": recall, "macro_f1": f1, "balanced": (accuracy + recall) / 2}


def training_weights(split: FeatureSet) -> np.ndarray:
    """Return weights of the test images that give every class its share of the training images."""
    classes = split.train_labels.max() + 1
    train, test = (np.bincount(labels, minlength=classes) for labels in (split.train_labels, split.test_labels))
    return (train / np.maximum(test, 1))[split.test_labels]


def run_method(repetitions: list[list[FeatureSet]], fit) -> dict:
    """Return scores per objective, pooled over folds and averaged over repetitions, with NLL and seconds."""
    rows, likelihoods, seconds, chosen = {}, [], 0.0, []
    for splits in repetitions:
        predicted, weights, labels = [], [], []
        for split in splits:
            began = time.process_time()
            one, posterior, choice = fit(split)
            seconds += time.process_time() - began
            weight = training_weights(split) if len(splits) == 1 else np.ones(len(split.test_labels))
            own = posterior[np.arange(len(weight)), split.test_labels]
            likelihoods.append(-(own * weight).sum() / weight.sum())
            for parts, part in ((predicted, one), (weights, weight), (labels, split.test_labels), (chosen, choice)):
                parts.append(part)
        for name in predicted[0]:
            pooled = np.concatenate([part[name] for part in predicted])
            rows.setdefault(name, []).append(score(pooled, np.concatenate(labels), np.concatenate(weights)))
    mean = {
        name: {key: round(float(np.mean([r[key] for r in values])), 2) for key in values[0]}
        for name, values in rows.items()
    }
    fits = sum(len(splits) for splits in repetitions)
    return {
        "scores": mean,
        "nll": round(float(np.mean(likelihoods)), 4),
        "seconds": round(seconds / fits, 2),
        "chosen": {key: round(float(np.mean([row[key] for row in chosen])), 5) for key in chosen[0]},
    }


METHODS = {
    "exact bal_ce": lambda split: fit_ours(split, "bal_ce"),
    "exact bal_bce": lambda split: fit_ours(split, "bal_bce"),
    "LogisticRegression": lambda split: fit_sklearn(split, None),
    "LogisticRegression balanced": lambda split: fit_sklearn(split, "balanced"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--features", type=Path, required=True, help="folder of cached features")
    parser.add_argument("--datasets", nargs="+", default=["hospital", "plantdoc", "glyphs", "cifar100-lt"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # scikit-learn's, of classes in few folds and of iterations
    for name in options.datasets:
        repetitions = split_outer(name, options.features)
        for method, fit in METHODS.items():
            results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            results.setdefault(name, {})[method] = run_method(repetitions, fit)
            RESULTS.write_text(json.dumps(results, indent=2) + "\n")
            print(name, method, json.dumps(results[name][method]), flush=True)


if __name__ == "__main__":
    main()
