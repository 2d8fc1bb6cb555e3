"""A check of the doctor and what comes of it: passed, failed with a remedy, or skipped with why."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Literal, NamedTuple

from msgspec import Struct
from rich.markup import escape
from rich.table import Table as RichTable

from agentenv.errors import AgentEnvError
from agentenv.pipelines.run.terminal import View
from agentenv.pipelines.setup.checks import Finding

State = Literal["passed", "failed", "skipped"]
MARKS = {"passed": "[green]pass[/]", "failed": "[bold red]FAIL[/]", "skipped": "[dim]skip[/]"}
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
        """Of a check of pipelines/setup/checks.py."""
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


def tell(verdict: Verdict, view: View) -> None:
    """A line, or a few, in the terminal."""
    grid = RichTable.grid(padding=(0, 1))
    grid.add_column(width=4, no_wrap=True)
    grid.add_column(width=32, no_wrap=True)
    grid.add_column(overflow="fold")
    told = escape(verdict.told)
    if verdict.state == "skipped":
        told = f"[dim]{told}[/]"
    grid.add_row(MARKS[verdict.state], verdict.name, told)
    if verdict.remedy:
        grid.add_row("", "", f"[bold]remedy:[/] {escape(verdict.remedy)}")
    view.console.print(grid)
