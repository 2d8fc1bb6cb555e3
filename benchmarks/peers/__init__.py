"""Cost of peers at the work of `bench.py overhead`, each in a separate environment."""
