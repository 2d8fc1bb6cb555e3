"""Grading of short answers: `make_grader` of `envs.grading.reward` makes a grader of keys."""
