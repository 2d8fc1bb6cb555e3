"""Inference servers of a run: processes, GPUs, roles."""
