"""Learner ranks: their group, commands, training, checkpoints, weights."""
