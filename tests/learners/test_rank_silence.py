"""A learner that is silent for far longer than usual is spoken of, with the rank that is waited
for."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from agentenv.learners.keys import LearnerConfig
from agentenv.learners.ranks import messages as wire
from agentenv.learners.ranks.rank_group import RankGroup
from agentenv.processes.worker_group import Hello
from tests.support.virtual_clock import run_virtual

COMMAND = wire.Announce


class Answering:
    """A link whose rank answers after so many seconds."""

    log_path, seconds = None, 0.0

    def __init__(self, rank: int) -> None:
        self.hello = Hello("", rank, 7)

    async def exchange(self, command: object) -> wire.RankDone:
        await asyncio.sleep(self.seconds)
        return wire.RankDone()

    def state(self) -> str:
        return "process 7, sleeping"

    async def close(self, *, idle: bool) -> None:
        pass


def reports_of(seconds: list[tuple[float, float]], caplog: pytest.LogCaptureFixture) -> list[str]:
    """The log messages while two ranks answer commands after these seconds."""
    links: list[Any] = [Answering(0), Answering(1)]

    async def main() -> None:
        group = RankGroup(LearnerConfig(num_ranks=2), Path("learner.log"))
        group._links = links
        for pair in seconds:
            for link, one in zip(links, pair, strict=True):
                link.seconds = one
            await group.call([COMMAND()] * 2, 3600.0)

    run_virtual(main())
    return [one for one in caplog.messages if "no answer" in one]


def test_a_silent_rank_is_reported_at_10_and_40_times_the_usual_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reports = reports_of([(2.0, 2.0)] * 3 + [(2.0, 19.0), (2.0, 100.0)], caplog)
    assert [re.findall(r"for (\d+) s", one)[0] for one in reports] == ["20", "80"]
    assert "1 (process 7" in reports[0]


def test_quick_and_first_commands_have_more_time(caplog: pytest.LogCaptureFixture) -> None:
    assert reports_of([(0.01, 0.01), (9.0, 9.0)], caplog) == []
    (reports,) = reports_of([(301.0, 299.0)], caplog)
    assert "0 (process 7" in reports
