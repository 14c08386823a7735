"""The comparison of `livt train` with other tools: its scores and paired tests."""

import json

import numpy as np
import pytest

from livt_hf.recipes.benchmarks import peers, recipe


def test_scores_of_three_images_are_those_one_counts():
    probabilities = np.array([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]])
    row = peers.score(np.log(probabilities), np.array([0, 1, 1]))
    assert (row["right"], row["accuracy"], row["mean_class_accuracy"]) == ("101", 66.67, 75.0)
    assert row["nll"] == pytest.approx(-np.log([0.9, 0.4, 0.8]).mean(), abs=1e-4)
    assert row["ece"] == pytest.approx(100 * (0.1 + 0.6 + 0.2) / 3, abs=1e-2)
    json.dumps(row)


def test_entries_are_paired_with_ours_over_the_seeds_that_both_have():
    def row(entry: str, seed: int, right: str) -> dict:
        return {"dataset": "plantdoc", "minutes": 2, "entry": entry, "seed": seed, "right": right}

    rows = [row("ours", 0, "1111"), row("ours", 1, "1111"), row("trainer", 0, "0001"), row("trainer", 2, "0000")]
    (test,) = peers.compare_with_ours(rows)
    assert (test["entry"], test["seeds"], test["only_ours_right"], test["only_entry_right"]) == ("trainer", [0], 3, 0)
    assert test["p"] == pytest.approx(0.25, abs=0.02)  # three of three by a fair coin, two-sided
    rows += [row("trainer", 1, "0001")]
    (test,) = peers.compare_with_ours(rows)
    assert (test["only_ours_right"], test["p"]) == (6, pytest.approx(0.25, abs=0.02))  # of three images still


def test_variants_of_the_recipe_are_compared_on_random_images_and_on_whole_clusters():
    generator = np.random.default_rng(0)
    cluster = np.repeat(np.arange(6), 10)
    features = 9 * np.eye(6)[cluster] + generator.normal(size=(60, 6))
    labels = np.r_[np.zeros(60, dtype=int), np.ones(5, dtype=int)]  # five images are too few to hold any out
    held_out = recipe.hold_out(labels, np.r_[features, generator.normal(size=(5, 6))])
    (chosen,) = set(cluster[held_out[:60] == 2])
    assert (held_out[:60][cluster == chosen] == 2).all()
    assert (held_out == 1).sum() == 6 and not held_out[60:].any()
