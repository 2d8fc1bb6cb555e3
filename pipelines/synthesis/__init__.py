"""Data synthesis: what `agentenv synthesize` is composed of."""
