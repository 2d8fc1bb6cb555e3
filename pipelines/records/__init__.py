"""One stored trajectory: as a row, as a conversation, as text."""
