"""What peers cost at the work of `bench.py overhead`, each driven in an environment of its own."""
