"""Messages between the controller and a learner rank, and their environment variables.

Messages are tagged Structs in length-prefixed msgpack frames:

    frame = 8 bytes little-endian length, then one msgpack map with its type in "type"

Each rank connects, sends the Hello of a worker (agentenv/worker_group.py), and answers each command
with Done or Failed. The trees of an Update are sent before it, one by one, so that no single frame
has a whole update. The transport is TCP, so that a rank may run on another machine.
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
BACKEND_VARIABLE = "AGENTENV_LEARNER_BACKEND"  # lets local ranks import the backend early


class Message(Struct, tag=True, tag_field="type"):
    """Base of the messages; the class name is the type."""


class Command(Message):
    """A message of the controller."""


class Init(Command):
    """Build the rank. `algorithm_class` is an import path, module:Class, which also supports
    classes of other packages."""

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
        """The message for an algorithm object."""
        kind = type(algorithm)
        path = f"{kind.__module__}:{kind.__qualname__}"
        raw = msgspec.Raw(msgspec.msgpack.encode(asdict(algorithm)))  # the name is the class's
        return cls(config, path, raw, model_dir, seed, store)

    def make_algorithm(self) -> Algorithm:
        """Decode the algorithm. Raises ConfigError if the rank cannot import its module."""
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
    """An update, with one optimizer step per mini-batch. On the wire it follows its trees and has
    only `sizes`, the number of trees of each mini-batch; see `messages_of`."""

    minibatches: list[list[EncodedTree]]
    lr_scale: float
    agreement: Agreement = "exact"
    sizes: list[int] = []


class Tree(Command):
    """The next tree of the following Update; without reply."""

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
    """Compile the code of the first update on GPUs, without other effects."""

    device: str = "cuda"


class ResetOptimizer(Command):
    """Drop the optimizer's state, or save it, or restore it."""

    config: OptimizerConfig
    state: Literal["drop", "set_aside", "take_back"] = "drop"


class WriteModel(Command):
    """Write a model directory. Publishing increments the policy version, exporting does not.
    `unmoved`: rejected if the weights have changed since the last published version.
    `adapter_only`: write only the LoRA adapter."""

    directory: str
    publish: bool
    unmoved: bool = False
    adapter_only: bool = False


class Announce(Command):
    """Increment the policy version, whose weights will be broadcast. The reply has `buckets`."""


class OpenGroup(Command):
    """Open a rendezvous store for the servers and rank 0. `port`: of the store, 0: any free one;
    `interface`: the network interface of its address, empty: that of the controller's connection.
    Rank 0's reply has `address`."""

    timeout_s: float
    wire: Wire = "torch"
    port: int = 0
    interface: str = ""


class JoinGroup(Command):
    """Rank 0 joins. The replies to this command and the next one have `problem`."""

    group: Group


class SendWeights(Command):
    """All ranks gather, rank 0 broadcasts."""


class LeaveGroup(Command):
    pass


class Share(Command):
    """Increment the policy version, and copy its weights to memory that servers of the machine can
    read (agentenv/learners/shared.py). The reply has `shared`, or `problem` on all ranks, and then
    the version is unchanged. `sleeps_next`: the ranks then sleep with the copy in place;
    `num_readers`: servers that share a GPU."""

    sleeps_next: bool
    num_readers: int


class Release(Command):
    """Release the copy after the last read. Sleeping ranks also execute this and the next
    command."""


class WriteShared(Command):
    """Write the directory of the last shared weights; rejected unless they have this
    `policy_version`."""

    directory: str
    policy_version: int


class Abort(Command):
    """Abort a running JoinGroup or SendWeights; without reply, and ignored if it is late."""


class Sleep(Command):
    """Free the memory of the device (`asleep`), or allocate it again. A sleeping rank rejects most
    other commands."""

    asleep: bool


class Save(Command):
    directory: str


class Load(Command):
    directory: str


class Stop(Command):
    pass


class Done(Message):
    """The reply to a command, with only the fields of that command.

    steps: metrics of skipped optimizer steps, with "minibatch" and "epoch".
    entropies, proximal, logprobs: of an update, by mini-batch and tree; see
    agentenv.learners.partition.
    problem: the failure of a transfer of weights, which is not a failure of the rank.
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
    """The command raised an error; the rank keeps its state and continues."""

    error: str
    traceback: str


Reply = Done | Failed


def pack_frame(message: Message) -> bytes:
    """A message in wire format."""
    return frame_of(msgspec.msgpack.encode(message))


def messages_of(command: Message) -> Iterator[Message]:
    """The messages of a command: its trees, then the command itself."""
    if isinstance(command, Update):
        yield from (Tree(tree) for trees in command.minibatches for tree in trees)
        command = replace(command, minibatches=[], sizes=[*map(len, command.minibatches)])
    yield command


def with_trees(trees: Iterable[EncodedTree], command: Command) -> Command:
    """The whole command, from the message and the preceding trees."""
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
