"""Gymnasium's AsyncVectorEnv: a process an environment, all of which step together.

Runs: `AsyncVectorEnv.step` of as many environments as rollouts, whose texts go through pipes; what
it lacks is written here as for SkyRL-gym. All turns of the policy are asked at once, and the step
begins when the last one is there: that is its contract. The processes of the environments are
counted as children. Not run: parsing by a library, HTTP, grading, a trainer.
"""

from __future__ import annotations

import asyncio
import re
import time
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import gymnasium
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from benchmarks.peers.work import Work

CALL = re.compile(r"<search>(.*?)</search>", re.DOTALL)
SIGNS = "".join(map(chr, range(9, 127)))
MOST = 8192


class LookUp(gymnasium.Env):  # type: ignore[misc]  # of a package that mypy does not read
    """Answers calls until there is none."""

    observation_space = gymnasium.spaces.Text(MOST, min_length=0, charset=SIGNS)
    action_space = gymnasium.spaces.Text(MOST, min_length=0, charset=SIGNS)

    def __init__(self, number: int, questions: list[str], texts: list[str], tool_s: float) -> None:
        self._questions, self._texts, self._tool_s = questions, texts, tool_s
        self._rng = Random(number)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        return self._rng.choice(self._questions), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if CALL.search(action) is None:
            return "", 1.0, True, False, {}
        time.sleep(self._tool_s * (0.5 + self._rng.random()))
        return self._rng.choice(self._texts), 0.0, False, False, {}


async def run(work: Work) -> None:
    tokenizer = Tokenizer.from_file(f"{work.tokenizer}/tokenizer.json")
    task = work.task
    tool_s = work.scale * task["tool_s"]
    make = partial(LookUp, questions=task["questions"], texts=task["texts"], tool_s=tool_s)
    envs = AsyncVectorEnv(
        [partial(make, number) for number in range(work.at_once)],
        shared_memory=False,
        autoreset_mode=AutoresetMode.SAME_STEP,
    )

    def encode(role: str, text: str) -> list[int]:
        whole = f"<|im_start|>{role}\n{text}<|im_end|>\n<|im_start|>assistant\n"
        ids: list[int] = tokenizer.encode(whole, add_special_tokens=False).ids
        return ids

    class Row:
        """Of one rollout: what a trainer wants of it."""

        def __init__(self, text: str) -> None:
            self.prompt_ids = encode("user", text)
            self.ids: list[int] = []
            self.mask: list[int] = []
            self.logprobs: list[float] = []
            self.num_results = 0

        def add(self, ids: list[int], logprobs: list[float], sampled: bool) -> None:
            self.ids += ids
            self.mask += [int(sampled)] * len(ids)
            self.logprobs += logprobs

    rows = [Row(text) for text in envs.reset()[0]]
    while not work.is_over:
        turns = await asyncio.gather(*(work.turn("tags", row.num_results) for row in rows))
        said = tuple(work.text("tags", row.num_results) for row in rows)
        texts, _, ended, _, _ = envs.step(said)
        for number, (row, turn) in enumerate(zip(rows, turns, strict=True)):
            row.add(*turn, sampled=True)
            if ended[number]:
                rows[number] = Row(texts[number])
                continue
            observation = encode("user", texts[number])
            row.add(observation, [0.0] * len(observation), sampled=False)
            row.num_results += 1
            work.num_results += 1
    envs.close(terminate=True)
