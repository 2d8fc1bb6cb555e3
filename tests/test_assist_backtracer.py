"""The backtracer: when a turn is repeated, from which point, and what is abandoned."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from agentenv.base.errors import EngineError, EnvError
from agentenv.base.types import Limit, Limits, Task
from agentenv.contract.env import Env
from agentenv.contract.tool_env import ToolEnv
from agentenv.envs.code_interpreter import CodeInterpreterEnv
from tests.support.assisted import ANSWER, Rollout, Turns, look, search_env
from tests.support.openai_endpoint import ScriptedEndpoint, reply
from tests.support.toy import CountingEnv
from tests.support.virtual_clock import run_virtual

pytestmark = pytest.mark.usefixtures("services")


@pytest.fixture
def server() -> Iterator[ScriptedEndpoint]:
    with ScriptedEndpoint(lambda body, number: reply(f"Summary {number}.", "stop", (50, 4))) as one:
        yield one


def python_env(task: Task) -> CodeInterpreterEnv:
    return CodeInterpreterEnv(task, python={"preload": []})


def python(code: str) -> str:
    return f"<think>try</think><python>{code}</python>"


async def test_the_backtracer_rewinds_the_turn_and_the_env() -> None:
    turns = Turns(python("x = 1"), python("x = 99\n1/0"), python("print(x)"), ANSWER)
    rollout = await Rollout(turns, python_env, backtracer={}).grow()
    assert " <result>\n1\n</result>" in rollout.text, "the env is as it was"
    assert "99" not in rollout.text
    prompts, samplings = rollout.engine.prompts, rollout.engine.samplings
    assert prompts[2] == prompts[1], "the same context again"
    assert samplings[2].seed != samplings[1].seed
    gone, again = rollout.tree.nodes[2], rollout.tree.nodes[3]
    assert gone.parent == again.parent == 1
    assert (gone.end, "ZeroDivisionError" in gone.info["abandoned"][0]) == (None, True)
    assert gone.observation_ids, "kept for those who look"
    assert (rollout.leaf.end, len(rollout.tree.leaves())) == ("terminated", 1)
    assert [record["ok"] for record in rollout.records] == [True, True]
    assert rollout.counts == {
        "backtracer_uses": 1,
        "backtracer_ok": 1,
        "abandoned_calls": 1,
        "abandoned_tokens": len(gone.action_ids),
    }


async def test_an_error_of_the_first_turn_and_of_search_counts_too() -> None:
    rollout = await Rollout(
        Turns(look("bad"), look("good"), ANSWER), search_env, backtracer={}
    ).grow()
    assert rollout.tree.nodes[2].parent == 0
    assert "found good" in rollout.text
    assert "bad" not in rollout.text


async def test_after_max_uses_the_policy_reads_the_error() -> None:
    turns = Turns(look("bad1"), look("bad2"), look("bad3"), ANSWER)
    rollout = await Rollout(turns, search_env, backtracer={"max_uses": 2}).grow()
    assert "not know bad3" in rollout.text
    assert rollout.counts["backtracer_uses"] == 2
    assert rollout.counts["backtracer_ok"] == 0


async def test_a_greedy_policy_is_sampled_for_the_repeated_turn() -> None:
    turns = Turns(look("bad"), look("good"), look("more"), ANSWER)
    rollout = await Rollout(turns, search_env, temperature=0.0, backtracer={}).grow()
    assert [one.temperature for one in rollout.engine.samplings] == [0, 0.6, 0, 0]


async def test_beyond_the_limit_of_calls_the_policy_is_notified_and_not_rewound() -> None:
    def limited(task: Task) -> ToolEnv:
        env = search_env(task)
        env.configure(max_tool_calls=1, on_limit="result")
        return env

    turns = Turns(look("good"), look("more"), look("again"), ANSWER)
    limits = Limits(on_limit="result", max_tool_calls=1)
    rollout = await Rollout(turns, limited, limits, backtracer={}).grow()
    assert rollout.text.count("No tool can be called any more") == 2
    assert "backtracer_uses" not in rollout.counts, "that was no error"
    assert {one.stop for one in rollout.engine.samplings} == {("</search>",)}


async def test_a_rewound_call_does_not_count_toward_the_limit() -> None:
    turns = Turns(look("bad"), look("good"), ANSWER)
    rollout = await Rollout(turns, search_env, Limits(max_tool_calls=1), backtracer={}).grow()
    assert (rollout.leaf.end, rollout.leaf.limit) == ("terminated", None)


async def test_the_backtracer_acts_only_after_the_debugger(server: ScriptedEndpoint) -> None:
    """Two errors: the first is corrected, the second rewound; the third is read, since a rewind
    does not reset the uses of the debugger."""
    server.script = lambda body, number: reply("```\nprint(5)\n```", "stop", (30, 3))
    turns = Turns(python("a"), python("b"), python("c"), ANSWER)
    helpers = {"debugger": {"url": server.url}, "backtracer": {}}
    rollout = await Rollout(turns, python_env, **helpers).grow()
    assert " <result>\n5\n</result>" in rollout.text
    assert "name 'b'" not in rollout.text
    assert "name 'c' is" in rollout.text
    assert len(server.requests) == 1
    expected = {"debugger_uses": 1, "debugger_ok": 1, "debugger_tokens": 33, "backtracer_uses": 1}
    assert expected.items() <= rollout.counts.items()


async def test_a_debugger_with_remaining_uses_keeps_the_turn(server: ScriptedEndpoint) -> None:
    server.script = lambda body, number: reply("no idea", "stop", (30, 3))
    helpers = {"debugger": {"url": server.url, "max_uses": 2}, "backtracer": {}}
    turns = Turns(python("a"), python("b"), python("c"), ANSWER)
    rollout = await Rollout(turns, python_env, **helpers).grow()
    assert "name 'a' is" in rollout.text, "one use of the debugger was left"
    assert "name 'b'" not in rollout.text
    assert "name 'c' is" in rollout.text
    assert len(server.requests) == 2
    assert rollout.counts["debugger_tokens"] == 66


class Copied(CountingEnv):
    """Counts its copies; every call with "bad" fails, and the copy of one with "stuck"."""

    num_copies = 0

    async def fork(self) -> CountingEnv:
        Copied.num_copies += 1
        if any("stuck" in call for call in self.calls):
            raise EnvError("a cell says something else than before")
        other = Copied(self.task, self.latency_s, self.faults, self.fork_mode, Random(1))
        other.calls = list(self.calls)
        return other

    async def step(self, action: Any) -> Any:
        outcome = await super().step(action)
        for record in outcome[4].get("tool_calls", ()):
            record["error"] = "bad" if "bad" in action.content else None
        return outcome


@pytest.fixture
def copied() -> Iterator[Callable[[Task], Env]]:
    Copied.num_copies = CountingEnv.num_open = 0
    yield Copied
    assert CountingEnv.num_open == 0


async def test_the_env_is_copied_only_while_a_rewind_is_possible(
    copied: Callable[[Task], Env], server: ScriptedEndpoint
) -> None:
    script = [look("a"), look("b"), look("c"), ANSWER]
    await Rollout(Turns(*script), copied, refiner={"url": server.url}).grow()
    assert Copied.num_copies == 0, "no backtracer"
    await Rollout(Turns(*script), copied, backtracer={}).grow()
    assert Copied.num_copies == 3, "one a call, none for the answer"
    Copied.num_copies = 0
    await Rollout(Turns(look("a"), look("bad"), *script), copied, backtracer={}).grow()
    assert Copied.num_copies == 2, "none once it is used up"


async def test_an_env_that_cannot_be_copied_continues_without_a_rewind(
    copied: Callable[[Task], Env],
) -> None:
    turns = Turns(look("stuck"), look("bad"), ANSWER)
    rollout = await Rollout(turns, copied, backtracer={}).grow()
    assert "2:bad" in rollout.text
    assert rollout.counts == {"backtracer_refused": 1}


def test_every_env_is_closed_after_any_failure(copied: Callable[[Task], Env]) -> None:
    """Errors, refused copies, failing engines, time-outs: one leaf, and no env left open."""
    ends = set()
    for seed in range(60):
        rng = Random(seed)

        def script(prompt: str, own: Random, rng: Random = rng) -> str:
            if rng.random() < 0.05:
                raise EngineError("out of memory")
            return ANSWER if rng.random() < 0.2 else look(rng.choice(["bad", "stuck", "c"]) * 9)

        def faulty(task: Task, rng: Random = rng) -> Env:
            faults = {"step": 0.05, "fork": 0.1, "finish": 0.1}
            return Copied(task, latency_s=1.0, faults=faults, rng=rng)

        limits = Limits(max_failures=0, max_seconds=rng.choice([5.0, 600.0]), max_turns=8)
        rollout = Rollout(script, faulty, limits, backtracer={"max_uses": 3})
        run_virtual(rollout.grow())
        assert CountingEnv.num_open == 0
        ends.add(rollout.leaf.limit or rollout.leaf.end)
        for node in rollout.tree.nodes:
            assert (node.end is None) or "abandoned" not in node.info
    assert {"terminated", "failed", Limit.SECONDS, Limit.TURNS} <= ends


async def test_a_cancelled_rollout_closes_its_copies(copied: Callable[[Task], Env]) -> None:
    rollout = Rollout(lambda prompt, rng: look("a"), copied, backtracer={})
    growing = asyncio.ensure_future(rollout.grow())
    while Copied.num_copies < 3:  # noqa: ASYNC110 - a count sets no event
        await asyncio.sleep(0)
    growing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await growing
