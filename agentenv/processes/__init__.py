"""Processes: supervision, groups of workers, links, the guard."""
