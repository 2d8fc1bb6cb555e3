"""The bench of the controller: a run of its workload, small and in this process."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from launchers import overhead
from learners import ranks as wire


@pytest.mark.slow
def test_figures_of_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    monkeypatch.setenv(wire.TOKEN_VARIABLE, "secret")
    place = ("1", str(tmp_path), address)
    rank = threading.Thread(target=overhead.main, args=("rank", *place))
    rank.start()
    while not (tmp_path / overhead.CONFIG).is_file():
        assert rank.is_alive()
    overhead.main("measure", *place)
    rank.join(10)
    assert not rank.is_alive()
    figures = json.loads((tmp_path / overhead.FIGURES).read_text())
    assert figures.keys() == set(overhead.Figures.__struct_fields__)
    assert figures["cpu_us_per_env_step"] > figures["floor_us"] > 0
    assert figures["all_processes_us"] >= figures["cpu_us_per_env_step"]
    assert figures["lag_max_ms"] >= figures["lag_p99_ms"] >= 0
    (summary,) = tmp_path.glob("run/summary.json")
    run = json.loads(summary.read_text())
    assert run["trees"]["offered"] == 4
    assert run["forks_total"] > 0
    assert run["tool_calls_total"] > 4 * 16 * 2, "four calls a trajectory, shared ones once"
