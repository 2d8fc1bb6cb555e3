"""The processes of workers."""
