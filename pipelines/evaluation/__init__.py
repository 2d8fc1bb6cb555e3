"""Evaluation: what `launchers/evaluate.py` is composed of."""
