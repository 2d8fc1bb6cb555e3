"""Shared by training and evaluation: keys, parts, servers, the folder of a run."""
