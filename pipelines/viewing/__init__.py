"""The viewer of runs and evaluations, a page over the files that they have written; and their
trajectories in the formats of other viewers, without secrets."""
