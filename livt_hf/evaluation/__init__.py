"""Running models over images: metrics under decision rules, probes, predictions for files."""
