"""Benchmarks, peers and experiments behind the figures of the documentation; not installed."""
