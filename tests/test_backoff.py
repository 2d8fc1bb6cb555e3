"""Waits between tries."""

from __future__ import annotations

from agentenv.backoff import backoff_s


def test_a_wait_doubles_is_bounded_and_differs_by_key() -> None:
    waits = [backoff_s(0, f"call {n}", first_s=0.5, max_s=30, at_least_s=7.0) for n in range(20)]
    assert all(7 <= wait <= 10.5 for wait in waits)  # never shorter than asked for
    assert len(set(waits)) > 10
    assert waits[3] == backoff_s(0, "call 3", first_s=0.5, max_s=30, at_least_s=7.0)
    assert 2 <= backoff_s(2, "call", first_s=0.5, max_s=30) <= 3
    for attempt in (12, 2000):
        assert 30 <= backoff_s(attempt, "call", first_s=0.5, max_s=30) <= 45
