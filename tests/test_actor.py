"""The actor grows trees: forks, budgets, failures, and every env closed exactly once."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.base.errors import DataError, EngineDeadError, EngineError
from agentenv.base.tree import Trajectory, TrajectoryTree
from agentenv.base.types import Chunk, Completion, Limit, Limits, SamplingParams, Task
from agentenv.contract.plan import Independent, RolloutPlan
from agentenv.engines.scripted import Script, ScriptedConfig, ScriptedEngine
from agentenv.learners.algorithms.aepo import AEPO
from agentenv.learners.algorithms.arpo import ARPO
from agentenv.reference.algorithms import ReleasedAEPO, ReleasedARPO
from agentenv.rollout.actor import Actor
from agentenv.text.renderer import TagRenderer
from tests.support.toy import CharTokenizer, CountingEnv
from tests.support.virtual_clock import on_virtual_clock, run_virtual

TASK = Task("t", "toy", "how many?", ("2",))


pytestmark = pytest.mark.usefixtures("no_env_left_open")


def two_searches(prompt: str, rng: Random) -> str:
    if prompt.count("<result>") < 2:
        return f"<think>{rng.random()}</think><search>q{rng.randrange(9)}</search>"
    return "<think>done</think><answer>2</answer>"


def make_actor(
    script: Script = two_searches,
    limits: Limits | None = None,
    engine: dict[str, Any] | None = None,
    make_env: Callable[[Task], Any] | None = None,
    **env: Any,
) -> Actor:
    tokenizer = CharTokenizer()
    return Actor(
        ScriptedEngine(
            ScriptedConfig(max_model_len=9000, **(engine or {})), tokenizer, script=script
        ),
        TagRenderer(tokenizer),
        make_env or (lambda task: CountingEnv(task, **env)),
        limits or Limits(),
        SamplingParams(max_tokens=1),
        seed=7,
    )


def rollout(actor: Actor, plan: RolloutPlan, index: int = 0) -> TrajectoryTree:
    return run_virtual(actor.rollout(TASK, plan, index=index))


@dataclass(frozen=True)
class AlwaysFork(Independent):
    """Fork once at every tool result while the group has room."""

    fork_window: int = 4

    def on_start(self, tree: TrajectoryTree) -> int:
        return 1

    def on_fork_point(self, tree: TrajectoryTree, *_: Any) -> int:
        return min(1, self.group_size - tree.num_started)

    def on_leaf_end(self, tree: TrajectoryTree, leaf: Any) -> int:
        return 0 if tree.num_live else self.group_size - tree.num_started


def test_a_trajectory_has_exactly_the_tokens_of_the_engine() -> None:
    tree = rollout(make_actor(), Independent(1))
    (trajectory,) = tree.trajectories()
    text = CharTokenizer().decode(trajectory.token_ids)
    assert text.startswith("how many?\n<think>")
    assert " <result>\n1:q" in text
    assert text.endswith("<answer>2</answer><eos>")
    sampled = CharTokenizer().decode(
        [
            token
            for token, mask in zip(trajectory.token_ids, trajectory.loss_mask, strict=True)
            if mask
        ]
    )
    assert "<result>" not in sampled
    assert sampled.count("</search>") == 2
    assert trajectory.leaf.end == "terminated"
    assert trajectory.reward == 2
    assert trajectory.num_tool_calls == 2


def test_forks_start_from_the_node_that_holds_the_tool_result() -> None:
    tree = rollout(make_actor(), AlwaysFork(group_size=4))
    assert len(list(tree.trajectories())) == 4
    assert tree.num_forks == 3
    children: dict[int | None, list[Any]] = {}
    for node in tree.nodes[1:]:
        children.setdefault(node.parent, []).append(node)
    for node in tree.nodes:
        assert len(children.get(node.index, [])) == 1 + (node.num_forks or 0) or node.end
    fork = next(node for node in tree.nodes if "+" in node.branch)
    assert tree.nodes[fork.parent or 0].observation_ids
    first, second = (t for t in list(tree.trajectories())[:2])
    assert first.token_ids != second.token_ids


@pytest.mark.parametrize("speed", [0.0, 50.0])
def test_every_node_is_sampled_from_exactly_the_tokens_of_its_ancestors(speed: float) -> None:
    actor = make_actor(engine={"tokens_per_s": speed})
    prompts = []
    generate = actor.engine.generate

    async def recording(prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        completion = await generate(prompt_ids, *args, **kwargs)
        prompts.append((list(prompt_ids), completion.token_ids))
        return completion

    actor.engine.generate = recording  # type: ignore[method-assign]
    tree = rollout(actor, AlwaysFork(group_size=8))
    seen = [
        (
            [t for above in tree.path(node)[:-1] for t in above.action_ids + above.observation_ids],
            list(node.action_ids),
        )
        for node in tree.nodes[1:]
    ]
    assert sorted(seen) == sorted(prompts)


def test_a_parent_steps_only_after_its_forks_have_their_env() -> None:
    actor = make_actor(engine={"tokens_per_s": 100.0}, latency_s=1.0)
    tree = rollout(actor, AlwaysFork(group_size=6))
    for trajectory in tree.trajectories():
        assert trajectory.reward == 2, "a fork taken after the parent's next step would see 3 calls"


@pytest.mark.parametrize(
    ("limits", "limit"),
    [
        (Limits(max_turn_tokens=10), Limit.TURN_TOKENS),
        (Limits(max_response_tokens=60, max_turn_tokens=60), Limit.RESPONSE_TOKENS),
        (Limits(max_turns=2), Limit.TURNS),
        (Limits(max_tool_calls=1), Limit.TOOL_CALLS),
        (Limits(max_seconds=1.5), Limit.SECONDS),
    ],
)
def test_each_limit_truncates_and_the_env_grades_the_truncated_trajectory(
    limits: Limits, limit: Limit
) -> None:
    actor = make_actor(limits=limits, engine={"latency_s": 1.0})
    tree = rollout(actor, Independent(2))
    for trajectory in tree.trajectories():
        assert trajectory.leaf.end == "truncated"
        assert trajectory.leaf.limit == limit
        assert trajectory.reward == -1
        num_response = len(trajectory.token_ids) - len(tree.root.observation_ids)
        assert num_response <= limits.max_response_tokens


def test_a_fork_has_the_remaining_seconds_of_its_parent() -> None:
    """Three turns of 1 s each, so a fork with a separate budget would end by itself."""
    actor = make_actor(limits=Limits(max_seconds=2.5), engine={"latency_s": 1.0})
    tree = rollout(actor, AlwaysFork(group_size=2))
    assert tree.num_forks == 1
    assert [leaf.limit for leaf in tree.leaves()] == [Limit.SECONDS] * 2


def test_a_prompt_over_its_limit_raises_an_error_that_names_the_task() -> None:
    with pytest.raises(ExceptionGroup) as raised:
        rollout(make_actor(limits=Limits(max_prompt_tokens=3)), Independent(1))
    assert raised.group_contains(DataError, match="prompt has 10")


def test_a_dead_engine_ends_the_rollout_with_its_reason() -> None:
    actor = make_actor(engine={"latency_s": 5.0})

    async def scenario() -> None:
        running = asyncio.ensure_future(actor.rollout(TASK, Independent(2)))
        await asyncio.sleep(1)
        await actor.engine.close()
        await running

    with pytest.raises(ExceptionGroup) as raised:
        run_virtual(scenario())
    assert raised.group_contains(EngineDeadError, match="closed")


class FailingAfterTheWindow(ScriptedEngine):
    """Fails in a turn that may fork, the second one, as soon as the fork has begun."""

    num_asked = 0

    async def generate(self, *rest: Any, **keys: Any) -> Completion:
        self.num_asked += 1
        on_tokens = keys.get("on_tokens")
        if on_tokens is None or self.num_asked != 2:
            return await super().generate(*rest, **keys)
        on_tokens(Chunk([1] * 4, [0.0] * 4, [0.0] * 4))
        await asyncio.sleep(0.1)
        raise EngineError("gone")


class SlowToCopy(CountingEnv):
    async def fork(self) -> CountingEnv:
        await asyncio.sleep(1.0)
        assert not self.closed, "closed while it was copied"
        return await super().fork()


def test_the_env_of_a_failed_branch_stays_open_until_its_fork_has_a_copy() -> None:
    actor = make_actor(limits=Limits(max_failures=0, max_turn_retries=0), make_env=SlowToCopy)
    config = ScriptedConfig(max_model_len=9000)
    actor.engine = FailingAfterTheWindow(config, CharTokenizer(), script=two_searches)
    tree = rollout(actor, AlwaysFork(group_size=2))
    ends = {leaf.branch: leaf.end for leaf in tree.leaves()}
    assert ends == {"0": "failed", "0.1+1": "terminated"}


class Caching(ScriptedEngine):
    """Reports half of each prompt except the first as cached."""

    async def generate(self, prompt_ids: Any, *rest: Any, **keys: Any) -> Completion:
        done = await super().generate(prompt_ids, *rest, **keys)
        text = CharTokenizer().decode(prompt_ids)
        done.num_cached_tokens = len(prompt_ids) // 2 if "<result>" in text else 0
        return done


def test_prefix_hits_of_turns_and_forks_are_counted_separately() -> None:
    actor = make_actor()
    actor.engine = Caching(ScriptedConfig(max_model_len=9000), CharTokenizer(), script=two_searches)
    rollout(actor, AlwaysFork(group_size=4))
    hits = actor.prefixes.take()
    assert hits == pytest.approx({"prefix/turn_hits": 0.5, "prefix/fork_hits": 0.5}, abs=0.01)
    assert actor.prefixes.take() == {}


class Updated(Caching):
    """Gets new weights after each turn."""

    async def generate(self, prompt_ids: Any, *rest: Any, **keys: Any) -> Completion:
        done = await super().generate(prompt_ids, *rest, **keys)
        done.num_cached_tokens = 0
        await self.load_weights(Path(), self.policy_version + 1)
        return done


def test_a_prefix_dropped_for_new_weights_is_not_a_cache_miss() -> None:
    actor = make_actor()
    actor.engine = Updated(ScriptedConfig(max_model_len=9000), CharTokenizer(), script=two_searches)
    tree = rollout(actor, Independent(1))
    assert len(tree.nodes) > 2
    assert actor.prefixes.take() == {}


def test_an_env_that_cannot_fork_gets_roots_only() -> None:
    tree = rollout(make_actor(fork_mode="none"), AlwaysFork(group_size=3))
    assert tree.num_forks == 0
    assert len(list(tree.trajectories())) == 3
    assert tree.num_roots == 3


def test_an_env_that_cannot_be_copied_is_replayed_in_a_fresh_one() -> None:
    tree = rollout(make_actor(faults={"fork": 1.0}), AlwaysFork(group_size=3))
    calm = rollout(make_actor(), AlwaysFork(group_size=3))
    assert tree.num_retaken == calm.num_started - 1 == 2
    assert not tree.failures()

    assert sorted(map(content_of, tree.trajectories())) == sorted(
        map(content_of, calm.trajectories())
    )


def content_of(trajectory: Trajectory) -> list[Any]:
    """The branches of a trajectory, and the tokens sampled there."""
    return [(node.branch, list(node.action_ids), node.reward) for node in trajectory.path]


PLANS: list[RolloutPlan] = [
    Independent(5),
    AlwaysFork(group_size=5),
    ARPO(group_size=6, entropy_window=8).plan(256),
    ARPO(group_size=6, entropy_window=8, fork_criterion="relative").plan(256),
    AEPO(group_size=6, entropy_window=8).plan(256),
    ReleasedARPO(group_size=6, beam_size=3).plan(256),
    ReleasedAEPO(group_size=6).plan(256),
]


@given(
    plan=st.sampled_from(PLANS),
    seed=st.integers(0, 10**6),
    fault=st.sampled_from([0.0, 0.1, 0.4]),
    latency=st.sampled_from([0.0, 0.5]),
)
def test_any_plan_under_any_faults_fills_its_group_or_reports_failures(
    plan: RolloutPlan, seed: int, fault: float, latency: float
) -> None:
    rng = Random(seed)
    actor = make_actor(
        limits=Limits(max_seconds=1e6),
        engine={"tokens_per_s": 100.0},
        latency_s=latency,
        faults={"reset": fault, "step": fault, "fork": fault},
        rng=rng,
    )
    actor.seed = seed
    tree = rollout(actor, plan)
    done, failed = len(list(tree.trajectories())), len(tree.failures())
    assert done <= plan.group_size
    assert done == plan.group_size or tree.num_retries == actor.limits.max_failures
    assert done + failed == len(tree.leaves())
    assert tree.num_live == 0
    assert actor.envs.count == 0
    for trajectory in tree.trajectories():
        assert len(trajectory.token_ids) == len(trajectory.loss_mask)


@pytest.mark.parametrize("fault", [0.0, 0.4])
@pytest.mark.parametrize("plan", PLANS[1:4:2])
def test_tokens_are_freed_with_the_last_reference_to_their_tree(
    plan: RolloutPlan, fault: float
) -> None:
    """Objects that only the collector finds stay for minutes."""
    faults = {"reset": fault, "step": fault, "fork": fault}
    actor = make_actor(
        limits=Limits(max_seconds=1e6, max_failed_share=1.0), faults=faults, rng=Random(1)
    )

    async def one(index: int) -> Any:
        tree = await actor.rollout(TASK, plan, index=index)
        assert fault == 0 or tree.num_retaken
        return weakref.ref(tree.root.observation_ids)

    async def main() -> list[object]:
        found = [await one(index) for index in range(8)]
        return [seen() for seen in found]

    gc.collect()
    gc.disable()
    try:
        assert run_virtual(main()) == [None] * 8
    finally:
        gc.enable()


@given(plan=st.sampled_from(PLANS), when=st.floats(0, 6))
@on_virtual_clock
async def test_cancelling_at_any_moment_closes_every_env(plan: RolloutPlan, when: float) -> None:
    actor = make_actor(engine={"tokens_per_s": 40.0}, latency_s=0.3)
    running = asyncio.ensure_future(actor.rollout(TASK, plan))
    await asyncio.sleep(when)
    running.cancel()
    await asyncio.wait({running})
    assert CountingEnv.num_open == 0
    assert len(asyncio.all_tasks()) == 1
