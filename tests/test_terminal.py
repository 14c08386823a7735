"""What a run shows: a progress bar on a terminal, plain lines in a file."""

import os
import re
import struct
import threading
from pathlib import Path

import pytest
from recipe_runs import TINY, RecipeRun, make_pictures

from livt_hf.text import shell_line


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("terminal")
    make_pictures(place / "pictures")
    return place


def test_a_terminal_shows_a_progress_bar(workplace):
    fcntl, pty, termios = map(pytest.importorskip, ("fcntl", "pty", "termios"))  # a terminal of Unix
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    shown = []

    def read():
        while b"Next, fine-tune it:" not in b"".join(shown):
            shown.append(os.read(master, 4096))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    options = ["--dataset", workplace / "pictures", *TINY, "--log_steps", 2]
    run = RecipeRun("pretrain", workplace / "terminal", *options, output=Path(os.ttyname(slave)))
    assert run.wait() == 0
    reader.join(10)
    text = b"".join(shown).decode()
    last = re.findall(r"\r([^\r\n]*?12/12 [^\r\n]*)", text)[-1]
    assert re.match(r"100%\|█+\| 12/12 \[\d\d:\d\d<\d\d:\d\d, .*(update/s|s/update)", last)
    assert re.search(r"loss=\d\.\d{4}, lr=\d\.\de-\d\d, images/s=\d+", last)
    assert "update 2  epoch" not in text  # the bar takes the place of the lines


def test_a_file_gets_plain_lines_now_and_then(workplace):
    folder = workplace / "my run"
    run = RecipeRun("pretrain", folder, "--dataset", workplace / "pictures", *TINY, "--log_steps", 4)
    assert run.wait() == 0
    assert run.printed.endswith(f"{shell_line(['livt', 'finetune', '--pretrained', folder])}\n")  # the next command
    lines = run.printed.splitlines()
    assert "\r" not in run.printed and "%|" not in run.printed
    told = [line for line in lines if line.startswith("update ")]
    numbers = r"  epoch \d\.\d\d  loss \d\.\d{4}  lr \S+"
    assert re.fullmatch(rf"update 4{numbers}  \d+ seconds? left", told[0])
    assert re.fullmatch(rf"update 12{numbers}", told[-1]) and len(told) <= 3
    assert run.logged() == 3


def test_each_evaluation_of_a_fine_tuning_says_its_groups_once(workplace):
    options = [
        "--dataset",
        workplace / "pictures",
        *TINY,
        "--pretrained",
        "none",
        "--eval_epochs",
        1,
        "--max_steps",
        8,
    ]
    run = RecipeRun("finetune", workplace / "groups", *options)
    assert run.wait() == 0, run.printed
    told = [line for line in run.printed.splitlines() if line.startswith("epoch ")]
    assert [line.split()[1] for line in told] == ["1,", "2,"]
    assert all(re.search(r"accuracy \S+  many \S+  medium \S+  few \S+", line) for line in told)
