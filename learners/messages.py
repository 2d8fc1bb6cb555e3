"""The wire between the controller and a rank: length-prefixed msgpack frames of tagged Structs.

    frame = 8 bytes little-endian length, then one msgpack map with its type in "type"

Each rank connects, says Hello with the token it was given, and answers each command with Done or
Failed. TCP, so that a rank may live on another machine.
"""

from __future__ import annotations

import importlib
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from agentenv.engines.weights import Address, Bucket, Group, Wire
from agentenv.errors import ConfigError
from learners.algorithm import Algorithm
from learners.batch import EncodedTree
from learners.learner import LearnerConfig, OptimizerConfig, Score

ADDRESS_VARIABLE = "AGENTENV_LEARNER_ADDRESS"  # host:port of the controller
TOKEN_VARIABLE = "AGENTENV_LEARNER_TOKEN"

PREFIX_BYTES = 8


class Hello(Struct, tag=True, tag_field="type"):
    """`store`: host:port of the store that rank 0 opened for all ranks to meet at; empty if they
    meet where their launcher says (MASTER_ADDR) or there is one rank only."""

    token: str
    rank: int
    num_ranks: int
    pid: int
    host: str
    store: str


class Init(Struct, tag=True, tag_field="type"):
    """What a rank is built from. `algorithm_class` is an import path, module:Class, so that a
    class from outside the project reaches the ranks as well."""

    config: LearnerConfig
    algorithm_class: str
    algorithm: msgspec.Raw
    model_dir: str
    seed: int
    store: str = ""

    @classmethod
    def of(
        cls, config: LearnerConfig, algorithm: Algorithm, model_dir: str, seed: int, store: str = ""
    ) -> Init:
        """The message for an algorithm at hand."""
        kind = type(algorithm)
        path = f"{kind.__module__}:{kind.__qualname__}"
        raw = msgspec.Raw(msgspec.msgpack.encode(asdict(algorithm)))  # the class says the name
        return cls(config, path, raw, model_dir, seed, store)

    def make_algorithm(self) -> Algorithm:
        """The algorithm again. Raises ConfigError where its module is not on the rank's path."""
        module, _, name = self.algorithm_class.partition(":")
        try:
            kind = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"a learner rank cannot load the algorithm {self.algorithm_class}: {error}; "
                "install its module where the rank runs"
            ) from error
        algorithm: Algorithm = msgspec.msgpack.decode(self.algorithm, type=kind)
        return algorithm


class Update(Struct, tag=True, tag_field="type"):
    """Each mini-batch is one optimizer step."""

    minibatches: list[list[EncodedTree]]
    lr_scale: float


class Imitate(Struct, tag=True, tag_field="type"):
    sequences: list[EncodedTree]
    lr_scale: float


class Prefer(Struct, tag=True, tag_field="type"):
    """One optimizer step of DPO on pairs (`learners.dpo`)."""

    pairs: list[EncodedTree]
    beta: float
    lr_scale: float


class ScoreSequences(Struct, tag=True, tag_field="type"):
    """Without `adapters`: of the model that LoRA started from."""

    sequences: list[EncodedTree]
    adapters: bool = True


class ResetOptimizer(Struct, tag=True, tag_field="type"):
    """Drop the optimizer's state; or set it aside, or take back what was set aside."""

    config: OptimizerConfig
    state: Literal["drop", "set_aside", "take_back"] = "drop"


class WriteModel(Struct, tag=True, tag_field="type"):
    """Publishing counts the policy version up, exporting does not. `unmoved`: refused when the
    weights are not those of the version published last. `adapter_only`: the directory is that of
    the LoRA adapter."""

    directory: str
    publish: bool
    unmoved: bool = False
    adapter_only: bool = False


class Announce(Struct, tag=True, tag_field="type"):
    """Count the policy version up: its weights will be broadcast. Answered with `buckets`."""


class OpenGroup(Struct, tag=True, tag_field="type"):
    """Open a place for the servers to meet rank 0 at. `port` of the store, 0: any that is free;
    `interface`: name of the network interface whose address the servers are told, empty: that by
    which the controller knows the machine. Answered with `address` by rank 0."""

    timeout_s: float
    wire: Wire = "torch"
    port: int = 0
    interface: str = ""


class JoinGroup(Struct, tag=True, tag_field="type"):
    """Rank 0 joins. This command and the next are answered with `problem`."""

    group: Group


class SendWeights(Struct, tag=True, tag_field="type"):
    """All ranks gather, rank 0 broadcasts."""


class LeaveGroup(Struct, tag=True, tag_field="type"):
    pass


class Abort(Struct, tag=True, tag_field="type"):
    """Break off JoinGroup or SendWeights while it runs; not answered. Ignored when it is late."""


class Nap(Struct, tag=True, tag_field="type"):
    """Give the memory of the device back, or take it again. Nothing else is done `asleep`."""

    asleep: bool


class Save(Struct, tag=True, tag_field="type"):
    directory: str


class Load(Struct, tag=True, tag_field="type"):
    directory: str


class Stop(Struct, tag=True, tag_field="type"):
    pass


class Done(Struct, tag=True, tag_field="type"):
    """Answer to every command; only the fields that it has to fill are filled.

    steps: metrics of the optimizer steps that were skipped, with "minibatch" and "epoch".
    problem: what went wrong in a broadcast, which is no failure of the rank.
    """

    policy_version: int = 0
    steps: list[dict[str, float]] = []
    metrics: dict[str, float] = {}
    scores: list[Score] = []
    buckets: list[Bucket] = []
    address: Address | None = None
    problem: str = ""


class Failed(Struct, tag=True, tag_field="type"):
    """The command raised; the rank goes on with the state it has."""

    error: str
    traceback: str


Command = (
    Init
    | Update
    | Imitate
    | Prefer
    | ScoreSequences
    | ResetOptimizer
    | WriteModel
    | Announce
    | OpenGroup
    | JoinGroup
    | SendWeights
    | LeaveGroup
    | Nap
    | Abort
    | Save
    | Load
    | Stop
)
Reply = Hello | Done | Failed


def pack_frame(message: Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(PREFIX_BYTES, "little") + body


def unpack_command(body: bytes) -> Command:
    command: Command = msgspec.msgpack.decode(body, type=Command)
    return command


def unpack_reply(body: bytes) -> Reply:
    reply: Reply = msgspec.msgpack.decode(body, type=Reply)
    return reply
