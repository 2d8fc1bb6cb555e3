"""Monitors: receivers of the metrics of a run, besides its own files."""
