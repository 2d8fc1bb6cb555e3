"""The trial of a program in a dry run: it shows how the calls of the program are read."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from agentenv.base.types import Limits
from agentenv.contract.env import close_shared
from agentenv.envs.program import ProgramEnv
from agentenv.lab.diagnosis.reading import try_program
from agentenv.text.native import NativeRenderer
from agentenv.text.renderer import TagRenderer
from tests.envs.sandbox.test_program_env import CLIENT, LOOP, TASK, keys
from tests.support.chat_models import QWEN3, make_tokenizer


def trial(code: str, renderer: Any = None, **more: Any) -> str:
    lines: list[str] = []

    async def work() -> None:
        chosen = renderer or TagRenderer(make_tokenizer(QWEN3))
        given = keys(code, **more)
        try:
            await try_program(lambda t: ProgramEnv(t, given), TASK, chosen, Limits(), lines.append)
        finally:
            await close_shared()

    asyncio.run(work())
    return "\n".join(lines)


@pytest.mark.parametrize("protocol", ["tags", "native"])
def test_a_trial_counts_turns_forks_and_replays(protocol: str) -> None:
    native = NativeRenderer(make_tokenizer(QWEN3)) if protocol == "native" else None
    found = trial(LOOP, native)
    numbers = [int(one) for one in re.findall(r"\d+", found.splitlines()[0])]
    assert numbers[-3:] == [3, 2, 2], found


def test_a_trial_names_the_first_difference_of_a_replay() -> None:
    code = "import time\nq = f'ticket {time.time_ns() % 9999}'\n"
    code += "m = [{'role': 'user', 'content': q}]\nm.append(ask(m))\n"
    code += "m.append({'role': 'tool', 'tool_call_id': 'x', 'content': 'y'})\nask(m)\n"
    found = trial(CLIENT + code)
    assert "normalise" in found
    assert "DivergedError" in found


def test_a_trial_shows_what_is_ignored_and_what_is_refused() -> None:
    one = "m = [{'role': 'user', 'content': 'q'}]\n"
    found = trial(CLIENT + one + "ask(m, temperature=0.1)\n")
    assert "ignored/temperature 1" in found
    assert "CallRefusedError" in trial(CLIENT + one + "ask(m)\nask(m, prediction=5)\n")


def test_a_trial_may_be_left_out() -> None:
    assert not trial(LOOP, trial_s=0.0)
