"""The laws of every run under any faults: a whole run under the virtual clock, with faults,
signals, kills, jumps of the clock and duplicate frames, at moments chosen by hypothesis.

conservation     each offered tree is trained once, filtered, failed, or still held
staleness        no trained token is older than `queue.max_staleness`
envs             every env is closed once
no leftovers     no task, no slot, no request to the engine
no tree twice    in the weights that survive
no deadlock      virtual time can always advance until the run ends
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from agentenv.assembly.run.rundir import RunDirectory
from agentenv.assembly.run.terminal import View
from agentenv.base.errors import AgentEnvError
from agentenv.base.offload import replaced
from agentenv.base.tree import TrajectoryTree
from agentenv.rollout.frames import frames_of
from agentenv.training.loop.batching import BatchBuilder, StepBatch
from agentenv.training.reports.recorder import RunRecorder
from agentenv.training.start import make_training
from tests.support.toy_run import ToyWorld, toy_config
from tests.support.virtual_clock import DeadlockError, Inline, VirtualClockLoop, waiting_tasks

NUM_STEPS = 4
LONG_S = 1e5  # more than any run takes without faults
CALLS = ("generate", "reset", "step", "grade", "fork", "finish", "close")
KINDS = ("fail", "outage", "crash", "hang")  # a crash of the engine would be a bug of the core


class Runs(RuleBasedStateMachine):
    """One run, with as many processes as it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.stack.enter_context(replaced(Inline()))
        self.stack.enter_context(redirect_stdout(StringIO()))
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(RunRecorder, "draw", lambda self: [])
        settle = BatchBuilder.settle

        def settling(batches: BatchBuilder, batch: StepBatch) -> None:
            assert batch.num_taken == self.config.queue.groups_per_step
            self.delivered[batches.state.step] = batch.delivered
            self.num_taken[batches.state.step] = batch.num_taken
            settle(batches, batch)

        patch.setattr(BatchBuilder, "settle", settling)
        self.loop = VirtualClockLoop()
        self.delivered: dict[int, list[TrajectoryTree]] = {}  # by step; later processes overwrite
        self.num_taken: dict[int, int] = {}
        self.num_starts = 0
        self.main: asyncio.Task[None]

    @initialize(
        groups=st.integers(1, 3),
        staleness=st.integers(0, 2),
        algorithm=st.sampled_from(["arpo", "grpo"]),
        refill=st.booleans(),
        drop=st.booleans(),
        seed=st.integers(0, 99),
        every=st.integers(0, 2),
        weather=st.fixed_dictionaries(
            {call: st.lists(st.sampled_from(KINDS), max_size=3) for call in CALLS}
        ),
    )
    def begin(
        self,
        groups: int,
        staleness: int,
        algorithm: str,
        refill: bool,
        drop: bool,
        seed: int,
        every: int,
        weather: dict[str, list[str]],
    ) -> None:
        own = ["algorithm.entropy_window=4"] if algorithm == "arpo" else []
        own += ["queue.equal_groups=drop"] if drop else []
        keys = [
            f"queue.groups_per_step={groups}", f"queue.max_staleness={staleness}",
            f"queue.refill={refill}".lower(), f"algorithm.name={algorithm}", *own,
            f"learner.groups_per_minibatch={groups}", f"run.seed={seed}",
            f"checkpoint.every={every}", f"train.num_steps={NUM_STEPS}",
        ]  # fmt: skip
        self.config = toy_config(self.folder, *keys)
        self.path = Path(self.config.run.dir) / "run0"
        self.start(weather)

    def start(self, weather: Mapping[str, list[str]] = MappingProxyType({})) -> None:
        """A process that begins or resumes the run."""
        resume = (self.path / "config.json").exists()
        self.world = ToyWorld()
        for call, kinds in weather.items():
            self.fault(call, kinds)
        self.run = RunDirectory(self.path, resume=resume)
        self.training = make_training(
            self.config, self.run, View(), resume="latest" if resume else "", build=self.world.build
        )
        queue, drain = self.training.queue, self.training.queue.drain
        self.num_held = 0

        def draining() -> list[asyncio.Task[TrajectoryTree]]:
            self.num_held = queue.num_waiting
            return drain()

        queue.drain = draining  # type: ignore[method-assign]
        self.main = self.loop.create_task(self.training.run_all())
        self.advance(0.1)

    def ended(self) -> bool:
        return self.main.done()

    # the events

    @rule(seconds=st.sampled_from([0.3, 3.0, 10.0, 30.0, 100.0, 1000.0]))
    def advance(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    @rule(call=st.sampled_from(CALLS), kinds=st.lists(st.sampled_from(KINDS), max_size=6))
    def fault(self, call: str, kinds: list[str]) -> None:
        self.world.faults.add(call, [k for k in kinds if (call, k) != ("generate", "crash")])

    @rule(seconds=st.sampled_from([1.0, 299.0, 1e4]))
    def clock_jumps(self, seconds: float) -> None:
        self.loop.now += seconds

    @rule(number=st.integers(1, 3), seconds=st.sampled_from([0.0, 0.1, 3.0]))
    def signal(self, number: int, seconds: float) -> None:
        for _ in range(number):
            if not self.ended():
                self.main.cancel()
            self.advance(seconds)

    @rule(twice=st.booleans(), groups=st.integers(1, 3))
    def kill(self, twice: bool, groups: int) -> None:
        """The process dies at this moment; another one resumes from the state on disk, with as many
        groups a step."""
        self.num_starts += 1
        self.path = Path(shutil.copytree(self.path, self.path.with_name(f"run{self.num_starts}")))
        self.main.cancel()
        self.end()
        if twice:
            for file in self.path.glob("journal/*.frames"):
                file.write_bytes(each_twice(file.read_bytes()))
        queue = replace(self.config.queue, groups_per_step=groups)
        learner = replace(self.config.learner, groups_per_minibatch=groups)
        self.config = replace(self.config, queue=queue, learner=learner)
        self.start()

    @precondition(lambda self: self.ended())
    @rule()
    def go_on(self) -> None:
        if self.end() is not None:
            self.start()

    # the laws

    @invariant()
    def slots_are_bounded(self) -> None:
        if hasattr(self, "training"):
            queue = self.training.queue
            assert queue.num_waiting <= queue.num_reserved <= queue.capacity

    def end(self) -> BaseException | None:
        """Let the process end, and check the state that it leaves. Returns the error that ended it
        early."""
        try:
            self.loop.run_until_complete(asyncio.wait([self.main], timeout=LONG_S))
        except DeadlockError as error:
            raise AssertionError(str(error)) from error
        assert self.ended(), f"it never ends: {waiting_tasks(self.loop)}"
        self.run.close()
        error = None if self.main.cancelled() else self.main.exception()
        if error is not None:
            expected, bugs = split(error)
            assert bugs is None, f"a bug: {bugs!r}" if bugs else expected
        left = asyncio.all_tasks(self.loop)
        assert not left, f"left: {waiting_tasks(self.loop)}"
        for env in self.world.envs:
            assert env.num_closed == 1, f"an env was closed {env.num_closed} times"
        if hasattr(self.training, "loop"):
            assert self.training.loop.parts.actor.envs.count == 0
            assert self.training.loop.parts.eval_actor.envs.count == 0
            assert self.world.engine.num_running == 0
        return asyncio.CancelledError() if self.main.cancelled() else error

    def teardown(self) -> None:
        try:
            if hasattr(self, "training"):
                self.to_the_end()
        finally:
            self.stack.close()
            self.loop.close()

    def to_the_end(self) -> None:
        """Without further faults the run reaches its last step, and each tree is accounted for."""
        self.world.faults.next.clear()
        error = self.end()
        for _ in range(2):  # a failure in progress may end the first
            if error is not None:
                self.start()
                error = self.end()
        assert error is None, f"it does not end well: {error!r}"
        state, learner = self.training.state, self.world.learner
        assert state.step == NUM_STEPS
        delivered = [tree for step in range(NUM_STEPS) for tree in self.delivered[step]]
        places = sorted(tree.index for tree in delivered)
        assert places == list(range(state.position)), "each once, none left out"
        fates: dict[str, list[int]] = {"trained": [], "filtered": [], "failed": []}
        num_equal = 0
        for tree in delivered:
            credit = self.config.algorithm.credit(tree)
            is_equal = credit is not None and not credit.has_signal
            is_filtered = is_equal and not self.config.counts_equal_groups
            num_equal += is_equal and not is_filtered
            fate = "failed" if credit is None else "filtered" if is_filtered else "trained"
            fates[fate].append(tree.index)
        assert learner.trained == fates["trained"], "each once, in order"
        if self.config.refills:  # each step trains as many groups with a signal
            assert len(learner.trained) == sum(self.num_taken.values())
        counters = state.counters
        found = (counters.trained, counters.filtered, counters.num_failed)
        assert found == tuple(map(len, fates.values()))
        assert counters.equal == num_equal
        assert counters.offered == len(delivered) + self.num_held
        assert self.training.queue.num_reserved == 0, "a slot is left"


def split(error: BaseException) -> tuple[BaseException | None, BaseException | None]:
    """The errors that may end a run, and the others."""
    if isinstance(error, BaseExceptionGroup):
        return error.split((AgentEnvError, asyncio.CancelledError))
    return (error, None) if isinstance(error, AgentEnvError) else (None, error)


def each_twice(data: bytes) -> bytes:
    """The frames, each followed by its duplicate, as by a writer that missed the confirmation."""
    frames, start = [], 0
    for offset, size, is_whole in frames_of(data):
        frames += [data[start : offset + size]] * (2 if is_whole else 1)
        start = offset + size
    return b"".join(frames)


class TestRuns(Runs.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(
        max_examples=settings.default.max_examples // 4,
        stateful_step_count=12,
        deadline=None,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shrink one takes minutes
        suppress_health_check=[HealthCheck.too_slow],
    )


@pytest.mark.parametrize(
    ("before", "after", "refill"), [(3, 1, False), (1, 3, False), (3, 1, True)]
)
def test_a_run_resumes_with_another_number_of_groups(before: int, after: int, refill: bool) -> None:
    runs = Runs()
    runs.begin(before, 1, "grpo", refill, drop=False, seed=3, every=1, weather={})
    while not (runs.path / "checkpoints" / "step-000002" / "state.json").exists():
        runs.advance(10.0)
    runs.kill(twice=False, groups=after)
    runs.teardown()
    assert runs.num_taken == {0: before, 1: before, 2: after, 3: after}
