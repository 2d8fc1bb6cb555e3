"""Monitors: where the metrics of a run go beside its own files."""
