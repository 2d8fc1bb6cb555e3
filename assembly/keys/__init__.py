"""The keys of every configuration."""
