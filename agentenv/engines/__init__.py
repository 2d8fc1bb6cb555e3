"""Engines: what samples tokens, in this process or behind HTTP."""
