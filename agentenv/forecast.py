"""Forecasts of success and of calls after a tool result, learned from the trees of a run, for plans
that fork where a call teaches most (`agentenv.plan.Spread`).

The success after a place c of a tree is

    logit p(c) = logit p0(c) + w x(c)

    p0   the estimate from the tree alone: the mean of the returns below c, each 1 or 0, and of
         `prior_weight` times the p0 of the turn before, 0.5 at the root
    x    1, depth, depth squared, mean entropy of the first 20 tokens of the turns after c, whether
         the result was an error, whether the path had it before, average success of the question,
         mean of the outcomes below c, their number

w is an online logistic ridge: each update adds the trees that it took to a Gaussian approximation
of what is known, of which 0.9 is kept, and penalizes |w|^2 / 2; before anything is learned w is 0.
A sample is a place and a leaf below it, whose own outcome is taken out of x and p0; the samples of
a place count as one. Calls still to come are averages by depth.

A shared predictor of success that decides on rollouts is the idea of TRACE (arXiv 2606.11119); the
features and the fit are this project's. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from agentenv.tree import Node, TrajectoryTree

FORECAST = "forecast"  # of the root's info
WINDOW = 20  # tokens whose entropy counts
RIDGE = 1.0
KEPT = 0.9  # of what is known, at each update
NEW = 0.3  # share of a new group, or update, in an average
PRIOR_WEIGHT = 3.0  # outcomes that the p0 of the turn before counts for
LONG, MANY = 8.0, 8.0  # turns and outcomes, to which features are scaled
NUM_FEATURES = 9
NUM_STEPS, MAX_LOGIT = 20, 12.0  # of Newton's method

Floats = NDArray[np.float64]


class Forecast(Struct):
    """What a tree is begun with: w, the average success of its question (none: unknown), and the
    calls still to come by depth."""

    weights: list[float]
    rate: float | None
    calls: dict[str, float]


class Known(Struct):
    """The state that a checkpoint keeps: w and its precision, averages by question and by depth."""

    weights: list[float] = field(default_factory=lambda: [0.0] * NUM_FEATURES)
    precision: list[list[float]] = field(
        default_factory=lambda: np.zeros((NUM_FEATURES, NUM_FEATURES)).tolist()
    )
    rates: dict[str, float] = field(default_factory=dict)
    calls: dict[str, float] = field(default_factory=dict)


class _Place(NamedTuple):
    """A turn on paths that ended, or the root: its depth with given turns, outcomes below it and
    the right ones of them, turns after it summed over these, and the place before."""

    depth: int
    num: int
    right: int
    after: int
    above: int | None


class Places:
    """The places of a tree, by index of their node, parents first."""

    def __init__(self, tree: TrajectoryTree) -> None:
        self.tree = tree
        self.paths = list(tree.trajectories())
        returns = [path.reward for path in self.paths]
        middle = (min(returns) + max(returns)) / 2 if returns else 0.0
        if returns and min(returns) == max(returns):
            middle = 0.0  # all alike: right if they are above 0
        self.outcomes = [reward > middle for reward in returns]
        self._num_given = len(tree.given)
        root = _Place(self._num_given, 0, 0, 0, None)
        self.of: dict[int, _Place] = {tree.root.index: root}
        self.nodes = [[tree.root, *path.turns] for path in self.paths]
        for nodes, outcome in zip(self.nodes, self.outcomes, strict=True):
            for place, node in enumerate(nodes):
                above = nodes[place - 1].index if place else None
                one = self.of.get(node.index, _Place(self._num_given + place, 0, 0, 0, above))
                self.of[node.index] = one._replace(
                    num=one.num + 1,
                    right=one.right + outcome,
                    after=one.after + len(nodes) - 1 - place,
                )
        self.of = dict(sorted(self.of.items()))
        self._turns: dict[int, list[tuple[int, float]]] = {}  # after a place: index and entropy
        for index, one in self.of.items():
            if one.above is not None:
                entropy = _entropy(tree.nodes[index])
                self._turns.setdefault(one.above, []).append((index, entropy))
        self._repeats = {
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
        """p of each place, by the forecast that the tree was begun with, else p0."""
        found, forecast = self.estimates(prior_weight), self.tree.root.info.get(FORECAST)
        if forecast is None:
            return found
        rate, weights = forecast["rate"], np.array(forecast["weights"])
        x = [self._features(at, one.num, one.right, rate) for at, one in self.of.items()]
        logits = _logit(np.array([*found.values()])) + np.array(x) @ weights
        return dict(zip(found, _sigmoid(logits).tolist(), strict=True))

    def calls_after(self, index: int) -> float:
        """Turns still to come: by the forecast, else the mean below the place."""
        one, forecast = self.of[index], self.tree.root.info.get(FORECAST)
        known = None if forecast is None else forecast["calls"].get(str(one.depth))
        return one.after / max(one.num, 1) if known is None else float(known)

    def samples(self, rate: float | None) -> Iterator[tuple[list[float], float, bool, float]]:
        """Features, p0, outcome and weight of each place and leaf below it that are not alone."""
        for nodes, outcome in zip(self.nodes, self.outcomes, strict=True):
            before = 0.5
            for number, node in enumerate(nodes[:-1]):
                one, following = self.of[node.index], nodes[number + 1].index
                count, right = one.num - 1, one.right - outcome
                if not count:  # nor is there another one below
                    break
                before = (right + PRIOR_WEIGHT * before) / (count + PRIOR_WEIGHT)
                own = following if self.of[following].num == 1 else None
                x = self._features(node.index, count, right, rate, without=own)
                yield x, before, outcome, 1 / one.num

    def _features(
        self, index: int, count: int, right: int, rate: float | None, without: int | None = None
    ) -> list[float]:
        node, depth = self.tree.nodes[index], self.of[index].depth / LONG
        turns = [entropy for turn, entropy in self._turns.get(index, ()) if turn != without]
        calls = node.info.get("tool_calls", ())
        return [
            *(1.0, depth, depth**2, fmean(turns) if turns else 0.0),
            float(any(not call.get("ok", True) for call in calls)),
            float(index in self._repeats),
            0.5 if rate is None else rate,
            right / count if count else 0.5,
            count / MANY,
        ]


class Forecaster:
    """Learns from the trees of each update. With equal `known`, equal forecasts are made."""

    def __init__(self, known: Known) -> None:
        self.known = known

    def forecast(self, question: str) -> Forecast:
        """For a tree of this question that begins now."""
        known = self.known
        return Forecast(list(known.weights), known.rates.get(question), dict(known.calls))

    def learn(self, trees: Sequence[TrajectoryTree]) -> dict[str, float]:
        """These trees were delivered for an update; forecast/log_loss is that of their outcomes
        before they were learned from, and forecast/log_loss_of_tree that of p0."""
        samples, calls = [], dict[int, list[float]]()
        for tree in trees:
            places = Places(tree)
            if not places.paths or tree.is_cancelled:
                continue
            samples += list(places.samples(self.known.rates.get(tree.task.id)))
            self._average(self.known.rates, tree.task.id, fmean(places.outcomes))
            for one in places.of.values():
                calls.setdefault(one.depth, []).append(one.after / max(one.num, 1))
        for depth, found in calls.items():
            self._average(self.known.calls, str(depth), fmean(found))
        return self._fit(samples)

    @staticmethod
    def _average(averages: dict[str, float], key: str, new: float) -> None:
        averages[key] = averages.get(key, new) * (1 - NEW) + NEW * new

    def _fit(self, samples: Sequence[tuple[list[float], float, bool, float]]) -> dict[str, float]:
        before, known = np.array(self.known.weights), KEPT * np.array(self.known.precision)
        self.known.precision = known.tolist()
        if not samples:
            return {}
        features, estimates, outcomes, weights = zip(*samples, strict=True)
        x, y, share = np.array(features), np.array(outcomes, np.float64), np.array(weights)
        offset = _logit(np.array(estimates))
        figures = {
            "forecast/log_loss": _log_loss(offset + x @ before, y, share),
            "forecast/log_loss_of_tree": _log_loss(offset, y, share),
        }
        ridge = RIDGE * np.eye(NUM_FEATURES)
        w = before
        for _ in range(NUM_STEPS):
            p = _sigmoid(offset + x @ w)
            gradient = x.T @ (share * (p - y)) + known @ (w - before) + RIDGE * w
            curvature = (x.T * (share * p * (1 - p))) @ x
            step = np.linalg.solve(curvature + known + ridge, gradient)
            w = w - step * min(1.0, 2.0 / float(np.abs(step).max() + 1e-12))
            if np.abs(step).max() < 1e-10:
                break
        p = _sigmoid(offset + x @ w)
        self.known.precision = (known + (x.T * (share * p * (1 - p))) @ x).tolist()
        self.known.weights = w.tolist()
        return figures


def _entropy(node: Node) -> float:
    """The mean over the first tokens of a turn, nats; 0 where none is known."""
    first = np.asarray(node.entropies[:WINDOW], np.float64)
    first = first[~np.isnan(first)]
    return float(first.mean()) if len(first) else 0.0


def _logit(p: Floats) -> Floats:
    found: Floats = np.log(p) - np.log1p(-p)
    return found


def _sigmoid(logits: Floats) -> Floats:
    found: Floats = 1 / (1 + np.exp(-np.clip(logits, -MAX_LOGIT, MAX_LOGIT)))
    return found


def _log_loss(logits: Floats, y: Floats, share: Floats) -> float:
    p = _sigmoid(logits)
    return float(-np.average(y * np.log(p) + (1 - y) * np.log1p(-p), weights=share))
