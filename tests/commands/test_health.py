"""Whether a run is healthy, and why, in one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from agentenv.lab.viewing.health import health_of


def updates(number: int, **more: Any) -> list[dict[str, Any]]:
    row = {"trees/offered": 8, "rollout/trajectories": 64, "learner/num_trained": 8}
    row |= {"reward/success": 0.5, "parity/logprob_gap_mean": 1e-6, **more}
    return [{"step": step, **row} for step in range(1, number + 1)]


def evaluation(step: int, success: float, name: str = "held") -> dict[str, Any]:
    place = f"eval/{name}"
    low, high = max(0.0, success - 0.05), min(1.0, success + 0.05)
    return {
        "step": step,
        "phase": "x",
        f"{place}/success": success,
        f"{place}/success_low": low,
        f"{place}/success_high": high,
        f"{place}/kind/success": success,
    }


def judged(rows: list[dict[str, Any]], status: str = "finished") -> tuple[str, str]:
    found = health_of(rows, status, 40)
    assert found is not None
    assert found.text[0].isupper() or found.text[0].isdigit()
    assert found.text.endswith(".")
    return found.grade, found.text


def test_a_healthy_run_reports_its_success() -> None:
    rows = [evaluation(0, 0.2), *updates(20), evaluation(20, 0.8)]
    assert judged(rows) == (
        "healthy",
        "Success on held went from 0.20 to 0.80 [0.75, 0.85]; no trajectory failed.",
    )
    assert judged(updates(3)) == (
        "healthy",
        "Success of training went from 0.50 to 0.50; no trajectory failed.",
    )


@pytest.mark.parametrize(
    ("more", "grade", "text"),
    [
        (
            {"failed/trajectories": 64, "failed/by_kind/EnvError": 60, "failed/by_kind/X": 4},
            "unhealthy",
            "50% of the trajectories of the last 10 updates failed, mostly EnvError; success is "
            "that of the rest.",
        ),
        (
            {"failed/trajectories": 3},
            "doubtful",
            "4% of the trajectories of the last 10 updates failed.",
        ),
        ({"parity/logprob_gap_mean": 0.4}, "unhealthy", "differ by 0.4 nats"),
        ({"parity/logprob_gap_mean": 0.05}, "doubtful", "differ by 0.05 nats"),
        ({"learner/num_skipped": 1}, "unhealthy", "10 optimizer steps of the last 10 updates"),
        ({"learner/num_trained": 0}, "unhealthy", "in the last 10 updates, no tree had a signal"),
        (
            {"learner/num_equal_groups": 8, "reward/success": 0.0},
            "unhealthy",
            "100% of the groups of the last 10 updates have no signal: nearly all answers are "
            "wrong",
        ),
        (
            {"tool/search/calls": 20, "tool/search/errors": 15},
            "doubtful",
            "75% of the calls of search are errors",
        ),
        ({"rollout/truncated": 0.6}, "doubtful", "limits cut off 60% of the trajectories"),
    ],
)
def test_a_fault_is_named_with_its_figure(more: dict[str, Any], grade: str, text: str) -> None:
    found = judged(updates(30, **more))
    assert found[0] == grade
    assert text.casefold() in found[1].casefold()


def test_equal_groups_of_a_successful_policy_are_not_a_fault() -> None:
    rows = updates(30, **{"learner/num_equal_groups": 8, "reward/success": 0.98})
    assert judged(rows)[0] == "healthy"


def test_old_faults_do_not_count() -> None:
    rows = updates(10, **{"failed/trajectories": 60}) + [
        {**row, "step": row["step"] + 10} for row in updates(10)
    ]
    assert judged(rows)[0] == "healthy"


def test_a_success_that_fell_is_a_fault() -> None:
    rows = [evaluation(0, 0.2), evaluation(10, 0.8), evaluation(20, 0.4), *updates(20)]
    assert judged(rows) == (
        "unhealthy",
        "Success on held fell to 0.40, from 0.80 after update 10.",
    )
    rows = [evaluation(10, 0.8), evaluation(20, 0.75), *updates(20)]
    assert judged(rows)[0] == "healthy"  # within the intervals


def test_the_most_severe_fault_is_reported() -> None:
    rows = updates(30, **{"rollout/truncated": 0.6, "learner/num_skipped": 1})
    grade, text = judged(rows, "stopped")
    assert grade == "unhealthy"
    assert "skipped" in text
    assert "limits" not in text


def test_a_stopped_run_reports_its_last_update() -> None:
    assert judged(updates(7), "stopped") == (
        "doubtful",
        "It was stopped after update 7 of 40.",
    )
    assert judged([], "stopped")[0] == "doubtful"
    assert health_of([], "running") is None
