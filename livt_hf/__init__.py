"""LiVT for the Hugging Face ecosystem: vision transformers trained from scratch on long-tailed images."""

from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    ViTImageProcessor,
    ViTImageProcessorPil,
)

from .configuration_livit import LiViTConfig, pretraining_config
from .modeling_livit import LiViTForImageClassification, LiViTModel
from .modeling_pretraining import LiViTForPreTraining
from .version import __version__

AutoConfig.register("livit", LiViTConfig)
AutoModel.register(LiViTConfig, LiViTModel)
AutoModelForImageClassification.register(LiViTConfig, LiViTForImageClassification)
AutoImageProcessor.register(
    LiViTConfig, image_processor_classes={"torchvision": ViTImageProcessor, "pil": ViTImageProcessorPil}
)

__all__ = [
    "LiViTConfig",
    "LiViTForImageClassification",
    "LiViTForPreTraining",
    "LiViTModel",
    "__version__",
    "pretraining_config",
]
