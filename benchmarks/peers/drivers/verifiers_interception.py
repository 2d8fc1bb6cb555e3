"""verifiers' interception server, with the client that tokenizes on this side, as a trainer asks.

Runs: the server, the dialect, the graph of messages, Qwen3's renderer with its bridge from turn to
turn in threads, reading the engine's JSON, parsing calls. Not run: HTTP to the engine, in whose
place the OpenAI client is a stub.
"""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import verifiers.v1 as vf
from captures import measured, write_line
from renderers import Qwen3RendererConfig
from transformers import AutoTokenizer
from verifiers.v1.clients import ModelContext, train
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.trace import AgentInfo, Trace, TraceTask

CALL = '\n<tool_call>\n{"name": "search", "arguments": {"query": "it"}}\n</tool_call><|im_end|>'


class Engine:
    """In the place of the OpenAI client. The answer is written beforehand."""

    base_url = "http://engine/v1"

    def __init__(self, work: dict[str, Any]) -> None:
        self._latency_s = work["latency_s"]
        tokenizer = AutoTokenizer.from_pretrained(work["tokenizer"])
        ids = tokenizer.encode(work["text"] + CALL, add_special_tokens=False)
        entries = [{"token": f"token_id:{one}", "logprob": -0.5} for one in ids]
        choice = {"token_ids": ids, "logprobs": {"content": entries}, "finish_reason": "stop"}
        self._answer = json.dumps({"request_id": "r", "choices": [choice]}).encode()

    async def get(self, path: str, **_: Any) -> dict[str, Any]:
        return {"data": [{"id": "policy", "max_model_len": 8192}]}

    async def post(self, path: str, **_: Any) -> Any:
        await asyncio.sleep(self._latency_s)
        return SimpleNamespace(content=self._answer)

    async def close(self) -> None:
        """There is nothing to close."""


def session(number: int, config: TrainClientConfig) -> RolloutSession:
    trace = Trace(
        task=TraceTask(type="Task", data=vf.TaskData(idx=number, prompt="?")),
        agent=AgentInfo(config=vf.AgentConfig()),
        state=vf.State(),
    )
    return RolloutSession(ctx=ModelContext(model="policy", client=config), trace=trace)


async def capture(work: dict[str, Any]) -> None:
    engine = Engine(work)
    train.build_async_openai = lambda config: engine
    config = TrainClientConfig(
        base_url=engine.base_url,
        renderer=Qwen3RendererConfig(enable_thinking=False),
        renderer_model_name=work["tokenizer"],
    )
    server = InterceptionServer()
    await server.start()
    sessions = [session(number, config) for number in range(work["programs"])]
    keys = [server.register(one)[0] for one in sessions]
    us = await asyncio.to_thread(measured, f"{server.base_url}/v1", keys)
    write_line({"us": us, "turns": sum(one.trace.num_turns for one in sessions)})
    await server.stop()


def main(work: dict[str, Any]) -> None:
    asyncio.run(capture(work))
