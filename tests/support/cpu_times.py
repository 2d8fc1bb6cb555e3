"""CPU seconds of tests: a table of the dearest, tests/cpu_times.txt, and the mark `heavy` by it.

User and system time of a test and of the processes that it started, from when they ended and were
waited for; on a busy machine they are about the same. A fixture that several tests share counts by
itself, as "FOLDER OR FILE::fixture NAME"; so does the import of modules by a fork server, which is
in the sum only.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import forkserver
from tests.support.sources import ROOT

TABLE = ROOT / "tests" / "cpu_times.txt"
HEAVY_S = 5.0  # a test that takes longer is heavy
LISTED_S = 3.0  # a test that takes longer is in the table
NEEDS = ("viewer", "mcp_servers", "engine_vllm", "engine_sglang", "inspect", "verifiers", "openenv")
COLLECTED = pytest.StashKey[dict[str, set[str]]]()  # marks by test, before a choice by mark
HEAD = """\
# CPU seconds of each test and shared fixture over 3 seconds; a test over 5 is marked heavy.
# Written by: pytest --cpu-times (tests that did not run keep their line)
"""


def read(table: Path = TABLE) -> dict[str, float]:
    """Seconds by test."""
    lines = table.read_text(encoding="utf-8").splitlines()
    pairs = [line.split(maxsplit=1) for line in lines if not line.startswith("#")]
    return {name: float(seconds) for seconds, name in pairs}


def write(seconds: dict[str, float], table: Path = TABLE) -> None:
    listed = sorted((name, value) for name, value in seconds.items() if value > LISTED_S)
    lines = [f"{value:6.1f}  {name}\n" for name, value in listed]
    table.write_text(HEAD + "".join(lines), encoding="utf-8")


def update(seconds: dict[str, float], table: Path = TABLE) -> None:
    """With what tests took that ran."""
    write(read(table) | seconds, table)


def mark_heavy(items: Sequence[pytest.Item]) -> None:
    """Those over HEAVY_S by the table, and those that need an environment of their own."""
    known = read()
    for item in items:
        if known.get(item.nodeid, 0.0) > HEAVY_S or any(map(item.get_closest_marker, NEEDS)):
            item.add_marker(pytest.mark.heavy)
    collected = {item.nodeid: {mark.name for mark in item.iter_markers()} for item in items}
    if items:
        items[0].config.stash[COLLECTED] = collected


class CpuTimes:
    """Adds up what tests take, also of the workers of pytest-xdist."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.seconds: Counter[str] = Counter()
        self.heavy: set[str] = set()
        self.ended = 0.0  # of workers of pytest-xdist
        self._shared: Counter[str] = Counter()  # since the last report
        self._depth, self._entered = 0, 0.0  # fixtures that are being made or undone
        self._before = cpu_seconds()

    def pytest_runtest_logstart(self) -> None:
        self._before = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Any:
        if fixturedef.scope == "function":
            return (yield)
        name = f"{fixturedef.baseid}::fixture {fixturedef.argname}"
        fixturedef.addfinalizer(lambda: self._leave(name))  # the last to run
        self._enter()
        try:
            return (yield)
        finally:
            self._leave(name)
            fixturedef.addfinalizer(self._enter)  # the first

    def _enter(self) -> None:
        if not self._depth:
            self._entered = cpu_seconds()
        self._depth += 1

    def _leave(self, name: str) -> None:
        self._depth -= 1
        if not self._depth:
            self._shared[name] += cpu_seconds() - self._entered

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        report = yield
        now = cpu_seconds()
        own = now - self._before - self._shared.total()
        report.cpu_s = {**self._shared, report.nodeid: own}  # pytest-xdist hands it on
        report.is_heavy = item.get_closest_marker("heavy") is not None
        self._before = now
        self._shared.clear()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, seconds in getattr(report, "cpu_s", {}).items():
            self.seconds[name] += seconds
        if getattr(report, "is_heavy", False):
            self.heavy.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workerinput"):  # of pytest-xdist: the controller writes
            self.config.workeroutput["cpu_s"] = cpu_seconds(with_servers=True)
        elif self.config.option.cpu_times:
            update(dict(self.seconds))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.ended += getattr(node, "workeroutput", {}).get("cpu_s", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        own = resource.getrusage(resource.RUSAGE_SELF)  # the workers are among its children
        total = (
            self.ended + own.ru_utime + own.ru_stime
            if self.ended
            else cpu_seconds(with_servers=True)
        )
        terminalreporter.line(
            f"{self.seconds.total():.0f} CPU seconds of tests, {total:.0f} in all"
        )
        for name, seconds in self.seconds.most_common():
            if seconds > HEAVY_S and name not in self.heavy and "::fixture " not in name:
                terminalreporter.line(f"{seconds:.1f} CPU seconds, not marked heavy: {name}")


def cpu_seconds(*, with_servers: bool = False) -> float:
    """Of this process, those that it waited for and those that its fork servers waited for; with
    the fork servers themselves."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    total = sum(each.ru_utime + each.ru_stime for each in used)
    return total + forkserver.cpu_seconds(with_servers=with_servers)
