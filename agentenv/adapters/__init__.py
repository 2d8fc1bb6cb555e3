"""Environments under the interfaces of others, and checks of environments."""
