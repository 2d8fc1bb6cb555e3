"""The audit of rewards: regrading against the gold and against another one, and jumps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentenv.assembly.checks.checks import Check, CheckResult, CheckRunner
from agentenv.base.errors import ConfigError
from agentenv.base.types import Message, Task
from agentenv.contract.env import Grade
from agentenv.lab.diagnosis import audit as audits
from agentenv.lab.diagnosis.audit import audit, find_jumps, no_jumps
from agentenv.launchers import doctor
from agentenv.rollout.archive import Entry, StepHeader
from agentenv.rollout.archive_reader import Step
from tests.support.golden import Said


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
async def test_a_step_far_from_earlier_steps_is_a_jump(steps: list[Step], jumps: list[int]) -> None:
    assert [one.partition(":")[0] for one in find_jumps(steps)] == [f"step {one}" for one in jumps]
    check = Check("jumps", "measured", (), no_jumps)
    verdict = await CheckRunner().run(check, steps)
    expected = "failed" if jumps else "passed" if len(steps) > 2 else "skipped"
    assert verdict.state == expected
    assert ("agentenv view" in verdict.remedy) is bool(jumps)


def audited(run: Path) -> dict[str, CheckResult]:
    return {one.name: one for one in asyncio.run(audit(run, 100))}


class Other:
    """ExactMatch with grades altered by `change`."""

    def __init__(self, inner: Any, change: Any) -> None:
        self.inner, self.change = inner, change

    async def grade(self, task: Task, written: Sequence[Message], calls: Any) -> Grade:
        grade: Grade = await self.inner.grade(task, written, calls)
        changed: Grade = self.change(grade, task, written[-1].content)
        return changed


@pytest.mark.parametrize(
    ("change", "failed", "remedy"),
    [
        (lambda grade, *_: grade, [], ""),
        (lambda grade, *_: Grade(2 * grade.reward, grade.success), ["regraded"], "changed since"),
    ],
)
def test_a_grader_that_changed_is_found(
    finished: Path, monkeypatch: pytest.MonkeyPatch, change: Any, failed: list[str], remedy: str
) -> None:
    import my_env  # type: ignore[import-not-found]

    exact = my_env.ExactMatch
    monkeypatch.setattr(my_env, "ExactMatch", lambda: Other(exact(), change))
    found = audited(finished)
    assert [name for name, one in found.items() if one.state == "failed"] == failed
    for name in failed:
        assert remedy in found[name].remedy
    assert found["regraded"].message


@pytest.mark.parametrize(("role", "is_audited"), [("teacher", True), ("judge", False)])
def test_a_run_whose_graders_use_a_model_is_refused(
    finished: Path, monkeypatch: pytest.MonkeyPatch, role: str, is_audited: bool
) -> None:
    roles = {role: {"url": "http://127.0.0.1:9"}}
    read = audits.load_run_config
    monkeypatch.setattr(audits, "load_run_config", lambda run: read(run) | {"roles": roles})
    if is_audited:
        assert audited(finished)["regraded"].state == "passed"
    else:
        with pytest.raises(ConfigError, match="roles"):
            audited(finished)


def test_a_jump_is_reported_with_its_step(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(audits, "FAR", -1.0)
    monkeypatch.setattr(audits, "LEAST_SHARE", -1.0)
    assert doctor.main(["audit", str(finished)]) == 1
    assert "step 3: " in capsys.readouterr().out
    assert doctor.main(["audit", str(finished), "--json"]) == 1
    found = {one["name"]: one["state"] for one in json.loads(capsys.readouterr().out)["verdicts"]}
    assert found["jumps of reward"] == "failed"


def test_a_folder_without_a_run_is_reported(tmp_path: Path, said: Said) -> None:
    assert "the folder of a run" in " ".join(said(doctor.main, "audit", tmp_path, status=2).split())
