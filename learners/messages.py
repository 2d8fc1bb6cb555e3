"""The wire between the controller and a rank: length-prefixed msgpack frames of tagged Structs.

    frame = 8 bytes little-endian length, then one msgpack map with its type in "type"

The rank connects, says Hello with the token it was given, and answers each command with Done or
Failed. TCP, so that a rank may live on another machine.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from learners.aepo import AEPO
from learners.arpo import ARPO
from learners.encoding import EncodedTree
from learners.grpo import GRPO
from learners.learner import LearnerConfig, OptimizerConfig, Score

ADDRESS_VARIABLE = "AGENTENV_LEARNER_ADDRESS"  # host:port of the controller
TOKEN_VARIABLE = "AGENTENV_LEARNER_TOKEN"

AnyAlgorithm = GRPO | ARPO | AEPO

PREFIX_BYTES = 8


class Hello(Struct, tag=True, tag_field="type"):
    token: str
    rank: int
    pid: int


class Init(Struct, tag=True, tag_field="type"):
    config: LearnerConfig
    algorithm: AnyAlgorithm
    model_dir: str
    seed: int


class Update(Struct, tag=True, tag_field="type"):
    """Each mini-batch is one optimizer step."""

    minibatches: list[list[EncodedTree]]
    lr_scale: float


class Imitate(Struct, tag=True, tag_field="type"):
    sequences: list[EncodedTree]
    lr_scale: float


class ScoreSequences(Struct, tag=True, tag_field="type"):
    sequences: list[EncodedTree]


class ResetOptimizer(Struct, tag=True, tag_field="type"):
    config: OptimizerConfig


class WriteModel(Struct, tag=True, tag_field="type"):
    """Publishing counts the policy version up, exporting does not."""

    directory: str
    publish: bool


class Save(Struct, tag=True, tag_field="type"):
    directory: str


class Load(Struct, tag=True, tag_field="type"):
    directory: str


class Stop(Struct, tag=True, tag_field="type"):
    pass


class Done(Struct, tag=True, tag_field="type"):
    """Answer to every command; only the fields that it has to fill are filled."""

    policy_version: int = 0
    metrics: dict[str, float] = {}
    scores: list[Score] = []


class Failed(Struct, tag=True, tag_field="type"):
    """The command raised; the rank goes on with the state it has."""

    error: str
    traceback: str


Command = (
    Init | Update | Imitate | ScoreSequences | ResetOptimizer | WriteModel | Save | Load | Stop
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
