"""GPUs of a run, and the engine servers that it starts."""
