"""What travels to the learner's ranks: a tree as packed arrays.

Tokens are in pre-order, each stored once:

    visible(q, k)  =  k <= q < end[k]        k is an ancestor of q, or q itself
    position id    =  depth[q]               tokens between the root's first token and q
    log p(t)       reads logits[pred[t]]     the token before t on its path, not t - 1

Only numpy is needed here, so that the controller never loads torch for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from agentenv.errors import DataError
from agentenv.tree import Node, TrajectoryTree
from learners.credit import TreeCredit

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]


class EncodedTree(Struct, frozen=True, array_like=True):
    """One tree (or one sequence) as raw little-endian arrays, an entry per token or per node.

    int32 per token: token_ids, pred (-1 at the first), depth, end, staleness (published updates
    between the sampling policy and the learner). bool per token: action (sampled by the policy
    and trained). float64 per token: behaviour (log-prob, nats), entropies (nats; empty if the
    engine gave none), adv_pos, adv_neg, weight; 0 where not trained. int32 per node, in
    pre-order: starts (first token), parents (-1 for the root). float64 per node: returns and
    advantages of the leaves, nan at other nodes; empty for sequences without a group.
    """

    token_ids: bytes
    pred: bytes
    depth: bytes
    end: bytes
    staleness: bytes
    action: bytes
    behaviour: bytes
    entropies: bytes
    adv_pos: bytes
    adv_neg: bytes
    weight: bytes
    starts: bytes
    parents: bytes
    returns: bytes = b""
    advantages: bytes = b""

    @property
    def num_tokens(self) -> int:
        return len(self.action)

    @property
    def num_action_tokens(self) -> int:
        return self.action.count(1)

    def ints(self, name: str) -> Ints:
        """One of the int32 arrays by name."""
        return np.frombuffer(getattr(self, name), np.int32)

    def floats(self, name: str) -> Floats:
        """One of the float64 arrays by name."""
        return np.frombuffer(getattr(self, name), np.float64)

    def actions(self) -> NDArray[np.bool_]:
        return np.frombuffer(self.action, np.bool_)

    @property
    def max_staleness(self) -> int:
        """Of the trained tokens; 0 when all are of the current version."""
        return int(self.ints("staleness")[self.actions()].max(initial=0))


def encode(tree: TrajectoryTree, credit: TreeCredit, policy_version: int) -> EncodedTree:
    """Pack a tree whose leaves have credit; parts below no counted leaf are left out.

    `policy_version` is the learner's. Raises DataError if a trained token has no token before
    it, and if a turn has tokens without log-probs.
    """
    order = _preorder(tree, credit)
    place = {node.index: i for i, (node, _) in enumerate(order)}
    parents = np.array(
        [-1 if node.parent is None else place[node.parent] for node, _ in order], np.int32
    )
    num_actions = np.array([len(node.action_ids) for node, _ in order], np.int32)
    texts = [node.action_ids + (node.observation_ids if inner else []) for node, inner in order]
    sizes = np.array([len(text) for text in texts], np.int32)
    for node, _ in order:
        if len(node.logprobs) != len(node.action_ids):
            raise DataError(f"{tree.task.id}: node {node.index} has tokens without log-probs")
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1])).astype(np.int32)
    owner = np.repeat(np.arange(len(order)), sizes)
    action = np.arange(len(owner)) - starts[owner] < num_actions[owner]
    indices = np.array([node.index for node, _ in order])
    pred, depth, end = _links(starts, sizes, parents)
    if np.any(action & (pred < 0)):
        raise DataError(f"{tree.task.id}: the prompt is empty")

    def per_action(values: list[list[float]]) -> Floats:
        out = np.zeros(len(owner))
        out[action] = [value for node_values in values for value in node_values]
        return out

    has_entropies = all(len(node.entropies) == len(node.action_ids) for node, _ in order)
    staleness = np.zeros(len(owner), np.int32)
    versions = [version for node, _ in order for version in _versions(node, tree.policy_version)]
    staleness[action] = policy_version - np.array(versions, np.int32)
    return EncodedTree(
        token_ids=np.array([t for text in texts for t in text], np.int32).tobytes(),
        pred=pred.tobytes(),
        depth=depth.tobytes(),
        end=end.tobytes(),
        staleness=staleness.tobytes(),
        action=action.tobytes(),
        behaviour=per_action([node.logprobs for node, _ in order]).tobytes(),
        entropies=per_action([n.entropies for n, _ in order]).tobytes() if has_entropies else b"",
        adv_pos=(credit.adv_pos[indices][owner] * action).tobytes(),
        adv_neg=(credit.adv_neg[indices][owner] * action).tobytes(),
        weight=(credit.weight[indices][owner] * action).tobytes(),
        starts=starts.tobytes(),
        parents=parents.tobytes(),
        returns=credit.returns[indices].tobytes(),
        advantages=credit.advantages[indices].tobytes(),
    )


def encode_sequence(token_ids: Sequence[int], mask: Sequence[bool]) -> EncodedTree:
    """A tree of one path and weight 1, for SFT and scoring; `mask` is True on predicted tokens.

    Raises DataError if the lengths differ, nothing is predicted, or the first token is.
    """
    action = np.array(mask, np.bool_)
    num_tokens = len(token_ids)
    if len(action) != num_tokens or not action.any() or action[0]:
        raise DataError("a sequence needs a mask of its length, with a True, not at its start")
    position = np.arange(num_tokens, dtype=np.int32)
    zeros = np.zeros(num_tokens).tobytes()
    return EncodedTree(
        token_ids=np.array(token_ids, np.int32).tobytes(),
        pred=(position - 1).tobytes(),
        depth=position.tobytes(),
        end=np.full(num_tokens, num_tokens, np.int32).tobytes(),
        staleness=np.zeros(num_tokens, np.int32).tobytes(),
        action=action.tobytes(),
        behaviour=zeros,
        entropies=b"",
        adv_pos=zeros,
        adv_neg=zeros,
        weight=action.astype(np.float64).tobytes(),
        starts=np.zeros(1, np.int32).tobytes(),
        parents=np.full(1, -1, np.int32).tobytes(),
    )


def _preorder(tree: TrajectoryTree, credit: TreeCredit) -> list[tuple[Node, bool]]:
    """Nodes with weight in pre-order, each with whether it has a child among them."""
    children: list[list[Node]] = [[] for _ in tree.nodes]
    for node in tree.nodes[1:]:
        if credit.weight[node.index] > 0 and node.parent is not None:
            children[node.parent].append(node)
    order, stack = [], [tree.root]
    while stack:
        node = stack.pop()
        order.append((node, bool(children[node.index])))
        stack.extend(reversed(children[node.index]))
    return order


def _links(starts: Ints, sizes: Ints, parents: Ints) -> tuple[Ints, Ints, Ints]:
    """pred, depth and end per token, int32. A node without tokens passes its parent's on."""
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


def _versions(node: Node, default: int) -> list[int]:
    versions = [default] * len(node.action_ids)
    for span in node.version_spans:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    return versions
