"""What `recipes/benchmark.py` measures."""
