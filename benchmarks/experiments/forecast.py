"""Forecasts of the success and of the remaining calls after a tool result, learned from the trees
of a process: a predictor of the value of a fork, for forks.py.

The success probability after a place c of a tree is

    logit p(c) = logit p0(c) + w x(c)

    p0   the estimate from the tree alone: the mean of the returns below c, each 1 or 0, and of
         `prior_weight` times the p0 of the turn before, 0.5 at the root
    x    1, depth, depth squared, mean entropy of the first 20 tokens of the turns after c, whether
         the result was an error, whether it occurred earlier on the path, average success of the
         question, mean of the outcomes below c, number of these outcomes

w is fitted by online logistic ridge regression: each group of trees is added to a Gaussian
approximation of the posterior, which is discounted by 0.9, with the penalty |w|^2 / 2; initially w
is 0. A sample is a place and a leaf below it, whose outcome is excluded from x and p0; the samples
of a place have a total weight of 1. The remaining calls are averages by depth.

A shared predictor of success that decides on rollouts is the idea of TRACE (arXiv 2606.11119); the
features and the fit are this project's. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from statistics import fmean
from typing import NamedTuple

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from agentenv.base.tree import Node, TrajectoryTree

FORECAST = "forecast"  # in the root's info
WINDOW = 20  # tokens of the mean entropy
RIDGE = 1.0
GROUP = 4  # trees that are learned from together: those of an update of the study
KEPT = 0.9  # discount of the posterior at each group
NEW = 0.3  # weight of a new tree, or group, in an average
PRIOR_WEIGHT = 3.0  # weight of the previous turn's p0, in outcomes
LONG, MANY = 8.0, 8.0  # turns and outcomes that scale the features
NUM_FEATURES = 9
NUM_STEPS, MAX_STEP, EPSILON = 30, 2.0, 1e-10  # of Newton's method
MAX_LOGIT = 12.0

Floats = NDArray[np.float64]


class Forecast(Struct):
    """The forecast at the start of a tree: w, the average success of its question (None: unknown),
    and the remaining calls by depth."""

    weights: list[float]
    rate: float | None
    calls: dict[str, float]


class Known(Struct):
    """What was learned: w and its precision, averages by question and by depth."""

    weights: list[float] = field(default_factory=lambda: [0.0] * NUM_FEATURES)
    precision: list[list[float]] = field(
        default_factory=lambda: np.zeros((NUM_FEATURES, NUM_FEATURES)).tolist()
    )
    rates: dict[str, float] = field(default_factory=dict)
    calls: dict[str, float] = field(default_factory=dict)


class _Place(Struct):
    """A turn on ended paths, or the root: its depth, the previous place, the
    numbers of outcomes and of successes below it, and the turns after it summed over them."""

    depth: int
    above: int | None = None
    num: int = 0
    right: int = 0
    after: int = 0


class _Sample(NamedTuple):
    features: list[float]
    estimate: float  # p0
    outcome: bool
    weight: float


class Places:
    """The places of a tree, by index of their node, parents first."""

    def __init__(self, tree: TrajectoryTree) -> None:
        self.tree = tree
        # Sorted by name, since the order in which they ended depends on timing.
        self.paths = sorted(tree.trajectories(), key=lambda path: path.leaf.branch)
        returns = [path.reward for path in self.paths]
        middle = (min(returns) + max(returns)) / 2 if returns else 0.0
        if returns and min(returns) == max(returns):
            middle = 0.0  # equal returns: successes if above 0
        self.outcomes = [reward > middle for reward in returns]
        self.of = {tree.root.index: _Place(0)}
        self.nodes = [[tree.root, *path.turns] for path in self.paths]
        for nodes, outcome in zip(self.nodes, self.outcomes, strict=True):
            above = None
            for place, node in enumerate(nodes):
                one = self.of.get(node.index)
                if one is None:
                    one = self.of[node.index] = _Place(place, above)
                one.num += 1
                one.right += outcome
                one.after += len(nodes) - 1 - place
                above = node.index
        self.of = dict(sorted(self.of.items()))

    @cached_property
    def _turns(self) -> dict[int, list[tuple[int, float]]]:
        """By place, its next turns: index and entropy."""
        found: dict[int, list[tuple[int, float]]] = {}
        for index, one in self.of.items():
            if one.above is not None:
                entropy = _entropy(self.tree.nodes[index])
                found.setdefault(one.above, []).append((index, entropy))
        return found

    @cached_property
    def _repeats(self) -> set[int]:
        """The nodes whose result also occurs above them."""
        return {
            node.index
            for nodes in self.nodes
            for number, node in enumerate(nodes[1:-1], 1)
            if any(node.observation_ids == other.observation_ids for other in nodes[1:number])
        }

    def estimates(self, prior_weight: float) -> dict[int, float]:
        """p0 of each place."""
        found: dict[int, float] = {}
        for index, one in self.of.items():
            before = 0.5 if one.above is None else found[one.above]
            found[index] = (one.right + prior_weight * before) / (one.num + prior_weight)
        return found

    def chances(self, prior_weight: float) -> dict[int, float]:
        """p of each place, by the forecast of the tree, else p0."""
        found, forecast = self.estimates(prior_weight), self.tree.root.info.get(FORECAST)
        if forecast is None:
            return found
        rate, weights = forecast["rate"], np.array(forecast["weights"])
        x = [self._features(at, one.num, one.right, rate) for at, one in self.of.items()]
        logits = _logit(np.array([*found.values()])) + np.array(x) @ weights
        return dict(zip(found, _sigmoid(logits).tolist(), strict=True))

    def calls_after(self, index: int) -> float:
        """Remaining turns: by the forecast, else the mean below the place."""
        one, forecast = self.of[index], self.tree.root.info.get(FORECAST)
        known = None if forecast is None else forecast["calls"].get(str(one.depth))
        return one.after / max(one.num, 1) if known is None else float(known)

    def samples(self, rate: float | None) -> Iterator[_Sample]:
        """One for each pair of a place and a leaf below it, if there are other leaves."""
        for nodes, outcome in zip(self.nodes, self.outcomes, strict=True):
            before = 0.5
            for number, node in enumerate(nodes[:-1]):
                one, following = self.of[node.index], nodes[number + 1].index
                count, right = one.num - 1, one.right - outcome
                if not count:  # nor below
                    break
                before = (right + PRIOR_WEIGHT * before) / (count + PRIOR_WEIGHT)
                own = following if self.of[following].num == 1 else None
                x = self._features(node.index, count, right, rate, without=own)
                yield _Sample(x, before, outcome, 1 / one.num)

    def _features(
        self, index: int, count: int, right: int, rate: float | None, without: int | None = None
    ) -> list[float]:
        node, depth = self.tree.nodes[index], self.of[index].depth / LONG
        turns = [entropy for turn, entropy in self._turns.get(index, ()) if turn != without]
        calls = node.info.get("tool_calls", ())
        return [
            1.0,
            depth,
            depth**2,
            fmean(turns) if turns else 0.0,
            float(any(not call.get("ok", True) for call in calls)),
            float(index in self._repeats),
            0.5 if rate is None else rate,
            right / count if count else 0.5,
            count / MANY,
        ]


class Forecaster:
    """Learns from groups of trees. Forecasts depend on `known` only."""

    def __init__(self, known: Known) -> None:
        self.known = known
        self._waiting: list[TrajectoryTree] = []

    def forecast(self, question: str) -> Forecast:
        """The forecast for a new tree of this question."""
        known = self.known
        return Forecast(list(known.weights), known.rates.get(question), dict(known.calls))

    def add(self, tree: TrajectoryTree) -> None:
        """Learn from this tree, once GROUP trees have ended."""
        self._waiting.append(tree)
        if len(self._waiting) == GROUP:
            self.learn(self._waiting)
            self._waiting = []

    def learn(self, trees: Sequence[TrajectoryTree]) -> dict[str, float]:
        """Learn from trees. Returns forecast/log_loss, the log loss of their outcomes before, and
        forecast/log_loss_of_tree, that of p0."""
        old = self.known
        new = Known(rates=dict(old.rates), calls=dict(old.calls))
        samples, calls = list[_Sample](), dict[int, list[float]]()
        for tree in trees:
            places = Places(tree)
            if not places.paths or tree.is_cancelled:
                continue
            samples += places.samples(old.rates.get(tree.task.id))
            _average(new.rates, tree.task.id, fmean(places.outcomes))
            for one in places.of.values():
                calls.setdefault(one.depth, []).append(one.after / max(one.num, 1))
        for depth, found in calls.items():
            _average(new.calls, str(depth), fmean(found))
        new.weights, new.precision, figures = _fitted(old, samples)
        self.known = new
        return figures


def _average(averages: dict[str, float], key: str, new: float) -> None:
    averages[key] = averages.get(key, new) * (1 - NEW) + NEW * new


def _fitted(
    old: Known, samples: Sequence[_Sample]
) -> tuple[list[float], list[list[float]], dict[str, float]]:
    """Weights and precision after these samples, and metrics of the previous weights."""
    before, known = np.array(old.weights), KEPT * np.array(old.precision)
    if not samples:
        return old.weights, known.tolist(), {}
    features, estimates, outcomes, weights = zip(*samples, strict=True)
    x, y, share = np.array(features), np.array(outcomes, np.float64), np.array(weights)
    offset = _logit(np.array(estimates))
    figures = {
        "forecast/log_loss": _log_loss(offset + x @ before, y, share),
        "forecast/log_loss_of_tree": _log_loss(offset, y, share),
    }
    w, ridge = before, RIDGE * np.eye(NUM_FEATURES)
    for _ in range(NUM_STEPS):
        p = _sigmoid(offset + x @ w)
        gradient = x.T @ (share * (p - y)) + known @ (w - before) + ridge @ w
        curvature = (x.T * (share * p * (1 - p))) @ x
        step = np.linalg.solve(curvature + known + ridge, gradient)
        w = w - step * min(1.0, MAX_STEP / float(np.abs(step).max() + EPSILON))
        if np.abs(step).max() < EPSILON:
            break
    p = _sigmoid(offset + x @ w)
    precision = known + (x.T * (share * p * (1 - p))) @ x
    return w.tolist(), precision.tolist(), figures


def _entropy(node: Node) -> float:
    """The mean over the first tokens of a turn, nats; 0 if none is known."""
    first = [one for one in node.entropies[:WINDOW] if one == one]  # nan: unknown
    return sum(first) / len(first) if first else 0.0


def _logit(p: Floats) -> Floats:
    found: Floats = np.log(p) - np.log1p(-p)
    return found


def _sigmoid(logits: Floats) -> Floats:
    found: Floats = 1 / (1 + np.exp(-np.clip(logits, -MAX_LOGIT, MAX_LOGIT)))
    return found


def _log_loss(logits: Floats, y: Floats, share: Floats) -> float:
    p = _sigmoid(logits)
    return float(-np.average(y * np.log(p) + (1 - y) * np.log1p(-p), weights=share))
