"""The course of the loss over a stage of imitation, and warnings about it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from statistics import fmean, variance

from agentenv.base.errors import SHOWN

logger = logging.getLogger(__name__)

MIN_COURSE = 40  # least number of losses to judge their trend
FALLEN = 0.93  # a loss above this share of the loss half a stage ago has stopped falling
RISEN = 1.1  # a loss above this multiple of the lowest loss has risen
LEARNT = 0.5  # exact match on the gate from which the loss need not fall
LOW_LOSS = 0.1  # nats per token, below which the loss need not fall


class LossCourse:
    """The losses of a stage, in nats per token."""

    def __init__(self, learning_rate: float) -> None:
        self.losses: list[float] = []
        self._rate = f"sft.optimizer.learning_rate, {learning_rate:g}"
        self._reported = ""

    def check(self, exact: Mapping[str, float], *, is_last: bool) -> None:
        """Warn when the losses rise or stagnate. `exact`: match on the gate by kind; `is_last`: the
        stage has ended without passing it."""
        kind, text = self._fault(min(exact.values(), default=0.0), is_last)
        if text and kind != self._reported:
            logger.warning("%s", text, extra=SHOWN)
        self._reported = kind

    def _fault(self, least: float, is_last: bool) -> tuple[str, str]:
        """The kind and the text of a warning; empty without one."""
        losses, rate = self.losses, self._rate
        if len(losses) < MIN_COURSE:
            return "", ""
        if not all(map(math.isfinite, losses)):
            return "infinite", (
                f"the loss of the cold start is not finite: its learning rate is too high ({rate})"
            )
        size = len(losses) // 4
        quarters = [losses[-size * number :][:size] for number in (4, 3, 2, 1)]
        means = [fmean(one) for one in quarters]
        lowest = min(range(3), key=means.__getitem__)
        noise = sum(variance(quarters[i]) / size for i in (lowest, 3)) ** 0.5
        if means[3] > RISEN * means[lowest] and means[3] - means[lowest] > 3 * noise:
            return "rises", (
                f"the loss of the cold start rose from {means[lowest]:.2f} to {means[3]:.2f} nats "
                f"a token: its learning rate is too high ({rate})"
            )
        if is_last and means[3] > max(LOW_LOSS, FALLEN * means[1]) and least < LEARNT:
            return "stays", (
                f"the loss of the cold start stays at {means[3]:.2f} nats a token ({means[1]:.2f} "
                f"half of the stage before), and exact match on the gate is {least:.2f}: its "
                f"learning rate is too low ({rate}; try three times that), or the demonstrations "
                "are that ambiguous"
            )
        return "", ""
