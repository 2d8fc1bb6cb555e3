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
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from statistics import fmean

import numpy as np
from msgspec import Struct

from agentenv.base.offload import poll_pause
from agentenv.base.tree import CANCELLED, GUIDED, LED, Node, Trajectory, TrajectoryTree
from agentenv.base.types import Completion, Info

Metrics = dict[str, float]
MAX_KIND_CHARS = 60
PADDED = (
    "sampled tokens have ids beyond the tokenizer's: the model's vocabulary is padded, and "
    "training has not yet made these ids unlikely; they have no text"
)


def rollout_metrics(
    trees: Sequence[TrajectoryTree], learner_version: int, num_words: float = math.inf
) -> Metrics:
    """Metrics of one step's trees, averaged over trajectories. Lengths are in tokens, entropy in
    nats; staleness is the number of published versions between the oldest sampled token and the
    learner. `num_words`: the first id beyond the tokenizer's."""
    nodes = [node for tree in trees for node in tree.nodes]
    calls = [call for node in nodes for call in node.info.get("tool_calls", ())]
    failures = Counter(failure_kind_of(node.error) for node in nodes if node.end == "failed")
    paths = [(path, tree.task.kind) for tree in trees for path in tree.trajectories()]
    metrics: Metrics = {
        "rollout/trees": len(trees),
        "rollout/trajectories": len(paths),
        "rollout/forks": sum(tree.num_forks for tree in trees),
        "rollout/roots": sum(tree.num_roots for tree in trees),
        "rollout/sampled_tokens": sum(len(node.action_ids) for node in nodes),
        "rollout/tool_calls": len(calls),
        "rollout/led_calls": sum(node.info.get(LED, 0) for node in nodes),
        "failed/trajectories": failures.total(),
        "failed/retaken": sum(tree.num_retaken for tree in trees),
    }
    metrics |= {f"failed/by_kind/{kind}": count for kind, count in sorted(failures.items())}
    if guided := [node for node in nodes if node.info.get(GUIDED)]:
        metrics["rollout/changed_share"] = changed_share(guided)
    if trees:
        oldest = [learner_version - tree.oldest_version() for tree in trees]
        metrics |= {"staleness/max": max(oldest), "staleness/mean": fmean(oldest)}
        ages = _ages(nodes, learner_version)
        metrics |= {f"staleness/tokens_{age}": ages[age] / ages.total() for age in sorted(ages)}
        entropies = np.concatenate([np.asarray(node.entropies) for node in nodes])
        known = entropies[~np.isnan(entropies)]
        if len(known):
            metrics["rollout/entropy"] = float(known.mean(dtype=np.float64))
    if num := len(paths) + failures.total():
        metrics["failed/share"] = failures.total() / num
    counted = (path.leaf.info.get("endpoint", ()) for path, _ in paths)
    if padded := num_padded(nodes, num_words):
        metrics["rollout/padded_tokens"] = padded
    if refused := sum(any(name.startswith("refused/") for name in one) for one in counted):
        metrics["rollout/refused"] = refused
    if paths:
        metrics |= _trajectory_metrics(paths, metrics["failed/share"])
        if len({tree.task.kind for tree in trees}) > 1:
            for kind in sorted({kind for _, kind in paths}):
                done = [path for path, its_kind in paths if its_kind == kind]
                metrics[f"by_kind/{kind}/reward"] = fmean(path.reward for path in done)
                metrics[f"by_kind/{kind}/success"] = fmean(path.success for path in done)
        metrics |= _tool_metrics(calls)
    return metrics


def num_padded(nodes: Iterable[Node], num_words: float) -> int:
    """The number of sampled ids from `num_words` on, the first one beyond the tokenizer's."""
    return sum(token >= num_words for node in nodes for token in node.action_ids)


def changed_share(guided: Sequence[Node]) -> float:
    """The share of tokens of turns with a grammar whose log-probs it has changed: they are not
    trained."""
    known = np.concatenate([np.asarray(node.logprobs) for node in guided])
    return float(np.isnan(known).mean())


def _ages(nodes: Iterable[Node], learner_version: int) -> Counter[int]:
    """The number of sampled tokens by staleness."""
    ages: Counter[int] = Counter()
    for node in nodes:
        for span in node.version_spans:
            ages[learner_version - span.version] += span.end - span.start
    return ages


def _trajectory_metrics(paths: Sequence[tuple[Trajectory, str]], failed_share: float) -> Metrics:
    """Means over trajectories that did not fail."""
    done = [path for path, _ in paths]
    lengths = [path.num_tokens - len(path.path[0].observation_ids) for path in done]
    success = fmean(path.success for path in done)
    metrics: Metrics = {
        "reward/mean": fmean(path.reward for path in done),
        "reward/success": success,
        "reward/success_if_failed_wrong": success * (1 - failed_share),
        "rollout/response_tokens": fmean(lengths),
        "rollout/response_tokens_max": max(lengths),
        "rollout/turns": fmean(len(path.turns) for path in done),
        "rollout/calls_per_trajectory": fmean(path.num_tool_calls for path in done),
        "rollout/truncated": fmean(path.leaf.end == "truncated" for path in done),
        "rollout/empty": fmean(  # an end token alone
            any(len(one.action_ids) == 1 and one.end != "truncated" for one in path.turns)
            for path in done
        ),
    }
    parts = [path.leaf.info.get("parts", {}) for path in done]
    metrics |= {f"reward/{name}": mean for name, mean in part_means(parts).items()}
    if formats := [one["format"] for one in parts if "format" in one]:
        metrics["reward/format_errors"] = fmean(value < 0 for value in formats)
    limits = Counter(path.leaf.limit for path in done if path.leaf.limit)
    return metrics | {f"truncated/{limit}": num / len(done) for limit, num in limits.items()}


def part_means(parts: Sequence[Mapping[str, float]]) -> Metrics:
    """The mean of each part of a reward (`Grade.parts`), over the trajectories that have it."""
    names = dict.fromkeys(name for one in parts for name in one)
    return {name: fmean(one[name] for one in parts if name in one) for name in names}


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
    ages = _ages(nodes.values(), learner_version)
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


def _tool_metrics(calls: Sequence[Info]) -> Metrics:
    metrics: Metrics = {}
    by_name: dict[str, list[Info]] = {}  # a policy may invent a name for each call
    for call in calls:
        by_name.setdefault(call["name"], []).append(call)
    for name, of_name in sorted(by_name.items()):
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
    failed: dict[str, int] = {}  # by kind: the group was too small

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
            "offered": self.offered, "trained": self.trained, "equal": self.equal,
            "filtered": self.filtered, "failed": self.num_failed, "in_flight": in_flight,
        }  # fmt: skip

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
    failures = Counter(failure_kind_of(leaf.error) for leaf in tree.failures())
    if failures:
        return failures.most_common(1)[0][0]
    limits = Counter(str(t.leaf.limit) for t in tree.trajectories() if t.leaf.limit)
    return f"{limits.most_common(1)[0][0]} (masked)" if limits else "none"


def failure_kind_of(error: str | None) -> str:
    """The kind of a trajectory's failure: the class of its error, e.g. "EnvError"."""
    return (error or "unknown").partition(":")[0][:MAX_KIND_CHARS]


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
            self.merge({kind: [completion.num_cached_tokens, num_tokens]})

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
            mine[0] += sums[0]
            mine[1] += sums[1]


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
OTHER_TOOLS = "after/other tools"  # a policy can invent any number of names
MAX_TOOLS = 32  # curves by tool in a merged profile


class MeanCurve(Struct, frozen=True):
    """A mean at each position, and the number (`count`) of those that have it: the entropy (nats)
    of the tokens of a turn, the surprise of the turns of a trajectory."""

    mean: list[float] = []
    count: list[int] = []

    def merged(self, other: MeanCurve) -> MeanCurve:
        """The curve over the turns of both."""
        count = [sum(pair) for pair in zip_longest(self.count, other.count, fillvalue=0)]
        sums = zip_longest(self._sums(), other._sums(), fillvalue=0.0)
        return MeanCurve([sum(pair) / n for pair, n in zip(sums, count, strict=True)], count)

    def _sums(self) -> list[float]:
        return [mean * count for mean, count in zip(self.mean, self.count, strict=True)]

    def window(self, size: int) -> float:
        """Mean over the tokens of the first `size` positions; nan if there are none."""
        pairs = list(zip(self.mean, self.count, strict=True))[:size]
        total = sum(count for _, count in pairs)
        return sum(mean * count for mean, count in pairs) / total if total else float("nan")


# By name: start, the first turns; after_result, all turns after an observation; after/TOOL, these
# by tool; turns after user messages are separate. ARPO and AEPO compare those of each tool with
# `start` over the first 10 to 50 tokens.
EntropyProfile = dict[str, MeanCurve]


def merged_profile(one: EntropyProfile, other: EntropyProfile) -> EntropyProfile:
    """The profile over the trees of both. Tools beyond the first MAX_TOOLS are combined, which
    bounds repeated merges."""
    curves = dict(one)
    for name, curve in other.items():
        known = name in curves or "/" not in name or len(curves) < MAX_TOOLS + 2
        name = name if known else OTHER_TOOLS
        curves[name] = curves.get(name, MeanCurve()).merged(curve)
    return _in_order(curves)


def _in_order(curves: EntropyProfile) -> EntropyProfile:
    return {
        name: curves[name] for name in sorted(curves, key=lambda n: (n != "start", "/" in n, n))
    }


def profile_rows(profile: EntropyProfile) -> list[dict[str, float | int | str]]:
    """A table: one row per curve and position."""
    return [
        {"curve": name, "position": place, "entropy": mean, "turns": count}
        for name, curve in profile.items()
        for place, (mean, count) in enumerate(zip(curve.mean, curve.count, strict=True))
    ]


def entropy_profile(trees: Iterable[TrajectoryTree], num_positions: int = 50) -> EntropyProfile:
    """Curves over all turns of the trees, each shared turn counted once.

    A result that answers calls of several tools counts for each of them once.
    """
    turns: dict[str, list[Sequence[float]]] = {"start": [], "after_result": []}
    for tree in trees:
        for node in tree.nodes[1:]:
            if not node.entropies or node.parent is None:
                continue
            above = tree.nodes[node.parent]
            names = ["start"] if above.parent is None else []
            if not names and above.observation_ids:
                names = ["after_result", *(f"after/{tool}" for tool in _tools(above))]
            for name in names:
                turns.setdefault(name, []).append(node.entropies[:num_positions])
    return _in_order({name: _curve(found) for name, found in turns.items()})


def _tools(node: Node) -> list[str]:
    names = {str(call["name"]) for call in node.info.get("tool_calls", ())}
    return [*names] or [USER if node.is_of_user else NO_TOOL]


def _curve(turns: Sequence[Sequence[float]]) -> MeanCurve:
    """The curve up to the first position without a known entropy."""
    length = max(map(len, turns), default=0)
    if not length:
        return MeanCurve()
    figures = np.full((len(turns), length), np.nan)
    for row, turn in zip(figures, turns, strict=True):
        row[: len(turn)] = turn
    is_known = ~np.isnan(figures)
    count = is_known.sum(0)
    size = length if count.all() else int(np.argmin(count > 0))
    sums = np.where(is_known, figures, 0.0).sum(0)
    return MeanCurve((sums[:size] / count[:size]).tolist(), count[:size].tolist())
