"""A rollout as ART's guides write it, gathered in groups by ART.

Runs: `gather_trajectory_groups` over groups of 16, trajectories and their metrics, the OpenAI
client with its models of requests and answers, log-probs of each token, over a transport that
answers without a socket. Not run: any tokenizing (ART encodes when it trains), HTTP on sockets, a
trainer.
"""

from __future__ import annotations

import json
from itertools import cycle
from typing import TYPE_CHECKING, Any

import art
import httpx
from openai import AsyncOpenAI
from work import rollouts

if TYPE_CHECKING:
    from benchmarks.peers.work import Work

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}},
                "required": ["query"],
            },
        },
    }
]


def _body(text: str, token_ids: list[int], logprobs: list[float], is_call: bool) -> bytes:
    """What a server with OpenAI's routes answers."""
    message: dict[str, Any] = {"role": "assistant", "content": "" if is_call else text}
    if is_call:
        function = {"name": "search", "arguments": '{"query": "it"}'}
        message["tool_calls"] = [{"id": "call", "type": "function", "function": function}]
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(token_ids, logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "finish_reason": "tool_calls" if is_call else "stop",
        "message": message,
        "logprobs": {"content": content, "refusal": None},
    }
    whole = {"id": "0", "object": "chat.completion", "created": 0, "model": "policy"}
    return json.dumps({**whole, "choices": [choice]}).encode()


async def run(work: Work) -> None:
    form = work.task["forms"]["json"]
    calls, answers = (
        cycle(
            [
                _body(form[f"{name}_text"], form[name], row, name == "call")
                for row in work.task["logprobs"]
            ]
        )
        for name in ("call", "answer")
    )

    async def answer(request: httpx.Request) -> httpx.Response:
        num_results = request.content.count(b'"role":"tool"')
        await work.turn("json", num_results)
        body = next(calls if num_results < work.num_calls else answers)
        return httpx.Response(200, content=body, headers={"content-type": "application/json"})

    client = AsyncOpenAI(
        base_url="http://engine/v1",
        api_key="none",
        http_client=httpx.AsyncClient(transport=httpx.MockTransport(answer)),
    )

    async def one(number: int) -> Any:
        prompt: Any = {"role": "user", "content": work.question(number)}
        messages = [prompt]  # beside the trajectory, whose `messages()` takes 15 ms each time
        trajectory = art.Trajectory(messages_and_choices=[prompt], reward=0.0, tools=TOOLS)
        while True:
            done = await client.chat.completions.create(
                model="policy",
                messages=messages,
                tools=TOOLS,
                max_tokens=256,
                logprobs=True,
            )
            choice = done.choices[0]
            trajectory.messages_and_choices.append(choice)
            messages.append(choice.message.to_dict())
            if not choice.message.tool_calls:
                trajectory.reward = float("it" in (choice.message.content or ""))
                return trajectory
            for call in choice.message.tool_calls:
                json.loads(call.function.arguments)
                result: Any = {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "content": await work.result(),
                }
                trajectory.messages_and_choices.append(result)
                messages.append(result)

    async def groups(number: int) -> None:
        size = work.group_size
        await art.gather_trajectory_groups(
            [art.TrajectoryGroup(one(number) for _ in range(size))], pbar_desc=None
        )

    await rollouts(work, groups, work.group_size)
