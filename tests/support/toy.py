"""A tokenizer of characters and an env without tools, for tests of the core."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any

from agentenv.base.errors import EnvError
from agentenv.base.types import Info, Limit, Message, Task
from agentenv.contract.env import ForkMode

TOOL = {
    "name": "search",
    "description": "",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}


class CharTokenizer:
    """One token a character; id 0 is the end of sequence."""

    eos_token_id = 0
    all_special_tokens = ("<eos>",)

    def __len__(self) -> int:
        return 256

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join("<eos>" if i == 0 else chr(i) for i in ids)

    def apply_chat_template(self, chat: list[dict[str, str]], **_: Any) -> str:
        return "\n".join(turn["content"] for turn in chat) + "\n"


class CountingEnv:
    """Answers each call with the number of calls so far; counts open envs.

    Reward of a terminated episode: the number of calls made. `faults` maps a method name to the
    probability that it raises EnvError; `latency_s` is the mean of an exponential step time.
    """

    num_open = 0
    num_made = 0

    def __init__(
        self,
        task: Task,
        latency_s: float = 0.0,
        faults: dict[str, float] | None = None,
        fork_mode: ForkMode = "pure",
        rng: Random | None = None,
    ) -> None:
        self.task = task
        self.latency_s = latency_s
        self.faults = faults or {}
        self.fork_mode: ForkMode = fork_mode
        self.rng = rng or Random(task.id)
        self.calls: list[str] = []
        self.closed = False
        CountingEnv.num_open += 1
        CountingEnv.num_made += 1

    async def _maybe_fail(self, method: str) -> None:
        await asyncio.sleep(self.rng.expovariate(1 / self.latency_s) if self.latency_s else 0)
        if self.rng.random() < self.faults.get(method, 0.0):
            raise EnvError(f"{method} failed on purpose")

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        await self._maybe_fail("reset")
        return [Message("user", self.task.question)], {"tools": [TOOL]}

    async def step(self, action: Message) -> tuple[list[Message], float, bool, bool, Info]:
        await self._maybe_fail("step")
        if not action.tool_calls:
            return [], float(len(self.calls)), True, False, {"success": True}
        self.calls += [call.arguments["query"] for call in action.tool_calls]
        info = {"tool_calls": [{"name": call.name} for call in action.tool_calls]}
        return [Message("tool", f"{len(self.calls)}:{self.calls[-1]}")], 0.0, False, False, info

    async def finish(self, reason: Limit, action: Message | None) -> tuple[float, Info]:
        await self._maybe_fail("finish")
        return -1.0, {"success": False, "written": "" if action is None else action.content}

    async def fork(self) -> CountingEnv:
        await self._maybe_fail("fork")
        other = CountingEnv(self.task, self.latency_s, self.faults, self.fork_mode)
        other.rng = Random(self.rng.random())
        other.calls = list(self.calls)
        return other

    async def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True
        CountingEnv.num_open -= 1
