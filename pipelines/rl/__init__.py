"""Asynchronous reinforcement learning: what `launchers/train.py` is composed of."""
