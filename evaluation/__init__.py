"""Evaluation: the parts of `agentenv evaluate`."""
