"""Three environments of the size of one's own; each folder trains as it is."""
