"""The keys of the Python interpreter, [python]: location and limits of model-written code."""

from __future__ import annotations

from functools import partial
from typing import Annotated, ClassVar

from msgspec import Meta, Struct, field

from agentenv.base.config import ESSENTIAL, PATH, about
from agentenv.contract.tool_config import shared_config


class SandboxLimits(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of one session, and of all together."""

    memory_bytes: Annotated[
        int, about("memory in addition to the preloaded modules", ge=1 << 20)
    ] = 512 << 20
    cpu_s: Annotated[int, about("CPU time of all calls of a session, seconds", ge=1)] = 600
    max_threads: ClassVar[int] = 1  # the main thread, which live forks require
    max_open_files: ClassVar[int] = 64  # a constant, since no tool needed more
    tmp_bytes: ClassVar[int] = 16 << 20  # total of a session's files
    max_output_chars: ClassVar[int] = 8000  # of one call; head and tail are kept
    max_sessions: Annotated[
        int,
        about(
            "live sessions; beyond that, the one idle for longest is closed and replayed later",
            ge=1,
        ),
    ] = 2000


class PythonConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Location and limits of model-written code."""

    interpreter: Annotated[
        str | None,
        about("virtual or conda environment, mounted read-only; none: the trainer's own", PATH),
    ] = None
    preload: Annotated[
        tuple[str, ...] | None, about("preloaded modules; none: numpy and sympy where installed")
    ] = None
    prelude: Annotated[
        str, about("code that runs first, whose names all calls have", max_length=32_768)
    ] = ""
    timeout_s: Annotated[
        Annotated[float, Meta(gt=0)], about("wall-clock limit of one call", ESSENTIAL)
    ] = 10.0
    limits: Annotated[SandboxLimits, about("resource limits of one session")] = field(
        default_factory=SandboxLimits
    )
    allow_unsafe: Annotated[bool, about("run without a sandbox where none is available")] = False


python_config = partial(shared_config, PythonConfig, "python")
