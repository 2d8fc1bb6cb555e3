"""Messages between a controller and a rollout worker.

    controller                                     worker
    Grow(number, task, ..)        ----->           grow a tree on the worker's actor
                                  <-----  TreeFrame  an event of the tree, as a frame of the
                                                   journal; the last frame is its end
                                  <-----  Refused  the error of its rollout
    Quit(number)                  ----->           cancel the rollout of a tree
                                  <-----  Acquire     request a slot on a server of the pool
    Granted, Refused              ----->           the server and its connection data, or an error
    ServerPause, SlotAbort        ----->           events of the server
                                  <-----  SlotRelease   the slot is free, with the outcome
                                  <-----  SampleTurn  request a turn of an engine that is not a pool
    Tokens, TurnPause,            ----->           events and result of the turn
    SampledTurn, Refused
                                  <-----  Quit     cancel a slot or turn
    Steer                         ----->           pause or resume all rollouts
    CancelTree(number, reason)    ----->           a user cancels that tree
    GetWaits(number)              ----->           request the current waits of its branches
                                  <-----  CurrentWaits
    Over                          ----->           the run has ended
                                  <-----  RolloutEnded  a rollout has ended, or failed
                                  <-----  WorkerFigures  every BEAT_S seconds, with statistics
                                  <-----  Notice   a message for the user
                                  <-----  Leaving  its machine is about to shut down

`number` identifies a tree, a slot or a turn on one link; a tree that is requested again gets a new
number.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from agentenv.base.types import Chunk, Completion, SamplingParams, Task
from agentenv.base.untrusted import packed
from agentenv.engines.pool.server import Outcome
from agentenv.rollout.branch import BranchNow
from agentenv.rollout.failure_log import Failure


class Numbered(Struct, array_like=True, frozen=True):
    """A message about the tree, slot or turn with this number."""

    number: int


class Grow(Numbered, frozen=True, tag=1):
    """Start a rollout, or resume a `recorded` one (agentenv.rollout.frames.RECORDED).
    `policy_version` is the engine's; the others are arguments of `Actor.rollout`."""

    task: Task
    index: int
    policy_version: int
    session: str = ""
    recorded: bytes | None = None
    known: Any = None


class Quit(Numbered, frozen=True, tag=16):
    """Cancel the rollout, turn or slot; without reply."""


class Tokens(Numbered, frozen=True, tag=3):
    """New tokens of a turn."""

    chunk: Chunk


class TurnPause(Numbered, frozen=True, tag=4):
    """The clock of a turn pauses or resumes; `lost_s` seconds of its work do not count."""

    is_paused: bool
    lost_s: float = 0.0


class SampledTurn(Numbered, frozen=True, tag=5):
    """A completed turn."""

    completion: Completion


class Refused(Numbered, frozen=True, tag=17):
    """The error of a rollout, or of the engine (`named` of agentenv/processes/worker_group.py)."""

    kind: str
    text: str
    is_final: bool = False


class Granted(Numbered, frozen=True, tag=8):
    """A slot on a server of the pool, which has a number there and serves this policy version;
    `handed` is the connection data for a client in another process (RemoteServer.handed)."""

    server: int
    url: str
    handed: bytes
    policy_version: int


class ServerPause(Numbered, frozen=True, tag=9):
    """The server pauses for new weights, or resumes with this version."""

    is_paused: bool
    policy_version: int


class SlotAbort(Numbered, frozen=True, tag=10):
    """Abort the requests of the slot: the server is lost, unused from now on, or asleep.
    `is_dead`: the whole pool is lost."""

    reason: str
    is_asleep: bool
    is_dead: bool = False


class Steer(Struct, array_like=True, frozen=True, tag=12):
    """Pause or resume all rollouts."""

    holds: bool


class CancelTree(Numbered, frozen=True, tag=13):
    """Fail the live branches of the tree as cancelled; without reply."""

    reason: str


class GetWaits(Numbered, frozen=True, tag=14):
    """Request CurrentWaits; no reply if the tree is not growing."""


class Over(Struct, array_like=True, frozen=True, tag=15):
    """The run has ended, and no worker is needed. After the end of a link without this message, the
    worker may reconnect."""


OfTurn = Tokens | TurnPause | SampledTurn | Refused
OfPlace = Granted | ServerPause | SlotAbort | Refused
WorkerRequest = Grow | Quit | Steer | CancelTree | GetWaits | Over | OfTurn | OfPlace


class TreeFrame(Numbered, frozen=True, tag=1):
    """An event of a tree: a frame of the journal with its head, and the tag of its content."""

    tag: int
    frame: bytes


class SampleTurn(Numbered, frozen=True, tag=3):
    """Request a turn of the engine. `prompt` has token ids, int32; `listens`: send Tokens; the
    others are arguments of `Engine.generate`."""

    prompt: bytes
    sampling: SamplingParams
    session: str
    listens: bool
    stream_interval: int
    order: tuple[int, int]


class WorkerFigures(Struct, array_like=True, tag=5):
    """A heartbeat, with statistics of a worker. `hits` and `probe_waits_s` are those of
    `agentenv.rollout.metrics.PrefixHits` and `ProbeWaits` since the last message; `env` counts
    since its start. `behind` names the longest wait of its rollouts; empty: no rollouts."""

    num_open_envs: int = 0
    hits: dict[str, list[int]] = {}
    probe_waits_s: list[float] = []
    env: dict[str, float] = {}
    loop: dict[str, float] = {}
    behind: str = ""


class Notice(Struct, array_like=True, frozen=True, tag=6):
    text: str


class Acquire(Numbered, frozen=True, tag=7):
    """Request a slot on a server. `avoid`: numbers of servers that failed the turn; the others are
    arguments of `Engine.generate`."""

    session: str
    order: tuple[int, int]
    avoid: list[int] = []


class SlotRelease(Numbered, frozen=True, tag=9):
    """The slot is free again. `num_answered` are the completed requests, `outcome` is that of the
    last one; `counts` are those of the worker's engine since the last one."""

    num_requests: int
    num_answered: int
    num_tokens: int
    counts: dict[str, int]
    outcome: Outcome


class Leaving(Struct, array_like=True, frozen=True, tag=10):
    """The worker ends within so many seconds, and accepts no more trees."""

    within_s: float


class CurrentWaits(Numbered, frozen=True, tag=11):
    """The current waits of the live branches of a tree."""

    branches: list[BranchNow]


class RolloutEnded(Struct, array_like=True, frozen=True, tag=12):
    """A rollout has ended, with a failure or without."""

    failure: Failure | None


OfTree = TreeFrame | CurrentWaits | RolloutEnded | Refused
OfEngine = SampleTurn | Acquire | SlotRelease | Quit
Answer = OfTree | OfEngine | WorkerFigures | Notice | Leaving

pack = packed
read_request = msgspec.msgpack.Decoder(WorkerRequest).decode
read_answer = msgspec.msgpack.Decoder(Answer).decode
