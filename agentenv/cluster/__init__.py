"""Rollout workers: separate event loops that grow the trees of one controller."""
