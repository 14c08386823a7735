"""Pretraining from a stream by the recipe."""

from pathlib import Path

from datasets import load_dataset
from recipe_runs import TINY, RecipeRun, make_pictures


def write_shards(tmp_path: Path, broken: tuple[str, ...] = ()) -> Path:
    """Pictures in two parquet files a split, some of them cut short."""
    folder = make_pictures(tmp_path / "pictures")
    for name in broken:
        (folder / name).write_bytes((folder / name).read_bytes()[:40])
    for split, dataset in load_dataset("imagefolder", data_dir=str(folder)).items():
        for shard in range(2):
            dataset.shard(2, shard).to_parquet(tmp_path / "shards" / f"{split}-{shard:05d}-of-00002.parquet")
    return tmp_path / "shards"


def test_pretraining_reads_a_stream_of_parquet_shards(tmp_path):
    options = ["--dataset", write_shards(tmp_path), *TINY, "--streaming", "--num_images", 64]
    run = RecipeRun("pretrain", tmp_path / "run", *options).finish()
    assert run.results.num_train_images == 64 and run.results.updates == 3 * 4
    assert (run.folder / "reconstructions.png").exists()


def test_broken_images_of_a_stream_are_left_out_of_training_and_of_the_held_out_loss(tmp_path):
    broken = [f"train/class0/{i}.png" for i in range(8)]
    shards = write_shards(tmp_path, broken=(*broken, "test/class1/0.png"))
    options = ["--dataset", shards, *TINY, "--streaming", "--num_images", 64, "--on_broken", "skip"]
    recipe = RecipeRun("pretrain", tmp_path / "run", *options)
    recipe.finish()
    assert "left out: image" in recipe.printed and "left out 1 broken of 44 images" in recipe.printed


def test_a_broken_held_out_image_is_refused_before_training(tmp_path):
    folder = make_pictures(tmp_path / "pictures")
    (folder / "test/class3/10.png").write_bytes(b"broken")
    recipe = RecipeRun("pretrain", tmp_path / "run", "--dataset", folder, *TINY)
    assert recipe.wait() != 0
    assert "held-out image" in recipe.printed and "--on_broken skip" in recipe.printed
    assert not recipe.folder.exists()
