"""The examples in docstrings of public functions run."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "name",
    [
        "configuration_livit",
        "conversion",
        "long_tail.balance",
        "long_tail.config",
        "long_tail.losses",
        "modeling_livit",
        "modeling_livit_mae",
        "predictions.record",
        "training.optim",
    ],
)
def test_the_examples_of_a_module_run(name):
    result = doctest.testmod(importlib.import_module(f"livt_hf.{name}"))
    assert result.attempted and not result.failed
