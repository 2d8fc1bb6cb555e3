"""Where tests find the virtual clock."""

from agentenv.offload import DeadlockError, VirtualClockLoop, run_virtual

__all__ = ["DeadlockError", "VirtualClockLoop", "run_virtual"]
