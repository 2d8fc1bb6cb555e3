"""Exports of the trajectories of a run or an evaluation in other formats, without secrets."""
