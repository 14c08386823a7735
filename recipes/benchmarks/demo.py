"""The demo with 8,142 classes: a move of its slider, as the server and as a browser see it, and its first paint.

The server's part is compared with classifying the image again, the browser's part with a model of 10 classes. On one
thread, so that a busy machine disturbs it little. Without Chromium and its driver the browser's part is left out.
"""

import importlib.util
import shutil
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from livt_hf import LiViTConfig, LiViTForImageClassification
from livt_hf.data import eval_processor
from livt_hf.demo.serving import ServedClassifier
from livt_hf.recipes.benchmarks.measuring import compared, median_seconds, say

CLASSES, FEW = 8_142, 10
# Moves the slider by itself: milliseconds from each move to the new bars, and to the first paint of the page.
MOVES = """
const [count, done] = arguments, times = [];
const slider = document.querySelector("#tilt input[type=range]"), bars = document.querySelector("#bars");
const shown = () => bars.querySelector(".panels")?.outerHTML;  // around them Gradio shows that it waits
function move() {
    if (times.length === count) return done(times);
    const before = shown(), started = performance.now();
    new MutationObserver((_, observer) => {
        if ([before, undefined].includes(shown())) return;
        observer.disconnect();
        times.push(performance.now() - started);
        setTimeout(move, 100);
    }).observe(bars, {childList: true, subtree: true, characterData: true});
    slider.value = (times.length % 2 ? -1 : 0) + 0.02 * times.length;
    slider.dispatchEvent(new Event("input", {bubbles: true}));
}
move();
"""
PAINT = "return performance.getEntriesByName('first-contentful-paint')[0].startTime"


def run(quick: bool = False) -> list[dict]:
    torch.set_num_threads(1)
    repeats = 5 if quick else 40
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        say("the demo's slider on the server, then in a browser")
        for classes in (FEW, CLASSES):
            save_model(folder / str(classes), classes)
        pixels = torch.randint(0, 256, (375, 500, 3), dtype=torch.uint8)
        (folder / "images").mkdir()
        Image.fromarray(pixels.numpy()).save(folder / "images" / "image.png")
        return on_server(folder, repeats) + in_browser(folder, repeats)


def save_model(folder: Path, classes: int) -> None:
    counts = (1000 * 500 ** (-np.arange(classes) / (classes - 1))).astype(int).tolist()
    LiViTForImageClassification(LiViTConfig.preset("tiny", class_counts=counts)).save_pretrained(folder)
    eval_processor(224, (0.5,) * 3, (0.5,) * 3).save_pretrained(folder)


def on_server(folder: Path, repeats: int) -> list[dict]:
    served, image = ServedClassifier(str(folder / str(CLASSES))), folder / "images" / "image.png"
    logits, places = served.logits(image), iter(np.linspace(-1, 1, 1000))

    def move(logits: torch.Tensor) -> None:
        frequencies = served.classes.tilt(next(places))
        served.panels(logits, frequencies)
        served.classes.rows(frequencies)

    ways = {"ours": lambda: move(logits), "ViT-Ti sees it again": lambda: move(served.logits(image))}
    times = {name: 1000 * value for name, value in median_seconds(ways, repeats).items()}
    return compared(f"a move of the demo's slider, {CLASSES:,} classes", times, "ms", smaller_is_better=True)


def in_browser(folder: Path, repeats: int) -> list[dict]:
    if importlib.util.find_spec("selenium") is None or shutil.which("chromedriver") is None:
        return []
    from livt_hf.demo.app import private_files, show, start
    from livt_hf.recipes.paper.screenshots import open_browser, pick_example

    moves, paints = {}, {}
    for classes, name in ((CLASSES, "ours"), (FEW, f"{FEW} classes")):
        with private_files():
            blocks = start([show(str(folder / str(classes)), images=str(folder / "images"))])
            driver = open_browser(folder / f"browser-{classes}", 1280, 900)
            try:
                for _ in range(2):  # the first time the server reads its own files
                    driver.get(blocks.local_url)
                pick_example(driver, 0)
                driver.set_script_timeout(30 + repeats)
                moves[name] = statistics.median(driver.execute_async_script(MOVES, repeats))
                paints[name] = driver.execute_script(PAINT)
            finally:
                driver.quit()
                blocks.close(verbose=False)
    where = f"in a browser, {CLASSES:,} classes"
    return [
        *compared(f"a move of the demo's slider {where}", moves, "ms", smaller_is_better=True),
        *compared(f"first paint of the demo {where}", paints, "ms", smaller_is_better=True),
    ]
