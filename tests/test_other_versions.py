"""Published models in transformers 4.57 and in transformers.js: the same classes for the same photographs."""

import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from transformers import BitImageProcessor, BitImageProcessorPil, ViTImageProcessor, ViTImageProcessorPil, pipeline

from livt_hf import LiViTConfig, LiViTForImageClassification
from livt_hf.conversion import to_beit
from livt_hf.data import eval_processor
from livt_hf.processors import to_portable_processor


def photographs(folder: Path, number: int) -> list[Path]:
    """Write smooth pictures of different shapes and colours."""
    noise, paths = np.random.default_rng(0), []
    for i in range(number):
        grain = noise.integers(-40, 40, (60 + 10 * i, 150 - 8 * i, 3))
        pixels = (noise.integers(0, 256, 3) + grain).clip(0, 255).astype(np.uint8)
        paths.append(folder / f"{i}.png")
        Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(4)).save(paths[-1])
    return paths


@pytest.mark.parametrize(
    ("theirs", "ours"), [(ViTImageProcessor, BitImageProcessor), (ViTImageProcessorPil, BitImageProcessorPil)]
)
@pytest.mark.parametrize("size", [32, 224, 384])
def test_a_processor_by_its_portable_name_makes_the_same_pixels(tmp_path, theirs, ours, size):
    values = eval_processor(size, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)).to_dict()
    assert (
        to_portable_processor(values | {"image_processor_type": theirs.__name__})["image_processor_type"]
        == "BitImageProcessor"
    )
    kinds = [kind(**values) for kind in (theirs, ours)]
    for path in photographs(tmp_path, 4):
        before, after = (kind(Image.open(path), return_tensors="pt")["pixel_values"] for kind in kinds)
        assert torch.equal(before, after)


def test_a_processor_that_squashes_keeps_its_name():
    values = ViTImageProcessor(size={"height": 32, "width": 32}).to_dict()
    assert to_portable_processor(values) == values


@pytest.fixture
def published(tmp_path, tiny) -> tuple[Path, list[Path], list[str]]:
    """A published model, twelve pictures, and the top classes that transformers 5 gives them."""
    torch.manual_seed(0)
    names = {i: f"class {i}" for i in range(5)}
    model = LiViTForImageClassification(LiViTConfig(**tiny, class_counts=[50, 40, 30, 20, 10], id2label=names)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    folder, pictures = tmp_path / "published", photographs(tmp_path, 12)
    processor = eval_processor(16, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3))
    pixels = processor([Image.open(path) for path in pictures], return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        model.classifier.bias -= model(pixels).logits.mean(0)  # so that the pictures are of several classes
    to_beit(model).save_pretrained(folder)
    processor.save_pretrained(folder)
    classify = pipeline("image-classification", model=str(folder), device="cpu")
    tops = [classify(str(path))[0]["label"] for path in pictures]
    assert len(set(tops)) > 1
    return folder, pictures, tops


def run(*command, **options) -> str:
    answer = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@pytest.mark.slow
def test_transformers_4_57_gives_the_same_classes(published, tmp_path):
    folder, pictures, tops = published
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    packages = ["transformers==4.57.6", "huggingface_hub<1", "tokenizers<0.23"]
    answer = subprocess.run([python, "-m", "pip", "install", "-q", *packages], capture_output=True, text=True)
    if answer.returncode:
        pytest.skip(f"pip cannot install transformers 4.57: {answer.stderr.strip().splitlines()[-1]}")
    shared = next(path for path in sys.path if Path(path, "torch").is_dir())
    code = (
        f"import sys, json; sys.path.append({shared!r})\n"
        "from transformers import pipeline, __version__; assert __version__.startswith('4.57')\n"
        f"classify = pipeline('image-classification', model={str(folder)!r}, device='cpu')\n"
        "print(json.dumps([classify(path)[0]['label'] for path in sys.argv[1:]]))"
    )
    assert json.loads(run(python, "-c", code, *pictures).splitlines()[-1]) == tops


@pytest.mark.slow
def test_transformers_js_gives_the_same_classes(published, tmp_path):
    if shutil.which("npm") is None:
        pytest.skip("there is no Node here")
    pytest.importorskip("onnxscript")
    from livt_hf.recipes.convert import main

    folder, pictures, tops = published
    main([str(folder), str(tmp_path / "models" / "web"), "--to", "onnx"])
    install = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "@huggingface/transformers"]
    answer = subprocess.run(install, cwd=tmp_path, capture_output=True, text=True)
    if answer.returncode:
        pytest.skip(f"npm cannot install transformers.js: {answer.stderr.strip().splitlines()[-1]}")
    code = f"""
import {{ env, pipeline }} from "@huggingface/transformers";
env.allowRemoteModels = false;
env.localModelPath = {json.dumps(str(tmp_path / "models"))};
const classify = await pipeline("image-classification", "web", {{ dtype: "fp32" }});
const tops = [];
for (const path of process.argv.slice(2)) tops.push((await classify(path))[0].label);
console.log(JSON.stringify(tops));
"""
    (tmp_path / "classify.mjs").write_text(code)
    assert json.loads(run("node", "classify.mjs", *pictures, cwd=tmp_path).splitlines()[-1]) == tops
