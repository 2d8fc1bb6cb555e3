"""Metrics of rollouts: a step's trees, the engine's prefix cache, the event loop.

rollout_metrics    lengths, rewards, failures and staleness of the trees of a step
trained_metrics    lengths and staleness of offered and of trained trajectories
TreeCounters       the fate of every offered tree, with a conservation law
PrefixHits         prompt tokens found in the engine's prefix cache
ProbeWaits         time that roots waited for a probe
LoopLag            latency of the event loop
entropy_profile    entropy by position in a turn: ARPO and AEPO assume that it rises after tool
                   results
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from statistics import fmean

import numpy as np
from msgspec import Struct, field

from agentenv.base.offload import poll_pause
from agentenv.base.tree import CANCELLED, LED, Node, Trajectory, TrajectoryTree
from agentenv.base.types import Completion, Info

Metrics = dict[str, float]


def rollout_metrics(trees: Sequence[TrajectoryTree], learner_version: int) -> Metrics:
    """Metrics of one step's trees, averaged over trajectories. Lengths are in tokens, entropy in
    nats; staleness is the number of published versions between the oldest sampled token and the
    learner."""
    seen = _Seen(learner_version)
    for tree in trees:
        seen.add(tree)
    return seen.metrics(trees)


Trained = Sequence[tuple[TrajectoryTree, Sequence[Node]]]  # trees with the leaves that counted


def trained_metrics(
    offered: Sequence[TrajectoryTree], trained: Trained, learner_version: int
) -> Metrics:
    """Lengths of offered and of trained trajectories, in tokens without the prompt, since limits
    and filters prefer some lengths; and the staleness of trained tokens, in published versions."""
    metrics = _lengths("offered", [one for tree in offered for one in tree.trajectories()])
    paths = [Trajectory(tree.history(leaf)) for tree, leaves in trained for leaf in leaves]
    metrics |= _lengths("trained", paths)
    nodes = {id(node): node for path in paths for node in path.path}
    ages: Counter[int] = Counter()
    for node in nodes.values():
        for span in node.version_spans:
            ages[learner_version - span.version] += span.end - span.start
    if num_tokens := ages.total():
        metrics["staleness/trained_mean"] = sum(a * n for a, n in ages.items()) / num_tokens
        metrics["staleness/trained_median"] = int(
            np.quantile([*ages], 0.5, weights=[*ages.values()], method="inverted_cdf")
        )
    return metrics


def _lengths(name: str, paths: Sequence[Trajectory]) -> Metrics:
    if not paths:
        return {}
    lengths = [path.num_tokens - len(path.path[0].observation_ids) for path in paths]
    num_cut = sum(path.leaf.end == "truncated" for path in paths)
    return {
        f"length/{name}_p50": int(np.percentile(lengths, 50, method="inverted_cdf")),
        f"length/{name}_p90": int(np.percentile(lengths, 90, method="inverted_cdf")),
        f"length/{name}_max": max(lengths),
        f"length/{name}_truncated": num_cut / len(paths),
    }


class _Seen:
    """The sums of one pass over the trees of a step."""

    def __init__(self, learner_version: int) -> None:
        self._version = learner_version
        self._counts: Counter[str] = Counter()
        self._kinds: Counter[str] = Counter()  # of failures
        self._staleness: list[int] = []  # of each tree
        self._ages: Counter[int] = Counter()  # sampled tokens by staleness
        self._entropy = (0.0, 0)  # sum, and number of tokens with known entropy
        self._done: dict[str, list[tuple[float, bool]]] = {}  # reward and success, by kind of task
        self._lengths: list[int] = []
        self._limits: Counter[str] = Counter()
        self._parts: dict[str, list[float]] = {}
        self._calls: dict[str, list[Info]] = {}  # by tool

    def add(self, tree: TrajectoryTree) -> None:
        counts, num_calls = self._counts, 0
        oldest = None
        for node in tree.nodes:
            counts["sampled_tokens"] += len(node.action_ids)
            counts["forks"] += node.num_forks or 0
            counts["led"] += node.info.get(LED, 0)
            for span in node.version_spans:
                self._ages[self._version - span.version] += span.end - span.start
                oldest = span.version if oldest is None else min(oldest, span.version)
            for call in node.info.get("tool_calls", ()):
                self._calls.setdefault(call["name"], []).append(call)
                num_calls += 1
            if node.end == "failed":
                self._kinds[failure_kind_of(node)] += 1
        self._staleness.append(self._version - (tree.policy_version if oldest is None else oldest))
        counts["roots"] += tree.num_roots
        counts["tool_calls"] += num_calls
        counts["retaken"] += tree.num_retaken
        self._add_entropies(tree)
        for trajectory in tree.trajectories():
            self._add_trajectory(trajectory)
            self._add_return(trajectory, tree.task.kind)

    def _add_entropies(self, tree: TrajectoryTree) -> None:
        known = np.concatenate([np.asarray(node.entropies) for node in tree.nodes])
        known = known[~np.isnan(known)]
        self._entropy = (
            self._entropy[0] + float(known.sum(dtype=np.float64)),
            self._entropy[1] + len(known),
        )

    def _add_return(self, trajectory: Trajectory, kind: str) -> None:
        self._done.setdefault(kind, []).append((trajectory.reward, trajectory.success))
        for name, value in trajectory.leaf.info.get("parts", {}).items():
            self._parts.setdefault(f"reward/{name}", []).append(value)

    def _add_trajectory(self, trajectory: Trajectory) -> None:
        leaf, counts = trajectory.leaf, self._counts
        self._lengths.append(trajectory.num_tokens - len(trajectory.path[0].observation_ids))
        counts["turns"] += len(trajectory.turns)
        counts["calls"] += trajectory.num_tool_calls
        counts["truncated"] += leaf.end == "truncated"
        if leaf.limit:
            self._limits[leaf.limit] += 1

    def metrics(self, trees: Sequence[TrajectoryTree]) -> Metrics:
        """Counts, rewards, ends and lengths of the trees of one update, as metrics by name."""
        counts = self._counts
        done = [one for of_kind in self._done.values() for one in of_kind]
        num_done = len(self._lengths)
        metrics: Metrics = {
            "rollout/trees": len(trees),
            "rollout/trajectories": num_done,
            "rollout/forks": counts["forks"],
            "rollout/roots": counts["roots"],
            "rollout/sampled_tokens": counts["sampled_tokens"],
            "rollout/tool_calls": counts["tool_calls"],
            "rollout/led_calls": counts["led"],
            "failed/trajectories": self._kinds.total(),
            "failed/retaken": counts["retaken"],
        }
        metrics |= {f"failed/by_kind/{kind}": count for kind, count in sorted(self._kinds.items())}
        if trees:
            metrics["staleness/max"] = max(self._staleness)
            metrics["staleness/mean"] = fmean(self._staleness)
            total = self._ages.total()
            metrics |= {
                f"staleness/tokens_{age}": self._ages[age] / total
                for age in sorted(self._ages)
                if total
            }
        if self._entropy[1]:
            metrics["rollout/entropy"] = self._entropy[0] / self._entropy[1]
        if num := num_done + self._kinds.total():
            metrics["failed/share"] = self._kinds.total() / num
        if not num_done:
            return metrics
        metrics["reward/mean"] = fmean(reward for reward, _ in done)
        metrics["reward/success"] = success = fmean(success for _, success in done)
        metrics["reward/success_if_failed_wrong"] = success * (1 - metrics["failed/share"])
        metrics["rollout/response_tokens"] = fmean(self._lengths)
        metrics["rollout/response_tokens_max"] = max(self._lengths)
        metrics["rollout/turns"] = counts["turns"] / num_done
        metrics["rollout/calls_per_trajectory"] = counts["calls"] / num_done
        metrics["rollout/truncated"] = counts["truncated"] / num_done
        metrics |= {name: fmean(values) for name, values in self._parts.items()}
        if "reward/format" in self._parts:
            wrong = (value < 0 for value in self._parts["reward/format"])
            metrics["reward/format_errors"] = fmean(wrong)
        for limit, count in self._limits.items():
            metrics[f"truncated/{limit}"] = count / num_done
        if len({tree.task.kind for tree in trees}) > 1:
            for kind in sorted(self._done):
                metrics[f"by_kind/{kind}/reward"] = fmean(one[0] for one in self._done[kind])
                metrics[f"by_kind/{kind}/success"] = fmean(one[1] for one in self._done[kind])
        return metrics | _tool_metrics(self._calls)


def _tool_metrics(calls: dict[str, list[Info]]) -> Metrics:
    metrics: Metrics = {}
    for name, of_name in sorted(calls.items()):
        metrics[f"tool/{name}/calls"] = len(of_name)
        metrics[f"tool/{name}/errors"] = sum(not call.get("ok", True) for call in of_name)
        metrics[f"tool/{name}/mean_s"] = fmean(call.get("duration_s", 0.0) for call in of_name)
        metrics[f"tool/{name}/waited_s"] = fmean(call.get("waited_s", 0.0) for call in of_name)
        cached = [call["info"]["cached"] for call in of_name if "cached" in call.get("info", ())]
        if cached:
            metrics[f"tool/{name}/cache_hits"] = sum(cached)
    return metrics


class TreeCounters(Struct):
    """The fates of all offered trees. `check` asserts the conservation law at each step:

    offered = trained + filtered + failed + in flight
    """

    offered: int = 0
    trained: int = 0
    equal: int = 0  # trained with equal returns: they count only in the denominators
    filtered: int = 0  # dropped or replaced because of equal returns
    failed: dict[str, int] = field(default_factory=dict)  # by kind: the group was too small

    def add(self, trained: int, filtered: int, failed: Mapping[str, int], equal: int = 0) -> None:
        """Count delivered trees; `equal` of the trained ones have equal returns."""
        self.trained += trained
        self.equal += equal
        self.filtered += filtered
        for kind, count in failed.items():
            self.failed[kind] = self.failed.get(kind, 0) + count

    @property
    def num_failed(self) -> int:
        return sum(self.failed.values())

    @property
    def num_delivered(self) -> int:
        """Trees that are no longer in flight."""
        return self.trained + self.filtered + self.num_failed

    def counts(self, in_flight: int) -> dict[str, int]:
        """The terms of the law by name, and "equal", which is a part of "trained"."""
        return {
            "offered": self.offered,
            "trained": self.trained,
            "equal": self.equal,
            "filtered": self.filtered,
            "failed": self.num_failed,
            "in_flight": in_flight,
        }

    def check(self, in_flight: int) -> None:
        """Raise AssertionError if a tree was lost. `in_flight` is counted independently, in the
        queue and at the learner."""
        assert self.offered == self.num_delivered + in_flight, (
            f"trees were lost: {self}, {in_flight} in flight"
        )


def failure_kind(tree: TrajectoryTree) -> str:
    """The reason for a group that is too small: its most frequent kind of failure, e.g. "EnvError",
    else the most frequent limit that ended its trajectories, as "seconds (masked)"."""
    if tree.is_cancelled:
        return CANCELLED
    failures = Counter(map(failure_kind_of, tree.failures()))
    if failures:
        return failures.most_common(1)[0][0]
    limits = Counter(str(t.leaf.limit) for t in tree.trajectories() if t.leaf.limit)
    return f"{limits.most_common(1)[0][0]} (masked)" if limits else "none"


def failure_kind_of(leaf: Node) -> str:
    """The kind of a leaf's failure, e.g. "EnvError"."""
    return (leaf.error or "unknown").partition(":")[0]


STALL_MS = 50.0  # a longer lag counts as a stall


class PrefixHits:
    """Prompt tokens that were in the engine's prefix cache, since the last `take`: for turns that
    continue their own trajectory, and for the first turns of forks. Turns with a prefix of older
    weights do not count, since no engine keeps it."""

    def __init__(self) -> None:
        self._sums: dict[str, list[int]] = {}  # tokens cached, and in all

    def add(self, branch: str, cursor: Node, num_tokens: int, completion: Completion) -> None:
        """Add a turn of the branch after `cursor`, with a prefix of `num_tokens`."""
        now = completion.version_spans[0].version
        if all(span.version == now for span in cursor.version_spans):
            kind = "turn_hits" if cursor.branch == branch else "fork_hits"
            sums = self._sums.setdefault(kind, [0, 0])
            sums[0] += completion.num_cached_tokens
            sums[1] += num_tokens

    def take(self) -> dict[str, float]:
        """The cached shares by kind of turn, without kinds that had no turns."""
        return {f"prefix/{kind}": hit / num for kind, (hit, num) in self.drain().items()}

    def drain(self) -> dict[str, list[int]]:
        """The sums, for `merge` into those of another actor; resets them."""
        sums, self._sums = self._sums, {}
        return sums

    def merge(self, others: dict[str, list[int]]) -> None:
        """Add the sums of an actor in another process."""
        for kind, sums in others.items():
            mine = self._sums.setdefault(kind, [0, 0])
            mine[:] = [a + b for a, b in zip(mine, sums, strict=True)]


class ProbeWaits(list[float]):
    """Seconds that roots waited for a probe, the single first root of some plans (AEPO), since the
    last `take`: from the start of a tree until its first leaf allowed others to begin."""

    def take(self) -> dict[str, float]:
        """Mean and longest wait; empty if none waited."""
        seconds = self.drain()
        if not seconds:
            return {}
        return {"rollout/probe_wait_s": fmean(seconds), "rollout/probe_wait_s_max": max(seconds)}

    def drain(self) -> list[float]:
        """The seconds, for those of another actor; resets them."""
        seconds = [*self]
        self.clear()
        return seconds


class LoopLag:
    """Measures the latency of the event loop: how late it wakes a sleeping task.

    Each measured lag represents `interval_s` of time. A late wake-up also adds those that were due
    meanwhile, so that a stall counts by its duration.
    """

    interval_s = 0.02

    def __init__(self) -> None:
        self._lags_ms: deque[float] = deque(maxlen=20_000)

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self.interval_s
            await poll_pause(self.interval_s)
            self.add(max(0.0, loop.time() - due))

    def clear(self) -> None:
        """Forget what was measured so far."""
        self._lags_ms.clear()

    def add(self, lag_s: float) -> None:
        """Add the lag of a wake-up, and those of the wake-ups that were due meanwhile."""
        for behind in range(min(int(lag_s / self.interval_s) + 1, self._lags_ms.maxlen or 1)):
            self._lags_ms.append((lag_s - behind * self.interval_s) * 1000)

    def percentile_ms(self, percent: float) -> float:
        """The given percentile of the lags, in milliseconds; 0 before the first measurement."""
        lags = sorted(self._lags_ms)
        return lags[min(len(lags) - 1, int(len(lags) * percent / 100))] if lags else 0.0

    def figures(self) -> Metrics:
        """Of the last minutes: percentile and maximum in milliseconds, and the share of the time
        in which the lag exceeded STALL_MS."""
        stalled = sum(lag > STALL_MS for lag in self._lags_ms)
        return {
            "lag_p99_ms": self.percentile_ms(99),
            "lag_max_ms": max(self._lags_ms, default=0.0),
            "stalled_share": stalled / max(1, len(self._lags_ms)),
        }


class Throughput:
    """The engine's sampled tokens per second, between calls of `rate`."""

    def __init__(self) -> None:
        self._before: tuple[float, float] | None = None

    def rate(self, stats: dict[str, float]) -> float:
        """The rate since the last call, from the engine's `stats`; 0 at the first call."""
        now = (asyncio.get_running_loop().time(), stats.get("sampled_tokens", 0.0))
        before, self._before = self._before or now, now
        seconds = now[0] - before[0]
        return (now[1] - before[1]) / seconds if seconds else 0.0


NO_TOOL = "no tool"  # an observation that does not answer a call
USER = "a user"  # a message that answers a turn without a call
OTHER_TOOLS = "other tools"  # a policy can invent any number of names
MAX_TOOLS = 32  # curves by tool in a merged profile


class EntropyCurve(Struct, frozen=True):
    """The mean entropy (nats) of the tokens at each position of a turn, and the number (`count`) of
    turns that have this position."""

    mean: list[float] = []
    count: list[int] = []

    def merged(self, other: EntropyCurve) -> EntropyCurve:
        """The curve over the turns of both."""
        count = [sum(pair) for pair in zip_longest(self.count, other.count, fillvalue=0)]
        sums = zip_longest(self._sums(), other._sums(), fillvalue=0.0)
        return EntropyCurve([sum(pair) / n for pair, n in zip(sums, count, strict=True)], count)

    def _sums(self) -> list[float]:
        return [mean * count for mean, count in zip(self.mean, self.count, strict=True)]

    def window(self, size: int) -> float:
        """Mean over the tokens of the first `size` positions; nan if there are none."""
        pairs = list(zip(self.mean, self.count, strict=True))[:size]
        total = sum(count for _, count in pairs)
        return sum(mean * count for mean, count in pairs) / total if total else float("nan")


class EntropyProfile(Struct, frozen=True):
    """Curves of first turns, of all turns after an observation, and of these by tool; turns after
    user messages are separate.

    ARPO and AEPO compare `after` each tool with `start`, the first turn of a trajectory, over the
    first 10 to 50 tokens.
    """

    start: EntropyCurve = EntropyCurve()
    after_result: EntropyCurve = EntropyCurve()
    after: dict[str, EntropyCurve] = {}

    def merged(self, other: EntropyProfile) -> EntropyProfile:
        """The profile over the trees of both. Tools beyond the first MAX_TOOLS are combined, which
        bounds repeated merges."""
        after = dict(self.after)
        for tool, curve in other.after.items():
            known = tool in after or len(after.keys() - {OTHER_TOOLS}) < MAX_TOOLS
            name = tool if known else OTHER_TOOLS
            after[name] = after.get(name, EntropyCurve()).merged(curve)
        return EntropyProfile(
            start=self.start.merged(other.start),
            after_result=self.after_result.merged(other.after_result),
            after={tool: after[tool] for tool in sorted(after)},
        )

    def curves(self) -> dict[str, EntropyCurve]:
        """By name: start, after_result, after/TOOL."""
        curves = {"start": self.start, "after_result": self.after_result}
        return curves | {f"after/{tool}": curve for tool, curve in self.after.items()}

    def rows(self) -> list[dict[str, float | int | str]]:
        """A table: one row per curve and position."""
        return [
            {"curve": name, "position": place, "entropy": mean, "turns": count}
            for name, curve in self.curves().items()
            for place, (mean, count) in enumerate(zip(curve.mean, curve.count, strict=True))
        ]


def entropy_profile(trees: Iterable[TrajectoryTree], num_positions: int = 50) -> EntropyProfile:
    """Curves over all turns of the trees, each shared turn counted once.

    A result that answers calls of several tools counts for each of them once.
    """
    start: list[Sequence[float]] = []
    after: dict[str, list[Sequence[float]]] = {}
    followed: list[Sequence[float]] = []
    for tree in trees:
        for node in tree.nodes[1:]:
            if not node.entropies or node.parent is None:
                continue
            first = node.entropies[:num_positions]
            above = tree.nodes[node.parent]
            if above.parent is None:
                start.append(first)
            elif above.observation_ids:
                followed.append(first)
                for tool in _tools(above):
                    after.setdefault(tool, []).append(first)
    return EntropyProfile(
        start=_curve(start),
        after_result=_curve(followed),
        after={tool: _curve(after[tool]) for tool in sorted(after)},
    )


def _tools(node: Node) -> list[str]:
    names = {str(call["name"]) for call in node.info.get("tool_calls", ())}
    return sorted(names) or [USER if node.is_of_user else NO_TOOL]


def _curve(turns: Sequence[Sequence[float]]) -> EntropyCurve:
    """The curve up to the first position without a known entropy."""
    length = max(map(len, turns), default=0)
    if not length:
        return EntropyCurve()
    figures = np.full((len(turns), length), np.nan)
    for row, turn in zip(figures, turns, strict=True):
        row[: len(turn)] = turn
    is_known = ~np.isnan(figures)
    count = is_known.sum(0)
    size = length if count.all() else int(np.argmin(count > 0))
    sums = np.where(is_known, figures, 0.0).sum(0)
    return EntropyCurve((sums[:size] / count[:size]).tolist(), count[:size].tolist())
