"""Messages between a controller and a rollout worker.

    controller                                     worker
    Grow(number, task, ..)        ----->           grows a tree on its actor
                                  <-----  TreeFrame  what happened to the tree, as a frame of the
                                                   journal; the last frame is its end
                                  <-----  Raised   the error of its rollout
    Drop(number)                  ----->           the tree is not wanted any more
                                  <-----  Acquire     a place on a server of the pool
    Granted, Refused              ----->           which server, and what is needed to ask it
    Standing, BreakOff            ----->           what happens to the server meanwhile
                                  <-----  FirstToken    it has given its first token
                                  <-----  Release    what became of the requests
                                  <-----  Sample   a turn, of an engine that is no pool
    Tokens, Stand, Turn, Refused  ----->           what becomes of it
                                  <-----  Quit     that slot or turn is not wanted any more
    Steer                         ----->           all rollouts pause or resume
    GiveUp(number, reason)        ----->           a person cancels that tree
    Look(number)                  ----->           what do its branches await?
                                  <-----  Looked
    Over                          ----->           the run has come to its end
                                  <-----  Ended    a rollout has ended, or failed
                                  <-----  Alive    every BEAT_S, with figures
                                  <-----  Say      a sentence for people
                                  <-----  Leaving  its machine is about to end

`number` names a tree, a place or a turn on one link: a tree that is requested again has another
one.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from agentenv.engines.pool.server import Outcome
from agentenv.failures import Failure
from agentenv.rollout import BranchNow
from agentenv.tree import Order
from agentenv.types import Chunk, Completion, SamplingParams, Task
from agentenv.untrusted import packed


class Grow(Struct, array_like=True, frozen=True, tag=1):
    """Start a rollout, or resume a `recorded` one (agentenv.frames.pack_recorded).
    `policy_version` is that of the engine; the others are arguments of `Actor.rollout`."""

    number: int
    task: Task
    index: int
    policy_version: int
    session: str = ""
    recorded: bytes | None = None
    order: Order | None = None


class Drop(Struct, array_like=True, frozen=True, tag=2):
    """Cancel the rollout; not answered."""

    number: int


class Tokens(Struct, array_like=True, frozen=True, tag=3):
    """More tokens of a turn."""

    number: int
    chunk: Chunk


class Stand(Struct, array_like=True, frozen=True, tag=4):
    """Nobody works for a turn from now on, or somebody does again; so many seconds of what was
    worked for it are lost."""

    number: int
    stands: bool
    lost_s: float = 0.0


class Turn(Struct, array_like=True, frozen=True, tag=5):
    """A turn that is done."""

    number: int
    completion: Completion


class Refused(Struct, array_like=True, frozen=True, tag=6):
    """The error of the engine (`named` of agentenv/worker_group.py)."""

    number: int
    kind: str
    text: str
    is_final: bool


class Granted(Struct, array_like=True, frozen=True, tag=8):
    """A place on a server of the pool, by its number there, which serves this version; `handed` is
    what a client in another process needs (RemoteServer.handed). `on_trial`: its first token is
    waited for."""

    number: int
    server: int
    url: str
    handed: bytes
    policy_version: int
    on_trial: bool


class Standing(Struct, array_like=True, frozen=True, tag=9):
    """The weights of the server are being replaced from now on, or have been, by this version."""

    number: int
    stands: bool
    policy_version: int


class BreakOff(Struct, array_like=True, frozen=True, tag=10):
    """End what runs in the place: the server is gone, or to be left alone, or sleeps. `is_dead`: so
    is the pool."""

    number: int
    reason: str
    asleep: bool
    is_dead: bool = False


class Steer(Struct, array_like=True, frozen=True, tag=12):
    """All rollouts pause or resume from now on."""

    holds: bool


class GiveUp(Struct, array_like=True, frozen=True, tag=13):
    """The live branches of the tree fail, as cancelled; not answered."""

    number: int
    reason: str


class Look(Struct, array_like=True, frozen=True, tag=14):
    """Asks for Looked; not answered when the tree does not grow."""

    number: int


class Over(Struct, array_like=True, frozen=True, tag=15):
    """The run has come to its end: no worker is needed any more. A link that ends without it is one
    that may come again."""


OfTurn = Tokens | Stand | Turn | Refused
OfPlace = Granted | Standing | BreakOff | Refused
Asked = Grow | Drop | Steer | GiveUp | Look | Over | OfTurn | OfPlace


class TreeFrame(Struct, array_like=True, frozen=True, tag=1):
    """An event of a tree: one frame of the journal with its head, and the tag of its content."""

    number: int
    tag: int
    frame: bytes


class Raised(Struct, array_like=True, frozen=True, tag=2):
    """The rollout raised; see `named` of agentenv/worker_group.py."""

    number: int
    kind: str
    text: str


class Sample(Struct, array_like=True, frozen=True, tag=3):
    """Ask the engine for a turn. `prompt` are token ids, int32; `listens`: Tokens are wanted; the
    others are arguments of `Engine.generate`."""

    number: int
    prompt: bytes
    sampling: SamplingParams
    session: str
    listens: bool
    stream_interval: int
    order: tuple[int, int]


class Quit(Struct, array_like=True, frozen=True, tag=4):
    """Abort the turn; not answered."""

    number: int


class Figures(Struct, array_like=True):
    """Of a worker. `hits` and `probe_waits_s` are those since the last ones, of
    `agentenv.metrics.PrefixHits` and `ProbeWaits`; `env` and `num_cut` since its start. `behind`
    says what its rollouts have waited for longest; empty: there are none."""

    num_trees: int = 0
    num_open_envs: int = 0
    num_cut: int = 0
    hits: dict[str, list[int]] = {}
    probe_waits_s: list[float] = []
    env: dict[str, float] = {}
    loop: dict[str, float] = {}
    behind: str = ""


class Alive(Struct, array_like=True, frozen=True, tag=5):
    figures: Figures


class Say(Struct, array_like=True, frozen=True, tag=6):
    text: str


class Acquire(Struct, array_like=True, frozen=True, tag=7):
    """Ask for a place on a server. `avoid`: numbers of servers that failed the turn; the others are
    arguments of `Engine.generate`."""

    number: int
    session: str
    order: tuple[int, int]
    avoid: list[int] = []


class FirstToken(Struct, array_like=True, frozen=True, tag=8):
    """A server that was on trial has given a token."""

    number: int


class Release(Struct, array_like=True, frozen=True, tag=9):
    """The slot is free again. `answers` are tokens and seconds of the requests that came to their
    end, `outcome` is that of the last one; `counts` are those of the
    worker's engine since the last Release."""

    number: int
    num_requests: int
    num_tokens: int
    answers: list[tuple[int, float]]
    counts: dict[str, int]
    outcome: Outcome


class Leaving(Struct, array_like=True, frozen=True, tag=10):
    """The worker ends within so many seconds, and wants no more trees."""

    within_s: float


class Looked(Struct, array_like=True, frozen=True, tag=11):
    """Waits of the live branches of a tree."""

    number: int
    branches: list[BranchNow]


class Ended(Struct, array_like=True, frozen=True, tag=12):
    """A rollout has ended, with a failure or without."""

    failure: Failure | None


Answer = (
    TreeFrame
    | Raised
    | Sample
    | Quit
    | Alive
    | Say
    | Acquire
    | FirstToken
    | Release
    | Leaving
    | Looked
    | Ended
)

pack = packed
read_asked = msgspec.msgpack.Decoder(Asked).decode
read_answer = msgspec.msgpack.Decoder(Answer).decode
