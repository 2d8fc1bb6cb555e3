"""Data synthesis: the parts of `launchers/synthesize.py`."""
