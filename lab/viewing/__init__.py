"""The viewer of runs and evaluations, a page over their files; and their
trajectories in the formats of other viewers, without secrets."""
