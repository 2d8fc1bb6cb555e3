"""SkyRL-gym's search environment in the loop that its trainer runs around environments.

Runs: the environment (parsing the call, its tool group, chat history, grading by exact match), each
`step` in a thread as SkyRL's generator calls it, of which there are as many as rollouts; what the
package lacks is written here and as short as it can be: encoding of the prompt once and of each
observation, token ids with mask and log-probs. Not run: HTTP, a trainer.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import skyrl_gym
from skyrl_gym.envs.search.env import SearchEnvConfig
from skyrl_gym.tools.core import ToolGroup, tool
from tokenizers import Tokenizer
from work import rollouts

if TYPE_CHECKING:
    from benchmarks.peers.work import Work


class LookUp(ToolGroup):  # type: ignore[misc]  # of a package that mypy does not read
    """In place of the group that asks a server."""

    def __init__(self, work: Work) -> None:
        self._work = work
        super().__init__("SearchToolGroup")

    @tool  # type: ignore[untyped-decorator]
    def search(self, query: str) -> str:
        return self._work.result_blocking()


async def run(work: Work) -> None:
    tokenizer = Tokenizer.from_file(f"{work.tokenizer}/tokenizer.json")
    loop = asyncio.get_running_loop()
    threads = ThreadPoolExecutor(max_workers=work.at_once)
    tools = LookUp(work)
    extras = {"reward_spec": {"ground_truth": {"target": ["it"]}}, "max_turns": work.num_calls + 1}

    def encode(messages: list[dict[str, str]]) -> list[int]:
        text = "".join(
            f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages
        )
        ids: list[int] = tokenizer.encode(
            f"{text}<|im_start|>assistant\n", add_special_tokens=False
        ).ids
        return ids

    async def one(number: int) -> Any:
        env = skyrl_gym.make("search", env_config=SearchEnvConfig(), extras=extras)
        env.init_tool_groups([tools])
        prompt = [{"role": "user", "content": work.question(number)}]
        messages, _ = await loop.run_in_executor(threads, env.init, prompt)
        prompt_ids = encode(messages)
        ids: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        done, num_results, reward = False, 0, 0.0
        while not done:
            token_ids, probs = await work.turn("tags", num_results)
            ids += token_ids
            mask += [1] * len(token_ids)
            logprobs += probs
            text = work.text("tags", num_results)
            output = await loop.run_in_executor(threads, partial(env.step, text))
            done, reward = output["done"], output["reward"]
            if not done:
                observation = encode(output["observations"])
                ids += observation
                mask += [0] * len(observation)
                logprobs += [0.0] * len(observation)
                num_results += 1
        env.close()
        return prompt_ids, ids, mask, logprobs, reward

    await rollouts(work, one)
    threads.shutdown()
