"""The pool finds by itself how many requests a server holds best, simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.envs.quickstart_setup import build_model
from benchmarks.parts import concurrency
from benchmarks.parts.concurrency import SHAPES, throughput
from tests.support.virtual_clock import run_virtual


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "best"), [("few ask", 32), ("the cache is full", 48), ("a small cache", 96)]
)
def test_its_own_limit_is_within_a_twentieth_of_the_best_fixed_one_after_ten_steps(
    name: str, best: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefixes that do not fit ask for a cache that is kept half free, a small cache for a full
    one, though both are full at first; trajectories begin as the feeder of a run lets them."""
    monkeypatch.setattr(concurrency, "NUM_STEPS", 8)
    build_model(tmp_path, seed=0)
    (shape,) = (one for one in SHAPES if one.name == name)
    fixed = run_virtual(throughput(shape, tmp_path, best, feeds=False))
    own = run_virtual(throughput(shape, tmp_path, None, feeds=True))
    assert own >= 0.95 * fixed
