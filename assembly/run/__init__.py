"""A run: its directory, terminal, event loop, signals and control socket."""
