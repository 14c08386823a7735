"""Numbers and names that several parts of the package share. Nothing here imports torch."""

# Shot groups of the paper: classes with more training images are many-shot, classes with fewer are few-shot.
MANY_ABOVE, FEW_BELOW = 100, 20
# Below so many training images of one's own, a pretrained backbone is taken, by default this small one;
# recipes/results/plantdoc/train.json has the evidence.
FEW_IMAGES, SMALL_BACKBONE = 50_000, "timm/tf_efficientnet_lite0.in1k"
# Encoders; intermediate layers are four times the width, as in every ViT of the paper.
PRESETS: dict[str, dict[str, int]] = {
    "micro": dict(hidden_size=128, num_hidden_layers=6, num_attention_heads=4, image_size=32, patch_size=4),
    "tiny": dict(hidden_size=192, num_hidden_layers=12, num_attention_heads=3, image_size=224, patch_size=16),
    "small": dict(hidden_size=384, num_hidden_layers=12, num_attention_heads=6, image_size=224, patch_size=16),
    "base": dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, image_size=224, patch_size=16),
    "large": dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, image_size=224, patch_size=16),
}
