"""Figures of rollouts, the conservation law, and the lag of the event loop."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Sequence
from statistics import fmean

from msgspec import Struct, field

from agentenv.tree import TrajectoryTree

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
    }
    if trees:
        staleness = [learner_version - tree.oldest_version() for tree in trees]
        metrics["staleness/max"] = max(staleness)
        metrics["staleness/mean"] = fmean(staleness)
        metrics |= _staleness_histogram(trees, learner_version)
    entropies = [h for tree in trees for node in tree.nodes for h in node.entropies]
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
    """Calls that were really made for this tree; one on a shared prefix counts once."""
    return sum(len(node.info.get("tool_calls", ())) for node in tree.nodes)


def _tool_metrics(trees: Sequence[TrajectoryTree]) -> Metrics:
    calls = [call for tree in trees for n in tree.nodes for call in n.info.get("tool_calls", ())]
    names = sorted({call["name"] for call in calls})
    metrics: Metrics = {}
    for name in names:
        of_name = [call for call in calls if call["name"] == name]
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

    def check(self, in_flight: int) -> None:
        """`in_flight`: trees counted where they are, in the queue or in the learner's hands."""
        accounted = self.trained + self.filtered + sum(self.failed.values()) + in_flight
        assert self.offered == accounted, f"trees were lost: {self}, {in_flight} in flight"


def failure_kind(tree: TrajectoryTree) -> str:
    """The commonest kind of failure in a tree, e.g. "EnvError"; "none" if nothing failed."""
    kinds = Counter((leaf.error or "unknown").partition(":")[0] for leaf in tree.failures())
    return kinds.most_common(1)[0][0] if kinds else "none"


class LoopLag:
    """Measures how late the event loop wakes a sleeper: the time others keep it busy."""

    def __init__(self, interval_s: float = 0.02, window: int = 20_000) -> None:
        self.interval_s = interval_s
        self._lags_ms: deque[float] = deque(maxlen=window)

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self.interval_s
            await asyncio.sleep(self.interval_s)
            self._lags_ms.append(max(0.0, loop.time() - due) * 1000)

    def percentile_ms(self, percent: float) -> float:
        """The given percentile of the lags, in milliseconds; 0 before the first measurement."""
        lags = sorted(self._lags_ms)
        return lags[min(len(lags) - 1, int(len(lags) * percent / 100))] if lags else 0.0
