"""The cost of a failure for a rollout: a turn, a wait, a trajectory, or the run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from agentenv.base.deadline import admitted, waiting
from agentenv.base.errors import ConfigError, EngineError, EnvError, InfraError, ToolError
from agentenv.base.tree import Node, TrajectoryTree
from agentenv.base.types import Completion, Limit, Limits, Message, Task, ToolResult
from agentenv.contract.env import Grade
from agentenv.contract.function_tool import tool
from agentenv.contract.plan import Independent, RolloutPlan
from agentenv.contract.tool_env import ToolEnv
from agentenv.contract.tools import StatelessTool, Tool
from agentenv.engines.scripted import ScriptedConfig, ScriptedEngine
from agentenv.learners.algorithms.aepo import AEPO, AEPOPlan, is_probe
from agentenv.learners.algorithms.arpo import ARPO, ARPOPlan
from agentenv.rollout.actor import Actor
from tests.support.toy import CharTokenizer, CountingEnv
from tests.support.virtual_clock import on_virtual_clock, run_virtual
from tests.test_actor import TASK, AlwaysFork, make_actor, rollout
from tests.test_tool_limits import Anything

SIZE = 16
GROUPS: list[RolloutPlan] = [
    Independent(SIZE),
    ARPO(group_size=SIZE, entropy_window=8).plan(256),
    AEPO(group_size=SIZE, entropy_window=8).plan(256),
]


def three_searches(prompt: str, rng: Random) -> str:
    if prompt.count("<result>") < 3:
        return f"<think>{rng.random()}</think><search>q{rng.randrange(9)}</search>"
    return "<think>done</think><answer>3</answer>"


class FlakyEngine(ScriptedEngine):
    """Turns fail with a probability, some after tokens of them were reported."""

    def __init__(self, rng: Random, probability: float) -> None:
        super().__init__(ScriptedConfig(max_model_len=9000), CharTokenizer(), script=three_searches)
        self.rng, self.probability = rng, probability
        self.num_turns = 0

    async def generate(self, *rest: Any, **keys: Any) -> Completion:
        self.num_turns += 1
        fails, late = self.rng.random() < self.probability, self.rng.random() < 0.5
        if fails and not late:
            raise EngineError("gone")
        completion = await super().generate(*rest, **keys)
        if fails:
            raise EngineError("gone")
        return completion


def turns_wasted(actor: Actor, trees: list[TrajectoryTree]) -> float:
    """Turns that are in no trajectory of the group, as a share of the requested ones."""
    assert isinstance(actor.engine, FlakyEngine)
    kept = {
        (tree.index, node.index)
        for tree in trees
        for trajectory in tree.trajectories()
        for node in trajectory.turns
    }
    return 1 - len(kept) / actor.engine.num_turns


@pytest.mark.parametrize("plan", GROUPS)
def test_failures_of_one_step_in_twenty_cost_few_turns_and_no_group(plan: RolloutPlan) -> None:
    """Turns that the engine fails, then steps that the env fails; 5 groups of 16 with 3 calls."""
    for of_engine, of_env in ((0.05, 0.0), (0.0, 0.05)):
        actor = make_actor(faults={"step": of_env}, rng=Random(1))
        actor.engine = FlakyEngine(Random(2), of_engine)
        trees = [rollout(actor, plan, index) for index in range(5)]
        assert all(len(list(tree.trajectories())) == SIZE for tree in trees)
        assert not any(tree.failures() for tree in trees)
        assert sum(tree.num_retaken for tree in trees) > 0
        assert turns_wasted(actor, trees) <= 0.06


def test_a_retried_turn_is_the_same_turn() -> None:
    tree, again = (
        rollout(actor, AlwaysFork(group_size=4))
        for actor in (make_actor(three_searches), make_actor(three_searches))
    )
    actor = make_actor(three_searches)
    actor.engine = FlakyEngine(Random(5), 0.1)
    flaky = rollout(actor, AlwaysFork(group_size=4))
    assert flaky.num_retaken
    sampled = [
        {leaf.branch: t.token_ids for t in one.trajectories() for leaf in [t.leaf]}
        for one in (tree, again, flaky)
    ]
    assert sampled[0] == sampled[1] == sampled[2]


class ForgetfulEnv(CountingEnv):
    """Answers otherwise in each episode, and fails its second step."""

    async def step(self, action: Message) -> Any:
        if self.calls:
            raise EnvError("broken")
        messages, *rest = await super().step(action)
        answers = [Message("tool", f"{message.content} {self.num_made}") for message in messages]
        return answers, *rest


def test_an_env_with_other_replies_on_replay_is_replaced_by_a_fresh_root() -> None:
    tree = rollout(make_actor(limits=Limits(max_failures=1), make_env=ForgetfulEnv), Independent(1))
    assert [leaf.branch for leaf in tree.failures()] == ["0", "1"]
    assert all("answers differently" in str(leaf.error) for leaf in tree.failures())


class DownEnv(CountingEnv):
    """Its machinery is down from second 5 to second `until`, which is known 4 s after a call."""

    until = 35.0

    async def _maybe_fail(self, method: str) -> None:
        await asyncio.sleep(1.0)
        if method != "close" and 5.0 <= asyncio.get_running_loop().time() < self.until:
            await asyncio.sleep(4.0)
            raise InfraError("no answer")


@pytest.mark.parametrize(("until", "num_failed"), [(35.0, 0), (2000.0, 5)])
def test_the_wait_for_an_outage_does_not_count_toward_the_time_limit(
    until: float, num_failed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some 17 s of work, within 20, though the outage is 30 s long; one that never ends is waited
    for by each of 5 roots."""
    monkeypatch.setattr(DownEnv, "until", until)
    actor = make_actor(limits=Limits(max_seconds=20.0), engine={"latency_s": 1.0}, make_env=DownEnv)
    tree = rollout(actor, Independent(1))
    assert len(tree.failures()) == num_failed
    assert [t.leaf.end for t in tree.trajectories()] == ["terminated"] * (num_failed == 0)


class Misconfigured(CountingEnv):
    async def step(self, action: Message) -> Any:
        raise ConfigError("search.backend.api_key_env: the plan is spent")


def test_a_configuration_error_ends_the_run_immediately() -> None:
    actor = make_actor(make_env=Misconfigured)
    made = CountingEnv.num_made
    with pytest.raises(ExceptionGroup) as raised:
        rollout(actor, Independent(2))
    assert raised.group_contains(ConfigError, match="plan is spent")
    assert CountingEnv.num_made - made == 2


class SlowToOpen(CountingEnv):
    async def fork(self) -> CountingEnv:
        await asyncio.sleep(50.0)
        return await super().fork()


def test_a_branch_that_never_got_its_env_has_failed() -> None:
    actor = make_actor(limits=Limits(max_seconds=10.0, max_failures=0), engine={"latency_s": 1.0})
    actor.make_env = SlowToOpen
    tree = rollout(actor, AlwaysFork(group_size=2))
    ends = {leaf.branch: leaf.end for leaf in tree.leaves()}
    assert ends["0.1+1"] == "failed"
    assert "truncated" not in [ends[name] for name in ends if "+" in name]


class FailsAtFirst(CountingEnv):
    """The first episodes of a test fail at their reset."""

    left = 0

    async def reset(self, **keys: Any) -> Any:
        type(self).left -= 1
        if type(self).left >= 0:
            raise EnvError("no place")
        return await super().reset(**keys)


def test_the_rest_of_a_group_starts_when_its_last_live_branch_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ARPO of 8: four roots fail without a retry left; the other four places are tried all the
    same."""
    monkeypatch.setattr(FailsAtFirst, "left", 4)
    actor = make_actor(limits=Limits(max_failures=0), make_env=FailsAtFirst)
    tree = rollout(actor, ARPO(group_size=8).plan(256))
    assert (len(tree.failures()), len(list(tree.trajectories()))) == (4, 4)


def test_the_probe_of_aepo_survives_forks_that_fail() -> None:
    """Its split is decided where the probe ends, though roots began in the places of its forks."""
    splits = []

    class Watched(AEPOPlan):
        def num_roots(self, tree: TrajectoryTree, probe: Node) -> int:
            splits.append(probe.branch)
            return super().num_roots(tree, probe)

    plan = Watched(AEPO(group_size=8, entropy_window=8, base_probability=1.0), 256)
    for index in range(20):
        actor = make_actor(script=three_searches, faults={"fork": 0.5}, rng=Random(index))
        tree = rollout(actor, plan, index)
        assert len(list(tree.trajectories())) == 8 or tree.num_retries == 4
        assert sum(is_probe(tree, leaf) for leaf in tree.leaves()) == 1
    assert splits == ["0"] * 20


def test_the_wait_of_roots_for_the_probe_of_aepo_is_measured() -> None:
    """Four turns of 2 s; ARPO's roots do not wait."""
    actor = make_actor(script=three_searches, engine={"latency_s": 2.0})
    rollout(actor, AEPO(group_size=8, base_probability=0.0).plan(256))
    assert actor.probes.take() == pytest.approx(
        {"rollout/probe_wait_s": 8.0, "rollout/probe_wait_s_max": 8.0}
    )
    rollout(actor, ARPO(group_size=8, base_probability=0.0).plan(256))
    assert actor.probes.take() == {}


@on_virtual_clock
async def test_a_tree_over_its_time_limit_is_delivered_with_its_trajectories() -> None:
    """Every second step hangs forever; each root alone has 30 s, the tree 70 s, and no root is
    started after that."""

    class Hanging(CountingEnv):
        async def step(self, action: Message) -> Any:
            if self.calls and self.task is TASK and Hanging.made % 2:
                await asyncio.Event().wait()
            Hanging.made += 1
            return await super().step(action)

        made = 0

    limits = Limits(max_seconds=30.0, max_tree_seconds=70.0, max_failures=9)
    actor = make_actor(limits=limits, engine={"latency_s": 1.0}, make_env=Hanging)
    plan = ARPO(group_size=6, initial_rollouts=1, base_probability=0.0, entropy_weight=0.0)
    tree = await actor.rollout(TASK, OneByOne(plan, 256))
    seconds = asyncio.get_running_loop().time()
    assert seconds == pytest.approx(70.0, abs=0.1)
    assert tree.num_started < 6
    assert [leaf.limit for leaf in tree.leaves()][-1] == Limit.SECONDS
    assert not tree.failures()


class OneByOne(ARPOPlan):
    """Each trajectory begins when the one before has ended."""

    def on_leaf_end(self, tree: TrajectoryTree, leaf: Node) -> int:
        return min(1, super().on_leaf_end(tree, leaf))


async def refused() -> None:
    raise InfraError("connection refused")


async def accepted() -> None:
    await asyncio.Event().wait()  # and never answered


def search_that_is_away(away: Callable[[], Awaitable[None]], until: float) -> Tool:
    @tool
    async def search(query: str) -> str:
        """A search server that is away from second 12 on."""
        await asyncio.sleep(0.5)
        if 12.0 <= asyncio.get_running_loop().time() < until:
            await away()
        return "found"

    return search


@pytest.mark.parametrize("plan", GROUPS[:2])
@pytest.mark.parametrize(("away", "until"), [(refused, 42.0), (accepted, 132.0)])
def test_an_unreachable_search_server_costs_no_trajectory(
    plan: RolloutPlan, away: Callable[[], Awaitable[None]], until: float
) -> None:
    """Six groups of 16 at once; turns of 5 s, and 30 s of work for a trajectory at most, which is
    as long as a single call may take."""
    limits = Limits(max_seconds=30.0)
    search = search_that_is_away(away, until)
    actor = make_actor(script=three_searches, limits=limits, engine={"latency_s": 5.0})
    actor.make_env = lambda task: ToolEnv(task, [search], Anything())

    async def main() -> list[TrajectoryTree]:
        return await asyncio.gather(*(actor.rollout(TASK, plan, index=index) for index in range(6)))

    for tree in run_virtual(main()):
        assert not tree.failures()
        assert [t.leaf.end for t in tree.trajectories()] == ["terminated"] * SIZE


class CodeTimedOut(StatelessTool):
    """Runs code that the policy wrote, for as long as it lets code run, which is 20 s."""

    name, description = "search", ""
    schema: dict[str, Any] = {"type": "object", "properties": {}}  # noqa: RUF012

    async def call(self, arguments: dict[str, Any], state: Any) -> ToolResult:
        await asyncio.sleep(20.0)
        raise ToolError("TimeoutError: stopped after 20 s")


@on_virtual_clock
async def test_code_that_exceeds_the_limit_of_its_tool_counts_as_work() -> None:
    """Its 50 s end within the third call, whose end is waited for: the tool could have been
    down."""
    actor = make_actor(script=three_searches, limits=Limits(max_seconds=50.0))
    actor.make_env = lambda task: ToolEnv(task, [CodeTimedOut()], Anything())
    tree, seconds = await actor.rollout(TASK, Independent(1)), asyncio.get_running_loop().time()
    (leaf,) = tree.leaves()
    assert leaf.limit == Limit.SECONDS
    assert 60.0 <= seconds <= 61.0


class Judge:
    """16 slots of 20 s; requests from second 0 to second `away_until` fail after 15 s of
    backoff."""

    def __init__(self, away_until: float = 0.0) -> None:
        self.away_until = away_until
        self.places = asyncio.Semaphore(16)

    async def grade(
        self, task: Task, written: Sequence[Message], calls: Mapping[str, int]
    ) -> Grade:
        if asyncio.get_running_loop().time() < self.away_until:
            with waiting("a pause before the judge is retried"):
                await asyncio.sleep(15.0)
            raise InfraError("connection refused")
        async with admitted(self.places, "a slot at the judge"):
            await asyncio.sleep(20.0)
        return Grade(float(len(written)), True)


BY_ITSELF, BY_A_LIMIT = Limits(max_seconds=60.0), Limits(max_seconds=60.0, max_tool_calls=2)


def judged(limits: Limits, judge: Judge, size: int) -> tuple[TrajectoryTree, int]:
    """A tree whose trajectories make three searches unless a limit ends them at the third, and how
    many calls were made."""
    num_calls = 0

    @tool
    async def search(query: str) -> str:
        """Finds it."""
        nonlocal num_calls
        num_calls += 1
        return "found"

    actor = make_actor(script=three_searches, limits=limits)
    actor.make_env = lambda task: ToolEnv(task, [search], judge)
    return rollout(actor, Independent(size)), num_calls


@pytest.mark.parametrize("limits", [BY_ITSELF, BY_A_LIMIT])
def test_any_ended_trajectory_waits_for_a_slot_at_the_judge(limits: Limits) -> None:
    """80 s for the last 16 of 64, though `finish` has 60."""
    tree, _ = judged(limits, Judge(), 64)
    assert not tree.failures()
    assert {t.leaf.end for t in tree.trajectories()} == (
        {"terminated"} if limits is BY_ITSELF else {"truncated"}
    )


@pytest.mark.parametrize("away_until", [42.0, 102.0])
@pytest.mark.parametrize(("limits", "calls_each"), [(BY_ITSELF, 3), (BY_A_LIMIT, 2)])
def test_a_request_to_an_unreachable_judge_is_the_only_part_retried(
    limits: Limits, calls_each: int, away_until: float
) -> None:
    tree, num_calls = judged(limits, Judge(away_until), 2)
    assert not tree.failures()
    assert num_calls == 2 * calls_each
    assert [t.reward for t in tree.trajectories()] == [calls_each + 1.0] * 2, "each turn once"


class SilentJudge(Judge):
    """Requests fail only after 20 s."""

    async def grade(
        self, task: Task, written: Sequence[Message], calls: Mapping[str, int]
    ) -> Grade:
        if asyncio.get_running_loop().time() < self.away_until:
            await asyncio.sleep(20.0)
            raise InfraError("no answer in time")
        return await super().grade(task, written, calls)


def test_no_deadline_truncates_an_ended_trajectory_during_grading() -> None:
    """10 s for a trajectory, of which the judge needs 20, and is silent for 102."""
    tree, num_calls = judged(replace(BY_ITSELF, max_seconds=10.0), SilentJudge(102.0), 2)
    assert [leaf.end for leaf in tree.leaves()] == ["terminated"] * 2
    assert num_calls == 6


class NeverDone:
    async def grade(self, *_: Any) -> Grade:
        await asyncio.Event().wait()
        raise AssertionError


@on_virtual_clock
async def test_a_hanging_grader_is_awaited_as_long_as_an_unreachable_one() -> None:
    """The step, then the grading after its deadline: each for `outage_s`, and the last attempt."""
    limits = Limits(max_seconds=10.0, max_failures=0, max_tree_seconds=9999.0)
    actor = make_actor(script=lambda *_: "<answer>3</answer>", limits=limits)
    actor.make_env = lambda task: ToolEnv(task, [], NeverDone())
    tree, seconds = await actor.rollout(TASK, Independent(1)), asyncio.get_running_loop().time()
    (leaf,) = tree.failures()
    assert "env.finish took over" in str(leaf.error)
    assert 600.0 < seconds < 800.0


@pytest.mark.parametrize("limits", [BY_ITSELF, BY_A_LIMIT])
def test_a_judge_that_stays_unreachable_leads_to_a_fresh_root(limits: Limits) -> None:
    """Its failure is a grader's, so that an evaluation can be graded again."""
    tree, _ = judged(replace(limits, max_failures=1), Judge(1e6), 1)
    assert [leaf.branch for leaf in tree.failures()] == ["0", "1"]
    for leaf in tree.failures():
        assert str(leaf.error).startswith("GraderError: ")
        assert str(leaf.error).endswith(": connection refused")


class SlowToFinish(CountingEnv):
    """Cannot grade a truncated trajectory before second `until`: its infrastructure refuses, or
    does not reply."""

    hangs = False
    until = 120.0

    async def finish(self, reason: Limit, action: Message | None) -> Any:
        if asyncio.get_running_loop().time() < self.until:
            if self.hangs:
                await asyncio.Event().wait()
            raise InfraError("connection refused")
        return await super().finish(reason, action)


@pytest.mark.parametrize("hangs", [False, True])
def test_grading_of_a_truncated_trajectory_is_retried_through_an_outage(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlowToFinish, "hangs", hangs)
    actor = make_actor(limits=Limits(max_tool_calls=1), make_env=SlowToFinish)
    tree = rollout(actor, Independent(2))
    assert not tree.failures()
    assert [t.reward for t in tree.trajectories()] == [-1.0, -1.0]
