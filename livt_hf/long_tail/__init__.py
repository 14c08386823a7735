"""What a long tail asks of a classifier: losses, priors, the head that carries them."""
