"""Equal formulas, compared by the workers of values.py; dangerous ones are refused."""

from __future__ import annotations

import importlib.util
import json
import re

from agentenv.base.errors import InfraError, MissingError
from agentenv.base.installation import install_hint
from agentenv.base.result_cache import ResultCache
from agentenv.base.untrusted import decode
from agentenv.contract.env import shared
from agentenv.envs.grading.text import Tables
from agentenv.envs.grading.verdict import GraderDownError
from agentenv.processes.worker_pool import JobError, JobStoppedError, WorkerPool

# Expressions that are never evaluated: they would run forever or fill the memory.

MAX_CHARS = 600
MAX_DEPTH = 20

_RISKS = Tables("formulas").patterns("risks")


def risk_of(expression: str) -> str:
    """Why the expression is refused; "" when it may be evaluated."""
    if len(expression) > MAX_CHARS:
        return f"longer than {MAX_CHARS} characters"
    plain = re.sub(r"\s*(?:\*\*|\^)\s*", "^", expression)
    opened: list[bool] = []  # of each open bracket, whether it holds an exponent
    for place, sign in enumerate(plain):
        if sign in "([{":
            opened.append(plain[place - 1 : place] == "^")
        elif sign in ")]}" and opened:
            opened.pop()
        elif sign == "^" and any(opened):
            return "a tower of powers"
        if len(opened) > MAX_DEPTH:
            return f"brackets nested over {MAX_DEPTH} deep"
    return next((risk for risk, form in _RISKS.items() if form.search(plain)), "")


LIMIT_S = 1.5  # of CPU time for one comparison
MAX_CACHED = 20_000
MEMORY_BYTES = 1 << 30


class MathEquivalence:
    """Asks `Equality`; risky expressions are refused, equal questions are asked once.

    An expression that takes over `limit_s` seconds of CPU time, or all memory, is not equal; the
    load of the machine does not matter. math-verify is an extra: without it `start` raises
    ConfigError.
    """

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.limit_s = limit_s
        self._pool = WorkerPool(
            "agentenv.envs.grading.values:Equality",
            name="math",
            memory_bytes=MEMORY_BYTES,
            environment={},
        )
        self._cache = ResultCache(max_memory_entries=MAX_CACHED)

    async def start(self) -> None:
        """Raise ConfigError without math-verify. It is loaded, which takes seconds, for the first
        pair that no cheaper rule decides."""
        if importlib.util.find_spec("math_verify") is None:
            raise MissingError(
                f"grader: mathematical equivalence requires math-verify: {install_hint('math')}, "
                'or compare expressions as text: grader.math = false with kind "layered" or '
                '"judge", or grader.kind = "exact"'
            )

    async def equal(self, answer: str, gold: str) -> tuple[bool, str]:
        """Whether the two are equal, and why. Raises GraderDownError without a worker process."""

        async def compute() -> bytes:
            return json.dumps(await self._request(answer, gold)).encode()

        return await self._cache.through(json.dumps([answer, gold]), compute, _read)

    async def _request(self, answer: str, gold: str) -> tuple[bool, str]:
        for side, text in (("answer", answer), ("gold", gold)):
            risk = risk_of(text)
            if risk:
                return False, f"not evaluated: the {side} contains {risk}"
        payload = {"gold": gold, "answer": answer}
        try:
            await self.start()
            equal = bool(await self._pool.run(payload, self.limit_s))
        except JobStoppedError:
            return False, f"math-verify did not finish within {self.limit_s:g} s"
        except JobError as error:
            return False, f"math-verify failed: {error}"
        except InfraError as error:
            raise GraderDownError(f"math-verify: {error}") from error
        return equal, "math-verify: " + ("equal" if equal else "not equal")

    def stats(self) -> dict[str, float]:
        """Numbers of comparisons by math-verify, and of those that were stopped."""
        return self._pool.stats()

    async def close(self) -> None:
        """Kill the workers."""
        await self._cache.close()
        self._pool.close()


def shared_math() -> MathEquivalence:
    """The workers that all episodes of this process share."""
    return shared("math equivalence", MathEquivalence)


def _read(verdict: bytes) -> tuple[bool, str]:
    return decode(verdict, tuple[bool, str])
