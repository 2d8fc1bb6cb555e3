"""Messages between the controller and a learner rank, and the names of their environment variables.

Messages are tagged Structs in length-prefixed msgpack frames:

    frame = 8 bytes little-endian length, then one msgpack map with its type in "type"

Each rank connects, sends Hello with the token it was given, and answers each command with Done or
Failed. The trees of an Update precede it one by one, so that only the controller and the rank hold
a whole update. TCP, so that a rank may run on another machine.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Literal, Union

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from agentenv.engines.remote.weights import Address, Bucket, Group, SharedWeights, Wire
from agentenv.errors import ConfigError
from agentenv.learners.algorithm import Algorithm
from agentenv.learners.batch import EncodedTree
from agentenv.learners.learner import Agreement, LearnerConfig, Score
from agentenv.learners.optimizer import OptimizerConfig
from agentenv.link import frame_of

ADDRESS_VARIABLE = "AGENTENV_LEARNER_ADDRESS"  # host:port of the controller
TOKEN_VARIABLE = "AGENTENV_LEARNER_TOKEN"
BACKEND_VARIABLE = "AGENTENV_LEARNER_BACKEND"  # of ranks that are started here: to be imported


class Message(Struct, tag=True, tag_field="type"):
    """Its class is its type."""


class Command(Message):
    """A message of the controller."""


class Hello(Message):
    """`store`: host:port of the store that rank 0 opened for all ranks to meet at; empty where
    their launcher names one (MASTER_ADDR), and for a single rank."""

    token: str
    rank: int
    num_ranks: int
    pid: int
    host: str
    store: str


class Init(Command):
    """Build the rank. `algorithm_class` is an import path, module:Class, so that a class from
    outside the project reaches the ranks as well."""

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
        raw = msgspec.Raw(msgspec.msgpack.encode(asdict(algorithm)))  # the name is the class's
        return cls(config, path, raw, model_dir, seed, store)

    def make_algorithm(self) -> Algorithm:
        """Decode the algorithm. Raises ConfigError where its module is not on the rank's path."""
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


class Update(Command):
    """Each mini-batch is one optimizer step. On the wire it follows its trees and holds only
    `sizes`, the number of trees of each mini-batch; see `messages_of`."""

    minibatches: list[list[EncodedTree]]
    lr_scale: float
    agreement: Agreement = "exact"
    sizes: list[int] = []


class Tree(Command):
    """The next tree of the Update that follows; not answered."""

    tree: EncodedTree


class Imitate(Command):
    sequences: list[EncodedTree]
    lr_scale: float


class Prefer(Command):
    """One optimizer step of DPO on pairs (`agentenv.learners.dpo`)."""

    pairs: list[EncodedTree]
    beta: float
    lr_scale: float


class ScoreSequences(Command):
    """Log-probs of sequences under the current weights."""

    sequences: list[EncodedTree]


class WarmUp(Command):
    """Compile what the first update would, on ranks with such a device; nothing else changes."""

    device: str = "cuda"


class ResetOptimizer(Command):
    """Drop the optimizer's state; or set it aside, or take it back."""

    config: OptimizerConfig
    state: Literal["drop", "set_aside", "take_back"] = "drop"


class WriteModel(Command):
    """Publishing counts the policy version up, exporting does not. `unmoved`: refused when the
    weights are not those of the version published last. `adapter_only`: the directory is that of
    the LoRA adapter."""

    directory: str
    publish: bool
    unmoved: bool = False
    adapter_only: bool = False


class Announce(Command):
    """Count the policy version up: its weights will be broadcast. Answered with `buckets`."""


class OpenGroup(Command):
    """Open a store where the servers meet rank 0. `port`: of the store, 0: any that is free;
    `interface`: the network interface whose address the servers get, empty: the one by which the
    controller reached the machine. Rank 0 answers with `address`."""

    timeout_s: float
    wire: Wire = "torch"
    port: int = 0
    interface: str = ""


class JoinGroup(Command):
    """Rank 0 joins. This command and the next are answered with `problem`."""

    group: Group


class SendWeights(Command):
    """All ranks gather, rank 0 broadcasts."""


class LeaveGroup(Command):
    pass


class Share(Command):
    """Count the policy version up, and put a copy of its weights where servers of the machine read
    it (agentenv/learners/shared.py). Answered with `shared`, or with `problem` by all ranks, which
    count nothing up then. `sleeps_next`: the ranks fall asleep with the copy in place;
    `num_readers`: servers that share a GPU."""

    sleeps_next: bool
    num_readers: int


class Release(Command):
    """Nothing reads the copy any more. This command and the next are for sleeping ranks too."""


class WriteShared(Command):
    """Write the directory of the weights that were shared last; refused unless they are those of
    `policy_version`."""

    directory: str
    policy_version: int


class Abort(Command):
    """Abort JoinGroup or SendWeights while it runs; not answered, and ignored when it is late."""


class Sleep(Command):
    """Give the memory of the device back, or take it again. A rank that is `asleep` does nothing
    else."""

    asleep: bool


class Save(Command):
    directory: str


class Load(Command):
    directory: str


class Stop(Command):
    pass


class Done(Message):
    """Answer to every command; each fills only its own fields.

    steps: metrics of the optimizer steps that were skipped, with "minibatch" and "epoch".
    entropies, proximal, logprobs: of an update, by mini-batch and tree; see
    agentenv.learners.partition.
    problem: of a transfer of weights, which is no failure of the rank.
    """

    policy_version: int = 0
    steps: list[dict[str, float]] = []
    metrics: dict[str, float] = {}
    scores: list[Score] = []
    entropies: list[list[bytes]] = []
    proximal: list[list[bytes]] = []
    logprobs: list[list[bytes]] = []
    buckets: list[Bucket] = []
    address: Address | None = None
    shared: SharedWeights | None = None
    problem: str = ""


class Failed(Message):
    """The command raised; the rank keeps running with the state it has."""

    error: str
    traceback: str


Reply = Hello | Done | Failed


def pack_frame(message: Message) -> bytes:
    """A message as it travels."""
    return frame_of(msgspec.msgpack.encode(message))


def messages_of(command: Message) -> Iterator[Message]:
    """A command as it travels: the trees that precede it, then itself."""
    if isinstance(command, Update):
        yield from (Tree(tree) for trees in command.minibatches for tree in trees)
        command = replace(command, minibatches=[], sizes=[*map(len, command.minibatches)])
    yield command


def with_trees(trees: Iterable[EncodedTree], command: Command) -> Command:
    """The whole command, from the message and the trees that preceded it."""
    if not isinstance(command, Update):
        return command
    rest = iter(trees)
    whole = [[*islice(rest, size)] for size in command.sizes]
    return replace(command, minibatches=whole, sizes=[])


_KINDS: Any = Union[tuple(Command.__subclasses__())]  # noqa: UP007
_COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(_KINDS)


def unpack_command(body: bytes) -> Command:
    """The command in the body of a frame."""
    return _COMMANDS.decode(body)
