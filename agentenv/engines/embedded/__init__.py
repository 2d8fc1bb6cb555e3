"""The engine in the controller's process."""
