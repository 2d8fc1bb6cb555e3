"""Cost of a captured call: CPU per call of the process that runs endpoint, rollouts and renderer.

Hundreds of programs run at once. A call has 2,000 tokens of context and 100 sampled tokens.

All programs run in a second process; each calls the endpoint over HTTP, as any program does. The
engine takes time but no CPU. The tokenizer is a BPE with 16,000 tokens, trained on the
documentation. The first call tokenizes the program's prompt; every call tokenizes its new messages,
which are tool results of about 60 tokens.

    python -m benchmarks.parts.captured programs URL CALLS KEY ...   starts the second process
"""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, cast

import aiohttp
import msgspec
from msgspec import Struct

from agentenv.assembly.run.watchdog import CommandLoop, rolling_out
from agentenv.base.types import (
    Completion,
    Info,
    Limit,
    Limits,
    Message,
    SamplingParams,
    Task,
    VersionSpan,
)
from agentenv.contract.engine import Engine
from agentenv.contract.env import ForkMode, StepResult
from agentenv.contract.plan import Independent
from agentenv.endpoint.capture import CaptureSession, Endpoint
from agentenv.rollout.actor import Actor
from agentenv.text.renderer import TagRenderer

NUM_PROGRAMS, NUM_CALLS = 500, 6
CONTEXT, TURN, RESULT = 2000, 100, 60  # tokens: context of the middle call, turn, tool result
LATENCY_S = 0.5  # of the engine
VOCABULARY = 16_000
DOCS = Path(__file__).resolve().parents[2] / "docs"
TOOL = {
    "name": "search",
    "description": "Looks something up.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Figures(Struct):
    """Microseconds of CPU per call, mean token counts, and calls per second.

    us_a_call: all calls.
    us_a_later_call: calls after the first of a program, from the difference between a run with one
        call per program and a run with many.
    us_of_the_programs: CPU of the programs' process, per call.
    """

    us_a_call: float
    us_a_later_call: float
    us_of_the_programs: float
    context_tokens: float
    turn_tokens: float
    calls_per_s: float


def words(size: int, rng: Random) -> str:
    """Return a text of about `size` tokens."""
    found = rng.choices(_words(), k=size)
    return " ".join(found)


def _words() -> list[str]:
    if not _known:
        text = (DOCS / "design.md").read_text(encoding="utf-8")
        _known.extend(re.findall(r"\b[a-z]{2,}\b", text))  # about one token each
    return _known


_known: list[str] = []


def make_tokenizer() -> Any:
    """Return a byte-level BPE tokenizer, trained on the documentation."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, show_progress=False, initial_alphabet=letters
    )
    backend.train([str(path) for path in sorted(DOCS.glob("*.md"))], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", chat_template=TEMPLATE
    )


class WaitingEngine(Engine):
    """An engine that waits and then returns a turn encoded in advance."""

    policy_version = 0

    def __init__(self, renderer: TagRenderer) -> None:
        rng = Random(1)
        self.turns = []
        for _ in range(64):
            text = f"<think>{words(TURN - 26, rng)}</think><search>{words(6, rng)}</search>"
            self.turns.append(renderer.encode(text))
        self._next = itertools.cycle(self.turns)
        self.num_turns = self.num_context = self.num_sampled = 0

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, **_: Any
    ) -> Completion:
        await asyncio.sleep(LATENCY_S)
        ids = next(self._next)
        self.num_turns += 1
        self.num_context += len(prompt_ids)
        self.num_sampled += len(ids)
        floats = [-0.5] * len(ids)
        spans = [VersionSpan(0, 0, len(ids))]
        return Completion(list(ids), floats, floats, "stop", spans, "</search>")


class CallsEnv:
    """An episode of one program in the second process."""

    fork_mode: ForkMode = "none"

    def __init__(self, endpoint: Endpoint, session: CaptureSession, num_calls: int) -> None:
        self.endpoint, self.session, self.left = endpoint, session, num_calls

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        call = await self.session.next()
        return call.messages, {"tools": call.tools, "turn": call.turn}

    async def step(self, action: Message) -> StepResult:
        self.session.reply(action)
        self.left -= 1
        if not self.left:
            return [], 0.0, True, False, {}
        call = await self.session.next()
        return call.messages, 0.0, False, False, {"turn": call.turn}

    async def finish(self, reason: Limit, action: Message | None) -> tuple[float, Info]:
        return 0.0, {}

    async def fork(self) -> CallsEnv:
        raise NotImplementedError

    async def close(self) -> None:
        self.endpoint.forget(self.session)


def run(num_programs: int = NUM_PROGRAMS, num_calls: int = NUM_CALLS) -> Figures:
    """Return the figures for `num_programs` concurrent programs."""
    renderer = TagRenderer(make_tokenizer())
    renderer.decode([1])
    with asyncio.Runner(loop_factory=CommandLoop) as runner:
        _, first_us, *_ = runner.run(_measured(renderer, num_programs, 1))
        measured = runner.run(_measured(renderer, num_programs, num_calls))
    engine, us, programs_us, wall_s = measured
    number = num_programs * num_calls
    return Figures(
        us_a_call=us / number,
        us_a_later_call=(us - first_us) / (number - num_programs),
        us_of_the_programs=programs_us / number,
        context_tokens=engine.num_context / engine.num_turns,
        turn_tokens=engine.num_sampled / engine.num_turns,
        calls_per_s=number / wall_s,
    )


async def _measured(
    renderer: TagRenderer, num_programs: int, num_calls: int
) -> tuple[WaitingEngine, float, float, float]:
    endpoint, engine = Endpoint(), WaitingEngine(renderer)
    await endpoint.start()
    sessions = [endpoint.open() for _ in range(num_programs)]
    envs = iter([CallsEnv(endpoint, session, num_calls) for session in sessions])
    limits = Limits(max_prompt_tokens=4000, max_tool_calls=99)
    sampling = SamplingParams(max_tokens=1)
    actor = Actor(cast(Any, engine), renderer, lambda task: next(envs), limits, sampling, seed=1)
    url = sessions[0].variables["OPENAI_BASE_URL"]
    command = [sys.executable, "-m", __name__, "programs", url, str(num_calls)]
    command += (session.key for session in sessions)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    assert process.stdin is not None
    await process.stdout.readline()  # "ready"
    process.stdin.write(b"\n")
    task = Task("t", "programs", "?", ())
    begun, wall = time.process_time(), time.monotonic()
    with rolling_out():  # as in a run, garbage is collected seldom
        async with asyncio.TaskGroup() as group:
            for index in range(num_programs):
                group.create_task(actor.rollout(task, Independent(1), index=index))
    us, wall_s = (time.process_time() - begun) * 1e6, time.monotonic() - wall
    programs_us = float((await process.stdout.read()).decode())
    await process.wait()
    await endpoint.close()
    return engine, us, programs_us, wall_s


# The programs.


async def programs(url: str, num_calls: int, keys: Sequence[str]) -> None:
    """Print "ready", wait for a line, run all programs, and print their CPU in microseconds."""
    rng = Random(2)
    half = num_calls // 2 * (TURN + RESULT)
    prompts = [words(CONTEXT - half, rng) for _ in keys]
    results = [words(RESULT, rng) for _ in range(num_calls * len(keys))]
    connector = aiohttp.TCPConnector(limit=0)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    begun = time.process_time()
    async with aiohttp.ClientSession(connector=connector) as http, asyncio.TaskGroup() as group:
        for number, key in enumerate(keys):
            own_results = results[number * num_calls :][:num_calls]
            group.create_task(_program(http, url, key, prompts[number], own_results))
    sys.stdout.write(str((time.process_time() - begun) * 1e6))


async def _program(
    http: aiohttp.ClientSession, url: str, key: str, prompt: str, results: Sequence[str]
) -> None:
    messages: list[Any] = [{"role": "user", "content": prompt}]
    tools = [{"type": "function", "function": TOOL}]
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    for result in results:
        body = msgspec.json.encode({"model": "policy", "messages": messages, "tools": tools})
        async with http.post(f"{url}/chat/completions", data=body, headers=headers) as response:
            reply = msgspec.json.decode(await response.read())
        message = reply["choices"][0]["message"]
        messages.append(message)
        (call,) = message["tool_calls"]
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


if __name__ == "__main__":
    _, _, address, calls, *names = sys.argv
    asyncio.run(programs(address, int(calls), names))
