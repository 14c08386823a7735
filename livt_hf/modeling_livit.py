"""LiViT: transformers' ViT with stochastic depth, mean pooling and a head that carries its long-tail loss."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    ViTImageProcessor,
    ViTImageProcessorPil,
)
from transformers import initialization as init
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.models.vit.modeling_vit import ViTEmbeddings, ViTLayer, ViTPreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils.generic import TransformersKwargs, can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from livt_hf.configuration_livit import LiViTConfig
from livt_hf.errors import LiVTError
from livt_hf.long_tail.balance import BalancedClassifier
from livt_hf.long_tail.head import CosineClassifier, LongTailHead, classifier_init_std
from livt_hf.pretrained import CheckpointReader


class LiViTPreTrainedModel(CheckpointReader, ViTPreTrainedModel):
    config: LiViTConfig
    _no_split_modules = ["ViTEmbeddings", "LiViTLayer"]


class LiViTLayer(ViTLayer):
    """ViT layer with stochastic depth: some images, drawn anew for each branch, skip the branch."""

    def __init__(self, config: LiViTConfig, drop_path: float):
        super().__init__(config)
        self.drop_path = drop_path

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Unpack[TransformersKwargs]
    ) -> Tensor:
        def attend(x):
            return self.attention(self.layernorm_before(x), attention_mask, **kwargs)[0]

        x = self._add_branch(attend, hidden_states)
        return self._add_branch(lambda x: self.mlp(self.layernorm_after(x)), x)

    def _add_branch(self, branch: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Add a branch to x; branches that stay are scaled so that the mean is kept."""
        if not self.training or self.drop_path == 0:
            return self.dropout(branch(x)) + x
        stay = 1 - self.drop_path
        kept = x.new_empty(len(x), 1, 1).bernoulli_(stay)
        # What is left out need not be computed. Accelerators and compiled graphs would wait for the number of images.
        eager = x.device.type == "cpu" and not torch.compiler.is_compiling() and not is_functorch_wrapped_tensor(x)
        if eager and kept.any():
            images = kept.flatten().nonzero().flatten()
            return x.index_add(0, images, self.dropout(branch(x[images])).to(x.dtype), alpha=1 / stay)
        return self.dropout(branch(x)) * (kept / stay) + x


class LiViTModel(LiViTPreTrainedModel):
    """LiViT encoder: tokens as `last_hidden_state`, pooled features as `pooler_output`."""

    _keys_to_ignore_on_load_unexpected = [r"^decoder\.", r"^classifier\.", r"pooler\.", r"layernorm\."]

    def __init__(self, config: LiViTConfig):
        super().__init__(config)
        self.embeddings = ViTEmbeddings(config)
        rates = torch.linspace(0, config.drop_path_rate, config.num_hidden_layers, device="cpu").tolist()
        self.layers = nn.ModuleList([LiViTLayer(config, rate) for rate in rates])
        norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        if config.pooling == "mean":
            self.fc_norm = norm
        else:
            self.layernorm = norm
        self.post_init()

    def resize_positions(self, image_size: int) -> None:
        """Change the native resolution, interpolating positions as forward would for an input of that size."""
        if image_size == self.config.image_size:
            return
        self.config.image_size = image_size
        grid = torch.empty(1, self.config.num_patches + 1, self.config.hidden_size, device=self.device)
        positions = self.embeddings.interpolate_pos_encoding(grid, image_size, image_size)
        self.embeddings.position_embeddings = nn.Parameter(positions.detach().clone())
        self.embeddings.image_size = self.embeddings.patch_embeddings.image_size = (image_size, image_size)
        self.embeddings.patch_embeddings.num_patches = self.config.num_patches

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: Tensor,
        kept: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """Encode images.

        Args:
            pixel_values: images (B, C, height, width); pixels around the largest centre of whole patches are left out.
            kept: indices (B, K) of the patches to use of each image, by default all.
            attention_mask: 1 for the tokens (B, 1 + patches) that are attended to, and averaged by mean pooling.
        """
        pixel_values = _crop_to_patches(pixel_values, self.config)
        x = self.embeddings(pixel_values.to(self.dtype), interpolate_pos_encoding=True)  # (B, 1 + patches, D)
        if kept is not None:
            x = torch.cat([x[:, :1], x[:, 1:].take_along_dim(kept[:, :, None], dim=1)], dim=1)  # (B, 1 + K, D)
        weight = None
        if attention_mask is not None:
            if attention_mask.shape != x.shape[:2]:
                raise LiVTError(
                    f"attention_mask has shape {tuple(attention_mask.shape)}; expected one number per token, class "
                    f"token first, {tuple(x.shape[:2])}."
                )
            weight = attention_mask[:, 1:, None].to(x.dtype)  # (B, patches, 1)
            attention_mask = create_bidirectional_mask(self.config, x, attention_mask)
        for layer in self.layers:
            x = layer(x, attention_mask, **kwargs)
        if self.config.pooling == "mean":
            patches = x[:, 1:]
            mean = patches.mean(dim=1) if weight is None else (patches * weight).sum(1) / weight.sum(1).clamp(min=1)
            features = self.fc_norm(mean)  # (B, D)
        else:
            x = self.layernorm(x)
            features = x[:, 0]  # (B, D)
        return BaseModelOutputWithPooling(last_hidden_state=x, pooler_output=features)


class LiViTForImageClassification(BalancedClassifier, LiViTPreTrainedModel):
    """LiViT with a linear classifier. Its loss is that of `config.long_tail`; its logits never contain the bias.

    Example:
        >>> from livt_hf import LiViTConfig
        >>> model = LiViTForImageClassification(LiViTConfig.preset("micro", class_counts=[90, 10])).eval()
        >>> images, labels = torch.zeros(2, 3, 32, 32), torch.tensor([0, 1])
        >>> loss = model(images, labels=labels).loss
        >>> model.probabilities(images, prior="uniform").shape
        torch.Size([2, 2])
    """

    encoder_class = LiViTModel

    def __init__(self, config: LiViTConfig):
        super().__init__(config)
        self.vit = LiViTModel(config)
        linear = CosineClassifier if config.long_tail.normalised_classifier else nn.Linear
        self.classifier = linear(config.hidden_size, config.num_labels)
        self.head = LongTailHead(config)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module):
        if module is self.classifier:
            init.trunc_normal_(module.weight, std=classifier_init_std(module))
            if module.bias is not None:
                init.copy_(module.bias, self.head.initial_classifier_bias())
        elif module is self.head:
            for name, value in module.compute_buffers().items():
                init.copy_(getattr(module, name), value)
        else:
            super()._init_weights(module)

    @can_return_tuple
    def forward(
        self, pixel_values: Tensor, labels: Tensor | None = None, **kwargs: Unpack[TransformersKwargs]
    ) -> ImageClassifierOutput:
        outputs = self.vit(pixel_values, **kwargs)
        features = outputs.pooler_output
        logits = self.classifier(features)  # (B, C)
        if labels is None:
            self.head.note_missing_labels()
        loss = None if labels is None else self.head(logits, labels, features)
        return ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


def _crop_to_patches(pixel_values: Tensor, config: LiViTConfig) -> Tensor:
    """Return the largest centre of images that divides into patches."""
    if pixel_values.ndim != 4 or pixel_values.shape[1] != config.num_channels:
        raise LiVTError(
            f"pixel_values have shape {tuple(pixel_values.shape)}; "
            f"expected (batch, {config.num_channels}, height, width)."
        )
    (height, width), patch = pixel_values.shape[2:], config.patch_size
    if height < patch or width < patch:
        raise LiVTError(f"images of {height}x{width} pixels are smaller than a patch of {patch}; resize them.")
    top, left = height % patch, width % patch
    if not (top or left):
        return pixel_values
    return pixel_values[..., top // 2 : top // 2 + height - top, left // 2 : left // 2 + width - left]


# Old and new key names of ViT checkpoints are the same for us.
register_checkpoint_conversion_mapping("LiViTModel", get_checkpoint_conversion_mapping("ViTModel"), overwrite=True)
AutoConfig.register("livit", LiViTConfig, exist_ok=True)
AutoModel.register(LiViTConfig, LiViTModel, exist_ok=True)
AutoModelForImageClassification.register(LiViTConfig, LiViTForImageClassification, exist_ok=True)
AutoImageProcessor.register(
    LiViTConfig,
    image_processor_classes={"torchvision": ViTImageProcessor, "pil": ViTImageProcessorPil},
    exist_ok=True,
)

__all__ = ["LiViTForImageClassification", "LiViTModel"]
