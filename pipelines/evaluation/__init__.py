"""Evaluation: what `agentenv evaluate` is composed of."""
