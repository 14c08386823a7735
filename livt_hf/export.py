"""A classifier as a graph that runs without this package: ONNX, or a program of torch.export.

The graph takes bytes of RGB at the model's own size, (images, height, width, 3) with any number of images. Rescaling
and normalisation are inside. Resizing and cropping are not: the images of a batch would need one size, and ONNX's own
resizing gives other bytes than the image processor (tests/test_export.py would notice a cure).
It gives the logits, or with a prior the class probabilities under it, calibrated where the model is.
Logits are written a second time from normalised pixels, as transformers.js runs them in a browser (`save_web_model`).
"""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import (
    BaseImageProcessor,
    PreTrainedModel,
    TimmWrapperForImageClassification,
    TimmWrapperImageProcessor,
)

from livt_hf.classifiers import check_posterior, class_names, get_head
from livt_hf.conversion import to_beit
from livt_hf.errors import LiVTError
from livt_hf.files import read_record, write_values
from livt_hf.long_tail.head import CosineClassifier
from livt_hf.long_tail.structure import get_classifier
from livt_hf.modeling_livit import LiViTForImageClassification
from livt_hf.processors import measure_output_sizes, to_portable_processor

TOLERANCE = 1e-4
_LARGEST = 2**30  # bytes of weights in one ONNX file; its format ends at 2 GiB

Runner = Callable[[Tensor], Tensor]


class ServingGraph(nn.Module):
    """Graph from bytes (B, H, W, 3) to logits or, under a prior, to class probabilities (B, C).

    Its first step is what the processor does to the colour of a pixel, which must be to rescale and to normalise it.
    """

    def __init__(self, model: PreTrainedModel, processor: BaseImageProcessor, prior: Tensor | None = None):
        super().__init__()
        self.model, self.prior, self.output = model, prior, "logits" if prior is None else "probabilities"
        if prior is not None:
            check_posterior(model)
        colours = torch.randint(0, 256, (16, 3), generator=torch.Generator().manual_seed(0))
        colours[0], colours[1] = 0, 255
        pixels = process_colours(processor, colours)
        self.register_buffer("scale", (pixels[1] - pixels[0]) / 255)
        self.register_buffer("offset", pixels[0])
        if not torch.allclose(self.pixel_values(colours[:, None, None])[:, :, 0, 0], pixels, atol=1e-5):
            kind = type(processor).__name__
            raise LiVTError(f"{kind} does more than rescale and normalise; export the logits by hand.")
        self.eval()

    def pixel_values(self, images: Tensor) -> Tensor:
        return (images.float() * self.scale + self.offset).permute(0, 3, 1, 2)

    def forward(self, images: Tensor) -> Tensor:
        logits = self.model(self.pixel_values(images)).logits.float()
        if self.prior is None:
            return logits
        head = get_head(self.model)
        return head.shift_posterior(head.training_posterior(logits), self.prior)


def get_output_size(processor: BaseImageProcessor) -> tuple[int, int]:
    """Return the height and width that a processor makes of any image."""
    sizes = measure_output_sizes(processor)
    if len(sizes) > 1:
        raise LiVTError("the image processor gives images of different sizes, and a graph takes one; let it crop.")
    return sizes.pop()


def process_colours(processor: BaseImageProcessor, colours: Tensor) -> Tensor:
    """Return what a processor makes of single-colour images, which resizing and cropping leave as they are. (N, 3)"""
    size = get_output_size(processor)[::-1]
    images = [Image.new("RGB", size, tuple(colour)) for colour in colours.tolist()]
    return processor(images, return_tensors="pt")["pixel_values"].mean(dim=(2, 3))


def example_images(processor: BaseImageProcessor, images: int = 2) -> Tensor:
    noise = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (images, *get_output_size(processor), 3), dtype=torch.uint8, generator=noise)


def trace(graph: nn.Module, batch: Tensor) -> torch.export.ExportedProgram:
    """Return the program of a graph for any number of images.

    torch notes the lines of code that each operation came from, with the paths of this machine. They are left out.
    """
    program = torch.export.export(graph, (batch,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program


def write_onnx(graph: nn.Module, batch: Tensor, path: Path, *names: str) -> None:
    """Write a graph as ONNX, with the names of its input and its output."""
    large = _weight_bytes(graph) > _LARGEST  # these are written beside it
    options = dict(input_names=names[:1], output_names=names[1:], external_data=large, verbose=False)
    torch.onnx.export(trace(graph, batch), f=path, dynamo=True, **options)


def _weight_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def save_torch_export(graph: ServingGraph, images: Tensor, folder: Path) -> Runner:
    """Write `model.pt2`, a program for `torch.export.load`."""
    torch.export.save(trace(graph, images), folder / "model.pt2")
    return torch.export.load(folder / "model.pt2").module()


class _Logits(nn.Module):
    """Graph from pixel values (B, 3, H, W) to logits."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.model(pixel_values).logits


def is_web_model(model: PreTrainedModel) -> bool:
    """Return True for models whose logits transformers.js can compute from one ONNX file."""
    unknown = isinstance(model, TimmWrapperForImageClassification)
    unknown = unknown or isinstance(get_classifier(model), CosineClassifier)
    return _weight_bytes(model) < _LARGEST and not unknown


def save_web_model(folder: Path, model: PreTrainedModel, processor: BaseImageProcessor) -> None:
    """Write `config.json`, `preprocessor_config.json` and `onnx/model.onnx`, which transformers.js loads.

    A LiViT has the config of its BEiT form. transformers.js does not know the models of timm's wrapper.
    """
    config = to_beit(model).config if isinstance(model, LiViTForImageClassification) else copy.deepcopy(model.config)
    config.architectures = config.architectures or ["BeitForImageClassification"]
    config.save_pretrained(folder)
    path = folder / "preprocessor_config.json"
    write_values(path, to_portable_processor(read_record(path)))
    (folder / "onnx").mkdir()
    pixels = processor(Image.new("RGB", get_output_size(processor)[::-1]), return_tensors="pt")["pixel_values"]
    path = folder / "onnx" / "model.onnx"
    write_onnx(_Logits(model).eval(), pixels.repeat(2, 1, 1, 1), path, "pixel_values", "logits")


def save_onnx(graph: ServingGraph, images: Tensor, folder: Path) -> Runner:
    """Write `model.onnx`, with the weights in a separate file where they are too many for one."""
    import onnxruntime

    path = folder / "model.onnx"
    write_onnx(graph, images, path, "images", graph.output)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


EXPORTERS: dict[str, Callable[[ServingGraph, Tensor, Path], Runner]] = {
    "onnx": save_onnx,
    "torch-export": save_torch_export,
}


@torch.no_grad()
def export_model(
    form: str, folder: Path, model: PreTrainedModel, processor: BaseImageProcessor, prior: Tensor | None = None
) -> float:
    """Export a classifier with its image processor and class names; return the largest error of the file's outputs.

    The file is read back and run on other batch sizes than it was exported with.
    """
    graph = ServingGraph(model, processor, prior)
    folder.mkdir(parents=True, exist_ok=True)
    run = EXPORTERS[form](graph, example_images(processor), folder)
    (model.config if isinstance(processor, TimmWrapperImageProcessor) else processor).save_pretrained(folder)
    write_values(folder / "classes.json", class_names(model))
    if form == "onnx" and prior is None and is_web_model(model):
        save_web_model(folder, model, processor)
    images = example_images(processor, 5)
    off = max((run(batch) - graph(batch)).abs().max().item() for batch in images.split([4, 1]))
    if not off < TOLERANCE:
        raise LiVTError(f"the file's {graph.output} differ by {off:.1e} from those of the model; do not serve it.")
    return off
