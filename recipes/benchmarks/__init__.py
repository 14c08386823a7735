"""What `recipes/benchmarks/run.py` measures."""
