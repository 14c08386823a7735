"""The training loop, its checkpoints, rates and machine."""
