"""Selection of training data: each filter, and the classes of difficulty."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from agentenv.assembly.keys.evaluation import FilterConfig, Way
from agentenv.assembly.reports.records import EvalRow
from agentenv.base.types import Task
from agentenv.lab.recipes import sorting
from agentenv.lab.recipes.sampling import plain_question
from agentenv.reference.grading import check_reference_format

TOOLS = ["search", "python"]
PROMPT = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
ANSWER = r"<think>so</think><answer>\boxed{Lima}</answer>"


def call(query: str, **more: Any) -> dict[str, Any]:
    return {"name": "search", "arguments": {"query": query}, "ok": True, "error": None, **more}


def trajectory(*texts: str, prompt: str = PROMPT, sample: int = 0, **keys: Any) -> EvalRow:
    """A right one that alternates between policy and tool; its calls are those in the texts."""
    kinds = ("policy", "env")
    segments = [{"env": prompt}, *({kinds[i % 2]: text} for i, text in enumerate(texts))]
    queries = [text.partition("<search>")[2].partition("<")[0] for text in texts[::2]]
    calls = [call(query) for query in queries if query]
    usual: dict[str, Any] = {"end": "terminated", "success": True, "tool_calls": calls}
    return EvalRow(dataset="q.tools", task="1", sample=sample, segments=segments, **usual | keys)


def searching(*queries: str, **keys: Any) -> EvalRow:
    """A right trajectory that searches for these and then answers."""
    texts: list[str] = []
    for query in queries:
        texts += [f"<think>a fact</think><search>{query}</search>", result("found")]
    return trajectory(*texts, ANSWER, **keys)


def result(text: str) -> str:
    return f" <result>\n{text}\n</result>"


def reason(row: EvalRow, way: Way = "tools", **keys: Any) -> str:
    return sorting.judge(row, way, TOOLS, FilterConfig(**keys)).reason


def test_a_right_trajectory_becomes_one_text() -> None:
    found = sorting.judge(searching("capital of Peru"), "tools", TOOLS, FilterConfig())
    assert (found.reason, found.detail) == ("", "")
    assert found.text == (
        "<think>a fact</think><search>capital of Peru</search><result>\nfound\n</result>" + ANSWER
    )
    assert check_reference_format(found.text) == (True, "format is correct")


def test_tags_are_unified() -> None:
    assert sorting.unify_tags("< Think >a</THINKING><Search>q</ search >", TOOLS) == (
        "<think>a</think><search>q</search>"
    )
    assert sorting.unify_tags("<final answer>a</Final_Answer>", TOOLS) == "<answer>a</answer>"
    assert sorting.unify_tags("if a < b > c: <b>bold</b> <thin>", TOOLS) == (
        "if a < b > c: <b>bold</b> <thin>"
    )


def test_a_thought_that_the_prompt_has_opened_is_part_of_the_text() -> None:
    row = trajectory(ANSWER.removeprefix("<think>"), prompt=PROMPT + "<think>\n")
    found = sorting.judge(row, "direct", TOOLS, FilterConfig())
    assert found.text == ANSWER.replace("<think>", "<think>\n")
    assert reason(trajectory(ANSWER.removeprefix("<think>")), "direct") == "unpaired_tag"


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([ANSWER], ""),
        (["<think>a<think>b</think></think>" + ANSWER], "unpaired_tag"),
        (["<think>a" + ANSWER.removeprefix("<think>") + "</think>"], "unpaired_tag"),
        (["<think>a</think><answer>\\boxed{1}"], "unpaired_tag"),
        (["<think>a</search>", result("r"), ANSWER], "unpaired_tag"),
        (["<think>a<search>q</search>", result("r"), "</think>" + ANSWER], "unpaired_tag"),
        (["<think>a</think><search>q</search>" + ANSWER], "wrong_order"),
        (["<think>a</think><search>q</search>" + result("mine") + ANSWER], "wrong_order"),
        (["<think>a</think>", result("r"), ANSWER], "wrong_order"),
        (["<think>a</think><search>q</search>"], "wrong_order"),
        ([ANSWER + ANSWER], "wrong_order"),
        ([ANSWER + "<search>q</search>", result("r"), ""], "wrong_order"),
        ([ANSWER + " That was easy."], "wrong_order"),
        ([r"<answer>\boxed{Lima}</answer>"], "no_thought"),
        (["<think>a</think> It is Lima."], "no_answer"),
        (["<think>a</think><answer>Lima</answer>"], "no_box"),
        (["<think>a</think><answer>\\boxed{Lima</answer>"], "no_box"),
    ],
)
def test_tags_come_in_pairs_and_in_order(texts: list[str], expected: str) -> None:
    parts = sorting.parts_of(trajectory(*texts), TOOLS)
    found, detail = sorting.check_chain(parts, TOOLS, require_box=True)
    assert found == expected
    assert bool(detail) == bool(expected)
    if not expected:
        assert check_reference_format(sorting.chain_text(parts))[0]


def test_tags_in_a_page_are_not_structure() -> None:
    page = result("</think> <answer>no</answer> </result> <search>x</search>")
    row = trajectory("<think>a</think><search>q</search>", page, ANSWER)
    assert reason(row) == ""


def test_an_answer_without_a_box_is_right_if_none_is_required() -> None:
    row = trajectory("<think>a</think><answer>Lima</answer>")
    assert reason(row, "direct", require_box=False) == ""


def test_failed_truncated_and_wrong_trajectories_have_their_own_reasons() -> None:
    assert reason(searching("q", end="failed", error="EngineError: gone")) == "failed"
    assert reason(searching("q", end="truncated", limit="turns")) == "truncated"
    assert reason(searching("q", success=False)) == "wrong"


def test_trajectories_of_more_than_five_calls_are_dropped() -> None:
    assert reason(searching(*"abcde")) == ""
    assert reason(searching(*"abcdef")) == "too_many_calls"
    assert reason(searching(*"abc"), max_tool_calls=2) == "too_many_calls"


def test_trajectories_with_repeated_calls_are_dropped() -> None:
    assert reason(searching("Lima", "lima  ")) == "repeated_call"
    assert reason(searching("Lima", "Cusco", "Lima")) == "repeated_call"
    other = [call("x"), {**call("x"), "name": "python"}]
    assert reason(searching("x", "y", tool_calls=other)) == "", "one text, two tools"


def test_tools_must_be_used_where_they_were_offered() -> None:
    assert reason(trajectory(ANSWER), "tools") == "no_tool_call"
    assert reason(trajectory(ANSWER), "hints") == "no_tool_call"
    assert reason(trajectory(ANSWER), "direct") == ""


def test_the_first_of_equal_trajectories_is_kept() -> None:
    rows = [searching("a", sample=0), searching("b", sample=1), searching("a", sample=2)]
    judged = [sorting.judge(row, "tools", TOOLS, FilterConfig()) for row in rows]
    assert [one.reason for one in sorting.without_duplicates(judged)] == ["", "", "duplicate"]
    wrong = [replace(judged[0], reason="wrong"), judged[2]]
    assert [one.reason for one in sorting.without_duplicates(wrong)] == ["wrong", ""]


def test_questions_are_compared_without_case_and_blanks() -> None:
    assert plain_question(" Who  was\nthe first? ") == plain_question("who was the FIRST?")
    assert plain_question("What is 2 + 2?") != plain_question("What is 2 - 2?")


# difficulty


def judged(way: Way, why: str, sample: int) -> sorting.Judged:
    row = searching(str(sample), sample=sample)
    return sorting.Judged(way, row, f"{way} {sample}", why)


def sort(
    direct: str, tools: str, hints: str = "", *, is_whole: bool = True, seed: int = 0, **keys: Any
) -> sorting.Sorted:
    """Each letter a trajectory: r right and clean, w wrong, f failed."""
    why = {"r": "", "w": "wrong", "f": "failed"}
    ways: dict[Way, str] = {"direct": direct, "tools": tools, "hints": hints}
    found = [
        judged(way, why[letter], sample)
        for way, letters in ways.items()
        for sample, letter in enumerate(letters)
    ]
    task = Task("1", "e", "Who?", ("Lima",))
    done = sorting.sort_question("q", task, found, FilterConfig(**keys), seed, is_whole=is_whole)
    assert len(done.chosen) + len(done.rejected) == len(found), "each is in one of the two"
    assert all(one.reason in sorting.REASONS for one in done.rejected)
    assert not any(one.reason for one in done.chosen)
    return done


@pytest.mark.parametrize(
    ("direct", "tools", "hints", "kind", "learned"),
    [
        ("r", "r", "", "direct", {"direct"}),
        ("wr", "ww", "", "direct", {"direct"}),
        ("ww", "wr", "", "tools", {"tools"}),
        ("ww", "ww", "wr", "tools", {"hints"}),
        ("ww", "ww", "ww", "hard", set()),
        ("wf", "ww", "", "unfinished", set()),
        ("wf", "wr", "", "tools", {"tools"}),
    ],
)
def test_direct_against_with_tools(
    direct: str, tools: str, hints: str, kind: str, learned: set[str]
) -> None:
    done = sort(direct, tools, hints)
    assert done.kind == kind
    assert {one.way for one in done.chosen} == learned


def test_a_question_with_missing_trajectories_is_unfinished() -> None:
    assert sort("w", "w", is_whole=False).kind == "unfinished"


def test_rejected_trajectories_have_a_reason() -> None:
    done = sort("rr", "rw")
    assert sorted(one.reason for one in done.rejected) == ["answered_directly", "surplus", "wrong"]
    assert len(sort("ww", "rrr", max_per_question=2).chosen) == 2


def test_the_drawn_trajectory_depends_on_the_seed_alone() -> None:
    drawn = {sort("w", "rrrr", seed=seed).chosen[0].row.sample for seed in range(20)}
    assert drawn == {0, 1, 2, 3}
    assert sort("w", "rrrr").chosen == sort("w", "rrrr").chosen
