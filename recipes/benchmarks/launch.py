"""A whole `accelerate launch recipes/pretrain.py` against as many stock steps launched the same way.

This is where one core of many is lost: `accelerate launch` pins a CPU process to one thread, and a script that does
not know it stays there. Both run the same model and batch on the same images; the time is the training loop's own,
without imports.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from livt_hf.recipes.benchmarks.measuring import compared, say
from livt_hf.runs import Run

HERE = Path(__file__).parent


def run(quick: bool = False) -> list[dict]:
    steps = 10 if quick else 60
    question = f"{steps} launched MGP updates of 128 glyphs, micro"
    say(f"{question}: ours")
    ours = launch_ours(steps)
    say(f"{question}: stock")
    stock = float(launch(HERE / "stock_pretrain.py", str(steps)).splitlines()[-1])
    times = {"ours": ours, "stock ViTMAE and DataLoader, launched alike": stock}
    return compared(question, times, "s", smaller_is_better=True)


def launch(script: Path, *arguments: str, processes: int = 1) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    # Accelerate says multi_gpu for several processes on a CPU, too, and this is how it is told to stay there.
    several = ["--multi_gpu", "--num_processes", str(processes)] if processes > 1 else []
    environment |= {"ACCELERATE_USE_CPU": "1"} if processes > 1 else {}
    command = [sys.executable, "-m", "accelerate.commands.launch", *several, str(script), *arguments]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def launch_ours(steps: int, processes: int = 1) -> float:
    """Seconds the default pretraining trained for so many updates."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        options = ("--max_steps", str(steps), "--output_dir", str(run), "--save_minutes", "1000")
        launch(HERE.parent / "pretrain.py", *options, processes=processes)
        return Run(run).results.seconds
