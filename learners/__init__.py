"""Algorithms, credit, losses, tree batches, and the learner with its ranks. torch lives here."""
