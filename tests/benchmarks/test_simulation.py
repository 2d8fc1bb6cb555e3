"""A simulation takes the times that a run has written, and predicts that run correctly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.run.rundir import RunDirectory
from agentenv.assembly.run.terminal import View
from agentenv.base.errors import DataError
from agentenv.training.start import ADDED
from benchmarks.parts.simulation import Variant, fitted, recorded, simulate, tool_bounds, variants
from benchmarks.parts.timings import FILE, TimedTraining, Trace, read_trace
from tests.support.toy_run import ToyWorld, toy_config
from tests.support.virtual_clock import run_virtual

KEYS = ("queue.groups_per_step=2", "learner.groups_per_minibatch=2", "train.num_steps=16")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, Trace]:
    """Of a toy run under the virtual clock: 0.5 s and 40 tokens a second a turn, 20 s an update."""
    config = toy_config(tmp_path_factory.mktemp("toy"), *KEYS)
    run = RunDirectory(Path(config.run.dir) / "toy", resume=False)
    training = TimedTraining(config, run, View(), **{**ADDED, "build": ToyWorld().build})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentenv.training.reports.recorder.RunRecorder.draw", lambda self: None)
        run_virtual(training.run_all())
    run.close()
    return config, read_trace(run.path)


def test_a_simulation_reproduces_the_recorded_run(trace: tuple[TrainConfig, Trace]) -> None:
    config, written = trace
    model = fitted(written)
    assert model.update_s + model.token_s == pytest.approx(20, rel=0.1)
    assert model.running_s == pytest.approx(0, abs=0.002), "this engine does not slow down"
    was, found = recorded(written), simulate(config, written, Variant(name="same"), 30)
    assert found.step_s == pytest.approx(was.step_s, rel=0.15)
    assert found.staleness == pytest.approx(was.staleness, rel=0.15)
    assert found == simulate(config, written, Variant(name="again"), 30)


def test_calls_wait_for_the_slots_of_their_tool(
    trace: tuple[TrainConfig, Trace], tmp_path: Path
) -> None:
    _, written = trace
    places = 'env.tools=[{name = "search", max_concurrency = 1}]'
    config = toy_config(tmp_path, *KEYS, places, "queue.max_staleness=0")
    few = simulate(config, written, Variant(name="few"), 12)
    more = simulate(config, written, Variant(name="more", places={"search": 3.0}), 12)
    assert few.tools_wait_s > 3 * more.tools_wait_s > 0
    assert few.step_s > more.step_s
    assert "2 x places of search" in {one.name for one in variants(config, written)}


def test_the_tool_bounds_of_a_configuration_apply_to_each_worker(tmp_path: Path) -> None:
    keys = (
        'search.backend={name="web", provider="serper", traffic={max_concurrency=8, rate_per_s=3}}',
        "python.limits.max_sessions=5",
        'env.tools=[{name="python", max_concurrency=9}, {name="my.tools:look", max_concurrency=2}]',
    )
    found = tool_bounds(toy_config(tmp_path, *keys))
    assert found == {"search": (8, 3.0), "python": (5, 0.0), "look": (2, 0.0)}
    found = tool_bounds(toy_config(tmp_path, *keys, 'cluster={kind="processes", workers=2}'))
    assert found["search"] == (16, 6.0)


def test_a_run_without_recorded_times_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"timings\.jsonl.*benchmarks\.parts\.timings"):
        read_trace(tmp_path)
    (tmp_path / FILE).write_text('{"vocab_size": 9, "max_staleness": 1}\n')
    with pytest.raises(DataError, match="two are needed"):
        read_trace(tmp_path)


def test_the_command_compares_settings(
    trace: tuple[TrainConfig, Trace], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import bench

    config, written = trace
    toml, run = Path(config.run.dir).parent / "toy.toml", Path(config.run.dir) / "toy"
    figures = tmp_path / "figures.json"
    given = ["simulate", str(toml), *KEYS, "--trace", str(run), "--steps", "5"]
    assert bench.main([*given, "--json", str(figures)]) == 0
    shown, found = capsys.readouterr().out, json.loads(figures.read_text())
    assert found["recorded"]["step_s"] == pytest.approx(recorded(written).step_s)
    names = {"as configured", "max_staleness 0", "2 x the engines", "tools twice as fast"}
    assert names < found.keys()
    assert all(name in shown for name in names)
    assert "concurrency" in shown
    twice = [*given, "--trace", str(run), "--json", "-"]
    capsys.readouterr()
    assert bench.main(twice) == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert model["decode_s"] == pytest.approx(found["model"]["decode_s"]), "the same run again"
    assert bench.main(["simulate", str(toml), "--trace", str(tmp_path)]) == 2
