"""Grading of short answers: `make_grader` of `envs.grading.config` makes a grader of keys."""
