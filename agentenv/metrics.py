"""Figures of rollouts: of one step's trees, of entropies after tool results, of the event loop.

rollout_metrics    lengths, rewards, failures and staleness of the trees of a step
Ledger             the conservation law: where every offered tree went
entropy_profile    does uncertainty rise after tool results, the premise of ARPO and AEPO?
LoopLag            how late the event loop wakes a sleeper
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import takewhile, zip_longest
from statistics import fmean

from msgspec import Struct, field

from agentenv.tree import Node, TrajectoryTree
from agentenv.types import Info

Metrics = dict[str, float]


def wilson_interval(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """95 % score interval of a share (Wilson 1927); (0, 1) without trials."""
    if not trials:
        return (0.0, 1.0)
    share, spread = successes / trials, z * z / trials
    centre = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / trials + spread / trials / 4) / (1 + spread)
    return (max(0.0, centre - half), min(1.0, centre + half))


def rollout_metrics(trees: Sequence[TrajectoryTree], learner_version: int) -> Metrics:
    """Figures of one step's trees, averaged over trajectories. Lengths in tokens, entropy in
    nats; staleness in published versions between the oldest sampled token and the learner."""
    done = [trajectory for tree in trees for trajectory in tree.trajectories()]
    metrics: Metrics = {
        "rollout/trees": len(trees),
        "rollout/trajectories": len(done),
        "rollout/forks": sum(tree.num_forks for tree in trees),
        "rollout/roots": sum(tree.num_roots for tree in trees),
        "rollout/sampled_tokens": sum(tree.num_action_tokens for tree in trees),
        "rollout/tool_calls": sum(num_tool_calls(tree) for tree in trees),
        "failed/trajectories": sum(len(tree.failures()) for tree in trees),
        "failed/retaken": sum(tree.num_retaken for tree in trees),
    }
    metrics |= failures_by_kind(trees)
    if trees:
        staleness = [learner_version - tree.oldest_version() for tree in trees]
        metrics["staleness/max"] = max(staleness)
        metrics["staleness/mean"] = fmean(staleness)
        metrics |= _staleness_histogram(trees, learner_version)
    entropies = [h for tree in trees for node in tree.nodes for h in node.entropies]
    entropies = [entropy for entropy in entropies if not math.isnan(entropy)]
    if entropies:
        metrics["rollout/entropy"] = fmean(entropies)
    if not done:
        return metrics
    metrics["reward/mean"] = fmean(t.reward for t in done)
    metrics["reward/success"] = fmean(t.success for t in done)
    metrics["rollout/response_tokens"] = fmean(
        len(t.token_ids) - len(t.path[0].observation_ids) for t in done
    )
    metrics["rollout/response_tokens_max"] = max(
        len(t.token_ids) - len(t.path[0].observation_ids) for t in done
    )
    metrics["rollout/turns"] = fmean(len(t.turns) for t in done)
    metrics["rollout/calls_per_trajectory"] = fmean(t.num_tool_calls for t in done)
    metrics["rollout/truncated"] = fmean(t.leaf.end == "truncated" for t in done)
    parts: dict[str, list[float]] = {}
    for trajectory in done:
        for name, value in trajectory.leaf.info.get("parts", {}).items():
            parts.setdefault(f"reward/{name}", []).append(value)
    metrics |= {name: fmean(values) for name, values in parts.items()}
    if "reward/format" in parts:
        metrics["reward/format_errors"] = fmean(value < 0 for value in parts["reward/format"])
    for limit, count in Counter(t.leaf.limit for t in done if t.leaf.limit).items():
        metrics[f"truncated/{limit}"] = count / len(done)
    return metrics | _kind_metrics(trees) | _tool_metrics(trees)


def _staleness_histogram(trees: Sequence[TrajectoryTree], learner_version: int) -> Metrics:
    """Share of the sampled tokens by how many published versions they are old."""
    tokens: Counter[int] = Counter()
    for span in (span for tree in trees for node in tree.nodes for span in node.version_spans):
        tokens[learner_version - span.version] += span.end - span.start
    total = tokens.total()
    return {f"staleness/tokens_{age}": tokens[age] / total for age in sorted(tokens) if total}


def _kind_metrics(trees: Sequence[TrajectoryTree]) -> Metrics:
    """Reward and success by the kind of the tasks, if there are several kinds."""
    kinds = sorted({tree.task.kind for tree in trees})
    metrics: Metrics = {}
    for kind in kinds if len(kinds) > 1 else ():
        done = [t for tree in trees if tree.task.kind == kind for t in tree.trajectories()]
        if done:
            metrics[f"by_kind/{kind}/reward"] = fmean(t.reward for t in done)
            metrics[f"by_kind/{kind}/success"] = fmean(t.success for t in done)
    return metrics


def num_tool_calls(tree: TrajectoryTree) -> int:
    """Calls that were really made for this tree; a call on a shared prefix counts once."""
    return sum(len(node.info.get("tool_calls", ())) for node in tree.nodes)


def _tool_metrics(trees: Sequence[TrajectoryTree]) -> Metrics:
    calls: dict[str, list[Info]] = {}
    for node in (node for tree in trees for node in tree.nodes):
        for call in node.info.get("tool_calls", ()):
            calls.setdefault(call["name"], []).append(call)
    metrics: Metrics = {}
    for name, of_name in sorted(calls.items()):
        metrics[f"tool/{name}/calls"] = len(of_name)
        metrics[f"tool/{name}/errors"] = sum(not call.get("ok", True) for call in of_name)
        metrics[f"tool/{name}/mean_s"] = fmean(call.get("duration_s", 0.0) for call in of_name)
        cached = [call["info"]["cached"] for call in of_name if "cached" in call.get("info", ())]
        if cached:
            metrics[f"tool/{name}/cache_hits"] = sum(cached)
    return metrics


class Ledger(Struct):
    """Where every offered tree went. `check` is the conservation law, asserted at each step:

    offered = trained + filtered + failed + in flight
    """

    offered: int = 0
    trained: int = 0
    filtered: int = 0  # all returns equal: nothing to learn
    failed: dict[str, int] = field(default_factory=dict)  # by kind: the group stayed too short

    @property
    def num_failed(self) -> int:
        return sum(self.failed.values())

    @property
    def num_delivered(self) -> int:
        """Trees that are not in flight any more."""
        return self.trained + self.filtered + self.num_failed

    def counts(self, in_flight: int) -> dict[str, int]:
        """Both sides of the law, by name."""
        return {
            "offered": self.offered,
            "trained": self.trained,
            "filtered": self.filtered,
            "failed": self.num_failed,
            "in_flight": in_flight,
        }

    def check(self, in_flight: int) -> None:
        """Raise AssertionError if a tree was lost. `in_flight` counts the trees where they are, in
        the queue or in the learner's hands."""
        assert self.offered == self.num_delivered + in_flight, (
            f"trees were lost: {self}, {in_flight} in flight"
        )


def failure_kind(tree: TrajectoryTree) -> str:
    """Why a group stayed too short: the commonest kind of failure in it, e.g. "EnvError", else the
    commonest limit that ended its trajectories, as "seconds (masked)"."""
    failures = Counter(map(_kind, tree.failures()))
    if failures:
        return failures.most_common(1)[0][0]
    limits = Counter(str(t.leaf.limit) for t in tree.trajectories() if t.leaf.limit)
    return f"{limits.most_common(1)[0][0]} (masked)" if limits else "none"


def failures_by_kind(trees: Sequence[TrajectoryTree]) -> Metrics:
    """Trajectories that failed, by kind."""
    kinds = Counter(_kind(leaf) for tree in trees for leaf in tree.failures())
    return {f"failed/by_kind/{kind}": kinds[kind] for kind in sorted(kinds)}


def _kind(leaf: Node) -> str:
    return (leaf.error or "unknown").partition(":")[0]


NO_TOOL = "no tool"  # an observation that answers no call
STALL_MS = 50.0  # a loop that is later than this is stalled
OTHER_TOOLS = "other tools"  # a policy can make up any number of names
MAX_TOOLS = 32  # that a merged profile keeps apart


class EntropyCurve(Struct, frozen=True):
    """The mean entropy (nats) of the tokens at each position of a turn, and the `count` of turns
    that were that long."""

    mean: list[float] = []
    count: list[int] = []

    def merged(self, other: EntropyCurve) -> EntropyCurve:
        """The curve of the turns of both."""
        count = [sum(pair) for pair in zip_longest(self.count, other.count, fillvalue=0)]
        sums = zip_longest(self._sums(), other._sums(), fillvalue=0.0)
        return EntropyCurve([sum(pair) / n for pair, n in zip(sums, count, strict=True)], count)

    def _sums(self) -> list[float]:
        return [mean * count for mean, count in zip(self.mean, self.count, strict=True)]

    def window(self, size: int) -> float:
        """Mean over the tokens of the first `size` positions; nan without one."""
        pairs = list(zip(self.mean, self.count, strict=True))[:size]
        total = sum(count for _, count in pairs)
        return sum(mean * count for mean, count in pairs) / total if total else float("nan")


class EntropyProfile(Struct, frozen=True):
    """Curves of first turns, of all turns after a tool result, and of those by tool.

    The figure of ARPO and AEPO is `after` each tool against `start`, the first turn of a
    trajectory, over the first 10 to 50 tokens.
    """

    start: EntropyCurve = EntropyCurve()
    after_result: EntropyCurve = EntropyCurve()
    after: dict[str, EntropyCurve] = {}

    def merged(self, other: EntropyProfile) -> EntropyProfile:
        """The profile of the trees of both; of more than MAX_TOOLS tools those that came last are
        counted together, so that a run can merge for ever."""
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
    return sorted(names) or [NO_TOOL]


def _curve(turns: Sequence[Sequence[float]]) -> EntropyCurve:
    """Of the positions up to the first at which no turn has an entropy that is known."""
    length = max(map(len, turns), default=0)
    known = ([t[i] for t in turns if len(t) > i and not math.isnan(t[i])] for i in range(length))
    columns = list(takewhile(bool, known))
    return EntropyCurve([fmean(column) for column in columns], [len(c) for c in columns])


class LoopLag:
    """Measures how late the event loop wakes a sleeper: the time others keep it busy.

    A sleeper that comes late stands for all that would have come meanwhile, so that a stall counts
    by how long it was: each lag is of `interval_s` of time, whether or not the loop ran then.
    """

    def __init__(self, interval_s: float = 0.02, window: int = 20_000) -> None:
        self.interval_s = interval_s
        self._lags_ms: deque[float] = deque(maxlen=window)

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self.interval_s
            await asyncio.sleep(self.interval_s)
            self.add(max(0.0, loop.time() - due))

    def add(self, lag_s: float) -> None:
        """A sleeper woke so late, and with it those that were due meanwhile."""
        for behind in range(min(int(lag_s / self.interval_s) + 1, self._lags_ms.maxlen or 1)):
            self._lags_ms.append((lag_s - behind * self.interval_s) * 1000)

    def percentile_ms(self, percent: float) -> float:
        """The given percentile of the lags, in milliseconds; 0 before the first measurement."""
        lags = sorted(self._lags_ms)
        return lags[min(len(lags) - 1, int(len(lags) * percent / 100))] if lags else 0.0

    def figures(self) -> Metrics:
        """Of the last minutes: percentile and maximum in milliseconds, and the share of the time
        in which a sleeper would have been over STALL_MS late."""
        stalled = sum(lag > STALL_MS for lag in self._lags_ms)
        return {
            "lag_p99_ms": self.percentile_ms(99),
            "lag_max_ms": max(self._lags_ms, default=0.0),
            "stalled_share": stalled / max(1, len(self._lags_ms)),
        }


class Throughput:
    """Tokens that the engine sampled a second, between one call of `rate` and the next."""

    def __init__(self) -> None:
        self._before: tuple[float, float] | None = None

    def rate(self, stats: dict[str, float]) -> float:
        """The rate since the last call by the engine's `stats`; 0 at the first."""
        now = (asyncio.get_running_loop().time(), stats.get("sampled_tokens", 0.0))
        before, self._before = self._before or now, now
        seconds = now[0] - before[0]
        return (now[1] - before[1]) / seconds if seconds else 0.0
