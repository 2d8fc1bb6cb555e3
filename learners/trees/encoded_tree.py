"""Trees as packed arrays (numpy only).

The learner's ranks receive a tree as `EncodedTree`: its tokens in pre-order, each stored once.

    visible(q, k)  =  k <= q < end[k]        k is an ancestor of q, or q itself
    position id    =  depth[q]               tokens between the root's first token and q
    log p(t)       reads logits[pred[t]]     the token before t on its path, not t - 1

A micro-batch (`agentenv.learners.trees.partition`) computes each token once, without padding.
Attention separates trees and computes only visible pairs (`agentenv.learners.trees.attention`). A
tree larger than the budget is cut, and its pieces repeat the path to them; gradients are the same,
since a repeated token has its loss in one piece only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import ArrayLike, NDArray

from agentenv.base.errors import DataError
from agentenv.base.tree import GUIDED, Node, TrajectoryTree
from agentenv.learners.algorithms.credit import Floats, Taught, TreeCredit

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Layout = Literal["tree", "segments"]  # see `agentenv.learners.ranks.trainer`
LAYOUTS: tuple[Layout, ...] = ("tree", "segments")

LINKS = ("pred", "depth", "end")
TYPES: dict[str, Any] = {"entropies": np.float32, "taught_ids": np.int32}  # others: float64


class WholeTree(Struct, frozen=True, array_like=True):
    """Data of a whole tree in each of its parts. `number` is the tree's in the mini-batch; one of
    the ranks with a part is its home and counts its leaves; `max_staleness` is as in EncodedTree;
    num_actions: int32 per node, its trained tokens."""

    number: int
    is_home: bool
    max_staleness: int
    num_actions: bytes


class EncodedTree(Struct, frozen=True, array_like=True, dict=True):
    """One tree (or one sequence) as raw little-endian arrays; at most 21 bytes per token on the
    wire, and 4 per kept id.

    Per token: token_ids, int32; action, bool (sampled by the policy and trained). Per trained
    token: staleness, int32 (published updates between the sampling policy and the learner);
    behavior, float64 (log-prob, nats); entropies, float32 (nats; empty if the engine gave none).
    Per node, in pre-order: starts (first token) and parents (-1 for the root), int32; adv_pos,
    adv_neg and weight of its trained tokens, float64; returns and advantages of the leaves,
    float64, nan at other nodes, and empty for sequences without a group; temperatures, float64,
    that divide the logits of its trained tokens (empty: all 1). Of trained tokens, where one was
    truncated: num_kept and kept_ids, int32, the numbers of ids that could be sampled (0: all), and
    these ids, token after token. Of trained tokens, where the credit has them: dense, float64, and
    the teacher's likeliest ids, equally many for each, taught_ids, int32, and teacher, float64.

    pred (-1 at the first), depth and end of each token follow from the nodes, as int32.

    Several ranks may have parts of a tree (`agentenv.learners.trees.partition`). A part has all
    nodes; those that do not lead to its leaves have no tokens. It trains only some of its tokens.

    is_counted: a group without a signal, whose tokens have no gradient: it counts in the
    denominators and statistics of its mini-batch, but is in no micro-batch.
    """

    token_ids: bytes
    action: bytes
    staleness: bytes
    behavior: bytes
    entropies: bytes
    starts: bytes
    parents: bytes
    adv_pos: bytes
    adv_neg: bytes
    weight: bytes
    returns: bytes = b""
    advantages: bytes = b""
    whole: WholeTree | None = None  # the tree that this is a part of
    is_counted: bool = False
    temperatures: bytes = b""
    num_kept: bytes = b""
    kept_ids: bytes = b""
    dense: bytes = b""
    taught_ids: bytes = b""
    teacher: bytes = b""

    @property
    def num_tokens(self) -> int:
        return len(self.action)

    @property
    def num_action_tokens(self) -> int:
        return self.action.count(1)

    def ints(self, name: str) -> Ints:
        """One of the int32 arrays by name."""
        return self._links[name] if name in LINKS else np.frombuffer(getattr(self, name), np.int32)

    def floats(self, name: str) -> Floats:
        """One of the arrays of floats by name, float64."""
        stored = np.frombuffer(getattr(self, name), TYPES.get(name, np.float64))
        return stored.astype(np.float64, copy=False)

    def of_actions(self, name: str) -> Floats:
        """A float array that is stored by node, per trained token."""
        return self.floats(name)[self.owner[self.actions()]]

    @property
    def temperature(self) -> Floats:
        """Of each trained token."""
        if not self.temperatures:
            return np.ones(self.num_action_tokens)
        return self.of_actions("temperatures")

    @property
    def taught(self) -> Taught:
        """Of each trained token; of width 0 without a teacher."""
        shape = self.num_action_tokens, -1 if self.num_action_tokens else 0
        ids, logprobs = self.floats("taught_ids").astype(np.int64), self.floats("teacher")
        return Taught(ids.reshape(shape), logprobs.reshape(shape))

    def kept(self, width: int) -> Longs:
        """Ids that could be sampled, [trained tokens, width]: rows are padded with their first id,
        and are -1 where all could be."""
        rows = np.full((self.num_action_tokens, width), -1)
        if self.num_kept:
            rows[np.arange(width) < self.ints("num_kept")[:, None]] = self.ints("kept_ids")
        return np.where(rows < 0, rows[:, :1], rows)

    def actions(self) -> NDArray[np.bool_]:
        return np.frombuffer(self.action, np.bool_)

    @property
    def sizes(self) -> Ints:
        """Tokens of each node."""
        stops = np.append(self.ints("starts")[1:], np.int32(self.num_tokens))
        return (stops - self.ints("starts")).astype(np.int32)

    @cached_property
    def owner(self) -> Longs:
        """The node of each token."""
        sizes = self.sizes
        return np.repeat(np.arange(len(sizes)), sizes)

    @cached_property
    def _links(self) -> dict[str, Ints]:
        found = _links(self.ints("starts"), self.sizes, self.ints("parents"))
        return dict(zip(LINKS, found, strict=True))

    @property
    def max_staleness(self) -> int:
        """The maximum over the trained tokens of the whole tree; 0 if all have the current
        version."""
        if self.whole is not None:
            return self.whole.max_staleness
        return int(self.ints("staleness").max(initial=0))


def computed(trees: Sequence[EncodedTree]) -> list[EncodedTree]:
    """The trees that are in micro-batches."""
    return [tree for tree in trees if not tree.is_counted]


def encode(tree: TrajectoryTree, credit: TreeCredit, policy_version: int) -> EncodedTree:
    """Pack a tree whose leaves have credit; parts without a counted leaf are omitted.

    `policy_version` is the learner's. Raises DataError if a trained token has no preceding token,
    or if a turn has tokens without log-probs or was greedy.
    """
    order = _preorder(tree, credit)
    nodes = [node for node, _ in order]
    place = {node.index: i for i, node in enumerate(nodes)}
    above_all = -1 if nodes[0].index >= 0 else 0  # of a context, among several
    parents = [above_all if node.parent is None else place[node.parent] for node in nodes]
    parents[0] = -1
    texts: list[Sequence[int]] = []  # of each node its sampled tokens, then its observation
    for node, is_inner in order:
        if len(node.logprobs) != len(node.action_ids):
            raise DataError(f"{tree.task.id}: node {node.index} has tokens without log-probs")
        if node.temperature <= 0:
            raise DataError(f"{tree.task.id}: node {node.index} is greedy, at temperature 0")
        texts += [node.action_ids, node.observation_ids if is_inner else ()]
    sizes = np.array([len(text) for text in texts], np.int32)
    action = np.repeat(np.arange(len(sizes)) % 2 == 0, sizes)
    starts = np.concatenate(([0], np.cumsum(sizes)[1:-1:2])).astype(np.int32)
    indices = np.array([node.index for node in nodes])
    absent = dict.fromkeys(("adv_pos", "adv_neg", "weight"), 0.0)
    absent |= dict.fromkeys(("returns", "advantages"), np.nan)
    figures: dict[str, ArrayLike] = {
        name: np.where(indices < 0, none, getattr(credit, name)[indices])
        for name, none in absent.items()
    }
    is_trained = np.concatenate([trained(node) for node in nodes])
    figures["behavior"] = _joined("f", [node.logprobs for node in nodes])[is_trained]
    if all(len(node.entropies) == len(node.action_ids) for node in nodes):
        figures["entropies"] = _joined("f", [node.entropies for node in nodes])[is_trained]
    if credit.dense:
        dense = [credit.dense.get(node.index, np.zeros(len(node.action_ids))) for node in nodes]
        figures["dense"] = np.concatenate(dense)[is_trained]
    if credit.taught:
        both = Taught.joined(
            [
                credit.taught.get(node.index) or Taught.unknown(len(node.action_ids), 0)
                for node in nodes
            ]
        )
        figures["taught_ids"] = both.ids[is_trained]
        figures["teacher"] = both.logprobs[is_trained]
    if any(node.temperature != 1 for node in nodes):
        figures["temperatures"] = [node.temperature for node in nodes]
    staleness = (policy_version - _versions(nodes, tree.policy_version))[is_trained]
    kept: dict[str, bytes] = {}
    if any(node.num_kept for node in nodes):
        sizes_kept = [node.num_kept or [0] * len(node.action_ids) for node in nodes]
        num_kept, ids = _joined("i", sizes_kept), _joined("i", [node.kept_ids for node in nodes])
        kept = chosen_ids(num_kept, ids, is_trained)
    action[action] = is_trained
    own = sizes.reshape(-1, 2).sum(1)
    above = path_sums(own.astype(np.float64), np.array(parents)) - own
    if np.any((sizes[::2] > 0) & (above == 0)):
        raise DataError(f"{tree.task.id}: the prompt is empty")
    whole = from_arrays(_joined("i", texts), action, starts, parents, staleness, **figures)
    return replace(whole, **kept)


def chosen_ids(num_kept: Ints, kept_ids: Ints, chosen: NDArray[np.bool_]) -> dict[str, bytes]:
    """The fields `num_kept` and `kept_ids` of the chosen tokens."""
    ids = kept_ids[np.repeat(chosen, num_kept)]
    return {"num_kept": num_kept[chosen].tobytes(), "kept_ids": ids.tobytes()}


def trained(node: Node) -> NDArray[np.bool_]:
    """The sampled tokens of a node that are trained: not those whose log-prob a grammar changed."""
    if node.info.get(GUIDED):
        return ~np.isnan(node.logprobs)
    return np.ones(len(node.action_ids), np.bool_)


def _joined(code: str, parts: Sequence[Sequence[Any]]) -> NDArray[Any]:
    return np.concatenate(parts, dtype=code, casting="unsafe")  # an empty list is of floats


def from_arrays(
    token_ids: ArrayLike,
    action: NDArray[np.bool_],
    starts: ArrayLike,
    parents: ArrayLike,
    staleness: ArrayLike = (),
    **figures: ArrayLike,
) -> EncodedTree:
    """A tree from arrays as in `EncodedTree`, in pre-order. `figures` has its float arrays,
    including `weight`; missing ones are 0, or empty where allowed."""
    num_actions, num_nodes = int(action.sum()), len(np.asarray(starts))
    age = staleness if np.size(staleness) else np.zeros(num_actions)
    ints = {"token_ids": token_ids, "starts": starts, "parents": parents, "staleness": age}
    defaults = {
        "behavior": np.zeros(num_actions),
        "entropies": np.zeros(0),
        "adv_pos": np.zeros(num_nodes),
        "adv_neg": np.zeros(num_nodes),
    }
    packed: dict[str, Any] = {
        name: np.asarray(one, TYPES.get(name, np.float64)).tobytes()
        for name, one in (defaults | figures).items()
    }
    packed |= {name: np.asarray(one, np.int32).tobytes() for name, one in ints.items()}
    return EncodedTree(action=action.tobytes(), **packed)


def encode_sequence(
    token_ids: Sequence[int], mask: Sequence[bool], temperature: float = 1.0, **kept: Sequence[int]
) -> EncodedTree:
    """A tree of one path and weight 1, for SFT and scoring; `mask` is True on predicted tokens,
    `kept` has `num_kept` and `kept_ids` if they were sampled from a part of the vocabulary.

    Raises DataError if the lengths differ, nothing is predicted, or the first token is.
    """
    action = np.array(mask, np.bool_)
    if len(action) != len(token_ids) or not action.any() or action[0]:
        raise DataError("a sequence needs a mask of its length, with a True after its first token")
    temperatures = [] if temperature == 1 else [temperature]
    tree = from_arrays(token_ids, action, [0], [-1], weight=[1.0], temperatures=temperatures)
    return replace(tree, **{name: np.array(one, np.int32).tobytes() for name, one in kept.items()})


def encoded_nodes(tree: TrajectoryTree, credit: TreeCredit) -> list[Node]:
    """The nodes of an EncodedTree, in its order."""
    return [node for node, _ in _preorder(tree, credit) if node.index >= 0]


def _preorder(tree: TrajectoryTree, credit: TreeCredit) -> list[tuple[Node, bool]]:
    """Nodes with weight in pre-order, each with whether it has a child among them. Several
    contexts are children of a node without tokens, whose index is -1."""
    children: list[list[Node]] = [[] for _ in (None, *tree.nodes)]  # the last ones: of index -1
    for node in tree.nodes[1:]:
        if credit.weight[node.index] > 0:
            children[-1 if node.parent is None else node.parent].append(node)
    order, stack = [], [tree.root]
    if children[-1]:
        children[-1] = [one for one in (tree.root, *children[-1]) if children[one.index]]
        stack = [Node(-1, None)]
    while stack:
        node = stack.pop()
        order.append((node, bool(children[node.index])))
        stack.extend(reversed(children[node.index]))
    return order


def _links(starts: Ints, sizes: Ints, parents: Ints) -> tuple[Ints, Ints, Ints]:
    """pred, depth and end per token, int32. A node without tokens inherits its parent's values."""
    num_nodes, num_tokens = len(starts), int(sizes.sum())
    last = np.full(num_nodes, -1, np.int32)  # last token on the path that ends with the node
    length = np.zeros(num_nodes, np.int32)  # tokens on that path
    pred = np.arange(-1, num_tokens - 1, dtype=np.int32)
    depth = np.zeros(num_tokens, np.int32)
    for i in range(num_nodes):
        above, before = (-1, 0) if parents[i] < 0 else (last[parents[i]], length[parents[i]])
        start, size = starts[i], sizes[i]
        depth[start : start + size] = np.arange(before, before + size)
        if size:
            pred[start] = above
        last[i], length[i] = (start + size - 1 if size else above), before + size
    stop = starts + sizes
    for i in range(num_nodes - 1, 0, -1):
        stop[parents[i]] = max(stop[parents[i]], stop[i])
    return pred, depth, np.repeat(stop, sizes).astype(np.int32)


def _versions(nodes: Sequence[Node], default: int) -> Longs:
    """The version of each sampled token; `default` outside of spans."""
    versions = np.full(sum(len(node.action_ids) for node in nodes), default)
    stop = 0
    for node in nodes:
        start, stop = stop, stop + len(node.action_ids)
        for span in node.version_spans:
            versions[start:stop][span.start : span.end] = span.version
    return versions


class ActionTokens:
    """The trained tokens of a mini-batch, tree after tree, in pre-order; [tokens], float64, of
    staleness int32. `entropies` are nan where the engine reported none; `dense` and `taught` are
    None without dense advantages and without a teacher's ids."""

    def __init__(self, trees: Sequence[EncodedTree]) -> None:
        def joined(parts: Iterable[Floats]) -> Floats:
            return np.concatenate([np.zeros(0), *parts])

        self.behavior = joined(tree.floats("behavior") for tree in trees)
        self.entropies = joined(
            tree.floats("entropies") if tree.entropies else np.full(tree.num_action_tokens, np.nan)
            for tree in trees
        )
        self.adv_pos = joined(tree.of_actions("adv_pos") for tree in trees)
        self.adv_neg = joined(tree.of_actions("adv_neg") for tree in trees)
        self.weight = joined(tree.of_actions("weight") for tree in trees)
        self.dense: Floats | None = None
        if any(tree.dense for tree in trees):
            self.dense = joined(
                tree.floats("dense") if tree.dense else np.zeros(tree.num_action_tokens)
                for tree in trees
            )
        self.taught: Taught | None = None
        if any(tree.teacher for tree in trees):
            self.taught = Taught.joined([tree.taught for tree in trees])
        staleness = [tree.ints("staleness") for tree in trees]
        self.staleness = np.concatenate([np.zeros(0, np.int32), *staleness])


def leaf_ranges(parent: Longs) -> tuple[NDArray[np.bool_], Longs, Longs]:
    """Per node of one or more trees, in pre-order: whether it is a leaf, and the range [first,
    last) of the leaves below it."""
    is_leaf = np.ones(len(parent), np.bool_)
    is_leaf[parent[parent >= 0]] = False
    first: Longs = np.cumsum(is_leaf) - is_leaf
    last = first + is_leaf
    for i in range(len(parent) - 1, 0, -1):
        if parent[i] >= 0:
            last[parent[i]] = max(last[parent[i]], last[i])
    return is_leaf, first, last


def path_sums(values: Floats, parent: Ints | Longs) -> Floats:
    """Per node: the sum of `values` over the path that ends with it."""
    sums = values.copy()
    for i, above in enumerate(parent.tolist()):
        if above >= 0:
            sums[i] += sums[above]
    return sums
