"""Reads runs and prepares them: viewer, checks, recipes. Only launchers import it."""
