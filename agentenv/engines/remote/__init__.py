"""Engines behind HTTP: requests, streams, stop strings, weights."""
