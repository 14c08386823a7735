"""Publishing to the Hugging Face Hub: cards, results files, models and data sets."""

from livt_hf.hub.cards import eval_result_files, model_card
from livt_hf.hub.datasets import dataset_card, publish_dataset
from livt_hf.hub.publishing import PublishError, prepare_publication, publish

__all__ = [
    "PublishError",
    "dataset_card",
    "eval_result_files",
    "model_card",
    "prepare_publication",
    "publish",
    "publish_dataset",
]
