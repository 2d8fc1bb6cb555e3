"""What a run would start and whether it fits (`--dry-run`); what a machine and a configuration lack
(`agentenv doctor`)."""
