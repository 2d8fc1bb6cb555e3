"""Sessions on another machine, by the HTTP interface of SandboxFusion.

The service keeps nothing between calls, so each call carries the cells before it and runs them
again first; whether they then say the same is asked only of a fork. One request: POST
{url}/run_code with {"code", "language", "run_timeout", ...}; its reply: {"status", "message",
"run_result": {"status", "execution_time", "stdout", "stderr"}}.
"""

from __future__ import annotations

import asyncio
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from agentenv.envs.sandbox.keys import SandboxLimits
from agentenv.envs.sandbox.sandbox import CODE_TOO_LONG, MAX_CODE_CHARS, RunResult, SandboxCounters
from agentenv.errors import ConfigError, EnvError, ForeignError, InfraError
from agentenv.offload import in_thread
from agentenv.untrusted import decode

if TYPE_CHECKING:
    from aiohttp import ClientSession


# The program that a session on another machine sends with each call.

MARK = "\n@@agentenv-answer@@"


@cache
def _cells() -> str:
    """The source of the module that runs cells there."""
    return Path(__file__).with_name("cells.py").read_text()


# The order in which sets of strings are gone through must not change from call to call. The
# program can be too long for an argument.
RESTART = """
import os, sys, tempfile
file = tempfile.TemporaryFile()
file.write({program!r}.encode())
file.seek(0)
os.dup2(file.fileno(), 0)
os.execve(sys.executable, [sys.executable, "-"], {{**os.environ, "PYTHONHASHSEED": "0"}})
"""
# What runs there: the cells before, then the new one.
SCRIPT = """
import hashlib, json, sys, types
request = json.loads({request!r})
cells = sys.modules["cells"] = types.ModuleType("cells")
exec(compile(request["cells"], "cells.py", "exec"), cells.__dict__)
if any("numpy" in code for code in request["codes"]):
    try:
        import numpy
    except ImportError:
        pass
cells.seed_all(request["seed"])
stdout = sys.stdout
main = types.ModuleType("__main__")
sys.modules["__main__"] = main
answer, digests = {{}}, []
for number, code in enumerate(request["codes"]):
    output, problem = cells.run_cell(code, main.__dict__, number + 1, request["max_chars"])
    said = [cells._printable(output), cells._printable(problem)]
    digests.append(hashlib.sha256(json.dumps(said).encode()).hexdigest())
    answer = {{"output": said[0], "problem": said[1]}}
answer["digests"] = [*digests, cells.digest(main.__dict__, None)]
stdout.write({mark!r} + json.dumps(answer))
stdout.flush()
"""


HTTP_PATIENCE_S = 15.0  # beside the time that the code may take
START_TIMEOUT_S = 30.0
FORK_TIMEOUT_S = 10.0  # beside twice what the cells took before
MAX_REPLY_BYTES = 4 << 20
MAX_ERROR_CHARS = 300
MAX_SECONDS = 1e6  # that a program there may have run


class _RunOutcome(Struct):
    status: str = ""
    execution_time: Annotated[float, Meta(ge=0, le=MAX_SECONDS)] | None = None
    stdout: str | None = None
    stderr: str | None = None


class _Reply(Struct):
    status: str = ""
    message: str | None = None
    run_result: _RunOutcome | None = None


class _Answer(Struct):
    output: str = ""
    problem: str = ""
    digests: list[str] = []


class RemoteSandbox:
    """Sessions at `url`, a SandboxFusion service. Whatever protection there is, is the service's.

    `start` runs one small program there, and raises ConfigError when that does not work.
    """

    def __init__(self, url: str, *, limits: SandboxLimits | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"python.remote_url: expected http://... or https://..., not {url!r}")
        self.url = url.rstrip("/")
        self.limits = limits or SandboxLimits()
        self.counters = SandboxCounters()
        self._http: ClientSession | None = None
        self._starting = asyncio.Lock()
        self._proven = False

    def session(self, seed: int | None) -> RemoteSession:
        """A session for one episode; costs nothing until it runs something."""
        self.counters.num_sessions += 1
        return RemoteSession(self, 0 if seed is None else seed)

    async def start(self) -> None:
        """See that the service works, once."""
        async with self._starting:
            if self._proven:
                return
            try:
                result, *_ = await self.post(0, ["6 * 7"], START_TIMEOUT_S)
            except InfraError as error:
                raise ConfigError(
                    f"python.remote_url: {self.url} does not work: {error}"
                ) from error
            if result.output != "42":
                raise ConfigError(
                    f"python.remote_url: {self.url} does not run Python: {result.output!r}"
                )
            self._proven = True

    def stats(self) -> dict[str, float]:
        """What happened here so far, as metrics."""
        return self.counters.stats()

    async def close(self) -> None:
        """Close the connections; idempotent."""
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    async def post(
        self, seed: int, codes: list[str], run_timeout_s: float
    ) -> tuple[RunResult, list[str], float]:
        """Run cells in a fresh interpreter there: how the last one went, digests of what each
        said and of the variables at the end, and the seconds that all took. Raises InfraError.
        """
        request = {
            "cells": await in_thread(_cells),
            "seed": seed,
            "codes": codes,
            "max_chars": self.limits.max_output_chars,
        }
        program = SCRIPT.format(request=json.dumps(request), mark=MARK)
        body = {
            "code": RESTART.format(program=program),
            "language": "python",
            "compile_timeout": run_timeout_s,
            "run_timeout": run_timeout_s,
            "memory_limit_MB": self.limits.memory_bytes >> 20,
            "stdin": "",
            "files": {},
            "fetch_files": [],
        }
        try:
            reply = decode(await self._request(body, run_timeout_s), _Reply)
        except ForeignError as error:
            raise InfraError(f"{self.url}: not a reply of SandboxFusion: {error}") from error
        outcome = reply.run_result
        if reply.status == "SandboxError" or outcome is None:
            message = (reply.message or "no message")[:MAX_ERROR_CHARS]
            raise InfraError(f"{self.url}: {reply.status or 'no status'}: {message}")
        return *self._read(outcome), outcome.execution_time or 0.0

    def _read(self, outcome: _RunOutcome) -> tuple[RunResult, list[str]]:
        if outcome.status == "TimeLimitExceeded":
            return RunResult("", False, "timed_out"), []
        _, mark, text = (outcome.stdout or "").rpartition(MARK)
        try:
            answer = decode(text.strip(), _Answer) if mark else None
        except ForeignError:
            answer = None
        if answer is None:
            return RunResult("The interpreter died.", False, "died"), []
        most = self.limits.max_output_chars  # which the program may have said something beside
        output, problem = answer.output[: 2 * most], answer.problem[: 2 * most]
        joined = f"{output}\n{problem}".strip("\n") if problem else output
        end = "raised" if problem else "done"
        return RunResult(joined, not problem, end, problem), answer.digests

    async def _request(self, body: dict[str, object], run_timeout_s: float) -> bytes:
        import aiohttp  # only who names a URL needs it

        if self._http is None:
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        try:
            async with asyncio.timeout(run_timeout_s + HTTP_PATIENCE_S):
                async with self._http.post(f"{self.url}/run_code", json=body) as response:
                    if response.status != 200:
                        raise InfraError(f"{self.url}: HTTP status {response.status}")
                    data = bytearray()
                    async for piece in response.content.iter_any():
                        data += piece
                        if len(data) > MAX_REPLY_BYTES:
                            raise InfraError(f"{self.url}: a reply over {MAX_REPLY_BYTES} bytes")
                    return bytes(data)
        except TimeoutError as error:
            raise InfraError(f"{self.url}: no reply in time") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise InfraError(f"{self.url}: {type(error).__name__}: {error}") from error


class RemoteSession:
    """The record of one episode's cells. A cell that timed out or died is not in it, so that the
    variables before it are kept."""

    def __init__(self, sandbox: RemoteSandbox, seed: int) -> None:
        self.seed = seed
        self._sandbox = sandbox
        self._codes: list[str] = []
        self._digests: list[str] = []
        self._spent_s = 0.0  # what running the record takes
        self._closed = False

    async def run(self, code: str, timeout_s: float) -> RunResult:
        """Run one cell. Raises InfraError when the machinery failed; then call again."""
        if self._closed:
            raise EnvError("this interpreter session is closed")
        if len(code) > MAX_CODE_CHARS:
            return RunResult(CODE_TOO_LONG, False, "raised", CODE_TOO_LONG)
        counters = self._sandbox.counters
        counters.num_calls += 1
        counters.num_replays += bool(self._codes)
        result, digests, spent_s = await self._sandbox.post(
            self.seed, [*self._codes, code], timeout_s + 2 * self._spent_s
        )
        if result.end == "timed_out":
            counters.num_timeouts += 1
            text = f"TimeoutError: stopped after {timeout_s:g} s"
            return RunResult(text, False, "timed_out")
        if result.end == "died":
            counters.num_deaths += 1
            return result
        self._codes.append(code)
        self._digests = digests
        self._spent_s = spent_s
        return result

    async def fork(self) -> RemoteSession:
        """A session that will replay the same cells. Raises EnvError where these do not say the
        same, or leave the same variables, when they run once more."""
        other = RemoteSession(self._sandbox, self.seed)
        other._codes, other._digests = list(self._codes), self._digests
        other._spent_s = self._spent_s
        if not other._codes:
            return other
        counters = self._sandbox.counters
        counters.num_replays += 1
        result, digests, _ = await self._sandbox.post(
            self.seed, other._codes, FORK_TIMEOUT_S + 2 * self._spent_s
        )
        if digests != other._digests:
            counters.num_replays_refused += 1
            raise EnvError(
                "an interpreter session cannot be replayed: its cells said something else than "
                f"the first time, or left other variables; the last one: {result.output[:100]!r}"
            )
        return other

    def close(self) -> None:
        """Nothing is held anywhere; idempotent."""
        self._closed = True
