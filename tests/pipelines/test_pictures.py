"""The learning curve: its axes fit what it shows."""

from __future__ import annotations

from typing import Any

import pytest

from agentenv.data_files import Row
from agentenv.pipelines.run.pictures import learning_curve


def update(step: int, success: float, reward: float) -> Row:
    return {"step": step, "trees/offered": 8, "reward/success": success, "reward/mean": reward}


def evaluation(step: int, success: float, *kinds: str) -> Row:
    row: Row = {"step": step, "eval/held/success": success}
    row |= {"eval/held/success_low": success - 0.02, "eval/held/success_high": success + 0.03}
    return row | {f"eval/held/{kind}/success": success for kind in kinds}


def labels(axes: Any) -> list[str]:
    return sorted(axes.get_legend_handles_labels()[1])


@pytest.mark.parametrize(
    ("successes", "rewards", "low", "high"),
    [
        ([0.05, 0.1], [0.05, 0.1], 0.0, 0.1),  # a small model on hard questions
        ([0.3, 1.0], [-0.4, 1.0], -0.4, 1.0),
        ([0.3, 0.4], [12.0, 20.0], 0.0, 20.0),  # a reward of an environment's own
        ([0.0, 0.0], [0.0, 0.0], 0.0, 0.05),
    ],
)
def test_the_axis_of_training_is_as_high_as_its_figures(
    successes: list[float], rewards: list[float], low: float, high: float
) -> None:
    pairs = enumerate(zip(successes, rewards, strict=True))
    axes, _ = learning_curve([update(step, *pair) for step, pair in pairs], "run").axes
    margin = 0.04 * (high - low)
    assert axes.get_ylim() == pytest.approx((low - margin, high + margin))


def test_the_axis_of_evaluations_is_as_high_as_their_intervals() -> None:
    rows = [evaluation(0, 0.02, "sums"), evaluation(10, 0.11, "sums"), update(10, 0.1, 0.1)]
    _, axes = learning_curve(rows, "run").axes
    assert axes.get_ylim() == pytest.approx((-0.04 * 0.14, 1.04 * 0.14))


def test_a_set_of_one_kind_of_questions_is_drawn_once() -> None:
    _, axes = learning_curve([evaluation(0, 0.2, "sums")], "run").axes
    assert labels(axes) == ["held"]
    _, axes = learning_curve([evaluation(0, 0.2, "sums", "roots")], "run").axes
    assert labels(axes) == ["held", "held/roots", "held/sums"]


def test_a_figure_of_nothing_can_be_drawn() -> None:
    assert len(learning_curve([], "run").axes) == 2
