"""A warm Python sandbox: sessions cost milliseconds, calls a fraction of one."""

from envs.sandbox.remote import RemoteSandbox
from envs.sandbox.sandbox import Sandbox
from envs.sandbox.session import InterpreterSession, RunResult, SandboxSession
from envs.sandbox.settings import Rung, SandboxLimits

__all__ = [
    "InterpreterSession",
    "RemoteSandbox",
    "RunResult",
    "Rung",
    "Sandbox",
    "SandboxLimits",
    "SandboxSession",
]
