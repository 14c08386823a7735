"""`LiViTForPreTraining`: transformers' ViTMAE, initialised to be trained from scratch, and faster in training."""

import torch
from torch import Tensor, nn
from transformers import ViTMAEConfig, ViTMAEForPreTraining, ViTMAEModel
from transformers import initialization as init
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.vit_mae.modeling_vit_mae import (
    ViTMAEAttention,
    ViTMAEDecoder,
    ViTMAEEmbeddings,
    ViTMAEForPreTrainingOutput,
    ViTMAELayer,
    ViTMAEPreTrainedModel,
    build_2d_sinusoidal_position_embedding,
    eager_attention_forward,
)
from transformers.processing_utils import Unpack
from transformers.utils.generic import TransformersKwargs

from livt_hf.configuration_livit import check_patches, encoder_preset
from livt_hf.errors import LiVTError

_MICRO_DECODER = dict(decoder_hidden_size=96, decoder_num_hidden_layers=2, decoder_num_attention_heads=4)
_MAE_DECODER = dict(decoder_hidden_size=512, decoder_num_hidden_layers=8, decoder_num_attention_heads=16)


def pretraining_config(size: str = "base", **overrides) -> ViTMAEConfig:
    """Return a `ViTMAEConfig` as MAE used it, unlike the stock defaults: eps 1e-6, per-patch normalised pixels."""
    decoder = _MICRO_DECODER if size == "micro" else _MAE_DECODER
    decoder = decoder | {"decoder_intermediate_size": 4 * decoder["decoder_hidden_size"]}
    return ViTMAEConfig(**(encoder_preset(size) | decoder | dict(layer_norm_eps=1e-6, norm_pix_loss=True) | overrides))


def sin_cos_positions(image_size: int, patch_size: int, width: int) -> Tensor:
    """Return MAE's fixed position table, class token first, columns before rows. (1, 1 + patches, D)"""
    grid = image_size // patch_size
    table = build_2d_sinusoidal_position_embedding(grid, grid, embed_dim=width, cls_token=True)
    rows, columns = table.chunk(2, dim=-1)
    return torch.cat([columns, rows], dim=-1).unsqueeze(0)


class _MAEInitialisation:
    """MAE's initialisation; the stock one leaves positions and both tokens at zero and learns no layout."""

    @torch.no_grad()
    def _init_weights(self, module):
        config = self.config
        if isinstance(module, nn.Linear):
            # MAE draws query, key and value as one matrix of three times as many rows, so their bound is smaller.
            attentions = (other for other in self.modules() if isinstance(other, ViTMAEAttention))
            fused = any(module in (a.q_proj, a.k_proj, a.v_proj) for a in attentions)
            init.xavier_uniform_(module.weight, gain=2**-0.5 if fused else 1.0)
            init.zeros_(module.bias)
        elif isinstance(module, nn.Conv2d):
            # Xavier's bound for the linear map of a patch. A view of the weight would not know that it was loaded.
            outputs, inputs = module.weight.flatten(1).shape
            bound = (6 / (inputs + outputs)) ** 0.5
            init.uniform_(module.weight, -bound, bound)
            bound = inputs**-0.5  # torch's default, which MAE leaves
            init.uniform_(module.bias, -bound, bound)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, ViTMAEEmbeddings):
            table = sin_cos_positions(config.image_size, config.patch_size, config.hidden_size)
            init.copy_(module.position_embeddings, table)
            init.normal_(module.cls_token, std=config.initializer_range)
        elif isinstance(module, ViTMAEDecoder):
            table = sin_cos_positions(config.image_size, config.patch_size, config.decoder_hidden_size)
            init.copy_(module.decoder_pos_embed, table)
            init.normal_(module.mask_token, std=config.initializer_range)


class PatchProjection(nn.Conv2d):
    """Projection of single patches (N, C, p, p) to (N, D, 1, 1); on whole images it is the convolution."""

    def forward(self, pixels: Tensor) -> Tensor:
        if pixels.shape[-2:] != self.kernel_size:
            return super().forward(pixels)
        # The kernel as a matrix over a patch's (row, column, channel) pixels.
        kernel = self.weight.permute(0, 2, 3, 1).flatten(1)
        return nn.functional.linear(pixels.permute(0, 2, 3, 1).flatten(1), kernel, self.bias)[:, :, None, None]


class LiViTMAEEmbeddings(ViTMAEEmbeddings):
    """Embeddings that can be given the visible patches only."""

    def forward(self, pixel_values: Tensor, *args, visible: Tensor | None = None, **kwargs):
        """Embed images as stock does, or patches (B, visible, p * p * C) at the places `visible` (B, visible)."""
        if visible is None:
            return super().forward(pixel_values, *args, **kwargs)
        side, table = self.patch_size, self.position_embeddings
        pixels = pixel_values.flatten(0, 1).unflatten(1, (side, side, -1)).permute(0, 3, 1, 2)
        x = self.patch_embeddings.projection(pixels).view(*visible.shape, -1) + table[0, 1:][visible]
        cls_token = (self.cls_token + table[:, :1]).expand(len(x), -1, -1)
        return torch.cat([cls_token, x.to(cls_token.dtype)], dim=1)  # (B, 1 + visible, D)


class LiViTMAEModel(_MAEInitialisation, ViTMAEModel):
    """Encoder of `LiViTForPreTraining`."""

    def __init__(self, config: ViTMAEConfig):
        super().__init__(config)
        # Built by stock, so that random numbers are drawn in its order. Adapters and FSDP need what a module
        # computes to be in its forward.
        self.embeddings.__class__ = LiViTMAEEmbeddings
        self.embeddings.patch_embeddings.projection.__class__ = PatchProjection


class LastDecoderLayer(ViTMAELayer):
    """Decoder block that can be run for its last tokens; the others are keys and values only."""

    def forward(self, hidden_states: Tensor, *args, tail: int | None = None, **kwargs) -> Tensor:
        if tail is None:
            return super().forward(hidden_states, *args, **kwargs)
        attention, x = self.attention, hidden_states
        normed = self.layernorm_before(x)

        def heads(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)

        attend = ALL_ATTENTION_FUNCTIONS.get_interface(attention.config._attn_implementation, eager_attention_forward)
        query, key, value = attention.q_proj(normed[:, -tail:]), attention.k_proj(normed), attention.v_proj(normed)
        dropout = attention.attention_dropout if attention.training else 0.0
        attended, _ = attend(
            attention, heads(query), heads(key), heads(value), None, dropout=dropout, scaling=attention.scaling
        )
        x = x[:, -tail:] + self.dropout(attention.o_proj(attended.flatten(2)))
        return x + self.dropout(self.mlp(self.layernorm_after(x)))


class LiViTMAEDecoder(ViTMAEDecoder):
    """Decoder that can predict the masked patches only."""

    def __init__(self, config: ViTMAEConfig, num_patches: int):
        super().__init__(config, num_patches)
        self.decoder_layers[-1].__class__ = LastDecoderLayer

    def forward(self, hidden_states: Tensor, *args, visible: Tensor | None = None, masked=None, **kwargs):
        """Decode as stock does, or predict the patches `masked` (B, M) from the tokens of the patches `visible`.

        Tokens stay in (class, visible, masked) order then, which attention ignores.
        """
        if visible is None:
            return super().forward(hidden_states, *args, **kwargs)
        x = self.decoder_embed(hidden_states)
        mask_tokens = self.mask_token.expand(*masked.shape, -1)
        table = self.decoder_pos_embed[0]  # (1 + patches, D)
        positions = torch.cat([torch.zeros_like(visible[:, :1]), visible + 1, masked + 1], dim=1)
        x = torch.cat([x, mask_tokens], dim=1) + table[positions]
        for layer in self.decoder_layers[:-1]:
            x = layer(x)
        x = self.decoder_layers[-1](x, tail=masked.shape[1])
        return self.decoder_pred(self.decoder_norm(x))  # (B, M, p * p * C)


class LiViTForPreTraining(_MAEInitialisation, ViTMAEForPreTraining):
    """Masked generative pretraining. Its checkpoints are stock ViTMAE checkpoints.

    In training mode only what the loss needs is computed: pixels of visible patches are projected, and the last
    decoder block, the prediction and the loss see masked tokens only (exact, but no `logits`). `decode_ratio` below 1
    decodes a random share of the masked patches: faster, and another objective. Forward is stock in evaluation mode,
    and where hidden states or attentions are returned.

    Example:
        >>> model = LiViTForPreTraining(pretraining_config("micro"), decode_ratio=0.5)
        >>> loss = model(torch.rand(2, 3, 32, 32)).loss
    """

    accepts_loss_kwargs = False  # as of BalancedClassifier
    _no_split_modules = ["LiViTMAEEmbeddings", "ViTMAELayer", "LiViTMAEDecoder"]

    def __init__(self, config: ViTMAEConfig, decode_ratio: float = 1.0):
        _check_config(config, decode_ratio)
        ViTMAEPreTrainedModel.__init__(self, config)
        self.decode_ratio = decode_ratio
        self.vit = LiViTMAEModel(config)
        self.decoder = LiViTMAEDecoder(config, num_patches=self.num_patches)
        self.post_init()

    @property
    def num_visible(self) -> int:
        return int(self.num_patches * (1 - self.config.mask_ratio))

    @property
    def num_patches(self) -> int:
        return self.vit.embeddings.patch_embeddings.num_patches

    def set_attn_implementation(self, attn_implementation, **kwargs):
        super().set_attn_implementation(attn_implementation, **kwargs)
        self.decoder.config._attn_implementation = self.config._attn_implementation  # a copy the stock setter misses

    def save_pretrained(self, save_directory, **kwargs):
        """Save a stock ViTMAE checkpoint, which names no class that stock transformers lacks."""
        super().save_pretrained(save_directory, **kwargs)
        self.config.architectures = ["ViTMAEForPreTraining"]
        if kwargs.get("is_main_process", True):
            self.config.save_pretrained(save_directory)

    def forward(
        self, pixel_values: Tensor, noise: Tensor | None = None, **kwargs: Unpack[TransformersKwargs]
    ) -> ViTMAEForPreTrainingOutput:
        """Compute the reconstruction loss; patches with the smallest `noise` (B, patches) stay visible."""
        _check_pixels(pixel_values, self.config)
        if noise is not None and noise.shape != (len(pixel_values), self.num_patches):
            raise LiVTError(
                f"noise has shape {tuple(noise.shape)}; expected one number per patch, "
                f"({len(pixel_values)}, {self.num_patches})."
            )
        intermediate = ("output_hidden_states", "output_attentions")
        if not self.training or any(kwargs.get(name, getattr(self.config, name)) for name in intermediate):
            return super().forward(pixel_values, noise=noise, **kwargs)
        if noise is None:
            noise = torch.rand(len(pixel_values), self.num_patches, device=pixel_values.device)
        order = noise.argsort(dim=1)  # (B, patches)
        visible = order[:, : self.num_visible]
        masked = order[:, self.num_visible :]
        masked = masked[:, : max(1, round(self.decode_ratio * masked.shape[1]))]
        patches = self.patchify(pixel_values)  # (B, patches, p * p * 3)
        latent = self._encode(patches, visible, **kwargs)
        prediction = self.decoder(latent, visible=visible, masked=masked).float()  # (B, masked, p * p * 3)
        target = self._target(patches.take_along_dim(masked[:, :, None], dim=1).float())
        return ViTMAEForPreTrainingOutput(loss=((prediction - target) ** 2).mean())

    def features(self, pixel_values: Tensor) -> Tensor:
        """Return the mean patch token of the encoder on whole images. (B, D)"""
        everything = torch.arange(self.num_patches, device=pixel_values.device).expand(len(pixel_values), -1)
        return self._encode(self.patchify(pixel_values), everything)[:, 1:].mean(dim=1)

    def _encode(self, patches: Tensor, visible: Tensor, **kwargs) -> Tensor:
        """Encode the class token and the visible patches. (B, 1 + visible, D)"""
        x = self.vit.embeddings(patches.take_along_dim(visible[:, :, None], dim=1), visible=visible)
        for layer in self.vit.layers:
            x = layer(x, None, **kwargs)
        return self.vit.layernorm(x)

    @torch.no_grad()
    def reconstruct(self, pixel_values: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (masked, reconstruction) pictures in the space of `pixel_values`; masked patches are 0 in the first.

        Under per-patch normalisation the prediction lacks mean and contrast of each patch; the true ones are used.
        """
        was_training = self.training
        outputs = self.eval()(pixel_values, noise=noise)
        self.train(was_training)
        patches = self.patchify(pixel_values)
        prediction = outputs.logits
        if self.config.norm_pix_loss:
            mean, std = _patch_statistics(patches)
            prediction = prediction * std + mean
        hidden = outputs.mask.unsqueeze(-1).to(patches)  # (B, patches, 1)
        masked = self.unpatchify(patches * (1 - hidden))
        return masked, self.unpatchify(patches * (1 - hidden) + prediction * hidden)

    @torch.no_grad()
    def zero_prediction_loss(self, pixel_values: Tensor, mask: Tensor) -> Tensor:
        """Return the loss of predicting zero on the patches of `mask` (1 is masked), which learning must beat."""
        target = self._target(self.patchify(pixel_values))
        return (target.pow(2).mean(-1) * mask).sum() / mask.sum()

    def _target(self, patches: Tensor) -> Tensor:
        """Return the target of each patch."""
        if not self.config.norm_pix_loss:
            return patches
        mean, std = _patch_statistics(patches)
        return (patches - mean) / std

    def no_weight_decay(self) -> set[str]:
        """Return the names of 1-D tensors, which include every bias."""
        return {name for name, parameter in self.named_parameters() if parameter.ndim <= 1}


def _patch_statistics(patches: Tensor) -> tuple[Tensor, Tensor]:
    return patches.mean(dim=-1, keepdim=True), (patches.var(dim=-1, keepdim=True) + 1e-6).sqrt()


def _check_config(config: ViTMAEConfig, decode_ratio: float) -> None:
    check_patches(config)
    patches = (config.image_size // config.patch_size) ** 2
    visible = int(patches * (1 - config.mask_ratio))
    if not 0 < visible < patches:
        raise LiVTError(
            f"mask_ratio {config.mask_ratio} leaves {visible} of {patches} patches visible; both kinds are needed."
        )
    if not 0 < decode_ratio <= 1:
        raise LiVTError(f"decode_ratio {decode_ratio} must be above 0 and at most 1 (the paper's).")


def _check_pixels(pixel_values: Tensor, config: ViTMAEConfig) -> None:
    expected = (config.num_channels, config.image_size, config.image_size)
    if pixel_values.shape[1:] != expected:
        raise LiVTError(f"pixel_values have shape {tuple(pixel_values.shape)}; this model takes (batch, *{expected}).")


for _name, _stock in (("LiViTMAEModel", "ViTModel"), ("LiViTForPreTraining", "ViTMAEForPreTraining")):
    register_checkpoint_conversion_mapping(_name, get_checkpoint_conversion_mapping(_stock), overwrite=True)

__all__ = ["LiViTForPreTraining", "pretraining_config"]
