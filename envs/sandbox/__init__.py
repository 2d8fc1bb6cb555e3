"""A warm Python sandbox: sessions cost milliseconds, calls a fraction of one."""

from envs.sandbox.sandbox import RunResult, Sandbox, SandboxSession
from envs.sandbox.zygote_process import SandboxLimits

__all__ = ["RunResult", "Sandbox", "SandboxLimits", "SandboxSession"]
