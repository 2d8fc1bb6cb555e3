"""Asynchronous reinforcement learning: what `agentenv train` is composed of."""
