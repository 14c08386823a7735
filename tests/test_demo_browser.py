"""The demo in a real browser: Debian's Chromium, headless, driven as a person would."""

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from recipe_runs import make_pictures
from test_demo import save_image, save_model, save_pretraining

from livt_hf.demo.serving import ARGMAX, DEPLOYMENT, UNIFORM, ServedClassifier
from livt_hf.predictions import Predictions

pytest.importorskip("gradio")
pytest.importorskip("selenium")
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

from livt_hf.recipes.paper.screenshots import PATIENCE, open_browser  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("chromedriver") is None, reason="needs Chromium and its driver"),
]
TEN = "airplane automobile bird cat deer dog frog horse ship truck".split()


class Page:
    """A browser on the demo."""

    def __init__(self, folder: Path, width: int, height: int):
        self.downloads = folder / "downloads"
        self.downloads.mkdir()
        self.driver = open_browser(folder, width, height)

    def all(self, selector: str) -> list:
        return [part for part in self.driver.find_elements(By.CSS_SELECTOR, selector) if part.is_displayed()]

    def wait(self, what):
        """The first true answer of a question that is asked again and again."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            with contextlib.suppress(Exception):  # parts of the page are replaced while they are looked at
                if answer := what():
                    return answer
            time.sleep(0.05)
        return what()

    def one(self, selector: str):
        return self.wait(lambda: self.all(selector)[0])

    def upload(self, selector: str, *paths: Path) -> None:
        part = self.wait(lambda: self.driver.find_element(By.CSS_SELECTOR, f"{selector} input[type=file]"))
        part.send_keys("\n".join(map(str, paths)))

    def clear(self) -> None:
        """Take the image away."""
        self.one('#image button[aria-label="Clear"]').click()
        self.wait(lambda: not self.bars())

    def tab(self, name: str) -> None:
        self.wait(lambda: [tab for tab in self.all("button[role=tab]") if tab.text == name])[0].click()

    def bars(self) -> dict[str, dict[str, float]]:
        """Rule -> class -> the number its bar shows."""
        script = """
        return [...document.querySelectorAll("#bars .panel")].map(panel => [
            panel.querySelector("h4").textContent,
            [...panel.querySelectorAll(".bar")].map(bar =>
                [bar.querySelector(".name").textContent, Number(bar.dataset.value)]),
        ])"""
        return {title: dict(bars) for title, bars in self.driver.execute_script(script)}

    def shows(self, expected: dict[str, torch.Tensor], names: list[str]) -> bool:
        """Whether every bar has the number it should have."""
        bars = self.bars()
        return bars.keys() == expected.keys() and all(
            value == pytest.approx(expected[rule][names.index(name)].item(), abs=2e-6)
            for rule, content in bars.items()
            for name, value in content.items()
        )

    def type_into(self, row: int, text: str) -> None:
        """Into the frequency of a row of the table."""
        cell = f'#frequencies [data-testid="cell-{row}-3"]'
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", self.one(cell))
        ActionChains(self.driver).double_click(self.one(cell)).perform()
        self.one(f"{cell} textarea")
        ActionChains(self.driver).key_down(Keys.CONTROL).send_keys("a").key_up(Keys.CONTROL).perform()
        ActionChains(self.driver).send_keys(text, Keys.ENTER).perform()

    def message(self, words: str) -> bool:
        """Whether the page says these words; the message is then put away."""
        toast = self.wait(lambda: next(toast for toast in self.all(".toast-body") if words in toast.text))
        toast.find_element(By.CSS_SELECTOR, ".toast-close").click()
        return bool(self.wait(lambda: not self.all(".toast-body")))

    def download(self, link, name: str) -> Path:
        link.click()
        return self.wait(lambda: next(iter(self.downloads.glob(name)), None))

    def hosts(self) -> set[str]:
        """Everything that the page has asked for anything."""
        entries = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = [e["params"]["request"]["url"] for e in entries if e["method"] == "Network.requestWillBeSent"]
        return {url.split("/")[2] for url in urls if not url.startswith(("data:", "blob:", "chrome"))}

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@contextlib.contextmanager
def demo(folder: Path, *words, width: int = 1280, height: int = 900):
    """`livt demo` as a command, and a browser on it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "livt_hf.cli.main", "demo", *map(str, words), "--browser", "no"]
    log = (folder / "demo.txt").open("w+")
    process = subprocess.Popen([*command, "--port", port], stdout=log, stderr=log, cwd=folder)
    page = Page(folder, width, height)
    try:
        page.wait(lambda: process.poll() is not None or "Open http" in (folder / "demo.txt").read_text())
        assert process.poll() is None, (folder / "demo.txt").read_text()
        page.driver.get(f"http://127.0.0.1:{port}/")
        yield page
        assert page.hosts() == {f"127.0.0.1:{port}"}
        assert page.complaints() == []
        assert "Traceback" not in (folder / "demo.txt").read_text()
    finally:
        page.driver.quit()
        process.terminate()
        process.wait()


def counts(classes: int) -> list[int]:
    return (1000 * 500 ** (-np.arange(classes) / (classes - 1))).astype(int).tolist()


def expected(served: ServedClassifier, path: Path, frequencies: np.ndarray) -> dict[str, torch.Tensor]:
    """What `probabilities` says of an image."""
    pixels = served.predictor.finish(served.predictor.read(path)[None])
    prior = served.classes.prior(frequencies)
    return {
        ARGMAX: served.model(pixels).logits.softmax(-1)[0],
        UNIFORM: served.model.probabilities(pixels, prior="uniform")[0],
        DEPLOYMENT: served.model.probabilities(pixels, prior=prior)[0],
    }


def test_the_bars_follow_the_image_the_slider_the_table_and_the_file(tmp_path, tiny):
    save_model(tmp_path / "model", tiny, counts(10), TEN)
    served = ServedClassifier(str(tmp_path / "model"))
    first, second = save_image(tmp_path / "first.png", 1), save_image(tmp_path / "second.jpg", 2)
    (tmp_path / "notes.png").write_text("not an image")
    with demo(tmp_path, tmp_path / "model") as page:
        page.one("#tilt")
        page.upload("#image", tmp_path / "notes.png")
        assert page.message("notes.png")  # and the demo goes on
        page.clear()
        page.upload("#image", first)
        assert page.wait(lambda: page.shows(expected(served, first, served.classes.tilt(1)), TEN))

        slider = page.one("#tilt input[type=range]")
        slider.send_keys(Keys.END)  # rare things are common
        assert page.wait(lambda: page.shows(expected(served, first, served.classes.tilt(-1)), TEN))
        ActionChains(page.driver).drag_and_drop_by_offset(slider, 0, 0).perform()  # to its middle: all are equal
        place = float(slider.get_attribute("value"))
        assert abs(place) < 0.1
        assert page.wait(lambda: page.shows(expected(served, first, served.classes.tilt(-place)), TEN))
        slider.send_keys(Keys.HOME)
        assert page.wait(lambda: page.shows(expected(served, first, served.classes.tilt(1)), TEN))

        page.type_into(9, "2500")  # the frequency of the rarest class
        edited = served.classes.tilt(1).copy()
        edited[9] = 2500
        assert page.wait(lambda: page.shows(expected(served, first, edited), TEN))

        page.one("#save").click()
        saved = page.download(page.one("#saved a"), "prior.json")
        shares = json.loads(saved.read_text())
        assert list(shares) == TEN and shares["truck"] == pytest.approx(2500 / edited.sum())

        slider.send_keys(Keys.END)
        assert page.wait(lambda: page.shows(expected(served, first, served.classes.tilt(-1)), TEN))
        page.upload("#open", saved)
        assert page.wait(lambda: page.shows(expected(served, first, edited), TEN))

        page.clear()
        page.upload("#image", second)
        assert page.wait(lambda: page.shows(expected(served, second, edited), TEN))
        page.driver.save_screenshot(str(tmp_path / "try.png"))


def test_a_folder_gives_a_world_that_can_be_tried_and_downloaded(tmp_path, tiny):
    save_model(tmp_path / "model", tiny, counts(10), TEN)
    served = ServedClassifier(str(tmp_path / "model"))
    images = [save_image(tmp_path / f"{seed}.png", seed) for seed in range(20)]
    with demo(tmp_path, tmp_path / "model") as page:
        page.one("#tilt")
        page.tab("Deployment prior")
        page.upload("#deployment-files", *images)
        assert page.wait(lambda: "20 images" in page.one("#deployment-words").text)
        links = page.wait(lambda: page.all("#deployment-downloads a"))
        table = page.download(links[0], "predictions.csv")
        assert len(table.read_text().splitlines()) == 21
        if len(links) == 2:
            shares = json.loads(page.download(links[1], "prior.json").read_text())
            page.one("#use").click()
            page.tab("Try")
            page.upload("#image", images[0])
            frequencies = served.classes.images * np.array([shares[name] for name in TEN])
            assert page.wait(lambda: page.shows(expected(served, images[0], frequencies), TEN))


def test_a_thousand_classes_fit_a_phone_and_are_found_by_name(tmp_path, tiny):
    names = [f"Species {number:03d} with a name that is longer than a phone is wide" for number in range(1000)]
    save_model(tmp_path / "model", tiny, counts(1000), names)
    served = ServedClassifier(str(tmp_path / "model"))
    image = save_image(tmp_path / "image.png")
    with demo(tmp_path, tmp_path / "model", width=390, height=844) as page:
        page.one("#tilt")
        page.upload("#image", image)
        assert page.wait(lambda: page.shows(expected(served, image, served.classes.tilt(1)), names))
        assert page.driver.execute_script("return document.documentElement.scrollWidth") <= 390
        page.one("#tilt input[type=range]").send_keys(Keys.END)
        assert page.wait(lambda: page.shows(expected(served, image, served.classes.tilt(-1)), names))
        page.one("button.label-wrap").click()  # the table starts folded
        page.one("#search input, #search textarea").send_keys("species 777")
        assert page.wait(lambda: len(page.all('#frequencies [data-testid$="-1"][role=gridcell]')) == 1)
        page.type_into(0, "100000")
        edited = served.classes.tilt(-1).copy()
        edited[777] = 100000
        assert page.wait(lambda: page.shows(expected(served, image, edited), names))


def make_run(folder: Path, data: Path) -> Path:
    """A folder that passes for a finished run on this data."""
    (folder / "arguments.yaml").write_text(f"dataset: {data}\n")
    (folder / "results.json").write_text("{}")
    return folder


def test_a_click_on_a_class_shows_its_wrong_images_and_their_neighbours(tmp_path, tiny):
    data = make_pictures(tmp_path / "pictures")
    names = [f"class{label}" for label in range(4)]
    save_model(tmp_path / "run", tiny, [30, 18, 10, 6], names)
    run = make_run(tmp_path / "run", data)
    label = torch.arange(4).repeat_interleave(11)
    predicted = torch.where(label == 2, 0, label)
    logits = torch.eye(4)[predicted] * torch.linspace(1, 4, 44)[:, None]
    record = Predictions.from_arrays(logits, label, class_names=names, split=["test"] * 44)
    record.save(run / "report" / "predictions")
    with demo(tmp_path, run) as page:
        page.wait(lambda: len(page.all("#examples button")) == 4)  # an example of every class
        page.all("#examples button")[0].click()
        assert page.wait(page.bars)
        page.tab("Errors")
        page.one('#errors [data-testid="cell-0-1"]').click()
        assert page.wait(lambda: "Misclassified as class0 (11)" in page.one("#errors-words").text)
        assert page.wait(lambda: len(page.all("#wrong img")) == 11)
        assert page.wait(lambda: len(page.all("#near img")) == 6)
        assert page.one("#reliability img")
        captions = {caption.text.split()[-1] for caption in page.all("#near .caption-label")}
        assert captions <= {"class2", "class0"}


def test_hidden_patches_are_filled_in_again_when_the_share_or_the_seed_changes(tmp_path, tiny):
    run = make_run(save_pretraining(tmp_path / "run", tiny), make_pictures(tmp_path / "pictures"))
    with demo(tmp_path, run) as page:
        page.one("#ratio")
        page.wait(lambda: page.all("#examples button"))[0].click()

        def pictures():
            return [image.get_attribute("src") for image in page.all("#pictures img")]

        first = page.wait(lambda: len(pictures()) == 3 and pictures())
        page.one("#ratio input[type=range]").send_keys(Keys.HOME)
        second = page.wait(lambda: pictures()[1] != first[1] and pictures())
        assert second[0] == first[0]  # the image itself
        seed = page.one("#seed input")
        seed.send_keys("7", Keys.TAB)
        assert page.wait(lambda: pictures()[1] != second[1])
