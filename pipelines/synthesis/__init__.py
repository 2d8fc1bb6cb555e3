"""Data synthesis: what `launchers/synthesize.py` is composed of."""
