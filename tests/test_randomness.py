"""Randomness that belongs to (seed, epoch, image)."""

import random

import numpy as np
import pytest
import torch

from livt_hf.randomness import keyed_rng, keyed_seed, keyed_uniform


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_an_image_gets_the_same_numbers_in_any_batch():
    together = keyed_uniform(0, 3, [5, 9, 1000], 7)
    assert np.array_equal(together[1], keyed_uniform(0, 3, [9], 7)[0])
    assert np.array_equal(together[::-1], keyed_uniform(0, 3, [1000, 9, 5], 7))
    assert np.array_equal(together[1:2, :5], keyed_uniform(0, 3, [9], 5))  # more numbers begin with the same ones


def test_seed_epoch_and_image_each_change_the_numbers():
    base = keyed_uniform(0, 0, [0], 16)
    for other in (keyed_uniform(1, 0, [0], 16), keyed_uniform(0, 1, [0], 16), keyed_uniform(0, 0, [1], 16)):
        assert not np.isclose(base, other).any()


def test_the_numbers_are_uniform_in_zero_to_one_and_uncorrelated():
    numbers = keyed_uniform(0, 0, np.arange(20_000), 4)
    assert numbers.min() >= 0 and numbers.max() < 1
    assert np.abs(np.histogram(numbers, 10, (0, 1))[0] / numbers.size - 0.1).max() < 0.005
    assert np.abs(np.corrcoef(numbers.T) - np.eye(4)).max() < 0.03
    neighbours = np.corrcoef(numbers[:-1, 0], numbers[1:, 0])[0, 1]
    epochs = np.corrcoef(numbers[:, 0], keyed_uniform(0, 1, np.arange(20_000), 4)[:, 0])[0, 1]
    assert abs(neighbours) < 0.03 and abs(epochs) < 0.03


def test_swapping_the_parts_of_a_key_gives_another_seed():
    assert len({keyed_seed(1, 2), keyed_seed(2, 1), keyed_seed(1, 2, 0), keyed_seed(3, 0)}) == 4
    assert 0 <= keyed_seed(1, 2) < 2**32


def test_keyed_rng_seeds_by_the_key_and_leaves_no_trace():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    undisturbed = draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with pytest.raises(KeyError), keyed_rng(0, 5):
        first = draw()
        raise KeyError
    assert draw() == undisturbed
    with keyed_rng(0, 5):
        assert draw() == first
    with keyed_rng(0, 6):
        assert draw() != first
