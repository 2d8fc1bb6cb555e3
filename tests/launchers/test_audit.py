"""The audit of rewards: what is graded again, against its gold and another one, and jumps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentenv.archive import Entry, Step, StepHeader
from agentenv.tool_env import Grade
from agentenv.types import Message, Task
from launchers import doctor
from launchers.diagnosis import audit as audits
from launchers.diagnosis.audit import audit, find_jumps, jump_verdict, mutated
from launchers.diagnosis.verdicts import Verdict

pytestmark = [pytest.mark.timeout(400)]


def step(number: int, *rewards: Sequence[float]) -> Step:
    """A step whose trees have these rewards."""
    header = StepHeader(number, number, 1, "", 8, len(rewards))
    entries = [
        Entry(tree, f"t{tree}", "all", "trained", "", list(own), len(own), 0, 0, 1, 0, 9, 5, 0, 0)
        for tree, own in enumerate(rewards)
    ]
    return Step(Path("nowhere"), header, entries, is_whole=True)


def steady(number: int, shift: float = 0.0) -> Step:
    return step(number, *([0.1 * (tree % 4) + shift] * 2 for tree in range(8)))


@pytest.mark.parametrize(
    ("steps", "jumps"),
    [
        ([steady(n) for n in range(1, 7)], []),
        ([steady(n, 0.02 * n) for n in range(1, 7)], []),  # it learns
        ([*(steady(n) for n in range(1, 5)), steady(5, 0.6)], [5]),
        ([*(steady(n, 0.6) for n in range(1, 5)), steady(5)], [5]),
        ([steady(1), steady(2, 0.6)], []),  # too few before it
    ],
)
def test_a_step_far_from_those_before_it_is_a_jump(steps: list[Step], jumps: list[int]) -> None:
    found = list(find_jumps(steps))
    assert [one.step for one in found] == jumps
    verdict = jump_verdict(found, steps)
    expected = "failed" if jumps else "passed" if len(steps) > 2 else "skipped"
    assert verdict.state == expected
    assert ("samples" in verdict.remedy) is bool(jumps)


@pytest.mark.parametrize(
    ("gold", "others", "expected"),
    [
        ("41", ["41"], "42"),
        ("1,240", [], "1241"),
        ("Lima", ["lima", "Quito"], "Quito"),
        ("Lima", [], "not Lima"),
    ],
)
def test_a_gold_is_changed_into_one_that_is_wrong(
    gold: str, others: list[str], expected: str
) -> None:
    assert mutated(Task("t", "e", "?", (gold,)), others) == expected


def audited(run: Path) -> dict[str, Verdict]:
    verdicts, _ = asyncio.run(audit(run, 100))
    return {one.name: one for one in verdicts}


class Other:
    """ExactMatch, but for what `change` makes of its grade."""

    def __init__(self, inner: Any, change: Any) -> None:
        self.inner, self.change = inner, change

    async def grade(self, task: Task, written: Sequence[Message], calls: Any) -> Grade:
        grade: Grade = await self.inner.grade(task, written, calls)
        changed: Grade = self.change(grade)
        return changed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "failed", "remedy"),
    [
        (lambda grade: grade, [], ""),
        (lambda grade: Grade(2 * grade.reward, grade.success), ["graded again"], "changed since"),
        (lambda grade: Grade(grade.reward, success=True), ["changed golds"], "stricter"),
    ],
)
def test_rewards_that_do_not_follow_the_golds_are_found(
    finished: Path, monkeypatch: pytest.MonkeyPatch, change: Any, failed: list[str], remedy: str
) -> None:
    import my_env  # type: ignore[import-not-found]

    exact = my_env.ExactMatch
    monkeypatch.setattr(my_env, "ExactMatch", lambda: Other(exact(), change))
    found = audited(finished)
    assert [name for name, one in found.items() if one.state == "failed"] == failed
    for name in failed:
        assert remedy in found[name].remedy
    assert found["graded again"].told


@pytest.mark.slow
def test_a_jump_shows_the_trajectories_behind_it(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(audits, "FAR", -1.0)
    monkeypatch.setattr(audits, "LEAST_SHARE", -1.0)
    assert doctor.main(["audit", str(finished)]) == 1
    said = capsys.readouterr().out
    assert "=== step" in said
    assert "policy | " in said
    assert doctor.main(["audit", str(finished), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["samples"]


def test_what_is_no_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["audit", str(tmp_path)]) == 2
    assert "expected the folder of a run" in " ".join(capsys.readouterr().err.split())
