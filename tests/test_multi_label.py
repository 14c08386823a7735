"""Images with several labels, from a parquet file to a measured model."""

import numpy as np
from datasets import ClassLabel, Dataset, Features, Image, List
from PIL import Image as PILImage
from recipe_runs import TINY, RecipeRun

from livt_hf import LiViTForImageClassification

NAMES = ["red", "green", "blue"]


def test_fine_tuning_on_several_labels_an_image_reports_mean_average_precision(tmp_path):
    rng = np.random.RandomState(0)
    present = rng.rand(96, 3) < (0.6, 0.3, 0.15)
    pixels = [rng.randint(0, 100, (8, 8, 3)) + 150 * row for row in present]
    rows = {
        "image": [PILImage.fromarray(picture.astype(np.uint8)) for picture in pixels],
        "label": [np.flatnonzero(row).tolist() for row in present],
    }
    features = Features(image=Image(), label=List(ClassLabel(names=NAMES)))
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "train.parquet")
    options = ["--dataset", tmp_path / "train.parquet", *TINY, "--pretrained", "none", "--test_prior", "none"]
    run = RecipeRun("finetune", tmp_path / "run", *options, "--mixup", 0, "--cutmix", 0).finish()
    metrics, config = run.results.metrics, LiViTForImageClassification.from_pretrained(run.folder).config
    assert 0 < metrics["map"] <= 1 and run.results.posterior is None
    assert config.problem_type == "multi_label_classification" and config.long_tail.num_images == 77  # 96 less a fifth
    assert max(config.long_tail.class_counts) < sum(config.long_tail.class_counts)
