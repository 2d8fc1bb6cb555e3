"""The trajectory tree: one object from the first token to the gradient.

    root: the prompt                         nodes[0], no action
    +-- turn: action + observation           a node = the policy's sampled action, then the
    |   +-- turn: action (leaf)              env's answer
    |   +-- turn: action (leaf, a fork)      a fork is a second child of the node that holds the
    +-- turn: action (leaf)                  tool result

Each token is stored once, in packed arrays: 12 bytes for a sampled token, 4 for an observed one.
Trajectories, prefixes, masks, returns and staleness are derived by traversal.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, overload

import msgspec
from msgspec import Struct, field

from agentenv.base.types import Info, Limit, Task, VersionSpan
from agentenv.base.untrusted import packed

End = Literal["terminated", "truncated", "failed"]
LED = "led_calls"  # in Node.info: tool calls that were replayed to reach the turn
PLAN = "plan"  # in the root's info: what the plan knew at its start
GUIDED = "guided"  # in Node.info: a grammar limited the turn
CANCELLED = "cancelled"  # the kind of failure of cancelled trajectories

if TYPE_CHECKING:
    Ids = array[int]
    Nats = array[float]
else:  # as given: from frames, from JSON rows or by hand
    Ids = bytes | list[int]
    Nats = bytes | list[float]


def packed_ids(ids: Iterable[int]) -> Ids:
    """Token ids in the form of nodes, int32."""
    return array("i", ids)


def _packed(code: str, values: Any) -> Any:
    if isinstance(values, array):
        return values
    if isinstance(values, bytes):
        found: array[Any] = array(code)
        found.frombytes(values)
        return found
    return array(code, values)


class Prefix(Sequence[int]):
    """The tokens before a turn: those of a path, whose arrays it shares."""

    __slots__ = ("_size", "parts")

    def __init__(self, parts: tuple[Ids, ...] = ()) -> None:
        self.parts = parts
        self._size = sum(map(len, parts))

    def plus(self, ids: Ids) -> Prefix:
        """This prefix followed by the tokens `ids`."""
        longer = Prefix.__new__(Prefix)
        longer.parts = (*self.parts, ids)
        longer._size = self._size + len(ids)
        return longer

    def joined(self) -> Ids:
        """All tokens in one new array."""
        whole = array("i")
        for part in self.parts:
            whole += part
        return whole

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.parts)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> Ids: ...
    def __getitem__(self, place: int | slice) -> int | Ids:
        if isinstance(place, slice) and place.start is not None and place.stop is None:
            last = self.parts[-1] if self.parts else array("i")
            if -len(last) <= place.start < 0:  # the tail, without joining
                return last[place]
        return self.joined()[place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """For numpy, int32 unless it requests another type."""
        import numpy as np

        return np.asarray(self.joined(), dtype)


class Node(Struct):
    """One turn. `logprobs` and `entropies` (nats, float32) have an entry per token of `action_ids`;
    a token of a guided turn whose log-prob is nan is not trained. Both are of the distribution at
    the turn's `temperature` (greedy, 0: at 1), truncated to `kept_ids`, `num_kept` for each token;
    whole if these are empty.

    `branch` names the coroutine that grew the node: "0", "1", ... for from-scratch trajectories,
    "0.2+1" for the first fork from branch "0" after its second turn. `num_forks` is the number of
    siblings that the plan started at this node, None if it made no decision. A leaf has `end`; a
    truncated one also `limit`, a failed one `error`. A trajectory may continue in a new context,
    such as a shorter one: its prompt is a node without a parent, and `continues` is the index of
    the last node of the previous context. Its `info` has the `kind` of the context, and in
    `discards` the nodes that the branch's program discarded with it.
    """

    index: int
    parent: int | None
    branch: str = ""
    action_ids: Ids = field(default_factory=lambda: array("i"))
    logprobs: Nats = field(default_factory=lambda: array("f"))
    entropies: Nats = field(default_factory=lambda: array("f"))
    temperature: float = 1.0
    num_kept: Ids = field(default_factory=lambda: array("i"))
    kept_ids: Ids = field(default_factory=lambda: array("i"))
    version_spans: list[VersionSpan] = []
    observation_ids: Ids = field(default_factory=lambda: array("i"))
    reward: float = 0.0
    end: End | None = None
    limit: Limit | None = None
    error: str | None = None
    num_forks: int | None = None
    continues: int | None = None
    info: Info = {}

    def __post_init__(self) -> None:
        self.action_ids = _packed("i", self.action_ids)
        self.observation_ids = _packed("i", self.observation_ids)
        self.num_kept, self.kept_ids = _packed("i", self.num_kept), _packed("i", self.kept_ids)
        self.logprobs, self.entropies = _packed("f", self.logprobs), _packed("f", self.entropies)

    @property
    def is_of_user(self) -> bool:
        """Whether the observation is a user message instead of a tool result."""
        return bool(self.info.get("user_messages")) and not self.info.get("tool_calls")


class Trajectory:
    """A root-to-leaf path, derived from its tree."""

    def __init__(self, path: list[Node]) -> None:
        self.path = path
        self.leaf = path[-1]

    @property
    def turns(self) -> list[Node]:
        """The nodes with an action, in order."""
        return self.path[1:]

    @property
    def reward(self) -> float:
        """The return: the sum of rewards along the path."""
        return sum(node.reward for node in self.path)

    @property
    def success(self) -> bool:
        """Whether the grader accepted the answer."""
        return bool(self.leaf.info.get("success", False))

    @cached_property
    def token_ids(self) -> list[int]:
        """Prompt, then action and observation of each turn: exactly the engine's input and output,
        one context after the other."""
        return [token for node in self.path for token in node.action_ids + node.observation_ids]

    @cached_property
    def loss_mask(self) -> list[bool]:
        """True on the tokens that the policy sampled; one entry per token of `token_ids`."""
        return [
            sampled
            for node in self.path
            for sampled in [True] * len(node.action_ids) + [False] * len(node.observation_ids)
        ]

    @property
    def num_tokens(self) -> int:
        return sum(len(node.action_ids) + len(node.observation_ids) for node in self.path)

    @property
    def num_action_tokens(self) -> int:
        return sum(len(node.action_ids) for node in self.path)

    @property
    def num_tool_calls(self) -> int:
        """Calls along the path; those on a shared prefix count for each trajectory."""
        return sum(len(node.info.get("tool_calls", ())) for node in self.path)


class Scored(Struct, array_like=True):
    """The learner's results for the tokens of a node's action: one entry per token, or empty.

    `proximal` has the log-probs under the weights before the update, nan where the engine's replace
    them; `logprobs` those at the token's first training; `entropies` belong to `proximal`, while
    the node has the engine's; `teacher` has a teacher's log-probs. Nats, float32.
    """

    proximal: Nats = field(default_factory=lambda: array("f"))
    logprobs: Nats = field(default_factory=lambda: array("f"))
    entropies: Nats = field(default_factory=lambda: array("f"))
    teacher: Nats = field(default_factory=lambda: array("f"))

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, _packed("f", getattr(self, name)))


class TrajectoryTree(Struct):
    """All trajectories of one task. `index` is its place in start order; nodes[0] is the root.

    `num_started` counts the used trajectories of the budget: begun, and not returned by a failure;
    `num_roots` those of them that began from scratch; `num_live` the growing ones; `num_retries`
    failures replaced by a fresh root; `num_retaken` retried turns and steps. The actor keeps these
    counts. `scored` has an entry per node once the tree is trained.
    """

    task: Task
    index: int = 0
    policy_version: int = 0  # the engine's at the start of the rollout
    nodes: list[Node] = []
    num_started: int = 0
    num_roots: int = 0
    num_live: int = 0
    num_retries: int = 0
    num_retaken: int = 0
    scored: list[Scored] = []

    @property
    def root(self) -> Node:
        return self.nodes[0]

    def add(self, parent: Node | None, **fields: object) -> Node:
        """Append a node below `parent` (None for the root) and return it."""
        node = Node(
            index=len(self.nodes),
            parent=None if parent is None else parent.index,
            **fields,  # type: ignore[arg-type]
        )
        self.nodes.append(node)
        return node

    def leaves(self) -> list[Node]:
        """The nodes that end a trajectory, failed ones included, in order of creation."""
        return [node for node in self.nodes if node.end is not None]

    def path(self, node: Node) -> list[Node]:
        """From the root to `node`, both included."""
        path = [node]
        while path[-1].parent is not None:
            path.append(self.nodes[path[-1].parent])
        return path[::-1]

    def history(self, node: Node) -> list[Node]:
        """All nodes before and including `node`: its path, preceded by the contexts that it
        continues; for a captured program also its other contexts, in order of growth, without
        discarded ones."""
        path = self.path(node)
        if not self.is_captured:
            while path[0].continues is not None:
                path = self.path(self.nodes[path[0].continues]) + path
            return path
        taken, last = self._taken(node.branch), node.index
        found = [one for one in taken if one.index <= last]
        gone = {index for one in found for index in one.info.get("discards", ())}
        kept = [one for one in found if one.index not in gone]
        return kept if kept[-1:] == [node] else [*kept, node]

    @property
    def is_captured(self) -> bool:
        """Whether branches have the kinds of contexts of a captured program."""
        return any("context" in node.info for node in self.nodes)

    def _taken(self, branch: str) -> list[Node]:
        """The nodes of a branch, including those before its fork, in order."""
        own = [node for node in self.nodes if node.branch == branch]
        first = own[0] if own else self.root
        if "+" not in branch or first.parent is None:
            return [self.root, *(node for node in own if node is not self.root)]
        origin = self.nodes[first.parent]
        before = [self.root] if origin is self.root else self._taken(origin.branch)
        return [node for node in before if node.index <= origin.index] + own

    def trajectories(self, *, failed: bool = False) -> Iterator[Trajectory]:
        """One trajectory per leaf that did not fail; with `failed`, also of those that did."""
        for leaf in self.leaves():
            if failed or leaf.end != "failed":
                yield Trajectory(self.history(leaf) if self.is_captured else self.path(leaf))

    def failures(self) -> list[Node]:
        """The leaves ended by infrastructure failures: not trajectories, without reward."""
        return [node for node in self.nodes if node.end == "failed"]

    @property
    def is_cancelled(self) -> bool:
        """Whether a user cancelled the tree."""
        return any((leaf.error or "").startswith(f"{CANCELLED}:") for leaf in self.failures())

    @property
    def num_tokens(self) -> int:
        """Stored tokens; shared ones count once."""
        return sum(len(node.action_ids) + len(node.observation_ids) for node in self.nodes)

    @property
    def num_action_tokens(self) -> int:
        """Sampled tokens; shared ones count once."""
        return sum(len(node.action_ids) for node in self.nodes)

    @property
    def num_forks(self) -> int:
        """Siblings that the plan started, over all fork points."""
        return sum(node.num_forks or 0 for node in self.nodes)

    def oldest_version(self) -> int:
        """The oldest policy version that sampled a token of this tree; staleness counts from it."""
        versions = [span.version for node in self.nodes for span in node.version_spans]
        return min(versions, default=self.policy_version)


def to_frame(tree: TrajectoryTree) -> bytes:
    """The tree for another process, MessagePack with the arrays as bytes."""
    return packed(tree)


of_frame = msgspec.msgpack.Decoder(TrajectoryTree).decode  # the inverse of `to_frame`


def to_json(tree: TrajectoryTree) -> str:
    """The tree as one line of JSON, a row of `agentenv dpo`."""
    return json.dumps(msgspec.to_builtins(tree, enc_hook=list), separators=(",", ":"))
