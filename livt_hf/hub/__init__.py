"""Publishing to the Hugging Face Hub: cards, results files, models and data sets."""

from .cards import eval_result_files, model_card

__all__ = ["eval_result_files", "model_card"]
