"""Processes that work for a command: rollouts, and environments that compute."""
