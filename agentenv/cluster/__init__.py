"""Rollout workers: event loops of their own that grow the trees of one controller."""
