"""Pretraining from a stream by the recipe."""

from datasets import load_dataset
from recipe_runs import TINY, RecipeRun, make_pictures


def test_pretraining_reads_a_stream_of_parquet_shards(tmp_path):
    pictures = load_dataset("imagefolder", data_dir=str(make_pictures(tmp_path / "pictures")))
    for split, dataset in pictures.items():
        for shard in range(2):
            dataset.shard(2, shard).to_parquet(tmp_path / "shards" / f"{split}-{shard:05d}-of-00002.parquet")
    options = ["--dataset", tmp_path / "shards", *TINY, "--streaming", "--num_images", 64]
    run = RecipeRun("pretrain.py", tmp_path / "run", *options).finish()
    assert run.results["num_train_images"] == 64 and run.results["updates"] == 3 * 4
    assert (run.folder / "reconstructions.png").exists()
