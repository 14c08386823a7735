"""Coverage of intervals, calibration on few images and offers of estimated priors, where the truth is known.

    python recipes/benchmarks/simulations.py [intervals] [calibration] [offers]

Writes recipes/results/statistics.json, in some minutes of one core. Classes are Gaussian in ten dimensions, so
that the posterior of a head that fitted well is known exactly.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from livt_hf.data import exponential_counts
from livt_hf.long_tail.calibration import MIN_IMAGES, apply_calibration, fit_calibration
from livt_hf.long_tail.label_shift import estimate_prior
from livt_hf.long_tail.priors import shift_prior
from livt_hf.predictions.metrics import shot_groups
from livt_hf.predictions.significance import TAILS, bootstrap_intervals

RESULTS = Path(__file__).parents[1] / "results" / "statistics.json"
TEST_SETS = {
    "15 classes of 1 and 15 of 20 images": [1] * 15 + [20] * 15,
    "28 classes of 1 to 20 images": np.geomspace(1, 20, 28).round().astype(int).tolist(),
    "100 classes of 3 images": [3] * 100,
}
NUMBERS = (10, 30, 100, 300, 1000, 3000)  # of images that a prior is estimated from
TRIALS = {10: 60, 100: 8}  # by the number of classes
FRESH = 5000  # images by which an offered prior is judged
Row = dict[str, str | int | float | None]


class GaussianClasses:
    """Classes of known densities, of which training saw the first most often, a hundred times the last."""

    def __init__(self, classes: int, generator: torch.Generator, spread: float = 1.0):
        self.means = spread * torch.randn(classes, 10, generator=generator, dtype=torch.float64)
        self.prior = torch.tensor(exponential_counts(classes, 1000, 100).tolist(), dtype=torch.float64)
        self.prior /= self.prior.sum()
        self.generator = generator

    def draw(self, prior: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """Return log P(j|x) under the training prior of images whose classes follow `prior`, and their labels."""
        labels = torch.multinomial(prior, number, replacement=True, generator=self.generator)
        noise = torch.randn(number, 10, generator=self.generator, dtype=torch.float64)
        density = -0.5 * torch.cdist(self.means[labels] + noise, self.means).square()
        return (density + self.prior.log()).log_softmax(-1), labels


def cover_intervals(trials: int = 150, resamples: int = 300) -> list[Row]:
    """Return how often 95 % intervals of the mean class accuracy hold its expectation.

    Beside ours, the interval that draws images within each class. The accuracy of a class is Beta(3, 2).
    """
    rng, rows = np.random.default_rng(0), []
    for name, sizes in TEST_SETS.items():
        labels, classes = np.repeat(np.arange(len(sizes)), sizes), len(sizes)
        shots, held = shot_groups([10 * size for size in sizes]), {"ours": 0, "within": 0}
        for _ in range(trials):
            accuracy = rng.beta(3, 2, size=classes)
            right = rng.random(len(labels)) < accuracy[labels]
            predictions = np.where(right, labels, (labels + rng.integers(1, classes, len(labels))) % classes)
            recall = np.bincount(labels, right) / sizes
            within = np.quantile((rng.binomial(sizes, recall, (resamples, classes)) / sizes).mean(1), TAILS)
            ours = bootstrap_intervals(labels, predictions, shots, resamples=resamples)["mean_class_accuracy"]
            for key, (low, high) in {"ours": ours, "within": within}.items():
                held[key] += low <= accuracy.mean() <= high
        shares = {"coverage": held["ours"] / trials, "coverage_within_classes": held["within"] / trials}
        rows.append({"test_set": name, "trials": trials} | shares)
    return rows


def calibrate_few_images(trials: int = 8) -> list[Row]:
    """Return the negative log-likelihood before and after calibration, of heads that are exact, or too unsure."""
    rows = []
    for head, power in (("exact", 1.0), ("unsure", 0.5)):
        for number in (5, 20, 50, 100, 200, 500):
            before, after = [], []
            for trial in range(trials):
                world = GaussianClasses(100, torch.Generator().manual_seed(trial))
                test, truth = world.draw(world.prior, 4000)
                held_out, labels = world.draw(world.prior, number)
                test, held_out = ((power * part).log_softmax(-1) for part in (test, held_out))
                before.append(_nll(test, truth))
                if number >= MIN_IMAGES:
                    calibration = fit_calibration(held_out, labels, world.prior)
                    after.append(_nll(apply_calibration(test, calibration, world.prior), truth))
            row = {"head": head, "images": number, "trials": trials, "nll_before": np.mean(before)}
            worst = max(np.subtract(after, before)) if after else None
            rows.append(row | {"nll_after": np.mean(after) if after else None, "largest_loss": worst})
    return rows


def offer_priors() -> list[Row]:
    """Return how often an estimated prior is offered, and what accuracy the offers add to the uniform rule."""
    rows = []
    for classes, trials in TRIALS.items():
        world = GaussianClasses(classes, torch.Generator().manual_seed(classes))
        calibrations = [fit_calibration(*world.draw(world.prior, 1000), world.prior) for _ in range(5)]
        uniform = torch.full_like(world.prior, 1 / classes)
        for name, truth in {"uniform": uniform, "training": world.prior, "reversed": world.prior.flip(0)}.items():
            for number in NUMBERS:
                gains = []
                for trial in range(trials):
                    calibration = calibrations[trial % len(calibrations)]
                    seen = apply_calibration(world.draw(truth, number)[0], calibration, world.prior)
                    estimate = estimate_prior(seen.exp(), world.prior, calibration)
                    if estimate.reliable:
                        fresh, labels = world.draw(truth, FRESH)
                        fresh = apply_calibration(fresh, calibration, world.prior)
                        rules = (shift_prior(fresh, world.prior, prior) for prior in (estimate.prior, uniform))
                        ours, theirs = ((rule.argmax(-1) == labels).double().mean().item() for rule in rules)
                        gains.append(ours - theirs)
                row = {"classes": classes, "truth": name, "images": number, "trials": trials, "offers": len(gains)}
                rows.append(
                    row | {"mean_gain": np.mean(gains) if gains else None, "least_gain": min(gains, default=None)}
                )
    return rows


def _nll(log_posterior: Tensor, labels: Tensor) -> float:
    return -log_posterior.gather(1, labels[:, None]).mean().item()


PARTS = {"intervals": cover_intervals, "calibration": calibrate_few_images, "offers": offer_priors}


def main() -> None:
    """Run the parts that are named, or all, and add them to the results file."""
    torch.set_num_threads(1)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in sys.argv[1:] or PARTS:
        started = time.process_time()
        rows = json.loads(json.dumps(PARTS[name]()), parse_float=lambda text: round(float(text), 4))
        results[name] = {"core_seconds": round(time.process_time() - started), "rows": rows}
        RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
