r"""Exact match, and the reward of ARPO and Tool-Star."""

from __future__ import annotations

import pytest

import agentenv.contract.env_registry
import agentenv.envs
from agentenv.base.errors import ConfigError
from agentenv.base.types import Message, Task
from agentenv.contract.env import Grade, Grader, close_shared
from agentenv.envs.grading.numbers import as_number
from agentenv.envs.grading.reward import ExactMatch, ToolReward
from agentenv.envs.grading.verdict import check_format, last_boxed, same_answer

THINK = "<think>hm</think>"
BOTH = {"search": 1, "python": 2}


async def grade(
    grader: Grader, *texts: str, answers: tuple[str, ...] = ("Paris",), **calls: int
) -> Grade:
    task = Task("t", "test", "?", answers)
    return await grader.grade(task, [Message("assistant", text) for text in texts], calls)


@pytest.mark.parametrize(("answer", "gold"), [
    ("paris", "Paris"), ("  The  Paris. ", "Paris"), ("O'Brien-Smith", "obriensmith"),
    ("\N{FULLWIDTH LATIN CAPITAL LETTER P}aris", "Paris"), ("1,234", "1234"), (".5", "0.50"),
    ("1/2", "0.5"), ("$5.", "5"), ("50%", "50"), ("\N{MINUS SIGN}5", "-5"), ("C++", "c"),
    ("!", "!"),
])  # fmt: skip
def test_equal_answers_match(answer: str, gold: str) -> None:
    assert same_answer(answer, gold)


@pytest.mark.parametrize(("answer", "gold"), [
    ("5", "-5"), ("12", "1/2"), ("- 5", "5"), ("Paris France", "Paris"), ("", "Paris"), ("?", "!"),
    ("1e3", "1000"), ("1/0", "10"), ("Paris " * 1000, "Paris"),
])  # fmt: skip
def test_different_answers_do_not_match(answer: str, gold: str) -> None:
    assert not same_answer(answer, gold)


@pytest.mark.parametrize("text", ["", "-", ".", "1/0", "1" * 41, "10^10", "9" * 10**6, "1e5"])
def test_other_texts_are_no_plain_numbers(text: str) -> None:
    assert as_number(text) is None


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\boxed{a} and \boxed{ b }", "b"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{a} \boxed{b", None),
        ("a", None),
    ],
)
def test_the_last_box_is_read_if_it_is_balanced(text: str, boxed: str | None) -> None:
    assert last_boxed(text) == boxed


@pytest.mark.parametrize(
    "text",
    [
        r"It is \boxed{Paris}",
        "Paris",
        f"{THINK}Paris",
        f"{THINK}<answer>Paris</answer>",
        rf"{THINK}<answer>a \boxed{{Paris}} or \boxed{{Paris}}</answer> \boxed{{Lima}}",
    ],
)
async def test_exact_match_rewards_an_equal_answer(text: str) -> None:
    assert await grade(ExactMatch(), "Lima", text) == Grade(
        1.0, True, {"accuracy": 1.0}, "right answer: Paris"
    )
    assert (await grade(ExactMatch(), text, answers=("Rome", "Oslo"))).reward == 0
    assert (await grade(ExactMatch(), text, answers=("Rome", "Paris"))).reward == 1


async def test_exact_match_of_no_message_is_wrong() -> None:
    assert not (await grade(ExactMatch())).success


@pytest.mark.parametrize(
    ("text", "calls", "reward"),
    [
        (r"<answer>\boxed{Paris}</answer>", {}, 1.0),
        (r"<answer>\boxed{the paris!}</answer>", {"search": 3}, 1.0),
        (r"<answer>\boxed{Paris}</answer>", {"python": 1}, 1.0),
        (r"<answer>\boxed{Paris}</answer>", BOTH, 1.1),
        (r"</search></python><answer>\boxed{Paris}</answer>", {}, 1.0),
        (r"<answer>\boxed{Paris France}</answer>", BOTH, 0.0),
        (r"<answer>\boxed{}</answer>", BOTH, 0.0),
        (r"<answer>\boxed{x} \boxed{Paris}</answer>", {}, 0.0),
    ],
)
async def test_the_tool_reward_adds_a_bonus_for_both_tools_to_a_right_answer(
    text: str, calls: dict[str, int], reward: float
) -> None:
    result = await grade(ToolReward(), THINK, THINK + text, **calls)
    assert result.reward == reward
    assert result.success == (reward >= 1)
    assert sum(result.parts.values()) == result.reward
    assert result.parts["tool_bonus"] == (0.1 if reward == 1.1 else 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0 <think>"),
        (r"<answer>\boxed{Paris}</answer>", "0 <think>"),
        (r"<think><think></think><answer>\boxed{Paris}</answer>", "2 <think> and 1 </think>"),
        (THINK, "exactly one <answer>"),
        (THINK + r"\boxed{Paris}", "exactly one <answer>"),
        (THINK + r"<answer>\boxed{Paris}", "exactly one <answer>"),
        (THINK + r"<answer>\boxed{Paris}</answer>" * 2, "exactly one <answer>"),
        (THINK + r"</answer>\boxed{Paris}<answer>", "precedes <answer>"),
        (THINK + "<answer>Paris</answer>", "no balanced"),
        (THINK + r"<answer>\boxed{Paris</answer>}", "no balanced"),
        (THINK + r"\boxed{Paris}<answer></answer>", "no balanced"),
    ],
)
async def test_a_malformed_answer_has_the_reward_minus_one(text: str, message: str) -> None:
    result = await grade(ToolReward(), text, **BOTH)
    assert (result.reward, result.success) == (-1.0, False)
    assert result.parts == {"format": -1.0, "accuracy": 0.0, "tool_bonus": 0.0}
    assert message in result.reason


async def test_the_format_is_checked_over_all_turns_together() -> None:
    turns = ["<think>", r"</think><answer>\boxed{Par", "is}</answer>"]
    assert check_format("".join(turns)) == ("", "Paris")
    result = await grade(ToolReward(), *turns)  # a turn ends in a line
    assert (result.parts["format"], result.parts["accuracy"]) == (0, 0)


async def test_hostile_answers_are_graded_without_backtracking() -> None:
    for body in (r"\boxed{" * 50_000, "{" * 10**6, r"\boxed{" + "9" * 10**6 + "}"):
        result = await grade(ToolReward(), f"{THINK}<answer>{body}</answer>", answers=("9",))
        assert result.reward <= 0


async def test_an_episode_is_a_single_turn() -> None:
    task = Task("t", "agentenv/QAGrader-v0", "A third of 36?", ("12",))
    env = agentenv.contract.env_registry.make("agentenv/QAGrader-v0", task, grader={"math": False})
    prompt, info = await env.reset(seed=1)
    assert prompt == [Message("user", task.question)]
    assert info["tools"] == []
    assert env.fork_mode == "pure"
    _, reward, terminated, _, info = await env.step(Message("assistant", r"So \boxed{twelve}."))
    assert (reward, terminated, info["success"]) == (1.0, True, True)
    assert info["reason"].endswith("by number")
    await env.close()
    with pytest.raises(ConfigError, match="mathh: unknown key"):
        agentenv.contract.env_registry.make("agentenv/QAGrader-v0", task, grader={"mathh": False})


async def test_a_missing_math_verify_is_reported_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    env = agentenv.contract.env_registry.make("agentenv/QAGrader-v0", Task("t", "e", "?", ("1",)))
    with pytest.raises(ConfigError, match=r"\[math\]"):
        await env.reset()
    await env.close()
    await close_shared()
