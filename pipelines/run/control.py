"""Steering a run from outside: what `agentenv ctl` asks, and how it reaches the process.

    agentenv ctl  --a Request, a line of JSON-->  RUN/ctl/socket   the training process
                      <--a Reply, a line of JSON----

The socket is in a folder that only its owner can enter (mode 0700), has mode 0600, and each end
asks the system for the user of the other. The system takes paths of up to 107 bytes: for a longer
one the socket is in a folder of its own among the temporary files, which RUN/ctl/place names. What
a process that was killed has left is removed by the next one.

One request a connection. It is of limited size, comes within a few seconds or not at all, and holds
up nothing. What was changed is kept in RUN/steering.jsonl.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import stat
import struct
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from agentenv.deadline import uncancelled
from agentenv.disk import append_whole
from agentenv.errors import AgentEnvError, ConfigError, DataError, ForeignError
from agentenv.offload import in_thread
from agentenv.untrusted import decode

FOLDER, SOCKET, PLACE = "ctl", "socket", "place"
LOG = "steering.jsonl"
SHORT = "agentenv-ctl-"  # how folders among the temporary files begin
MAX_PATH = 107  # bytes, of the system's own
MAX_REQUEST, MAX_REPLY = 1 << 16, 1 << 22  # bytes
MAX_CLIENTS = 16  # at a time
READ_S, WRITE_S = 5.0, 5.0
ANSWER_S = 10.0  # for what is answered at once
LONG_S = 4 * 3600.0  # for what has to be done first: a checkpoint, an evaluation
MAX_ROWS = 1000

_PEER = struct.Struct("3i")  # pid, uid, gid


# Requests.


class AskStatus(Struct, tag="status", forbid_unknown_fields=True):
    """How the run stands."""


class AskRollouts(Struct, tag="rollouts", forbid_unknown_fields=True):
    """The rollouts that are under way, those that have waited longest first. With `text` the
    questions too."""

    max_rows: int = 50
    text: bool = False


class AskWhy(Struct, tag="why", forbid_unknown_fields=True):
    """What all rollouts await, or one tree in detail; with `text` its question and last turns."""

    tree: int | None = None
    text: bool = False


class Cancel(Struct, tag="cancel", forbid_unknown_fields=True):
    """Give trees up: they fail, of kind `cancelled`."""

    trees: list[int]


class Requeue(Struct, tag="requeue", forbid_unknown_fields=True):
    """Let trees begin again, in the place that they have."""

    trees: list[int]


class Pause(Struct, tag="pause", forbid_unknown_fields=True):
    """No tree, no turn and no update begins."""


class Resume(Struct, tag="resume", forbid_unknown_fields=True):
    """They begin again."""


class Checkpoint(Struct, tag="checkpoint", forbid_unknown_fields=True):
    """Write one between two updates; answered when it is there."""


class Evaluate(Struct, tag="evaluate", forbid_unknown_fields=True):
    """Evaluate these sets (none: all) between two updates; answered with the figures."""

    sets: list[str] = []


class Set(Struct, tag="set", forbid_unknown_fields=True):
    """Change keys of the configuration, each as KEY=VALUE; none: tell those that can be."""

    values: list[str] = []


Request = (
    AskStatus
    | AskRollouts
    | AskWhy
    | Cancel
    | Requeue
    | Pause
    | Resume
    | Checkpoint
    | Evaluate
    | Set
)
SLOW = (Checkpoint, Evaluate)


# Replies.


class Refused(Struct, tag="refused"):
    """It is not done, and why."""

    why: str


class Status(Struct, tag="status"):
    """`phase`: set-up, cold start, RL, end. `doing` is what an interruption would wait for.
    `trees`: where every tree went. `set` are keys that were changed in flight."""

    run: str
    pid: int
    host: str
    since: str
    phase: str
    is_paused: bool
    step: int
    num_steps: int
    policy_version: int
    doing: str = ""
    evaluating: str = ""
    trees: dict[str, int] = {}
    queue: dict[str, int] = {}
    num_open_envs: int = 0
    loop: dict[str, float] = {}
    engine: dict[str, float] = {}
    workers: dict[str, float] = {}
    longest_wait: str = ""
    set: dict[str, Any] = {}


class RolloutRow(Struct):
    """A tree that is under way. `of`: training or evaluation. `state`: begins, grows, ended (it
    waits for the learner). `what` is awaited by the branch that has waited longest, for `for_s`
    seconds, since `since`; of a tree in a worker only `why` asks. `num_before`: trees that the
    learner takes before this one."""

    tree: int
    task: str
    of: str
    state: str
    age_s: float = 0.0
    what: str = ""
    for_s: float = 0.0
    since: str = ""
    branch: str = ""
    num_branches: int = 0
    num_turns: int = 0
    num_failures: int = 0
    num_before: int | None = None
    worker: str = ""
    question: str | None = None


class Rollouts(Struct, tag="rollouts"):
    """`num_left_out` rows are not shown."""

    rows: list[RolloutRow]
    num_left_out: int = 0
    note: str = ""


class Wait(Struct):
    """What several branches await. `is_long`: longer than expected. `advice`: what it may mean."""

    what: str
    num_branches: int
    longest_s: float
    since: str
    tree: int
    branch: str
    task: str
    is_long: bool
    advice: str = ""


class Waits(Struct, tag="waits"):
    """Of all rollouts, those that are awaited longest first; `lines`: what else holds the run."""

    waits: list[Wait]
    lines: list[str]


class BranchRow(Struct):
    """A live branch of a tree. `limit_s`: of the seconds that it may be worked for."""

    branch: str
    what: str
    for_s: float
    since: str
    num_turns: int
    num_response_tokens: int
    num_tool_calls: int
    worked_s: float
    limit_s: float
    advice: str = ""
    text: str | None = None


class Why(Struct, tag="why"):
    """One tree. `ends` counts its branches that are at their end, by how; `failures` those that
    failed and were replaced, by kind."""

    row: RolloutRow
    branches: list[BranchRow]
    ends: dict[str, int]
    failures: dict[str, int]
    lines: list[str]


class Done(Struct, tag="done"):
    """What was done, for people, and its facts."""

    lines: list[str]
    facts: dict[str, Any] = {}


class Knob(Struct):
    """A key that can be changed in flight: its value, that of the configuration, what it means."""

    key: str
    value: Any
    configured: Any
    meaning: str
    reach: str


class Knobs(Struct, tag="knobs"):
    knobs: list[Knob]


Reply = Refused | Status | Rollouts | Waits | Why | Done | Knobs
Answer = Callable[[Request], Awaitable[Reply]]


# Where the socket is.


def _user_of(connection: Any) -> int:
    """The user of the process at the other end, whom the system names."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    uid: int = _PEER.unpack(told)[1]
    return uid


def _is_short(path: Path) -> bool:
    return len(os.fsencode(path)) <= MAX_PATH


def place_of(run: Path) -> Path:
    """The socket of the process that has the run's folder."""
    here = run.absolute() / FOLDER
    try:
        return Path((here / PLACE).read_text(encoding="utf-8").strip()) / SOCKET
    except (FileNotFoundError, NotADirectoryError):
        return here / SOCKET


def _sweep(run: Path) -> None:
    """Remove what processes that were killed have left: of this run, whose folder is ours alone,
    and among the temporary files what is ours and nobody listens to."""
    shutil.rmtree(run / FOLDER, ignore_errors=True)
    for folder in Path(tempfile.gettempdir()).glob(f"{SHORT}*"):
        with suppress(OSError):
            found = folder.lstat()
            is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if is_ours and time.time() - found.st_mtime > READ_S and not _is_heard(folder / SOCKET):
                shutil.rmtree(folder)


def _is_heard(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
        return True


def _make_place(run: Path) -> Path:
    """A folder for the socket that nobody else can enter."""
    folder = run.absolute() / FOLDER
    folder.mkdir(mode=0o700)
    if _is_short(folder / SOCKET):
        return folder
    short = Path(tempfile.mkdtemp(prefix=SHORT))  # mode 0700
    if not _is_short(short / SOCKET):
        short.rmdir()
        raise OSError(f"{short} is too long for a socket; set TMPDIR to a shorter place")
    (folder / PLACE).write_text(f"{short}\n", encoding="utf-8")
    return short


# The end in the training process.


@asynccontextmanager
async def listening(run: Path, answer: Answer, warn: Callable[[str], None]) -> AsyncIterator[None]:
    """Inside, requests are answered. A run that cannot be steered, since its place takes no
    sockets, goes on without; `warn` is told."""
    server, place = None, None
    try:
        await in_thread(_sweep, run)
        place = await in_thread(_make_place, run)
        before = os.umask(0o177)
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            listener.bind(str(place / SOCKET))
        finally:
            os.umask(before)
        serve = Desk(answer).serve
        server = await asyncio.start_unix_server(serve, sock=listener, limit=MAX_REQUEST)
    except OSError as error:
        warn(f"agentenv ctl cannot reach this run: {error}")
    try:
        yield
    finally:
        if server is not None:
            server.close()
        await uncancelled(in_thread(_remove, run / FOLDER, place))


def _remove(*folders: Path | None) -> None:
    for folder in folders:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


class Desk:
    """Answers connections, MAX_CLIENTS at a time."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._num_clients = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection. Whatever it says, or however it ends, only itself is concerned."""
        self._num_clients += 1
        try:
            reply = await self._reply(reader, writer)
            writer.write(msgspec.json.encode(reply) + b"\n")
            async with asyncio.timeout(WRITE_S):
                await writer.drain()
        except (OSError, TimeoutError):  # it is gone, or does not read
            pass
        finally:
            self._num_clients -= 1
            writer.close()

    async def _reply(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Reply:
        user = _user_of(writer.get_extra_info("socket"))
        if user != os.geteuid():
            return Refused(f"this run is user {os.geteuid()}'s, and not user {user}'s")
        if self._num_clients > MAX_CLIENTS:
            return Refused(f"{MAX_CLIENTS} others are being answered; ask again later")
        try:
            async with asyncio.timeout(READ_S):
                line = await reader.readuntil(b"\n")
            request = decode(line, Request)
        except TimeoutError:
            return Refused(f"no request came within {READ_S:g} s")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return Refused(f"expected a line of JSON of at most {MAX_REQUEST} bytes")
        except ForeignError as error:
            return Refused(f"{error}; is agentenv ctl of the version that the run has?")
        try:
            async with asyncio.timeout(LONG_S if isinstance(request, SLOW) else ANSWER_S):
                return await self._answer(request)
        except TimeoutError:
            return Refused("the run has not come to an answer in time")
        except AgentEnvError as error:
            return Refused(str(error))


# The other end.


class UnreachableError(AgentEnvError):
    """No process can be asked about this run; the text says why."""


def ask(run: Path, request: Request, timeout_s: float | None = None) -> Reply:
    """What the process that trains in `run` replies. Raises UnreachableError, and ConfigError for
    what it refuses; `timeout_s` is by default what the request may take."""
    if timeout_s is None:
        timeout_s = LONG_S if isinstance(request, SLOW) else ANSWER_S + READ_S
    path = place_of(run)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(path))
            user = _user_of(connection)
            if user != os.geteuid():
                raise UnreachableError(f"{path} is listened to by user {user}, and not by you")
            with suppress(BrokenPipeError):  # it has its answer ready
                connection.sendall(msgspec.json.encode(request) + b"\n")
            data = _received(connection)
        except TimeoutError as error:
            raise UnreachableError(
                f"the run gave no answer within {timeout_s:g} s: its event loop is held up, which "
                f"{run / 'run.log'} tells of after a while, or it is at its end"
            ) from error
        except PermissionError as error:
            raise UnreachableError(f"{path} is not yours: {error.strerror}") from error
        except OSError as error:
            raise UnreachableError(
                f"nobody listens at {path}: {error.strerror or error}"
            ) from error
    try:
        reply: Reply = decode(data, Reply)
    except ForeignError as error:
        raise UnreachableError(
            f"the run's answer cannot be read ({error}); it ended meanwhile, or is of another "
            "version"
        ) from error
    if isinstance(reply, Refused):
        raise ConfigError(reply.why)
    return reply


def _received(connection: socket.socket) -> bytes:
    parts, size = [], 0
    while part := connection.recv(1 << 16):
        parts.append(part)
        size += len(part)
        if size > MAX_REPLY:
            raise OSError("its answer is too long")
    return b"".join(parts)


# What was changed.


class Change(Struct):
    """A line of RUN/steering.jsonl: a command that changed something, after which update."""

    time: str
    command: str
    step: int
    policy_version: int
    incarnation: int
    facts: dict[str, Any] = field(default_factory=dict)


def write_change(run: Path, change: Change) -> None:
    """Add a line, durably."""
    append_whole(run / LOG, msgspec.json.encode(change) + b"\n", durable=True)


def read_changes(run: Path) -> list[Change]:
    """Everything that was changed in the run, in order; a line that a crash cut off is left out.
    Raises DataError for another one that cannot be read."""
    path = run / LOG
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    try:
        return [decode(line, Change) for line in lines[:-1] if line]
    except ForeignError as error:
        raise DataError(f"{path}: {error}; remove the line") from error


def last_values(run: Path) -> dict[str, Any]:
    """Keys that were set in flight, with what they were set to last."""
    found: dict[str, Any] = {}
    for change in read_changes(run):
        if change.command == "set":
            found |= change.facts.get("values", {})
    return found


def settings_of(run: Path, current: dict[str, Any]) -> dict[str, Any]:
    """What was set in flight and still holds for a run that goes on: keys that the configuration of
    today, `current` in plain values, has as the run began with; for others the word of today
    counts."""
    values = last_values(run)
    if not values:
        return {}
    path = run / "config.json"
    try:
        saved = decode(path.read_bytes())
    except (OSError, ForeignError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    return {
        key: value
        for key, value in values.items()
        if looked_up(saved, key) == looked_up(current, key) != value
    }


def looked_up(plain: Any, key: str) -> Any:
    """The value of "table.key" among plain values."""
    for part in key.split("."):
        plain = plain.get(part) if isinstance(plain, dict) else None
    return plain
