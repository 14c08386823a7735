"""What a hospital exports, from the table to a report of five folds."""

from pathlib import Path

import pytest
from hospital import ONE_PATIENT, SIZES, make_hospital

from livt_hf.data import class_counts, load_long_tailed
from livt_hf.recipes import data as look
from livt_hf.recipes import finetune, pretrain
from livt_hf.runs import Run

OF_PATIENTS = ["labels.csv", "--group_column", "patient"]


@pytest.fixture(scope="module")
def export(tmp_path_factory) -> Path:
    return make_hospital(tmp_path_factory.mktemp("hospital"))


def test_the_export_is_what_hospitals_have(export):
    data = load_long_tailed(str(export), group_column="patient")
    counts = sum(class_counts(part) for part in data.values())
    assert sorted(counts.tolist(), reverse=True) == list(SIZES) and sum(SIZES) == 600
    rows = [
        (label, patient) for part in data.values() for label, patient in zip(part["label"], part["group"], strict=True)
    ]
    images = [sum(other == patient for _, other in rows) for patient in {patient for _, patient in rows}]
    assert min(images) >= 1 and max(images) <= 9
    assert len({patient for label, patient in rows if label == ONE_PATIENT}) == 1


@pytest.mark.slow
def test_three_commands_lead_from_the_table_to_a_report_of_five_folds(export, monkeypatch, capsys, caplog):
    """With a smaller model, for time."""
    monkeypatch.chdir(export.parent)
    monkeypatch.setenv("LIVT_RUNS", str(export.parent / "runs"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    smaller = "--epochs 1 --batch_size 32 --threads 1".split()
    look.main(OF_PATIENTS)
    printed = capsys.readouterr().out
    assert "Broken images in train" in printed and "groups" in printed
    assert "6  the file is missing" in caplog.text and "4  the label is empty" in caplog.text
    sizes = ["--model_size", "micro", "--image_size", "16"]
    pretrain.main(["--dataset", *OF_PATIENTS, "--on_broken", "skip", *smaller, *sizes])
    finetune.main([*smaller, "--folds", "5"])
    printed = capsys.readouterr().out
    assert "diagnosis 13 (4)" in caplog.text and "mean ± std" in printed
    (folder,) = (export.parent / "runs").glob("finetune-*/1")
    run = Run(folder)
    assert run.finished and (folder / "report" / "report.html").exists()
    assert run.results.num_images == run.results.metrics["num_images"] > 500
