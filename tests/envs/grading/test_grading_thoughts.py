"""No grader reads what the policy thought, in any style of its marks, finished or not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import product
from typing import Any

import pytest

from agentenv.assembly.reports.records import EvalRow, prediction, written
from agentenv.base.types import Message, Task, ToolCall
from agentenv.contract.env import Grade
from agentenv.envs.dialogue import DialogueEnv
from agentenv.envs.grading.reward import ToolReward, make_grader
from agentenv.envs.program import ProgramResult
from agentenv.envs.sandbox.program import Ended
from agentenv.text.call_syntax import PARSERS
from agentenv.text.spoken import spoken
from tests.test_call_syntax import TOOLS, WELL

FORMS = {  # thoughts, and the text after them
    **dict.fromkeys(("tags", *PARSERS), "<think>{}</think>{}"),
    "the prompt opened them": "{}</think>{}",
    "in two parts": "<think>Hm.</think> <think>{}</think>{}",
    "with the marks": "<think>Is it <think> or </think>? {}</think>{}",
    "harmony": "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final"
    "<|message|>{}",
    "atem": " to=self<|message|>{}<|eom|><|start|>assistant<|message|>{}",
    "gemma": "<|channel>thought\n{}\n<channel|>{}",
}
OPEN = [form.partition("{}")[0] + "{}" for name, form in FORMS.items() if "the " not in name]
ANSWERS = (r"<answer>\boxed{2}</answer>", "<answer>2</answer>", "<answer>2", r"\boxed{2}", "2")
TASK = Task("t", "toy", "how many?", ("2",))


def by(**keys: Any) -> Callable[[str], Awaitable[float]]:
    async def read(text: str) -> float:
        return (await make_grader(keys).grade(TASK, [Message("assistant", text)], {})).reward

    return read


async def by_tools(text: str) -> float:
    grade: Grade = await ToolReward().grade(TASK, [Message("assistant", text)], {})
    return max(grade.reward, 0.0)


async def of_row(text: str) -> float:
    row = EvalRow(dataset="d", task="t", sample=0, segments=[{"env": "?"}, {"policy": text}])
    return float(prediction(written(row)) == "2")


async def of_program(text: str) -> float:
    messages = (Message("assistant", text),)
    return float("2" in ProgramResult(messages, Ended(exit=0), None, str).last_message)


async def of_dialogue(text: str) -> float:
    env = DialogueEnv(TASK, [], make_grader(), user=[])
    return float("<answer>" in text and env.is_answer(Message("assistant", text)))


READERS = {
    "exact": by(kind="exact"), "f1": by(kind="f1"), "layered": by(kind="layered", math=False),
    "tools": by_tools, "row": of_row, "program": of_program, "dialogue": of_dialogue,
}  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
async def test_an_answer_within_the_thoughts_is_not_read(reader: str) -> None:
    closed = [form.format("It is {}.", "{}") for form in FORMS.values()]
    for form, rest in product(closed, ("", "I do not know.")):
        for answer in ANSWERS:
            text = form.replace("{}", answer, 1).replace("{}", rest)
            assert await READERS[reader](text) == 0, text
    for form, answer in product(OPEN, ANSWERS):
        assert await READERS[reader](form.format(f"So {answer}")) == 0, form


@pytest.mark.parametrize("reader", [name for name in READERS if name != "tools"])
async def test_an_answer_after_the_thoughts_is_read(reader: str) -> None:
    for form, answer in product(FORMS.values(), ANSWERS[:2]):
        text = form.format("Perhaps <answer>3</answer>", answer)
        assert await READERS[reader](text) == 1, text


def test_an_unfinished_thought_that_the_prompt_opened_has_no_answer() -> None:
    row = EvalRow(dataset="d", task="t", sample=0)
    row.segments = [{"env": "user\n<think>\n"}, {"policy": "So <answer>2</answer>"}]
    assert prediction(written(row)) == ""


@pytest.mark.parametrize("style", ["harmony", "atem"])
def test_a_program_gets_thoughts_and_text_of_a_turn_of_messages_apart(style: str) -> None:
    form = FORMS[style]
    assert spoken(Message("assistant", form.format("Hm.", "2")), style, TOOLS)[:2] == ("Hm.", "2")
    assert spoken(Message("assistant", "Plain 2"), style, TOOLS)[:2] == ("", "Plain 2")
    text = form.format("Hm.", "").rpartition("assistant")[0] + "assistant" + WELL[style][0]
    calls = PARSERS[style](text, TOOLS)
    own = spoken(Message("assistant", text, calls), style, TOOLS)
    assert own[:3] == ("Hm.", "", (ToolCall("search", {"query": "Lima"}),))
