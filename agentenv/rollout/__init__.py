"""Growing trees: actor, rollout, queue, journal, archive, metrics."""
