"""A check of the doctor and what comes of it: passed, failed with a remedy, or skipped with why."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Literal, NamedTuple

from msgspec import Struct

from agentenv.errors import AgentEnvError
from launchers.checks import Finding

State = Literal["passed", "failed", "skipped"]
CHECK_S = 600.0  # of one check, at most


class Skip(AgentEnvError):
    """The check does not apply, or what it needs is not there; the text says why."""


class Verdict(Struct):
    """`told` is what was found, of a check that has not passed what is wrong; `remedy` what to do
    about it."""

    name: str
    state: State
    told: str = ""
    remedy: str = ""
    seconds: float = 0.0


class Probe(NamedTuple):
    """`look` gives what was found, and raises what is wrong, as "problem; remedy", or Skip."""

    name: str
    look: Callable[[Any], Awaitable[str]]


class Judge:
    """Makes verdicts. What failed before and is only in the way of a later check is not failed
    again."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}  # errors, with the check that has found them

    async def judge(self, probes: Iterable[Probe], of: Any) -> AsyncIterator[Verdict]:
        """One verdict after the other."""
        for probe in probes:
            began = time.monotonic()
            try:
                async with asyncio.timeout(CHECK_S):
                    told = await probe.look(of)
            except Skip as why:
                verdict = Verdict(probe.name, "skipped", str(why))
            except TimeoutError:
                verdict = Verdict(probe.name, "skipped", f"it took longer than {CHECK_S:g} s")
            except AgentEnvError as error:
                verdict = self.of_error(probe.name, error)
            else:
                verdict = Verdict(probe.name, "passed", told)
            verdict.seconds = time.monotonic() - began
            yield verdict

    def of_finding(self, finding: Finding) -> Verdict:
        """Of a check of launchers/checks.py."""
        if finding.error is None:
            return Verdict(finding.name, "passed")
        return self.of_error(finding.name, finding.error)

    def of_error(self, name: str, error: AgentEnvError) -> Verdict:
        text = str(error)
        if text in self._known:
            return Verdict(name, "skipped", f"needs {self._known[text]!r}, which has failed")
        self._known[text] = name
        problem, _, remedy = text.partition("; ")
        return Verdict(name, "failed", problem, remedy)
