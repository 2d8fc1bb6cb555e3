"""What `launchers/bench.py` measures."""
