import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def tiny() -> dict[str, int]:
    """Sizes of a ViT that runs in a millisecond: 16 patches of 4 x 4 pixels."""
    return dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4
    )
