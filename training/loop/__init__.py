"""Asynchronous reinforcement learning: the parts of `agentenv train`."""
