"""A warm Python sandbox: sessions cost milliseconds, calls a fraction of one."""

from envs.sandbox.process import Rung, SandboxLimits
from envs.sandbox.remote import RemoteSandbox
from envs.sandbox.sandbox import InterpreterSession, RunResult, Sandbox, SandboxSession

__all__ = [
    "InterpreterSession",
    "RemoteSandbox",
    "RunResult",
    "Rung",
    "Sandbox",
    "SandboxLimits",
    "SandboxSession",
]
