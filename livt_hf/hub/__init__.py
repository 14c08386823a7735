"""Publishing to the Hugging Face Hub: cards, results files, models and datasets."""

from livt_hf.hub.cards import eval_result_files, model_card
from livt_hf.hub.datasets import Origin, dataset_card, origin_of, publish_dataset
from livt_hf.hub.publication import Publication, PublishError
from livt_hf.hub.publishing import (
    check_space,
    listing,
    prepare_publication,
    prepare_space,
    publish,
    publish_space,
)

__all__ = [
    "Origin",
    "Publication",
    "PublishError",
    "check_space",
    "dataset_card",
    "eval_result_files",
    "listing",
    "model_card",
    "origin_of",
    "prepare_publication",
    "prepare_space",
    "publish",
    "publish_dataset",
    "publish_space",
]
