"""The bench of the controller: a run of its workload, small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentenv.base.errors import AgentEnvError
from benchmarks.parts import overhead

STUCK = """
import pathlib, sys, time
if sys.argv[1] == "stage" and sys.argv[2] == "measure":
    pathlib.Path(sys.argv[3], "run.toml").touch()
else:
    time.sleep(600)
"""


@pytest.mark.parametrize("stuck", ["stage", "measure"])
def test_a_hanging_run_raises_an_error_after_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: str
) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(AgentEnvError, match=rf"the run '{stuck}' did not end within 0\.5 s"):
        overhead.measured("stuck", [stuck], tmp_path, limit_s=0.5)


@pytest.mark.heavy
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_small_run_reports_its_costs(tmp_path: Path, num_workers: int) -> None:
    options = ["1", str(num_workers), "4", overhead.ENV]
    figures = json.loads(overhead.measured(overhead.__name__, options, tmp_path))
    assert figures.keys() == set(overhead.Figures.__struct_fields__)
    assert figures["cpu_us_per_env_step"] > figures["floor_us"] > 0
    assert figures["all_processes_us"] >= figures["cpu_us_per_env_step"]
    assert figures["rss_mb"] < 250, "without torch, which takes 200"
    assert figures["lag_max_ms"] >= figures["lag_p99_ms"] >= 0
    (summary,) = tmp_path.glob("run/summary.json")
    run = json.loads(summary.read_text())
    assert run["trees"]["offered"] == 4
    assert run["forks_total"] > 0
    assert run["tool_calls_total"] > 4 * 16 * 2, "four calls a trajectory, shared ones once"
