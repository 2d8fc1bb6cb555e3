"""Algorithms: plan, credit, loss. Torch-free until a loss is computed."""
