"""Algorithms: plan, credit, loss. Torch-free until a loss is computed."""

from agentenv.learners.algorithms.algorithm import Algorithm, Clipped, Grouped

__all__ = ["Algorithm", "Clipped", "Grouped"]
