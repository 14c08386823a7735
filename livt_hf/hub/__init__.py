"""Publishing to the Hugging Face Hub: cards, results files, models and data sets."""

from .cards import eval_result_files, model_card
from .datasets import dataset_card, publish_dataset
from .publishing import PublishError, prepare_publication, publish

__all__ = [
    "PublishError",
    "dataset_card",
    "eval_result_files",
    "model_card",
    "prepare_publication",
    "publish",
    "publish_dataset",
]
