"""Benches, their peers and experiments, on which the documentation rests; not installed."""
