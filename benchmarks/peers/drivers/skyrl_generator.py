"""SkyRL's own generator around SkyRL-gym's search environment.

Runs: `SkyRLGymGenerator.agent_loop` with the environment in its threads (as many as rollouts),
encoding of the prompt and of each observation by the chat template, masks, log-probs, rewards by
token. Not run: HTTP, in whose place the client of engines is a stub; batches, a trainer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import skyrl_gym
from skyrl.train.config import GeneratorConfig, SkyRLGymConfig
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl_env import LookUp
from skyrl_gym.envs.search.env import SearchEnv, SearchEnvConfig
from transformers import AutoTokenizer
from work import rollouts

if TYPE_CHECKING:
    from benchmarks.peers.work import Work

_tools: list[LookUp] = []


class LookUpEnv(SearchEnv):  # type: ignore[misc]  # of a package that mypy does not read
    """With the tool of the work in place of the one that asks a server."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__(SearchEnvConfig(), extras)
        self.init_tool_groups(_tools)


class Engine:
    """What the generator asks of an InferenceEngineInterface; the work answers."""

    model_name = "policy"
    weight_version = "0"

    def __init__(self, work: Work, call_end: int) -> None:
        self._work, self._call_end = work, call_end

    async def generate(self, input_batch: Any, model: str | None = None) -> dict[str, Any]:
        (prompt_ids,) = input_batch["prompt_token_ids"]
        num_results = prompt_ids.count(self._call_end)
        token_ids, logprobs = await self._work.turn("tags", num_results)
        return {
            "responses": [self._work.text("tags", num_results)],
            "response_ids": [token_ids],
            "response_logprobs": [logprobs],
            "stop_reasons": ["stop"],
        }

    async def finish_session(self, session_id: str) -> None:
        """Does nothing."""


async def run(work: Work) -> None:
    tokenizer = AutoTokenizer.from_pretrained(work.tokenizer)
    _tools[:] = [LookUp(work)]
    if "peers" not in skyrl_gym.envs.registration.registry:
        skyrl_gym.register(id="peers", entry_point=LookUpEnv)
    generator = SkyRLGymGenerator(
        GeneratorConfig(max_turns=work.num_calls + 1, max_input_length=4096),
        SkyRLGymConfig(max_env_workers=work.at_once),
        Engine(work, tokenizer.convert_tokens_to_ids("</search>")),
        tokenizer,
    )

    async def one(number: int) -> None:
        await generator.agent_loop(
            [{"role": "user", "content": work.question(number)}],
            "peers",
            {"reward_spec": {"ground_truth": {"target": ["it"]}}},
            max_tokens=256,
            max_input_length=4096,
        )

    await rollouts(work, one)
