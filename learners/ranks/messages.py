"""Messages between the controller and a learner rank, and their environment variables.

Messages are tagged Structs in length-prefixed msgpack frames:

    frame = 8 bytes little-endian length, then one msgpack map with its type in "type"

Each rank connects, sends the Hello of a worker (agentenv/processes/worker_group.py), and answers
each command with the reply that the command's class names, or with RankFailed. The trees of an
Update are sent before it, one by one, so that no single frame has a whole update. The transport is
TCP, so that a rank may run on another machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Generic, Literal, TypeVar, Union

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from agentenv.base.errors import ConfigError, reported_as
from agentenv.base.registry import loaded
from agentenv.contract.weights import Address, Group, Manifest, SharedWeights, Wire
from agentenv.learners.algorithms.algorithm import Algorithm
from agentenv.learners.keys import Agreement, LearnerConfig, Score
from agentenv.learners.optimizer import OptimizerConfig
from agentenv.learners.trees.encoded_tree import EncodedTree
from agentenv.processes.link import frame_of

ADDRESS_VARIABLE = "AGENTENV_LEARNER_ADDRESS"  # host:port of the controller
TOKEN_VARIABLE = "AGENTENV_LEARNER_TOKEN"


class RankMessage(Struct, tag=True, tag_field="type"):
    """Base of the messages; the class name is the type."""


# Of a rank

OldState = Literal["drop", "set_aside", "take_back"]  # of an optimizer that is replaced


class RankFailed(RankMessage):
    """The command raised an error; the rank keeps its state and continues."""

    error: str
    traceback: str


class RankDone(RankMessage, kw_only=True):
    """The command was executed; base of the replies with results. `untrained`, of Init: the tensors
    of the model's directory that are not trained."""

    policy_version: int = 0  # after the command
    untrained: list[str] = []


class RankMetrics(RankDone):
    """Metrics of optimizer steps."""

    metrics: dict[str, float]


class RankUpdated(RankMetrics):
    """`steps`: metrics of skipped optimizer steps, with "minibatch" and "epoch". `values`: by
    mini-batch and tree; see `agentenv.learners.trees.partition.Share`."""

    steps: list[dict[str, float]] = []
    values: list[list[bytes]] = []


class RankScores(RankDone):
    """The scores of the sequences, in order."""

    scores: list[Score]


class RankManifest(RankDone):
    """What SendWeights will broadcast, in order."""

    buckets: Manifest


class RankTransfer(RankDone):
    """`problem`: the failure of a transfer of weights, which is not a failure of the rank.
    `address`: of the opened rendezvous store, on rank 0; `shared`: handles of this rank's copy, if
    it has one."""

    problem: str
    address: Address | None = None
    shared: SharedWeights | None = None


# Of the controller

R = TypeVar("R", bound=RankDone)


class RankCommand(RankMessage, Generic[R]):
    """A command, whose reply is an R or RankFailed."""


class RankNotice(RankMessage):
    """A message without reply."""


class Init(RankCommand[RankDone]):
    """Build the rank. `algorithm_class` is an import path, module:Class, which also supports
    classes of other packages. `teacher`: the directory of a second model, which only scores."""

    config: LearnerConfig
    algorithm_class: str
    algorithm: msgspec.Raw
    model_dir: str
    seed: int
    store: str = ""
    teacher: str = ""

    @classmethod
    def of(
        cls,
        config: LearnerConfig,
        algorithm: Algorithm,
        model_dir: str,
        seed: int,
        store: str = "",
        teacher: str = "",
    ) -> Init:
        """The message for an algorithm object."""
        kind = type(algorithm)
        path = f"{kind.__module__}:{kind.__qualname__}"
        raw = msgspec.Raw(msgspec.msgpack.encode(asdict(algorithm)))  # the name is the class's
        return cls(config, path, raw, model_dir, seed, store, teacher)

    def make_algorithm(self) -> Algorithm:
        """Decode the algorithm. Raises ConfigError if the rank cannot import its module."""
        problem = f"a learner rank cannot load the algorithm {self.algorithm_class}"
        remedy = "; install its module where the rank runs"
        with reported_as(ConfigError, problem, ConfigError, end=remedy):
            kind = loaded(self.algorithm_class)
        algorithm: Algorithm = msgspec.msgpack.decode(self.algorithm, type=kind)
        return algorithm


class Update(RankCommand[RankUpdated]):
    """An update, with one optimizer step per mini-batch. On the wire it follows its trees and has
    only `sizes`, the number of trees of each mini-batch; see `messages_of`."""

    minibatches: list[list[EncodedTree]]
    lr_scale: float
    agreement: Agreement = "exact"
    sizes: list[int] = []


class Tree(RankNotice):
    """The next tree of the following Update."""

    tree: EncodedTree


class Imitate(RankCommand[RankMetrics]):
    sequences: list[EncodedTree]
    lr_scale: float


class Prefer(RankCommand[RankMetrics]):
    """One optimizer step of DPO on pairs (`agentenv.learners.ranks.dpo`)."""

    pairs: list[EncodedTree]
    beta: float
    lr_scale: float


class ScoreSequences(RankCommand[RankScores]):
    """Log-probs of sequences under the current weights, or those of the teacher; of each token's
    `top_k` likeliest ids, too."""

    sequences: list[EncodedTree]
    by_teacher: bool = False
    top_k: int = 0


class ResetOptimizer(RankCommand[RankDone]):
    """Drop the optimizer's state, or save it, or restore it."""

    config: OptimizerConfig
    state: OldState = "drop"


class WriteModel(RankCommand[RankDone]):
    """Write a model directory. Publishing increments the policy version, exporting does not.
    `unmoved`: rejected if the weights have changed since the last published version.
    `adapter_only`: write only the LoRA adapter."""

    directory: str
    publish: bool
    unmoved: bool = False
    adapter_only: bool = False


class Announce(RankCommand[RankManifest]):
    """Increment the policy version, whose weights will be broadcast."""


class OpenGroup(RankCommand[RankTransfer]):
    """Open a rendezvous store for the servers and rank 0."""

    timeout_s: float
    wire: Wire = "torch"


class JoinGroup(RankCommand[RankTransfer]):
    """Rank 0 joins."""

    group: Group


class SendWeights(RankCommand[RankTransfer]):
    """All ranks gather, rank 0 broadcasts."""


class LeaveGroup(RankCommand[RankDone]):
    pass


class ShareWeights(RankCommand[RankTransfer]):
    """Increment the policy version, and copy its weights to memory that servers of the machine can
    read (learners/ranks/shared.py). With a problem, which all ranks report, the version is
    unchanged. `sleeps_next`: the ranks then sleep with the copy in place; `num_readers`: servers
    that share a GPU."""

    sleeps_next: bool
    num_readers: int


class ReleaseShared(RankCommand[RankDone]):
    """Release the copy after the last read. Sleeping ranks also execute this and the next
    command."""


class WriteShared(RankCommand[RankDone]):
    """Write the directory of the last shared weights; rejected unless they have this
    `policy_version`."""

    directory: str
    policy_version: int


class AbortTransfer(RankNotice):
    """Abort a running JoinGroup or SendWeights; ignored if it is late."""


class Sleep(RankCommand[RankDone]):
    """Free the memory of the device (`asleep`), or allocate it again. A sleeping rank rejects most
    other commands."""

    asleep: bool


class Save(RankCommand[RankDone]):
    directory: str


class Load(RankCommand[RankDone]):
    directory: str


class StopRank(RankNotice):
    pass


def pack_frame(message: RankMessage) -> bytes:
    """A message in wire format."""
    return frame_of(msgspec.msgpack.encode(message))


def messages_of(command: RankCommand[Any]) -> Iterator[RankMessage]:
    """The messages of a command: its trees, then the command itself."""
    if isinstance(command, Update):
        yield from (Tree(tree) for trees in command.minibatches for tree in trees)
        command = replace(command, minibatches=[], sizes=[*map(len, command.minibatches)])
    yield command


def with_trees(trees: Iterable[EncodedTree], command: RankCommand[R]) -> RankCommand[R]:
    """The whole command, from the message and the preceding trees."""
    if not isinstance(command, Update):
        return command
    rest = iter(trees)
    whole = [[*islice(rest, size)] for size in command.sizes]
    found: Any = replace(command, minibatches=whole, sizes=[])
    return found  # type: ignore[no-any-return]


Reply = RankDone | RankMetrics | RankUpdated | RankScores | RankManifest | RankTransfer | RankFailed
unpack_reply = msgspec.msgpack.Decoder(Reply).decode
_SENT: Any = Union[(*RankCommand.__subclasses__(), *RankNotice.__subclasses__())]
unpack_command: Callable[[bytes], RankCommand[Any] | RankNotice] = msgspec.msgpack.Decoder(
    _SENT
).decode
