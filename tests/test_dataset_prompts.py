"""Prompts beyond limits.max_prompt_tokens: refused, skipped, or truncated, before a run starts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from agentenv.base.errors import ConfigError, DataError, EnvError
from agentenv.base.types import Info, Limits, Message, Task
from agentenv.contract.env import Env
from agentenv.data.rows import Overlong
from agentenv.text.prompt_fitting import BATCH, PromptFitter
from agentenv.text.renderer import TagRenderer
from tests.support.toy import CharTokenizer

LIMIT = 40  # tokens; one a character, and one for the end of the line after each message


class CountingRenderer(TagRenderer):
    num_rendered = 0

    def prompt(self, messages: Sequence[Message], tools: Any) -> list[int]:
        self.num_rendered += 1
        return super().prompt(messages, tools)


class AskingEnv:
    """Its prompt is a system text and the question."""

    num_open = 0
    fault: Exception | None = None

    def __init__(self, task: Task) -> None:
        self.task = task
        AskingEnv.num_open += 1

    async def reset(self, **_: Any) -> tuple[list[Message], Info]:
        if AskingEnv.fault is not None and self.task.id == "2":
            raise AskingEnv.fault
        return [Message("system", "Answer."), Message("user", self.task.question)], {}

    async def close(self) -> None:
        AskingEnv.num_open -= 1


def tasks(*lengths: int) -> list[Task]:
    return [
        Task(str(n), "env", "".join(chr(65 + i % 26) for i in range(length)), ("a",))
        for n, length in enumerate(lengths)
    ]


class Fitting:
    """A fitter on the toy env, with its messages."""

    def __init__(self, mode: Overlong, limit: int = LIMIT) -> None:
        self.said: list[str] = []
        self.renderer = CountingRenderer(CharTokenizer())
        self.fitter = PromptFitter(
            self.make_env,
            self.renderer,
            Limits(max_prompt_tokens=limit),
            mode,
            "data.overlong_prompt",
            self.said.append,
        )

    def make_env(self, task: Task) -> Env:
        env: Any = AskingEnv(task)
        return env  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _all_closed(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(AskingEnv, "num_open", 0)
    monkeypatch.setattr(AskingEnv, "fault", None)
    yield
    assert AskingEnv.num_open == 0


async def test_prompts_that_fit_are_unchanged() -> None:
    fitting = Fitting("error")
    given = tasks(31, 1, 30)
    assert await fitting.fitter.fit(given) == given
    assert fitting.said == []


async def test_all_overlong_prompts_are_refused_in_one_error() -> None:
    with pytest.raises(
        DataError,
        match=r"2.*3.*limits\.max_prompt_tokens.*40.*0.*\(41.*2.*\(59.*data\.overlong_prompt.*'skip'.*'cut'",
    ):
        await Fitting("error").fitter.fit(tasks(32, 5, 50))


async def test_an_overlong_prompt_is_skipped_and_counted() -> None:
    fitting = Fitting("skip")
    assert [task.id for task in await fitting.fitter.fit(tasks(32, 5, 50, 31))] == ["1", "3"]
    (text,) = fitting.said
    assert text.startswith("data.overlong_prompt: 2 of 4")
    with pytest.raises(DataError, match=r"'skip'.*1"):
        await fitting.fitter.fit(tasks(99))


async def test_an_overlong_prompt_loses_the_middle_of_its_question() -> None:
    fitting = Fitting("cut")
    (whole,) = tasks(100)
    fits, cut = await fitting.fitter.fit([*tasks(5), whole])
    assert fits.question == "ABCDE"
    assert len(cut.question) == LIMIT - len("Answer.\n\n")
    head, _, tail = cut.question.partition(" ... ")
    assert whole.question.startswith(head)
    assert whole.question.endswith(tail)
    assert cut.metadata == {"num_cut_chars": 100 - len(head) - len(tail)}
    assert "1 of 2" in fitting.said[0]


async def test_a_prompt_that_is_too_long_without_its_question_cannot_be_cut() -> None:
    with pytest.raises(DataError, match="task 0"):
        await Fitting("cut", limit=10).fitter.fit(tasks(100))


async def test_short_questions_are_not_rendered_after_the_first() -> None:
    fitting = Fitting("error", limit=100)
    await fitting.fitter.fit(tasks(*[9] * (BATCH + 9), 82, 83, 90))
    assert fitting.renderer.num_rendered == 3  # the first, and the two whose sum is over 100


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (EnvError("no service"), "no service"),
        (TimeoutError("late"), "the environment's reset raised TimeoutError: late"),
        (KeyError("key"), "the environment's reset raised KeyError: 'key'"),
    ],
)
async def test_an_env_that_fails_to_reset_is_reported_and_its_task_kept(
    fault: Exception, said: str
) -> None:
    AskingEnv.fault = fault
    given = tasks(1, 2, 300, 4)
    fitting = Fitting("error")
    assert await fitting.fitter.fit(given) == given
    (text,) = fitting.said
    assert text.startswith("1 of 4")
    assert f"task 2: {said}" in text


async def test_a_user_error_is_raised_after_all_envs_are_closed() -> None:
    AskingEnv.fault = DataError("no corpus")
    with pytest.raises(DataError, match="no corpus"):
        await Fitting("error").fitter.fit(tasks(1, 2, 3, 4))


async def test_a_row_with_an_unknown_environment_is_named() -> None:
    fitting = Fitting("error")

    def refuse(task: Task) -> Env:
        raise ConfigError("no environment is registered as 'x'")

    fitting.fitter.make_env = refuse
    with pytest.raises(ConfigError, match="registered as 'x'"):
        await fitting.fitter.fit(tasks(1))


async def test_a_reset_that_takes_too_long_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forever(self: AskingEnv, **_: Any) -> None:
        await asyncio.sleep(9)

    monkeypatch.setattr(AskingEnv, "reset", forever)
    fitting = Fitting("error")
    fitting.fitter.limits = Limits(max_prompt_tokens=LIMIT, env_timeout_s=0.01)
    assert await fitting.fitter.fit(given := tasks(1)) == given
    assert fitting.said[0].startswith("1 of 1")
    assert "limits.env_timeout_s" in fitting.said[0]
