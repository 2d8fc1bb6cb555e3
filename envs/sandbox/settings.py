"""What a sandbox is made of: its limits, its interpreter, its rung."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from agentenv.errors import ConfigError
from envs.sandbox import landlock
from envs.sandbox.interpreter import Interpreter

UNUSED_ID = 1_948_000_000  # uid and gid of model-written code when the host runs as root


class MissingModuleError(ConfigError):
    """The interpreter lacks a module; no other rung would help."""


Rung = Literal["namespaces", "landlock", "unsafe"]
PRELOAD_IF_INSTALLED = ("numpy", "sympy")
READABLE = ("/usr", "/lib", "/lib32", "/lib64", "/dev/null", "/dev/urandom")
LANDLOCK_ADVICE = (
    "Landlock needs Linux 5.13 or newer, built with CONFIG_SECURITY_LANDLOCK and with landlock "
    "in the lsm= list of the kernel's command line"
)


class SandboxLimits(Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of one session."""

    memory_bytes: Annotated[
        int, Meta(ge=1 << 20, description="what it may add to what is preloaded")
    ] = 512 << 20
    cpu_s: Annotated[int, Meta(ge=1, description="CPU time of all its calls, seconds")] = 600
    max_threads: Annotated[
        int, Meta(ge=1, description="the interpreter's own counts: with 1, nothing outlives a call")
    ] = 1
    max_open_files: Annotated[int, Meta(ge=8, description="open files")] = 64
    tmp_bytes: Annotated[int, Meta(ge=4096, description="its files in all")] = 16 << 20
    max_output_chars: Annotated[
        int, Meta(ge=16, description="of one call; head and tail are kept")
    ] = 8000


class SandboxSetup(Struct, frozen=True):
    """What a zygote is made of. `interpreter` is a virtual or conda environment, or None for that
    of this process; `preload` names modules, or is None for numpy and sympy where installed."""

    limits: SandboxLimits = SandboxLimits()
    interpreter: str | None = None
    preload: tuple[str, ...] | None = None


def check_rung(limits: SandboxLimits, rung: Rung) -> None:
    """Raises ConfigError where this machine, or what it can do, does not allow the rung."""
    if rung != "landlock":
        return
    if landlock.abi() < 1:
        raise ConfigError(f"this kernel offers no Landlock. {LANDLOCK_ADVICE}")
    if limits.max_threads > 1:  # they are counted by user, and all sessions are one
        raise ConfigError(
            "python.limits.max_threads: without user namespaces the threads of a session cannot "
            "be counted, so only 1 is possible"
        )


def check_missing(missing: list[str], python: Interpreter) -> None:
    """Raises MissingModuleError if there are any."""
    if missing:
        names = ", ".join(missing)
        raise MissingModuleError(
            f"python.preload: {python.program} cannot import {names}; install it there "
            f"({python.program} -m pip install ...), name another python.interpreter, or leave "
            "it out of python.preload"
        )


def settings_of(setup: SandboxSetup, python: Interpreter, rung: Rung, control_fd: int) -> str:
    """What the zygote reads from its command line."""
    limits = setup.limits
    root = rung != "unsafe" and os.geteuid() == 0
    if rung == "landlock":  # bubblewrap can open the way to a private folder, Landlock cannot
        root = root and python.open_to_all()
    config = {
        "control_fd": control_fd,
        "rung": rung,
        # process limits do not bind uid 0
        "uid": UNUSED_ID if root else None,
        "preload": setup.preload or (),
        "preload_if_installed": PRELOAD_IF_INSTALLED if setup.preload is None else (),
        "readable": [path for path in (*READABLE, *python.folders) if os.path.exists(path)],
        "below_tmp": [path for path in python.folders if path.startswith("/tmp/")],
        "tmp_bytes": limits.tmp_bytes,
        "max_output_chars": limits.max_output_chars,
        "rlimits": {
            "AS": limits.memory_bytes,
            "CPU": limits.cpu_s,
            "NPROC": limits.max_threads,
            "NOFILE": limits.max_open_files,
            "FSIZE": limits.tmp_bytes,
        },
    }
    return msgspec.json.encode(config).decode()
