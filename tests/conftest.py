import os
import socket

import pytest
import torch
from accelerate.state import AcceleratorState

if torch.backends.mps.is_available():  # what the tests say is about float32 on a CPU; the Macs of CI have little else
    torch.backends.mps.is_available = torch.accelerator.is_available = lambda: False
    os.environ["ACCELERATE_USE_CPU"] = "1"


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_state_of_another_test():
    """Accelerate keeps its state in classes, so that one test's mixed precision would be the next one's."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    """A test that reaches beyond this machine fails, instead of passing wherever there is a network."""
    connect = socket.socket.connect

    def checked(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise OSError(f"a test tried to reach {address[0]}; tests use no network")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", checked)


@pytest.fixture
def tiny() -> dict[str, int]:
    """Sizes of a ViT that runs in a millisecond: 16 patches of 4 x 4 pixels."""
    return dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4
    )
