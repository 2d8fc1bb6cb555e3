"""Many engine servers as one engine."""
