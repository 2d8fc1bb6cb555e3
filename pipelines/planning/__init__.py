"""What a run would start, and whether it fits: --dry-run."""
