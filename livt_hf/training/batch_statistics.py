"""The running statistics of BatchNorm layers: kept as they are, or estimated again for other weights."""

import contextlib
from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def batch_norms(module: nn.Module) -> dict[str, _BatchNorm]:
    """Return the layers of a module that keep batch statistics, by name."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)}
    return {name: layer for name, layer in layers.items() if layer.track_running_stats}


def freeze_statistics(module: nn.Module) -> None:
    """Keep the running statistics of BatchNorm layers until the next `train()`."""
    for layer in batch_norms(module).values():
        layer.eval()


@contextlib.contextmanager
def estimate_statistics(layers: Iterable[_BatchNorm]) -> Iterator[None]:
    """Replace the statistics of layers by their means over the batches that go through them inside."""
    momenta = {layer: layer.momentum for layer in layers}
    for layer in momenta:
        layer.reset_running_stats()
        layer.momentum = None  # the mean over all batches
        layer.train()
    try:
        yield
    finally:
        for layer, momentum in momenta.items():
            layer.momentum = momentum
            layer.eval()
