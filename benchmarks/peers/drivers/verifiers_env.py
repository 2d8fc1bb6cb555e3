"""A ToolEnv of verifiers, asked by the client that tokenizes on this side, as a trainer asks it.

Runs: `run_rollout` of the environment with its rubric, messages and state, Qwen3's renderer with
its bridge from turn to turn in threads, reading the engine's answer from JSON, parsing calls. Not
run: HTTP, in whose place the OpenAI client is a stub; grouping, advantages, storing.
"""

from __future__ import annotations

import json
from itertools import cycle
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import verifiers.legacy as vf
from datasets import Dataset
from renderers import Qwen3RendererConfig
from verifiers.legacy.clients.renderer_client import RendererClient
from verifiers.legacy.types import ClientConfig
from work import rollouts

if TYPE_CHECKING:
    from benchmarks.peers.work import Work


def _body(token_ids: list[int], logprobs: list[float]) -> bytes:
    """What vLLM answers to a request for tokens."""
    content = [
        {"token": f"token_id:{token}", "logprob": logprob}
        for token, logprob in zip(token_ids, logprobs, strict=True)
    ]
    choice = {"token_ids": token_ids, "logprobs": {"content": content}, "finish_reason": "stop"}
    return json.dumps({"choices": [choice]}).encode()


class Engine:
    """What the client takes for an AsyncOpenAI."""

    base_url = "http://engine/v1"

    def __init__(self, work: Work, results_end: int) -> None:
        self._work, self._results_end = work, results_end
        # Written beforehand: that is the work of a server.
        calls, answers = (
            [_body(work.task["forms"]["json"][name], row) for row in work.task["logprobs"]]
            for name in ("call", "answer")
        )
        self._calls, self._answers = cycle(calls), cycle(answers)

    async def get(self, path: str, **options: Any) -> dict[str, Any]:
        return {"data": [{"id": "policy", "max_model_len": 4096}]}

    async def post(self, path: str, *, body: dict[str, Any], **options: Any) -> Any:
        num_results = body["token_ids"].count(self._results_end)
        await self._work.turn("json", num_results)
        bodies = self._calls if num_results < self._work.num_calls else self._answers
        return SimpleNamespace(content=next(bodies))

    async def close(self) -> None:
        """There is nothing to close."""


class Client(RendererClient):  # type: ignore[misc]  # of a package that mypy does not read
    """The client, over the stub."""

    engine: Engine

    def setup_client(self, config: ClientConfig) -> Engine:
        return self.engine


async def right(completion: Any, answer: str, **others: Any) -> float:
    return float(answer in str(completion[-1].content))


async def run(work: Work) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(work.tokenizer)

    async def search(query: str) -> str:
        """Search.

        Args:
            query: What is looked for.
        """
        return await work.result()

    rows = [{"question": text, "answer": "it"} for text in work.task["questions"]]
    env = vf.ToolEnv(
        tools=[search],
        dataset=Dataset.from_list(rows),
        rubric=vf.Rubric(funcs=[right]),
        max_turns=work.num_calls + 2,
    )
    inputs = list(env.get_dataset())
    end = tokenizer.convert_tokens_to_ids("</tool_response>")
    Client.engine = Engine(work, end)
    client = Client(
        ClientConfig(
            client_type="renderer",
            renderer_config=Qwen3RendererConfig(enable_thinking=False),
            renderer_model_name=work.tokenizer,
        )
    )

    async def one(number: int) -> None:
        done = await env.run_rollout(
            inputs[number % len(inputs)],
            client,
            "policy",
            {"temperature": 1.0, "max_tokens": 256},
            state_columns=["trajectory"],
        )
        if done.get("error"):
            raise RuntimeError(f"a rollout of verifiers failed: {done['error']}")

    await rollouts(work, one)
