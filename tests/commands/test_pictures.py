"""The learning curve: its axes fit the data."""

from __future__ import annotations

from typing import Any

import pytest

from agentenv.assembly.reports.pictures import learning_curve, png
from agentenv.data.data_files import Row


def update(step: int, success: float, reward: float) -> Row:
    return {"step": step, "trees/offered": 8, "reward/success": success, "reward/mean": reward}


def evaluation(step: int, success: float) -> Row:
    row: Row = {"step": step, "eval/held/success": success}
    row |= {"eval/held/success_low": success - 0.02, "eval/held/success_high": success + 0.03}
    return row | {"eval/held/sums/success": success}  # of a kind of its questions: no curve


def others(names: str = "ab") -> Row:
    """The success of other sets."""
    return {f"eval/{name}/success": 0.2 for name in names}


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
    rows = [evaluation(0, 0.02), evaluation(10, 0.11), update(10, 0.1, 0.1)]
    _, axes = learning_curve(rows, "run").axes
    assert axes.get_ylim() == pytest.approx((-0.04 * 0.14, 1.04 * 0.14))


def test_a_figure_without_data_can_be_drawn() -> None:
    assert len(learning_curve([], "run").axes) == 2


def test_what_was_measured_before_a_cold_start_is_left_of_the_updates() -> None:
    rows = [evaluation(step, 0.2) | others() for step in (0, 0, 10, 20)]
    for row, phase in zip(rows, ("before_sft", "after_sft", "step-10", "after_rl"), strict=True):
        row["phase"] = phase
    _, axes = learning_curve(rows, "run").axes
    found = [tuple(bars.lines[0].get_xdata()) for bars in axes.containers]
    assert found == [(-2.0, 0.0, 10.0, 20.0)] * 3


def test_evaluations_have_intervals_and_the_failed_share() -> None:
    row = evaluation(10, 0.2) | {"eval/held/failed_share": 0.3}
    row["eval/held/success_if_failed_wrong"] = 0.14
    _, axes = learning_curve([row], "run").axes
    (bars,) = axes.containers
    low, high = bars.lines[2][0].get_segments()[0][:, 1]
    assert (low, high) == (pytest.approx(0.18), pytest.approx(0.23))
    assert "held: share of failed trajectories" in labels(axes)


def test_success_that_is_the_reward_is_one_curve() -> None:
    axes, _ = learning_curve([update(1, 0.2, 0.2), update(2, 0.4, 0.4)], "run").axes
    assert labels(axes) == ["success, which is the reward"]


def test_a_long_legend_does_not_cover_labels() -> None:
    rows = [evaluation(step, 0.2) | others("abcdefgh") for step in (0, 10)]
    figure = learning_curve([update(1, 0.1, 0.2), *rows], "run")
    png(figure)
    for axes in figure.axes:
        (legend,) = axes.figure.legends
        assert legend.get_window_extent().y1 <= axes.xaxis.get_tightbbox().y0 + 2
