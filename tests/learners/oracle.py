"""A second implementation of an update: flat, in float64, without code of `learners`.

The Hugging Face model gets each trajectory whole, as a row of a batch; advantages, clips and means
as the papers print them, clips by the derivative that they leave. A token that several trajectories
share is counted in each of them. The settings are plain values, with the oracle's own defaults.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agentenv.base.tree import Node, TrajectoryTree
from agentenv.base.types import Limit, Task, VersionSpan

VERSION = 3  # of the learner; tokens are of this one and of the one before
DEFAULTS = {
    "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "importance_cap": 2.0, "kl_loss": 0.0,
    "kl_kind": "k3", "kl_reward": 0.0, "entropy_bonus": 0.0, "sharing": "soft", "token_mask": None,
    "sequence_mask": None, "aggregation": "token-mean", "norm_length": 1024,
    "normalize_by_std": True, "entropy_advantage": 0.2, "entropy_balanced_clipping": True,
    "proximal": "stale", "equal_groups": "count", "dense": False,
    "taught": 0.0,
}  # fmt: skip
OWN = {
    "dr_grpo": {"aggregation": "seq-mean-token-sum-norm", "normalize_by_std": False},
    "rloo": {"aggregation": "seq-mean-token-sum"},
    "reinforce_pp": {"normalize_by_std": False},
    "gspo": {"aggregation": "seq-mean-token-mean", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"clip_low": 1.0, "clip_high": 1.0},
}


def grow(seed: int, index: int, vocabulary: int) -> TrajectoryTree:
    """A tree of up to eight leaves: empty turns and observations, rewards on the way, versions that
    change inside a turn; one leaf has failed, one was out of time, one out of turns."""
    random = Random(seed * 1000 + index)

    def ids(most: int, least: int = 0) -> list[int]:
        return [random.randrange(vocabulary) for _ in range(random.randint(least, most))]

    tree = TrajectoryTree(task=Task(f"t{index}", "env", "?", ("a",)), index=index)
    tree.policy_version = VERSION
    tree.add(None, observation_ids=ids(6, 1))
    for _ in range(11):
        parent = random.choice(tree.nodes)
        action = ids(6)
        middle = random.randint(0, len(action)) if index % 3 else 0
        spans = [VersionSpan(VERSION - 1, 0, middle), VersionSpan(VERSION, middle, len(action))]
        tree.add(
            parent,
            action_ids=action,
            logprobs=[random.uniform(-6, -2) for _ in action],
            entropies=[random.uniform(0.1, 4) for _ in action],
            version_spans=[span for span in spans if span.end > span.start],
            observation_ids=ids(5),
            reward=random.choice([0.0, 0.0, 0.1]),
        )
    above = {node.parent for node in tree.nodes}
    leaves = [node for node in tree.nodes[1:] if node.index not in above]
    for number, leaf in enumerate(leaves):
        leaf.end = "terminated"
        leaf.reward = [0.0, 1.0, 0.4][(number + index) % 3] if index != 5 else 0.0
    if index == 5:  # a group without a signal
        for node in tree.nodes:
            node.reward = 0.0
    ends = {2: ("failed", None), 3: ("truncated", Limit.SECONDS), 4: ("truncated", Limit.TURNS)}
    if index in ends and len(leaves) > 4:
        leaves[0].end, leaves[0].limit = ends[index]  # type: ignore[assignment]
    return tree


@dataclass
class Row:
    """A trajectory. Arrays have an entry per sampled token; `places` are their positions."""

    tree: TrajectoryTree
    path: list[Node]
    ids: Tensor
    places: Tensor
    behavior: Tensor
    entropies: Tensor
    token: list[tuple[int, int]]  # node and place in it: tokens that are shared are equal here
    reward: float
    advantage: Tensor = field(default_factory=lambda: torch.zeros(0))  # per token
    proximal: Tensor = field(default_factory=lambda: torch.zeros(0))
    reference: Tensor = field(default_factory=lambda: torch.zeros(0))


def rows_of(tree: TrajectoryTree) -> list[Row]:
    """The trajectories that count: not failed, not out of time."""
    rows = []
    for leaf in tree.nodes:
        if leaf.end is None or leaf.end == "failed" or leaf.limit is Limit.SECONDS:
            continue
        path = [leaf]
        while path[0].parent is not None:
            path.insert(0, tree.nodes[path[0].parent])
        ids: list[int] = []
        places, tokens = [], []
        for node in path:
            places += range(len(ids), len(ids) + len(node.action_ids))
            tokens += [(node.index, place) for place in range(len(node.action_ids))]
            ids += node.action_ids + node.observation_ids
        figures = (
            [x for node in path for x in getattr(node, n)] for n in ("logprobs", "entropies")
        )
        behavior, entropies = (torch.tensor(one, dtype=torch.float64) for one in figures)
        reward = sum(node.reward for node in path)
        place = torch.tensor(places, dtype=torch.long)
        rows.append(Row(tree, path, torch.tensor(ids), place, behavior, entropies, tokens, reward))
    return rows


def dense_of(tree: TrajectoryTree) -> dict[int, np.ndarray]:
    """Advantages of single tokens, of both signs; some nodes have none."""
    return {
        node.index: np.sin(5.0 * node.index + 2.0 * np.arange(len(node.action_ids)))
        for node in tree.nodes
        if node.index % 4
    }


def taught_of(tree: TrajectoryTree, vocabulary: int) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Three ids of each token of some nodes, and a teacher's log-probs of them."""
    found = {}
    for node in tree.nodes:
        size = len(node.action_ids)
        if size and node.index % 3:
            first = np.array(node.action_ids)[:, None]
            ids = (first + np.array([0, 1, 5])) % vocabulary
            found[node.index] = ids, -1.6 - 0.3 * np.cos(ids + node.index)
    return found


def is_stale(tree: TrajectoryTree, rows: Sequence[Row]) -> bool:
    """Whether a token that is trained is of an older version."""
    nodes = {node.index: node for row in rows for node in row.path}
    return any(span.version < VERSION for node in nodes.values() for span in node.version_spans)


class Oracle:
    """Gradients of one run: `update` yields the gradient of each step, as one vector, and its loss;
    the caller moves the weights of `model` before it requests the next one."""

    def __init__(self, model: Any, kind: str, num_epochs: int, **settings: Any) -> None:
        self.model, self.kind, self.num_epochs = model, kind, num_epochs
        self.set = {**DEFAULTS, **OWN.get(kind, {}), **settings}
        self.reference: dict[str, Tensor] | None = None

    def update(self, minibatches: list[list[TrajectoryTree]]) -> Iterator[tuple[Tensor, float]]:
        """One update."""
        batches = [[rows_of(tree) for tree in batch] for batch in minibatches]
        self._credit([group for batch in batches for group in batch])
        if self.set["equal_groups"] == "drop":
            batches = [[g for g in batch if any(r.advantage.any() for r in g)] for batch in batches]
        if self.reference is None:
            self.reference = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        for group in (group for batch in batches for group in batch):
            self._score(group)
        for _ in range(self.num_epochs):
            for batch in batches:
                yield self._step([row for group in batch for row in group])

    # advantages

    def _credit(self, groups: list[list[Row]]) -> None:
        found = [self._advantages(np.array([row.reward for row in group])) for group in groups]
        if self.kind == "reinforce_pp":
            pairs = [
                (a, len(row.places))
                for group, values in zip(groups, found, strict=True)
                if values.any() or self.set["equal_groups"] == "count"
                for row, a in zip(group, values, strict=True)
            ]
            flat = np.concatenate([np.full(count, a) for a, count in pairs])
            found = [
                (values - flat.mean()) / (flat.std(ddof=1) + 1e-6)
                if values.any() or self.set["equal_groups"] == "count"
                else values
                for values in found
            ]
        for group, values in zip(groups, found, strict=True):
            self._spread(group, values)

    def _advantages(self, returns: np.ndarray) -> np.ndarray:
        if len(returns) < 2 or np.ptp(returns) < 1e-9:
            return np.zeros(len(returns))
        if self.kind == "rloo":
            others = (returns.sum() - returns) / (len(returns) - 1)
            return returns - others
        centered = returns - returns.mean()
        return centered / (returns.std(ddof=1) + 1e-6) if self.set["normalize_by_std"] else centered

    def _spread(self, group: list[Row], values: np.ndarray) -> None:
        for row, value in zip(group, values, strict=True):
            row.advantage = torch.full((len(row.places),), float(value), dtype=torch.float64)
        if self.set["sharing"] == "hard":
            through: dict[tuple[int, int], list[float]] = {}
            for row, value in zip(group, values, strict=True):
                for token in row.token:
                    through.setdefault(token, []).append(float(value))
            for row in group:
                row.advantage = torch.tensor(
                    [sum(through[token]) / len(through[token]) for token in row.token],
                    dtype=torch.float64,
                )

    # log-probs before the first step

    @torch.no_grad()
    def _score(self, group: list[Row]) -> None:
        masks = self.set["token_mask"] or self.set["sequence_mask"]
        needed = self.set["proximal"] == "always" or masks or is_stale(group[0].tree, group)
        for row in group:
            row.proximal = row.behavior
        if needed:
            for row, (proximal, entropies, _) in zip(group, self._figures(group), strict=True):
                row.proximal, row.entropies = proximal, entropies
        if self.set["kl_loss"] or self.set["kl_reward"]:
            assert self.reference is not None
            now = {n: p.detach().clone() for n, p in self.model.named_parameters()}
            self._place(self.reference)
            for row, (logprobs, _, _) in zip(group, self._figures(group), strict=True):
                row.reference = logprobs
            self._place(now)
        if self.set["kl_reward"]:
            drift = np.array([float((row.proximal - row.reference).sum()) for row in group])
            rewards = np.array([row.reward for row in group])
            self._spread(group, self._advantages(rewards - self.set["kl_reward"] * drift))

    @torch.no_grad()
    def _place(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(weights[name])

    def _figures(self, rows: list[Row]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Log-probs and entropies of the sampled tokens, and the log-probs of the vocabulary, by
        trajectory. Short ones are padded after their end, which a causal model does not read."""
        ids = pad_sequence([row.ids for row in rows], batch_first=True)
        found = []
        for row, logits in zip(
            rows, self.model(input_ids=ids, use_cache=False).logits, strict=True
        ):
            logprobs = logits[row.places - 1].log_softmax(-1)
            chosen = logprobs[torch.arange(len(row.places)), row.ids[row.places]]
            found.append((chosen, -(logprobs.exp() * logprobs).sum(-1), logprobs))
        return found

    # a step

    def _step(self, rows: list[Row]) -> tuple[Tensor, float]:
        self.model.zero_grad()
        lengths = [len(row.places) for row in rows]
        mode = self.set["aggregation"]
        count = sum(length > 0 for length in lengths)
        total = {
            "token-mean": sum(lengths),
            "seq-mean-token-mean": count,
            "seq-mean-token-sum": count,
            "seq-mean-token-sum-norm": count * self.set["norm_length"],
        }[mode]
        old = torch.cat([row.entropies for row in rows])
        loss = torch.zeros((), dtype=torch.float64)
        for row, length, figures in zip(rows, lengths, self._figures(rows), strict=True):
            if length:
                share = 1 / length if mode == "seq-mean-token-mean" else 1.0
                loss = loss + self._loss(row, *figures, old.mean(), old.std()) * share / total
        loss.backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters()]
        return torch.cat([grad.flatten() for grad in grads]), float(loss.detach())

    def _loss(
        self, row: Row, current: Tensor, entropies: Tensor, every: Tensor, mean: Tensor, std: Tensor
    ) -> Tensor:
        """Sum over the tokens of a trajectory, whose figures under the weights of now are given."""
        advantage = row.advantage
        if self.kind == "aepo" and self.set["entropy_advantage"]:
            score = (row.entropies - mean) / std
            advantage = advantage * (1 + self.set["entropy_advantage"] * score).clamp(0, 2)
        ratio = (current.detach() - row.proximal).exp()
        if self.kind == "gspo":
            ratio = (current.detach() - row.proximal).mean().exp().expand_as(ratio)
        value, slope = self._policy_loss(ratio, advantage)
        if self.set["dense"]:
            values = dense_of(row.tree)
            own = [values[node][place] if node in values else 0.0 for node, place in row.token]
            of_token = (current.detach() - row.proximal).exp()
            more = self._policy_loss(of_token, torch.tensor(own, dtype=torch.float64), whole=False)
            value, slope = value + more[0], slope + more[1]
        weight = self._importance(row)
        loss = (weight * (value + slope * (current - current.detach()))).sum()
        if self.set["kl_loss"]:
            loss = loss + self.set["kl_loss"] * self._kl(current - row.reference).sum()
        if self.set["taught"]:
            loss = loss + self.set["taught"] * self._kl_to_teacher(row, every)
        return loss - self.set["entropy_bonus"] * entropies.sum()

    def _kl_to_teacher(self, row: Row, every: Tensor) -> Tensor:
        """Sum over tokens, of three ids and the rest of the vocabulary."""
        known, total = taught_of(row.tree, every.shape[1]), torch.zeros((), dtype=torch.float64)
        for (node, place), own in zip(row.token, every, strict=True):
            if node in known:
                ids, teacher = (torch.tensor(one[place]) for one in known[node])
                p, q = own[ids].exp(), teacher.exp()
                total = total + (p * (p / q).log()).sum()
                total = total + (1 - p.sum()) * ((1 - p.sum()) / (1 - q.sum())).log()
        return total

    def _policy_loss(
        self, ratio: Tensor, advantage: Tensor, *, whole: bool = True
    ) -> tuple[Tensor, Tensor]:
        """The loss of a token, and its derivative by the log-prob; `whole`: not of a dense term."""
        low, high = 1 - self.set["clip_low"], 1 + self.set["clip_high"]
        plain = -advantage * ratio
        if self.kind == "gspo" and not whole:
            return plain, plain
        if self.kind == "cispo":
            weight = ratio.clamp(low, high)
            return -weight * advantage, -weight * advantage
        above, below = (advantage > 0) & (ratio > high), (advantage < 0) & (ratio < low)
        value = torch.where(above, -advantage * high, torch.where(below, -advantage * low, plain))
        slope = torch.where(above | below, torch.zeros_like(plain), plain)
        if self.kind == "gspo":
            return value, slope
        if self.kind == "aepo" and self.set["entropy_balanced_clipping"]:
            slope = torch.where(above, -advantage * high, slope)
        far = (advantage < 0) & (ratio > self.set["dual_clip"])
        value = torch.where(far, -advantage * self.set["dual_clip"], value)
        return value, torch.where(far, torch.zeros_like(slope), slope)

    def _importance(self, row: Row) -> Tensor:
        ratio = (row.proximal - row.behavior).exp()
        cap = self.set["importance_cap"]
        weight = torch.ones_like(ratio) if cap == "none" else ratio.clamp(max=cap)
        if self.set["token_mask"]:
            low, high = self.set["token_mask"]
            weight = weight * ((ratio >= low) & (ratio <= high))
        if self.set["sequence_mask"]:
            low, high = self.set["sequence_mask"]
            weight = weight * (low <= math.exp(float(ratio.log().mean())) <= high)
        return weight

    def _kl(self, difference: Tensor) -> Tensor:
        kind = self.set["kl_kind"]
        if kind == "k1":  # the log-ratio, as a reward that the score function carries
            return difference.detach() * (1 + difference - difference.detach())
        if kind == "abs":
            return difference.abs()
        if kind == "k2":
            return difference**2 / 2
        return ((-difference).exp() + difference - 1).clamp(-10, 10)  # as verl bounds it
