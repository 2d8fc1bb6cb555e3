"""A warm Python sandbox: sessions cost milliseconds, calls a fraction of one."""

from agentenv.envs.sandbox.process import Rung, SandboxLimits
from agentenv.envs.sandbox.sandbox import InterpreterSession, RunResult, Sandbox, SandboxSession

__all__ = [
    "InterpreterSession",
    "RunResult",
    "Rung",
    "Sandbox",
    "SandboxLimits",
    "SandboxSession",
]
