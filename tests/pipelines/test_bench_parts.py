"""Parts of bench.py: rules of staleness keep what they promise, costs multiply, a file has all."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import ConfigError
from benchmarks import bench
from benchmarks.parts import engines, everything, paper, sandboxes, staleness


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PROMPTS": 2, "SLOTS": 16, "PLACES": 16, "NUM_STEPS": 4}.items():
        monkeypatch.setattr(staleness, name, value)


@pytest.mark.usefixtures("small")
def test_ours_trains_the_first_that_were_begun_within_the_bound() -> None:
    taken = staleness._taken("ours", 2, seed=0)
    assert [tree.index for tree in taken.trained] == list(range(8))
    assert max(taken.ages) == 2
    assert not taken.discarded


@pytest.mark.usefixtures("small")
def test_drop_discards_those_that_are_too_old_and_no_others() -> None:
    taken = staleness._taken("drop", 0, seed=0)
    assert set(taken.ages) == {0}
    assert taken.discarded
    offered = [*taken.trained, *taken.discarded, *taken.left]
    assert sorted(tree.index for tree in offered) == list(range(len(offered)))
    assert staleness._slowness(taken) < 1, "slow trees are the ones that grow old"


@pytest.mark.usefixtures("small")
def test_wait_is_slower_and_never_stale() -> None:
    waited, ours = (staleness._taken(rule, 1, seed=0) for rule in ("wait", "ours"))
    assert set(waited.ages) == {0}
    assert waited.seconds > ours.seconds
    figures = staleness._figures([ours], [waited])
    assert figures.over_wait > 1
    assert (figures.discarded, figures.length, figures.calls, figures.slowness) == (0, 1, 1, 1)


def test_what_gpus_ask_for_by_hand() -> None:
    costs = paper.Costs(
        env_step_us=100.0,
        central_us=50.0,
        client_us=1.0,
        frame_bytes=10.0,
        learner_bytes=30.0,
        call_s=0.001,
        fork_s=0.004,
        fork_share=0.25,
    )
    cluster = paper.Cluster(tokens_per_s=1000.0, turn_tokens=100, disk_mb_s=1, network_mb_s=10)
    found = paper.resources(100, costs, cluster)
    assert found.tokens_per_s == 50_000
    assert found.env_steps_per_s == 500
    assert found.worker_share == 0.1  # 500 x 100 us + 50,000 x 1 us
    assert found.central_share == 0.025
    assert found.journal_share == 0.5  # 0.5 MB/s
    assert found.network_share == 0.2  # 2 MB/s
    assert found.sandbox_share == 1.0
    assert (found.workers, found.sandbox_cores, found.first_full) == (1, 2, "none")
    assert paper.resources(1000, costs, cluster).first_full == "journal"


def test_costs_are_read_from_what_all_writes(tmp_path: Path) -> None:
    file = tmp_path / "all.json"
    row = {"cpu_us_per_env_step": 300.0, "floor_us": 80.0}
    central = {"cpu_us_per_env_step": 250.0, "floor_us": 90.0}
    parts = {"overhead": row, "overhead-workers": central}
    written = {name: {"figures": {"1000": one}} for name, one in parts.items()}
    file.write_text(json.dumps({"parts": written}))
    assert paper.read_costs(file).env_step_us == 220.0
    assert paper.read_costs(file).central_us == 160.0
    assert paper.read_costs(file).client_us == paper.COSTS.client_us
    file.write_text('{"parts": {"tools": {"figures": {}}}}')
    with pytest.raises(ConfigError, match="not what `bench"):
        paper.read_costs(file)


def test_all_measures_the_controller_with_and_without_workers() -> None:
    found = {name: bench._parse(everything.command_of(name)) for name in everything.PARTS}
    for name, workers in (("overhead", 0), ("overhead-workers", 2)):
        options = found[name]
        assert (options.part, options.sizes, options.workers) == ("overhead", [1000], workers)


def test_a_part_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(everything, "PARTS", {"start": ("--repeats", "x")})
    file = tmp_path / "all.json"
    assert bench.main(["all", "--json", str(file)]) == 1
    found = json.loads(file.read_text())
    assert "invalid int value" in found["parts"]["start"]["error"]
    assert found["machine"]["cores"] >= 1
    assert found["versions"]["python"]


def test_pictures_are_of_what_was_measured(tmp_path: Path) -> None:
    figures = {
        "median_ms": 0.1,
        "bytes_a_token": 18.5,
        "write_us": 0.01,
        "read_us": 0.02,
    }
    parts = {name: {"figures": {"a": figures, "b": figures}} for name in ("transport", "fork")}
    parts |= {"tools": {"error": "no sandbox"}}
    assert everything.plot({"parts": parts}, tmp_path / "plots") == ["transport.png", "fork.png"]
    assert (tmp_path / "plots" / "fork.png").read_bytes().startswith(b"\x89PNG")


def test_the_controller_and_its_peers_have_pictures(tmp_path: Path) -> None:
    cost = {"cpu_us_per_env_step": 300.0, "floor_us": 80.0, "all_processes_us": 500.0}
    peer = {"cpu_us": 300.0, "floor_us": 80.0, "children_us": 20.0}
    peers = {"ours": {"sizes": {"100": peer, "1000": peer}}, "absent": {"sizes": {}}}
    parts: dict[str, Any] = {"overhead": {"1000": cost}, "overhead-workers": {"1000": cost}}
    parts |= {"peers": {"peers": peers}}
    found = {"parts": {name: {"figures": figures} for name, figures in parts.items()}}
    names = ["overhead.png", "overhead-workers.png", "peers.png"]
    assert everything.plot(found, tmp_path) == names
    found["parts"]["peers"]["figures"]["peers"] = {"absent": {"sizes": {}}}
    assert everything.plot(found, tmp_path) == names, "with nothing on the last one"


def test_every_picture_is_of_a_part_of_all() -> None:
    assert everything.PICTURES.keys() <= everything.PARTS.keys()


def test_forks_and_searches_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes, "NUM_COPIES", 10)

    async def measure() -> list[Any]:
        return [await sandboxes._env_forks(), await sandboxes._searches(10)]

    forks, searches = asyncio.run(measure())
    assert sandboxes._node_forks().median_ms > 0
    assert 0 < forks.median_ms <= forks.worst_ms
    assert 0 < searches.p50_ms <= searches.p99_ms


@pytest.mark.slow
def test_a_client_costs_more_than_reading_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "STREAMS", 4)
    found = engines.run(1)
    assert found.keys() >= {"bytes, 10 at a time", "pool, 10 at a time"}
    assert all(one.us_per_token > 0 for one in found.values())
