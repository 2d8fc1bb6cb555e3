"""No grader reads what the policy thought, in any style of its marks, finished or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import product

import pytest

from agentenv.assembly.reports.records import EvalRow, prediction
from agentenv.base.types import Message, Task
from agentenv.contract.env import Grader, graded
from agentenv.envs.dialogue import DialogueEnv
from agentenv.envs.grading.reward import ToolReward, make_grader
from agentenv.envs.program import ProgramResult
from agentenv.envs.sandbox.program import Ended
from agentenv.text.call_syntax import PARSERS
from agentenv.text.spoken import spoken
from tests.test_call_syntax import CALL, TOOLS, WELL

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


def message(text: str) -> Message:
    return Message("assistant", text)


def row(before: str, text: str) -> EvalRow:
    return EvalRow(dataset="d", task="t", sample=0, segments=[{"env": before}, {"policy": text}])


def by(grader: Grader) -> Callable[[str], bool]:
    return lambda text: asyncio.run(graded(grader, TASK, [message(text)], {})).reward > 0


DIALOGUE = DialogueEnv(TASK, [], make_grader(), user=[])
READERS: dict[str, Callable[[str], bool]] = {
    **{kind: by(make_grader({"kind": kind})) for kind in ("exact", "f1", "layered")},
    "tools": by(ToolReward()),
    "row": lambda text: prediction(row("?", text)) == "2",
    "program": lambda text: (
        "2" in ProgramResult((message(text),), Ended(exit=0), None, str).last_message
    ),
    "dialogue": lambda text: "<answer>" in text and DIALOGUE.is_answer(message(text)),
}


@pytest.mark.parametrize("reader", READERS)
def test_an_answer_is_read_after_the_thoughts_and_never_within(reader: str) -> None:
    reads = READERS[reader]
    for form, rest, answer in product(FORMS.values(), ("", "I do not know."), ANSWERS):
        assert not reads(form.format(f"It is {answer}.", rest)), form
        if "</answer>" in answer and reader != "tools":
            assert reads(form.format("Perhaps <answer>3</answer>", answer)), form
    for form, answer in product(OPEN, ANSWERS):
        assert not reads(form.format(f"So {answer}")), form


def test_an_unfinished_thought_that_the_prompt_opened_has_no_answer() -> None:
    assert prediction(row("user\n<think>\n", "So <answer>2</answer>")) == ""


@pytest.mark.parametrize("style", ["harmony", "atem"])
def test_a_program_gets_thoughts_and_text_of_a_turn_of_messages_apart(style: str) -> None:
    text = FORMS[style].format("Hm.", "")
    assert spoken(message(text + "2"), style, TOOLS)[:2] == ("Hm.", "2")
    text = text.rpartition("assistant")[0] + "assistant" + WELL[style][0]
    own = spoken(Message("assistant", text, (CALL,)), style, TOOLS)
    assert own[:3] == ("Hm.", "", (CALL,))
