"""The README's pictures of the demo and of a report, as a browser shows them.

python recipes/paper/screenshots.py RUN FOLDER   # FOLDER/demo.png and FOLDER/report.png, of a run after `livt eval`

Needs Chromium with its driver, and selenium (`pip install 'livt-hf[dev]'`).
"""

import argparse
import io
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from livt_hf.cli.console import run_command
from livt_hf.demo.app import private_files, show, start
from livt_hf.errors import LiVTError
from livt_hf.text import shell_line

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars"
).split()
PATIENCE = 90  # seconds, for a machine that is busy with other things
EXAMPLE = 9  # of those that the demo offers, which go from head to tail
STEPS = 60  # of the slider, which has 100: from "as in training" a little beyond "all equal"


def open_browser(folder: Path, width: int, height: int) -> webdriver.Chrome:
    """Chromium without a window; what it stores and downloads goes to a folder."""
    if shutil.which("chromedriver") is None:
        raise LiVTError("there is no chromedriver here; install Chromium with its driver.")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*FLAGS, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    options.add_experimental_option("prefs", {"download.default_directory": str(folder / "downloads")})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    # The window itself has a smallest width, and its height is not that of the page.
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    return driver


def wait_for(what: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not what():
        if time.monotonic() > end:
            raise LiVTError(f"the page did not come to rest within {PATIENCE} seconds; try again on a calmer machine.")
        time.sleep(0.1)


def save_picture(driver: webdriver.Chrome, path: Path, height: int) -> None:
    """Save the top of the page, as a PNG of 256 colours, which is a third of the size."""
    with Image.open(io.BytesIO(driver.get_screenshot_as_png())) as picture:
        top = picture.convert("RGB").crop((0, 0, picture.width, height))
    top.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def found(driver: webdriver.Chrome, selector: str) -> list:
    return driver.find_elements(By.CSS_SELECTOR, selector)


def pick_example(driver: webdriver.Chrome, number: int) -> None:
    """Click an example of the demo and wait for its bars."""
    wait_for(lambda: len(found(driver, "#examples button")) > number)
    found(driver, "#examples button")[number].click()
    wait_for(lambda: found(driver, "#bars .panel") and found(driver, "#preview img"))


def demo_picture(run: str, driver: webdriver.Chrome, path: Path) -> None:
    """Show an example of a rare class, with the slider moved."""
    with private_files():
        blocks = start([show(run)])
        try:
            driver.get(blocks.local_url)
            pick_example(driver, EXAMPLE)
            before = found(driver, "#bars")[0].get_attribute("innerHTML")
            found(driver, "#tilt input[type=range]")[0].send_keys(*[Keys.ARROW_RIGHT] * STEPS)
            wait_for(lambda: found(driver, "#bars")[0].get_attribute("innerHTML") != before)
            time.sleep(2)  # the last of many moves
            driver.execute_script("window.scrollTo(0, 0)")
            save_picture(driver, path, 830)
        finally:
            blocks.close()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a finished fine-tuning with a report")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args(argv)
    report = Path(arguments.run, "report", "report.html")
    if not report.is_file():
        raise LiVTError(f"{report} does not exist; write it with: livt eval {shell_line([arguments.run])}")
    with tempfile.TemporaryDirectory() as temporary:
        driver = open_browser(Path(temporary), 1280, 860)
        try:
            demo_picture(arguments.run, driver, arguments.folder / "demo.png")
            driver.get(report.resolve().as_uri())
            save_picture(driver, arguments.folder / "report.png", 670)
        finally:
            driver.quit()


if __name__ == "__main__":
    run_command(main)
