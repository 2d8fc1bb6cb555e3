"""The sampling parameters of the configuration reach the engine, turn by turn."""

from __future__ import annotations

from typing import Any

from agentenv.assembly.keys.rl import Sampling
from agentenv.base.types import Completion, SamplingParams
from agentenv.contract.plan import Independent
from tests.test_actor import make_actor, rollout


def test_stop_strings_of_the_user_are_added_to_those_of_the_renderer() -> None:
    actor = make_actor()
    actor.sampling = Sampling(
        stop=["</think>"], min_p=0.1, repetition_penalty=1.2, top_k=7, temperature=0.5
    ).params()
    asked: list[SamplingParams] = []
    generate = actor.engine.generate

    async def record(prompt_ids: Any, sampling: SamplingParams, **rest: Any) -> Completion:
        asked.append(sampling)
        return await generate(prompt_ids, sampling, **rest)

    actor.engine.generate = record  # type: ignore[method-assign]
    tree = rollout(actor, Independent(1))
    assert {"</search>", "</think>"} <= set(asked[0].stop)
    assert (asked[0].min_p, asked[0].repetition_penalty, asked[0].top_k) == (0.1, 1.2, 7)
    first = actor.renderer.decode(tree.nodes[1].action_ids)  # type: ignore[attr-defined]
    assert first.endswith("</think>")
    assert first.count("</think>") == 1
