"""What becomes of each tree of a step, and the sums that a run keeps of them."""

from __future__ import annotations

import asyncio
import logging

from agentenv.entropy_profile import entropy_profile
from agentenv.errors import EnvError
from agentenv.metrics import failure_kind
from agentenv.tree import TrajectoryTree
from launchers.config import TrainConfig
from launchers.rl.parts import Parts
from launchers.rl.state import RunState
from learners.learner import Metrics

logger = logging.getLogger(__name__)


class StepAccounts:
    """Says which trees are trained and writes it down in the run's state."""

    def __init__(self, config: TrainConfig, state: RunState) -> None:
        self.config = config
        self.state = state

    def fate(self, tree: TrajectoryTree) -> str:
        """trained, filtered (all returns equal) or failed."""
        credit = self.config.algorithm.credit(tree)
        if credit is None:
            return "failed"
        return "trained" if credit.has_signal else "filtered"

    def settle(self, delivered: list[TrajectoryTree], version: int) -> list[TrajectoryTree]:
        """Account for each tree of a step under the learner's `version`; returns those to train.

        Raises EnvError when not one trajectory succeeded.
        """
        refuse_total_failure(delivered)
        self.state.totals.add(delivered, version)
        self.state.entropy = self.state.entropy.merged(entropy_profile(delivered))
        ledger, trained = self.state.ledger, []
        for tree in delivered:
            fate = self.fate(tree)
            if fate == "trained":
                trained.append(tree)
                ledger.trained += 1
            elif fate == "filtered":
                ledger.filtered += 1
            else:
                kind = failure_kind(tree)
                ledger.failed[kind] = ledger.failed.get(kind, 0) + 1
        return trained

    def metrics(self, in_flight: int) -> Metrics:
        """The conservation law as figures: offered = trained + filtered + failed + in flight."""
        ledger = self.state.ledger
        return {
            "trees/offered": ledger.offered,
            "trees/trained": ledger.trained,
            "trees/filtered": ledger.filtered,
            "trees/failed": sum(ledger.failed.values()),
            "trees/in_flight": in_flight,
        }

    async def parity(self, parts: Parts) -> Metrics:
        """The gap that the probe found since the last call; a warning if it is too wide."""
        gap = await parts.probe.finish()
        if gap is None:
            return {}
        self.state.parity.add(gap)
        if gap.max > self.config.train.max_logprob_gap:
            logger.warning(
                "%s and learner disagree by up to %.4f nats at policy version %d "
                "(train.max_logprob_gap = %g)",
                gap.worst or "engine",
                gap.max,
                parts.learner.policy_version,
                self.config.train.max_logprob_gap,
            )
        return {"parity/logprob_gap_mean": gap.mean, "parity/logprob_gap_max": gap.max}


def refuse_total_failure(trees: list[TrajectoryTree]) -> None:
    """Stop when not one trajectory of a step succeeded: something is broken, not unlucky."""
    failures = [leaf for tree in trees for leaf in tree.failures()]
    if failures and not any(True for tree in trees for _ in tree.trajectories()):
        raise EnvError(
            f"all {len(failures)} trajectories of a step failed; the first: {failures[0].error}"
        )


class Throughput:
    """Tokens that the engine sampled a second, between one call of `rate` and the next."""

    def __init__(self) -> None:
        self._before: tuple[float, float] | None = None

    def rate(self, stats: dict[str, float]) -> float:
        now = (asyncio.get_running_loop().time(), stats["sampled_tokens"])
        before, self._before = self._before or now, now
        seconds = now[0] - before[0]
        return (now[1] - before[1]) / seconds if seconds else 0.0
