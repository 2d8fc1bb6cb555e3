"""Data synthesis: the parts of `agentenv synthesize`."""
