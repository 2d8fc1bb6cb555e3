"""Evaluation: the parts of `launchers/evaluate.py`."""
