"""The checks before a run: one list for a start, a dry run and the doctor."""
