"""Mathematical equivalence by math-verify, in workers that are killed at a limit."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
from collections import OrderedDict
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from agentenv.errors import ConfigError, GraderError
from agentenv.shared import shared
from envs.grading.risk import risk_of
from envs.grading.workers import JobFailedError, JobTimeoutError, WorkerPool
from envs.search.flight import SingleFlight

LIMIT_S = 1.5
MAX_WAIT_S = 0.35  # for a worker; with LIMIT_S every question is answered within 2 s
MIN_CPU_S = 0.15  # a job that got less did not fail, the machine was too busy
PATIENT_SHARE = 0.6  # of the limit, in CPU time, that a job gets if none hurries
MAX_PATIENT_S = 60.0  # after so much wall time, even then
MAX_JOBS = min(64, 8 * (os.cpu_count() or 1))
MAX_CACHED = 20_000
MEMORY_BYTES = 1 << 30


class MathEquivalence:
    """Asks math-verify; risky expressions are refused, equal questions are asked once.

    math-verify is an extra: without it `start` raises ConfigError.
    """

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.limit_s = limit_s
        self._pool = WorkerPool(
            "envs.grading.math_worker:MathVerify",
            max_jobs=MAX_JOBS,
            memory_bytes=MEMORY_BYTES,
            environment={},
            share_cores=True,
            max_wait_s=MAX_WAIT_S,
        )
        self._flight: SingleFlight[tuple[bool, str]] = SingleFlight()
        self._known: OrderedDict[tuple[str, str, bool], tuple[bool, str]] = OrderedDict()
        self._turns: AbstractAsyncContextManager[None] = nullcontext()
        self._patient = False

    def take_turns(self) -> None:
        """From now on ask no more at once than the cores can take, however long others wait, and
        give a job its CPU time rather than its wall time: for stored answers, of which there are
        many and none is urgent. So verdicts do not depend on what else the machine does."""
        self._turns = asyncio.Semaphore(1 + (os.cpu_count() or 1))
        self._patient = True

    async def start(self) -> None:
        """Load math-verify now rather than in the first grading."""
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                'grader: mathematical equivalence needs math-verify: pip install "agentenv[math]", '
                "or set math = false to compare expressions as text"
            )
        await self._pool.start()

    async def equal(self, answer: str, gold: str, *, plain: bool = False) -> tuple[bool, str]:
        """Whether the two are equal, and why. Raises GraderError when the machine is too busy to
        find out: never after over 2 s."""
        key = (answer, gold, plain)
        if key not in self._known:
            flight = json.dumps(key)
            found = await self._flight.run(flight, lambda: self._ask(answer, gold, plain))
            self._known[key] = found
            while len(self._known) > MAX_CACHED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]

    async def _ask(self, answer: str, gold: str, plain: bool) -> tuple[bool, str]:
        for side, text in (("answer", answer), ("gold", gold)):
            risk = "" if plain else risk_of(text)
            if risk:
                return False, f"not evaluated: the {side} holds {risk}"
        payload = {"gold": gold, "answer": answer, "plain": plain}
        await self.start()
        for last in (False, True):
            try:
                async with self._turns:
                    equal = await self._run(payload)
            except JobTimeoutError:
                return False, f"math-verify did not finish within {self.limit_s:g} s"
            except JobFailedError as error:
                if "died" in str(error) and not last:
                    continue  # killed from outside, perhaps for memory: once more
                return False, f"math-verify failed: {error}"
            return bool(equal), "math-verify: " + ("equal" if equal else "not equal")
        raise AssertionError("unreachable")

    async def _run(self, payload: dict[str, Any]) -> Any:
        """The worker's answer. Raises GraderError when it got too little CPU time to tell."""
        limit_s = self.limit_s
        min_cpu_s = PATIENT_SHARE * self.limit_s if self._patient else MIN_CPU_S
        while True:
            try:
                return await self._pool.run(payload, limit_s)
            except JobTimeoutError as error:
                if (error.cpu_s or 0.0) >= min_cpu_s:
                    raise
                if not self._patient or limit_s >= MAX_PATIENT_S:
                    raise GraderError(
                        f"math-verify got less than {min_cpu_s:g} s of CPU time in "
                        f"{limit_s:g} s: the machine is too busy to grade"
                    ) from None
            limit_s *= 4

    async def close(self) -> None:
        """Kill the workers."""
        await self._flight.close()
        self._pool.close()


def shared_math(limit_s: float = LIMIT_S) -> MathEquivalence:
    """The workers that all episodes of this process share."""
    return shared(("math equivalence", limit_s), lambda: MathEquivalence(limit_s))
