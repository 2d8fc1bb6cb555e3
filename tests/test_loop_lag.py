"""How late the event loop is: a stall counts by its length, though nobody can look during it."""

from __future__ import annotations

import pytest

from agentenv.metrics import LoopLag


def test_a_stall_counts_by_its_length() -> None:
    lag = LoopLag()
    for _ in range(250):  # five seconds in time, then one in which nothing runs
        lag.add(0.0)
    lag.add(1.0)
    figures = lag.figures()
    assert figures["lag_max_ms"] == 1000
    assert figures["stalled_share"] == pytest.approx(1 / 6, abs=0.02)
    assert figures["lag_p99_ms"] > 900, "one sleeper in 250 is late, but 1 s in 6 is stalled"


def test_before_anything_was_measured() -> None:
    assert LoopLag().figures() == {"lag_p99_ms": 0.0, "lag_max_ms": 0.0, "stalled_share": 0.0}
