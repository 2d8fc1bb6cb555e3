"""Many servers as one engine."""
