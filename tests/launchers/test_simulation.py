"""A simulation takes the times that a run has written, and what it says of that run is true."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random

import pytest

from agentenv.errors import DataError
from agentenv.virtual_clock import run_virtual
from launchers.config import TrainConfig
from launchers.rl.training import Training
from launchers.rundir import RunDirectory
from launchers.simulation import (
    Durations,
    Machine,
    ServiceModel,
    Variant,
    fitted,
    recorded,
    simulate,
)
from launchers.terminal import View
from launchers.timings import FILE, StepTimes, Trace, Turn, read_trace
from tests.support.toy_run import ToyWorld, toy_config

pytestmark = pytest.mark.slow

MODEL = ServiceModel(
    decode_s=0.02, running_s=0.001, prefill_s=1e-4, beside=1.5,
    update_s=2.0, token_s=1e-3, publish_s=0.5, parity_s=0.1,
)  # fmt: skip
KEYS = ("queue.groups_per_step=2", "learner.groups_per_minibatch=2", "train.num_steps=16")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, Trace]:
    """Of a toy run under the virtual clock: 0.5 s and 40 tokens a second a turn, 20 s an update."""
    config = toy_config(tmp_path_factory.mktemp("toy"), *KEYS, "log.timings=true")
    run = RunDirectory(Path(config.run.dir) / "toy", resume=False, settings={})
    training = Training(config, run, View(), resume="", build=ToyWorld().build)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("launchers.rl.recorder.Recorder.draw", lambda self: [])
        run_virtual(training.run_all())
    run.close()
    return config, read_trace(run.path)


def test_a_run_is_simulated_as_it_was(trace: tuple[TrainConfig, Trace]) -> None:
    config, written = trace
    model = fitted(written)
    assert model.update_s + 60 * model.token_s == pytest.approx(20, rel=0.1)
    assert model.running_s == pytest.approx(0, abs=0.002), "this engine does not slow down"
    was, found = recorded(written), simulate(config, written, Variant(name="same"), 30)
    assert found.step_s == pytest.approx(was.step_s, rel=0.15)
    assert found.staleness == pytest.approx(was.staleness, rel=0.15)
    assert found == simulate(config, written, Variant(name="again"), 30)


def test_settings_have_the_effects_that_they_must_have(trace: tuple[TrainConfig, Trace]) -> None:
    config, written = trace
    plain = simulate(config, written, Variant(name="plain"), 12)
    fresh = simulate(config, written, Variant(name="fresh", max_staleness=0), 12)
    few = simulate(config, written, Variant(name="few", max_branches=4), 12)
    assert fresh.staleness == 0
    assert fresh.idle_share > plain.idle_share
    assert fresh.step_s > plain.step_s
    assert few.branches <= 4
    assert few.tokens_per_s <= plain.tokens_per_s


def test_the_fit_finds_what_made_the_times() -> None:
    rng = Random(0)
    turns = []
    for _ in range(200):
        size, running, share = rng.randint(10, 60), rng.uniform(1, 60), rng.random()
        computed = rng.randint(50, 500)
        seconds = size * (0.02 + 0.001 * running) + 1e-4 * computed + 0.01 * size * share
        turns.append(Turn(size, seconds, running, computed, share))
    tokens = [5000.0, 9000.0]
    steps = [
        StepTimes(
            at_s=0.0, wait_s=0.0, update_s=2 + 1e-3 * num, publish_s=0.5, parity_s=0.1,
            num_tokens=num, staleness=0.0, turns=turns, trees=[],
        )
        for num in tokens
    ]  # fmt: skip
    found = fitted(Trace(600, steps))
    mean = sum(turn.running for turn in turns) / len(turns)
    assert found.decode_s == pytest.approx(MODEL.decode_s)
    assert found.running_s == pytest.approx(MODEL.running_s)
    assert found.prefill_s == pytest.approx(MODEL.prefill_s)
    assert found.beside == pytest.approx(1 + 0.01 / (0.02 + 0.001 * mean))
    assert (found.update_s, found.token_s) == pytest.approx((2.0, 1e-3))


def test_turns_share_a_machine_and_wait_for_its_slots() -> None:
    async def main() -> list[float]:
        machine, ends = Machine(MODEL, slots=2), []

        async def turn(size: int) -> None:
            await machine.sample(1000, [size], lambda _: None)
            ends.append(asyncio.get_running_loop().time())

        await asyncio.gather(turn(10), turn(20), turn(30))
        return ends

    # 0.2 s for both prompts; 10 steps of 22 ms; 0.1 s for the third prompt, 10 steps of 22 ms; then
    # 20 of 21 ms by itself
    assert run_virtual(main()) == pytest.approx([0.42, 0.74, 1.16])


def test_a_tail_goes_beyond_the_longest_call() -> None:
    rng = Random(1)
    durations = Durations(rng.paretovariate(1.2) for _ in range(5000))
    drawn = sorted(durations.draw(rng) for _ in range(5000))
    assert drawn[2500] == pytest.approx(2 ** (1 / 1.2), rel=0.1)
    assert drawn[-50] == pytest.approx(100 ** (1 / 1.2), rel=0.4)
    assert Durations([2.0]).draw(rng) == 2.0


def test_a_run_without_its_times_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"timings\.jsonl cannot be read: .*log\.timings=true"):
        read_trace(tmp_path)
    (tmp_path / FILE).write_text('{"vocab_size": 9}\n')
    with pytest.raises(DataError, match="two are needed"):
        read_trace(tmp_path)


def test_the_command_compares_settings(
    trace: tuple[TrainConfig, Trace], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from launchers import bench

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
    assert bench.main(["simulate", str(toml), "--trace", str(tmp_path)]) == 2
