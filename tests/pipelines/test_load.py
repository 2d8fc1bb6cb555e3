"""A run on engine servers with faults: none costs a trajectory, and the run says what they were.

That one is slow is not expected of it here: on a busy machine they all are."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agentenv.engines.pool.server import MIN_ANSWERS, PooledServer, problems
from agentenv.server_config import PoolConfig
from benchmarks import bench
from benchmarks.parts import load

SHORT = load.Size(scale=0.02, prompts=4, num_steps=2, descriptors=108)


@pytest.mark.slow
def test_all_faults_at_once_cost_no_trajectory_and_are_named() -> None:
    """Also 64 streams and more with 108 file descriptors, of which 18 are spared and a run needs
    60 for itself."""
    found = load.run(["all"], SHORT)["all"]
    assert found.num_lost == 0
    assert found.trajectories == SHORT.prompts * SHORT.num_steps * load.GROUP_SIZE
    lines = "\n".join(found.told)
    for sign in (
        "requests failed",  # sick
        "was full",
        "left in silence",
        "to change its weights",
        "for a file descriptor",
    ):
        assert sign in lines, lines
    assert "other weights" in lines or "broke off" in lines, "of the one that was restarted"


async def test_a_server_is_slow_beside_the_others() -> None:
    """Known after a few answers; nobody is slow alone."""
    clients = [cast(Any, SimpleNamespace(name=name)) for name in "abc"]
    servers = [PooledServer(client, 0, PoolConfig(), lambda: None) for client in clients]
    for _ in range(MIN_ANSWERS - 1):
        for server, seconds in zip(servers, (1.0, 1.0, 2.1), strict=True):
            server.answer(100, seconds)
    assert problems(servers) == []
    servers[2].answer(100, 2.1)
    assert problems(servers[2:]) == problems(servers) == []
    for server in servers[:2]:
        server.answer(100, 1.0)
    assert problems(servers) == ["c is slow: 48 tokens a second of a request, the others 100"]


def test_what_is_lost_is_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And `--json -` prints nothing else."""

    def run(names: list[str], size: load.Size) -> dict[str, load.Figures]:
        lost = load.Figures(1.0, 16, int("sick" in names), 0, 0, 0, 0, 0, 9, ["all was well"])
        return dict.fromkeys(names, lost)

    monkeypatch.setattr(load, "run", run)
    assert bench.main(["load", "--json", "-", "--faults", "none"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["size"]["scale"] == load.Size().scale
    assert printed["none"]["told"] == ["all was well"]
    file = tmp_path / "figures.json"
    assert bench.main(["load", "--json", str(file), "--faults", "sick", "none"]) == 1
    assert "sick: all was well" in capsys.readouterr().out
    assert json.loads(file.read_text())["sick"]["failed"] == 1
