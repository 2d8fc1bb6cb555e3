"""The parts of a run, each checked and built once."""
