"""A made-up export of a hospital: a table of labels with everything that real ones come with."""

import csv
from pathlib import Path

import numpy as np
from PIL import Image

SIZES = (350, 80, 40, 25, 18, 14, 11, 9, 8, 7, 6, 5, 5, 4, 3, 3, 2, 2, 2, 1, 1, 1, 1, 1, 1)  # 600 images of 25 classes
ONE_PATIENT = 13  # the class of four images that a single patient has
SUFFIXES = ("png", "jpg", "tif", "webp")


def make_hospital(folder: Path, seed: int = 0) -> Path:
    """`labels.csv` (file, diagnosis, patient) and its images; 18 images are broken, 6 files missing, 4 labels empty.

    Patients have 1 to 9 images. What a class looks like is a colour and the width of stripes.
    """
    rng = np.random.RandomState(seed)
    labels = np.repeat(np.arange(len(SIZES)), SIZES)
    patients = _patients(labels, rng)
    colours, widths = rng.randint(40, 216, (len(SIZES), 3)), rng.randint(2, 9, len(SIZES))
    broken = set(rng.choice(len(labels), round(0.03 * len(labels)), replace=False).tolist())
    (folder / "images").mkdir(parents=True)
    rows = []
    for number, label in enumerate(labels):
        name = f"images/{rng.randint(16**8):08x}.{SUFFIXES[number % len(SUFFIXES)]}"
        path = folder / name
        stripes = 40 * (np.arange(48) // widths[label] % 2)[None, :, None]
        pixels = colours[label] + stripes + rng.normal(0, 25, (40, 48, 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)
        if number in broken:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
        rows.append((name, f"diagnosis {label:02d}", f"P{patients[number]:03d}"))
    rows += [(f"images/lost {number}.png", "diagnosis 00", "P000") for number in range(6)]
    rows += [(rows[place][0].replace("images/", "images/unread "), "", "P001") for place in range(4)]
    rng.shuffle(rows)
    with (folder / "labels.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("file", "diagnosis", "patient"), *rows])
    return folder / "labels.csv"


def _patients(labels: np.ndarray, rng: np.random.RandomState) -> np.ndarray:
    """A patient for each image, 1 to 9 images each, mostly of one class."""
    order = np.argsort(labels + rng.normal(0, 0.3, len(labels)), kind="stable")  # neighbours share a patient
    order = np.concatenate([order[labels[order] != ONE_PATIENT], order[labels[order] == ONE_PATIENT]])
    sizes = rng.randint(1, 10, len(labels))
    patient = np.searchsorted(np.cumsum(sizes), np.arange(len(labels)), side="right")
    last = labels[order] == ONE_PATIENT
    patient[last] = patient[~last].max() + 1
    result = np.empty(len(labels), dtype=int)
    result[order] = patient
    return result
