"""The files of a report, by name. Nothing here imports torch."""

from pathlib import Path

PAGE, TEXT = "report.html", "report.md"
NUMBERS, CLASSES = "evaluation.json", "classes.csv"
FREQUENCY, CONFUSED, TRAINING, SHIFTS = "frequency.png", "confused.png", "training.png", "shifts.png"
TRADE_OFF = "trade_off.png"
RELIABILITY = "reliability-{number}.png"
BEST_AND_WORST = "classes.png"
# Plots show numbers and may be published; other pictures show images of the dataset.
PLOTS = [FREQUENCY, CONFUSED, RELIABILITY.format(number="*"), TRAINING, SHIFTS, TRADE_OFF]
PICTURES_OF_IMAGES = [BEST_AND_WORST]


def find_logs(run: Path) -> dict[str, Path]:
    """Return the training logs of a run, or of the folds of a cross-validation, by the names of their folders."""
    return {path.parent.name: path for path in [*run.glob("log.jsonl"), *sorted(run.glob("fold-*/log.jsonl"))]}


def find_reports(run: Path, name: str) -> list[Path]:
    """Return the files (or folders) of this name in the reports of a run, the newest first."""
    return sorted(run.glob(f"report*/{name}"), key=lambda path: path.stat().st_mtime, reverse=True)
