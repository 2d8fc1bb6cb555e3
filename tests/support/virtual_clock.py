"""Where tests find the virtual clock."""

from agentenv.virtual_clock import DeadlockError, VirtualClockLoop, run_virtual

__all__ = ["DeadlockError", "VirtualClockLoop", "run_virtual"]
