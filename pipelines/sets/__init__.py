"""Sets of runs: `sweep.py` trains several arms with several seeds, `comparison.py` compares them by
the learning curves of `curves.py`."""
