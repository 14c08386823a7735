"""Masked pretraining: an initialisation that can learn, stock ViTMAE's loss and checkpoints, pictures."""

import io
import math

import pytest
import torch
from accelerate import Accelerator
from datasets import ClassLabel, Dataset, Features, Image, IterableDatasetDict
from PIL import Image as PILImage
from refusals import refusal
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import ViTMAEForPreTraining, ViTMAEModel

from livt_hf import LiViTForPreTraining, pretraining_config
from livt_hf.modeling_livit_mae import sin_cos_positions
from livt_hf.training.pretrain import compute_reconstruction_loss, select_eval_images

PATCHES = 16


@pytest.fixture
def config(tiny):
    decoder = dict(decoder_hidden_size=16, decoder_num_hidden_layers=2, decoder_num_attention_heads=2)
    return pretraining_config("micro", **tiny, **decoder, decoder_intermediate_size=32)


@pytest.fixture
def model(config):
    return LiViTForPreTraining(config)


def pictures(images=4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(images, 3, 16, 16), torch.rand(images, PATCHES)


def mae_table(grid: int, width: int) -> torch.Tensor:
    """MAE's table from its definition: zeros for cls, then row by row; half the width is the column, half the row."""
    quarter = width // 4
    rows = [[0.0] * width]
    for row in range(grid):
        for column in range(grid):
            entry = []
            for place in (column, row):
                angles = [place / 10000 ** (i / quarter) for i in range(quarter)]
                entry += [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
            rows.append(entry)
    return torch.tensor(rows)


# Initialisation


def masked_spread(model) -> float:
    """The largest difference between predictions for two masked patches of one image."""
    pixels, noise = pictures()
    outputs = model.eval()(pixels, noise=noise)
    spreads = []
    for prediction, mask in zip(outputs.logits, outputs.mask, strict=True):
        masked = prediction[mask.bool()]
        spreads.append((masked - masked[0]).abs().max().item())
    return max(spreads)


def test_the_stock_initialiser_predicts_the_same_for_every_masked_patch_and_ours_does_not(config, model):
    assert masked_spread(ViTMAEForPreTraining(config)) < 1e-6
    assert masked_spread(model) > 0.1


def test_position_tables_are_mae_s_with_columns_before_rows(model):
    torch.testing.assert_close(model.vit.embeddings.position_embeddings[0], mae_table(4, 32))
    torch.testing.assert_close(model.decoder.decoder_pos_embed[0], mae_table(4, 16))
    torch.testing.assert_close(sin_cos_positions(224, 16, 768)[0], mae_table(14, 768), atol=1e-5, rtol=0)
    for table in (model.vit.embeddings.position_embeddings, model.decoder.decoder_pos_embed):
        assert not table.requires_grad


def test_linear_layers_start_xavier_uniform_and_tokens_normal(config):
    model = LiViTForPreTraining(pretraining_config("micro"))
    weight = model.vit.layers[0].mlp.fc1.weight
    bound = math.sqrt(6 / sum(weight.shape))
    assert weight.abs().max().item() == pytest.approx(bound, rel=0.01)
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    projection = model.vit.embeddings.patch_embeddings.projection
    assert projection.weight.abs().max().item() == pytest.approx(math.sqrt(6 / (128 + 48)), rel=0.01)
    for token in (model.vit.embeddings.cls_token, model.decoder.mask_token):
        assert token.std().item() == pytest.approx(0.02, rel=0.3)
    assert projection.bias.abs().max().item() == pytest.approx(48**-0.5, rel=0.05)  # torch's default
    assert all((p == 0).all() for n, p in model.named_parameters() if n.endswith("bias") and p is not projection.bias)


def test_query_key_and_value_start_with_the_bound_of_their_fused_matrix():
    model = LiViTForPreTraining(pretraining_config("micro"))
    for layer in (*model.vit.layers, *model.decoder.decoder_layers):
        width = layer.attention.q_proj.in_features
        for part in (layer.attention.q_proj, layer.attention.k_proj, layer.attention.v_proj):
            assert part.weight.std().item() == pytest.approx(math.sqrt(2 / (4 * width)), rel=0.03)
            assert part.weight.abs().max().item() == pytest.approx(math.sqrt(6 / (4 * width)), rel=0.01)
    assert model.vit.layers[0].attention.o_proj.weight.std().item() == pytest.approx(128**-0.5, rel=0.03)


# The same mathematics as stock ViTMAE


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("norm_pix_loss", [True, False])
def test_training_mode_has_the_loss_and_gradients_of_stock_vitmae(config, attention, norm_pix_loss):
    config.norm_pix_loss = norm_pix_loss
    ours, stock = LiViTForPreTraining(config), ViTMAEForPreTraining(config)
    stock.load_state_dict(ours.state_dict())
    for model in (ours, stock):
        model.set_attn_implementation(attention)
        model.train()
    assert ours.decoder.config._attn_implementation == attention
    pixels, noise = pictures()
    losses = [model(pixels, noise=noise).loss for model in (ours, stock)]
    torch.testing.assert_close(*losses, atol=1e-6, rtol=1e-6)
    for loss in losses:
        loss.backward()
    theirs = dict(stock.named_parameters())
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, theirs[name].grad, atol=1e-6, rtol=1e-4, msg=name)


def test_training_and_evaluation_give_the_same_loss_also_under_autocast(model):
    """The mask token is not rounded: only the products are in half precision."""
    pixels, noise = pictures()
    trained = model.train()(pixels, noise=noise).loss
    torch.testing.assert_close(trained, model.eval()(pixels, noise=noise).loss, atol=1e-6, rtol=1e-6)
    with torch.no_grad():
        model.decoder.mask_token += 100.3
    with torch.autocast("cpu", torch.bfloat16):
        trained = model.train()(pixels, noise=noise).loss
        evaluated = model.eval()(pixels, noise=noise).loss
    torch.testing.assert_close(trained, evaluated, atol=1e-3, rtol=1e-3)


def test_attention_dropout_reaches_the_last_decoder_block(config):
    config.attention_probs_dropout_prob = 0.5
    config.num_hidden_layers, config.decoder_num_hidden_layers = 1, 1
    model = LiViTForPreTraining(config).train()
    model.vit.layers[0].attention.attention_dropout = 0.0
    pixels, noise = pictures()
    assert model(pixels, noise=noise).loss != model(pixels, noise=noise).loss


@pytest.mark.parametrize("saver", ["ours", "stock"])
def test_checkpoints_go_both_ways_between_ours_and_stock_vitmae(config, tmp_path, saver):
    saved = (LiViTForPreTraining if saver == "ours" else ViTMAEForPreTraining)(config).eval()
    saved.save_pretrained(tmp_path)
    pixels, noise = pictures()
    expected = saved(pixels, noise=noise)
    for reader in (LiViTForPreTraining, ViTMAEForPreTraining):
        loaded, info = reader.from_pretrained(tmp_path, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        outputs = loaded.eval()(pixels, noise=noise)
        assert torch.equal(outputs.logits, expected.logits) and torch.equal(outputs.loss, expected.loss)
    encoder, info = ViTMAEModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    latent = saved.vit(pixels, noise=noise).last_hidden_state
    assert torch.equal(encoder.eval()(pixels, noise=noise).last_hidden_state, latent)


def test_save_load_save_is_bit_equal(model, tmp_path):
    model.save_pretrained(tmp_path / "first")
    LiViTForPreTraining.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    assert {path.name for path in (tmp_path / "first").iterdir()} == {"config.json", "model.safetensors"}
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    loaded = LiViTForPreTraining.from_pretrained(tmp_path / "first", decode_ratio=0.5)
    assert loaded.config.architectures == ["ViTMAEForPreTraining"]  # a class that stock transformers has
    assert loaded.decode_ratio == 0.5
    tensors = load_file(tmp_path / "first" / "model.safetensors")
    tables = [tensors[name][0] for name in sorted(tensors) if name.endswith(("position_embeddings", "pos_embed"))]
    torch.testing.assert_close(tables, [mae_table(4, 16), mae_table(4, 32)])


# decode_ratio


@pytest.mark.parametrize(("ratio", "decoded"), [(1.0, 12), (0.5, 6), (0.25, 3), (0.01, 1)])
def test_decode_ratio_decodes_a_fixed_number_of_masked_patches(config, ratio, decoded):
    model = LiViTForPreTraining(config, decode_ratio=ratio).train()
    seen = []
    model.decoder.decoder_pred.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    pixels, noise = pictures()
    loss = model(pixels, noise=noise).loss
    assert seen == [(4, decoded, 48)] and torch.isfinite(loss)
    model.eval()(pixels, noise=noise)
    assert seen[1] == (4, 1 + PATCHES, 48)
    full = LiViTForPreTraining(config).train()
    full.load_state_dict(model.state_dict())
    assert (full(pixels, noise=noise).loss == loss) == (ratio == 1)  # another objective


# Pictures


@pytest.mark.parametrize("norm_pix_loss", [True, False])
def test_a_perfect_prediction_reconstructs_the_picture(config, norm_pix_loss):
    config.norm_pix_loss = norm_pix_loss
    model = LiViTForPreTraining(config)
    pixels, noise = pictures()
    patches = model.patchify(pixels)
    if norm_pix_loss:
        mean, std = patches.mean(-1, keepdim=True), (patches.var(-1, keepdim=True) + 1e-6).sqrt()
        patches = (patches - mean) / std
    perfect = torch.cat([torch.zeros(4, 1, 48), patches], dim=1)  # the class token's prediction is dropped
    model.decoder.decoder_pred.register_forward_hook(lambda module, args, output: perfect)
    for training in (True, False):
        masked, reconstruction = model.train(training).reconstruct(pixels, noise=noise)
        assert model.training == training
        torch.testing.assert_close(reconstruction, pixels, atol=1e-5, rtol=1e-5)
        shown = (masked != 0).float().mean().item()
        assert shown == pytest.approx(0.25)
        assert torch.equal(masked[masked != 0], pixels[masked != 0])
        assert torch.equal(reconstruction[masked != 0], pixels[masked != 0])


def test_predicting_zero_costs_almost_one_under_per_patch_normalisation(model):
    pixels, noise = pictures()
    mask = model.eval()(pixels, noise=noise).mask
    # Bessel's correction makes the mean square of 48 normalised pixels 47/48.
    assert model.zero_prediction_loss(pixels, mask).item() == pytest.approx(47 / 48, rel=1e-4)


# Training


def test_gradient_checkpointing_gives_the_same_gradients(model):
    pixels, noise = pictures()
    gradients, calls = [], []
    for index, layer in enumerate(model.decoder.decoder_layers):
        layer.layernorm_before.register_forward_hook(lambda *_, index=index: calls.append(index))
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model.train()(pixels, noise=noise).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
    torch.testing.assert_close(*gradients)
    assert sorted(calls) == [0, 0, 0, 1, 1, 1]  # every decoder block is computed again


# Bad input


@pytest.mark.parametrize(
    ("argument", "wrong", "values"),
    [
        ("image_size", 18, [18, 4]),
        ("mask_ratio", 0.0, [0.0, "16 of 16"]),
        ("mask_ratio", 0.99, [0.99, "0 of 16"]),
        ("decode_ratio", 0.0, [0.0]),
        ("decode_ratio", 1.5, [1.5]),
    ],
)
def test_a_config_that_cannot_be_masked_or_decoded_is_refused(config, argument, wrong, values):
    options = {argument: wrong} if argument == "decode_ratio" else {}
    if not options:
        setattr(config, argument, wrong)
    with refusal("image_size" if argument == "image_size" else None, argument, *values):
        LiViTForPreTraining(config, **options)


@pytest.mark.parametrize("shape", [(2, 1, 16, 16), (2, 3, 20, 20), (3, 16, 16)])
def test_pixels_of_another_shape_are_refused(model, shape):
    with refusal(None, (3, 16, 16)):
        model(torch.zeros(shape))
    with refusal(None, (2, 9), (2, 16)):
        model.train(len(shape) == 3)(torch.zeros(2, 3, 16, 16), noise=torch.rand(2, 9))


@pytest.mark.slow
def test_the_training_step_compiles_without_graph_breaks_to_the_same_loss(model):
    pixels, noise = pictures()
    compiled = torch.compile(model.train(), fullgraph=True)
    torch.testing.assert_close(compiled(pixels, noise=noise).loss, model(pixels, noise=noise).loss)


# Held-out images


def stream_of(count: int, broken: tuple[int, ...] = ()) -> IterableDatasetDict:
    """A test stream of pictures of different widths, some of them not pictures at all."""
    images = []
    for i in range(count):
        buffer = io.BytesIO()
        PILImage.new("RGB", (64 + i, 64), (200, 100, i)).save(buffer, "JPEG", quality=30)  # encoded again, it differs
        images.append({"bytes": b"broken" if i in broken else buffer.getvalue(), "path": None})
    features = Features(image=Image(), label=ClassLabel(names=["a"]))
    dataset = Dataset.from_dict({"image": images, "label": [0] * count}, features=features)
    return IterableDatasetDict(test=dataset.to_iterable_dataset())


def test_held_out_images_of_a_stream_are_its_first_ones_still_encoded():
    data = stream_of(6)
    held_out = select_eval_images(data, 4)
    expected = [row["image"] for row in data["test"].cast_column("image", Image(decode=False)).take(4)]
    assert held_out.data.column("image").to_pylist() == expected
    assert held_out[3]["image"].size == (67, 64)


def test_a_broken_held_out_image_is_an_error_or_left_out():
    data = stream_of(6, broken=(2,))
    with refusal("on_broken", "image 2"):
        select_eval_images(data, 4)
    assert [image.width for image in select_eval_images(data, 4, "skip")["image"]] == [64, 65, 67]


class _NoDoublePrecision(TorchDispatchMode):
    """A device like Apple's GPUs."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        assert not any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64 for leaf in tree_leaves(result))
        return result


def test_the_held_out_loss_is_a_mean_over_images_and_needs_no_double_precision_of_the_device(model):
    batches = [
        {"pixel_values": torch.randn(size, 3, 16, 16), "index": torch.arange(size) + start}
        for start, size in ((0, 3), (3, 1))
    ]
    with _NoDoublePrecision():
        loss, zero = compute_reconstruction_loss(model, batches, Accelerator(cpu=True), seed=0)
    whole = [{key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}]
    assert (loss, zero) == pytest.approx(compute_reconstruction_loss(model, whole, Accelerator(cpu=True), seed=0))


# Adapters and sharding, which act in the forward of each module


def test_lora_on_the_patch_projection_gets_a_gradient(model):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["projection", "decoder_layers.1.mlp.fc1"])
    )
    adapted.train()(pictures()[0]).loss.backward()
    gradients = {name: p.grad for name, p in adapted.named_parameters() if "lora_B" in name}
    assert len(gradients) == 2 and all(grad.abs().sum() > 0 for grad in gradients.values())


def test_training_mode_computes_what_evaluation_mode_does_where_modules_are_changed_by_hooks(model):
    """Hooks act on the projection and on the last decoder block in training, as in evaluation."""
    pixels, noise = pictures()
    called = []
    places = model.vit.embeddings.patch_embeddings.projection, model.decoder.decoder_layers[-1], model.decoder
    for place in (*places, model.vit.embeddings):
        place.register_forward_hook(lambda module, *_: called.append(module))
    model.train()(pixels, noise=noise)
    assert set(called) == {*places, model.vit.embeddings}


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kinds", [("ViTMAELayer", "LastDecoderLayer"), LiViTForPreTraining._no_split_modules])
def test_fsdp2_per_layer_gives_the_same_gradients(config, one_process, kinds):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    plain = LiViTForPreTraining(config).train()
    sharded = LiViTForPreTraining(config).train()
    sharded.load_state_dict(plain.state_dict())
    mesh = init_device_mesh("cpu", (1,))
    inner_first = reversed([layer for layer in sharded.modules() if type(layer).__name__ in kinds])
    for layer in inner_first:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    pixels, noise = pictures()
    for model in (plain, sharded):
        model(pixels, noise=noise).loss.backward()
    for (name, ours), theirs in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        if ours.requires_grad:
            torch.testing.assert_close(theirs.grad.full_tensor(), ours.grad, msg=name)
