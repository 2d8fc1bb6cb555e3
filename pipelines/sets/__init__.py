"""Sets of runs: `sweep.py` makes the runs of several arms and seeds, `comparison.py` compares
them by their learning curves."""
