"""OpenEnv's capture proxy under its own server, as a trainer runs it in its process.

Runs: the server, the dialect, the client of the engine with the reading of its JSON, the graph of
turns. Not run: HTTP to the engine, in whose place the connection is a stub. OpenEnv tokenizes
nothing: the engine returns the ids of each prompt.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
from captures import measured, write_line
from openenv.core.harness.capture import CaptureServer, InferenceClient


class Engine:
    """In the place of the HTTP client. The answers are written beforehand."""

    def __init__(self, work: dict[str, Any]) -> None:
        self._latency_s = work["latency_s"]
        step = work["turn"] + work["result"]
        first = work["context"] - work["calls"] // 2 * step
        self._answers = [
            _answer(number, first + number * step, work) for number in range(work["calls"])
        ]

    async def post(self, path: str, *, json: dict[str, Any], **_: Any) -> httpx.Response:
        await asyncio.sleep(self._latency_s)
        number = sum(message["role"] == "assistant" for message in json["messages"])
        return httpx.Response(
            200, content=self._answers[number], headers={"Content-Type": "application/json"}
        )


def _answer(number: int, num_context: int, work: dict[str, Any]) -> bytes:
    ids = list(range(1000, 1000 + num_context + work["turn"]))
    sampled = ids[num_context:]
    arguments = json.dumps({"query": "it"})
    call = {"name": "search", "arguments": arguments}
    message = {
        "role": "assistant",
        "content": work["text"],
        "tool_calls": [{"id": f"call_{number}", "type": "function", "function": call}],
    }
    entries = [{"token": f"token_id:{one}", "logprob": -0.5, "top_logprobs": []} for one in sampled]
    choice = {
        "index": 0,
        "finish_reason": "tool_calls",
        "message": message,
        "token_ids": sampled,
        "logprobs": {"content": entries},
    }
    answer = {
        "id": f"answer-{number}",
        "object": "chat.completion",
        "created": 1,
        "model": "policy",
        "prompt_token_ids": ids[:num_context],
        "choices": [choice],
        "usage": {"prompt_tokens": num_context, "completion_tokens": len(sampled)},
    }
    return json.dumps(answer).encode()


def main(work: dict[str, Any]) -> None:
    engine = Engine(work)

    async def client(self: InferenceClient) -> Engine:
        return engine

    InferenceClient._get_client = client
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = CaptureServer(llm_url="http://engine/v1", model="policy", port=port)
    server.start()
    sessions = [server.registry.create() for _ in range(work["programs"])]
    us = measured(f"http://127.0.0.1:{port}/v1", [one.session_id for one in sessions])
    write_line({"us": us, "turns": sum(len(list(one.graph.nodes())) for one in sessions)})
