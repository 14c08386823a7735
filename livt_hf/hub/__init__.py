"""Publishing to the Hugging Face Hub: cards, results files, models and datasets.

Names are looked up when they are first used.
"""

from livt_hf.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "card": "eval_result_files model_card",
        "datasets": "Origin dataset_card origin_of publish_dataset",
        "publication": "Publication PublishError",
        "publishing": "check_space list_files prepare_publication prepare_space publish publish_space",
    },
)
