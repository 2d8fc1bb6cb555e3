"""Engines sample tokens, in this process or over HTTP."""
