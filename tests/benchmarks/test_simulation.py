"""A simulation takes the times that a run has written, and predicts that run correctly."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.run.rundir import RunDirectory
from agentenv.assembly.run.terminal import View
from agentenv.base.errors import DataError
from agentenv.training.start import ADDED
from benchmarks.parts.simulation import (
    Durations,
    Grown,
    Machine,
    ServiceModel,
    Variant,
    fitted,
    recorded,
    simulate,
    tool_bounds,
    variants,
)
from benchmarks.parts.timings import (
    FILE,
    StepTimes,
    TimedTraining,
    Trace,
    Turn,
    read_trace,
)
from tests.support.toy_run import ToyWorld, toy_config
from tests.support.virtual_clock import run_virtual

MODEL = ServiceModel(
    decode_s=0.02, running_s=0.001, prefill_s=1e-4, beside=1.5,
    update_s=2.0, token_s=1e-3, shared=1.5, publish_s=0.5, score_s=0.1, turn_s=0.0,
    env_s=0.0, tree_s=0.0,
)  # fmt: skip
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


def test_the_fit_recovers_the_parameters_of_generated_times() -> None:
    rng, turns = Random(0), []
    for _ in range(200):
        size, running, share = rng.randint(10, 60), rng.uniform(1, 60), rng.random()
        computed = rng.randint(50, 500)
        seconds = size * (0.02 + 0.001 * running) + 1e-4 * computed + 0.01 * size * share
        turns.append(Turn(size, seconds, running, computed, share))
    steps = [step(5000, 0.2), step(9000, 0.7), step(6000, 0.5, fresh=True), step(8000, 0.0)]
    found = fitted(Trace(600, 1, [replace(one, turns=turns) for one in steps]))
    mean = sum(turn.running for turn in turns) / len(turns)
    assert found.decode_s == pytest.approx(MODEL.decode_s)
    assert found.running_s == pytest.approx(MODEL.running_s)
    assert found.prefill_s == pytest.approx(MODEL.prefill_s)
    assert found.beside == pytest.approx(1 + 0.01 / (0.02 + 0.001 * mean))
    assert (found.update_s, found.token_s, found.shared) == pytest.approx((2.0, 1e-3, 1.5))
    assert (found.publish_s, found.score_s, found.tree_s) == pytest.approx((0.5, 0.1, 0.05))


TRUE = ServiceModel(
    decode_s=0.01, running_s=0.0008, prefill_s=5e-5, beside=1.4,
    update_s=3.0, token_s=4e-3, shared=1.3, publish_s=0.5, score_s=0.2, turn_s=0.002,
    env_s=0.05, tree_s=0.02,
)  # fmt: skip
FEW = ("queue.groups_per_step=2", "learner.groups_per_minibatch=2", "queue.max_staleness=1")
MANY = ("queue.groups_per_step=8", "learner.groups_per_minibatch=4", "queue.max_staleness=1")
OTHERS = {
    "no staleness": ("queue.groups_per_step=6", "learner.groups_per_minibatch=3",
                     "queue.max_staleness=0"),
    "deeper queue, smaller groups": ("queue.groups_per_step=4", "learner.groups_per_minibatch=4",
                                     "queue.max_staleness=3", "algorithm.group_size=3"),
}  # fmt: skip


def test_a_fit_to_two_runs_predicts_other_settings(
    trace: tuple[TrainConfig, Trace], tmp_path: Path
) -> None:
    """Runs are simulated on a machine with known times, and write their times: a model fitted to
    them predicts other settings on that machine. The work is the same, since tools with such a long
    tail take other times in each run."""
    _, work = trace
    same = Variant(name="same")

    def on_true(name: str, keys: tuple[str, ...]) -> Trace:
        config = toy_config(tmp_path, *keys, "train.num_steps=16")
        (tmp_path / name).mkdir()
        simulate(config, work, same, 12, TRUE, timings=tmp_path / name / FILE)
        found = read_trace(tmp_path / name)
        # the loop's computation is on the clock of this process, not on the simulated one
        steps = [replace(one, loop_s=TRUE.turn_s * len(one.turns)) for one in found.steps]
        return replace(found, steps=steps)

    model = fitted(on_true("few", FEW), on_true("many", MANY))
    for name, keys in OTHERS.items():
        config = toy_config(tmp_path, *keys, "train.num_steps=16")
        was = simulate(config, work, same, 16, TRUE)
        predicted = simulate(config, work, same, 16, model)
        assert predicted.step_s == pytest.approx(was.step_s, rel=0.15), name
        assert 1 - predicted.idle_share == pytest.approx(1 - was.idle_share, rel=0.15), name
        assert predicted.staleness == pytest.approx(was.staleness, rel=0.15), name
    assert model.update_s == pytest.approx(TRUE.update_s, rel=0.15)
    assert model.token_s == pytest.approx(TRUE.token_s, rel=0.15)
    assert model.turn_s == pytest.approx(TRUE.turn_s)


def step(num_tokens: float, busy: float, *, fresh: bool = False) -> StepTimes:
    """Two optimizer steps of 2 s, a millisecond a token, a third more for stale ones; half as long
    again while turns run."""
    passes = num_tokens * (1 if fresh else 4 / 3)
    return StepTimes(
        wait_s=0.0, update_s=4.0 + 1e-3 * passes * (1 + busy / 2), publish_s=0.5,
        parity_s=0.1 + busy, rest_s=0.1, loop_s=0.4, branch_s=0.0, busy=busy, num_steps=2.0,
        staleness=1.0, num_tokens=num_tokens, num_proximal_tokens=0.0 if fresh else num_tokens,
        turns=[], trees=[[], []],
    )  # fmt: skip


def test_an_update_costs_its_tokens_when_steps_are_alike() -> None:
    rng = Random(0)
    turn = Turn(10, 1.0, 1.0, 0, 0.0)
    steps = [
        replace(one, update_s=one.update_s * rng.uniform(0.9, 1.1), turns=[turn])
        for one in (step(rng.uniform(7900, 8100), 0.5) for _ in range(20))
    ]
    found = fitted(Trace(600, 1, steps))
    mean_s = sum(one.update_s for one in steps) / len(steps)
    assert 2 * found.update_s < 0.2 * mean_s
    assert found.shared < 1.5
    size = 8000 * 4 / 3
    whole_s = 2 * found.update_s + found.token_s * size * (1 + (found.shared - 1) * 0.5)
    assert whole_s == pytest.approx(mean_s, rel=0.02)


def test_turns_share_a_machine_and_wait_for_its_slots() -> None:
    async def main() -> list[float]:
        machine, ends = Machine(MODEL, slots=2), []

        async def turn(size: int) -> None:
            await machine.sample(1000, [size], lambda _: None)
            ends.append(asyncio.get_running_loop().time())

        await asyncio.gather(turn(10), turn(20), turn(30))
        return ends

    # 0.2 s for both prompts; 10 steps of 22 ms; 0.1 s for the third prompt, 10 steps of 22 ms; then
    # 20 of 21 ms alone
    assert run_virtual(main()) == pytest.approx([0.42, 0.74, 1.16])


def test_a_prompt_is_computed_once_by_each_version() -> None:
    tree = Grown(home=Machine(MODEL, slots=1))
    prompt, action, result = [0] * 99 + [1], [0, 2], [0, 0, 3]
    assert tree.compute([prompt], 0) == 100
    assert tree.compute([prompt], 0) == 1, "a sibling, whose last token is computed again"
    tree.cached.add(2)  # the engine has sampled it
    assert tree.compute([prompt, action, result], 0) == 3
    assert tree.compute([prompt, action, result], 1) == 105


def test_a_fitted_tail_exceeds_the_longest_call() -> None:
    rng = Random(1)
    durations = Durations(rng.paretovariate(1.2) for _ in range(5000))
    drawn = sorted(durations.draw(rng) for _ in range(5000))
    assert drawn[2500] == pytest.approx(2 ** (1 / 1.2), rel=0.1)
    assert drawn[-50] == pytest.approx(100 ** (1 / 1.2), rel=0.4)
    assert Durations([2.0]).draw(rng) == 2.0


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
