"""The viewer of runs and evaluations: a page over the files that they have written."""
