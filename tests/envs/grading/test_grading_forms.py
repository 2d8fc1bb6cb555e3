"""The layered grader by rule: fixtures/answer_forms.txt lists right answers and near misses."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.contract.env import close_shared
from agentenv.envs.grading.layers import Layered, compare

FORMS = Path(__file__).parents[2] / "fixtures" / "answer_forms.txt"
MAX_CHARS = 2000


def rows() -> dict[str, list[tuple[bool, str, str]]]:
    """Label, gold and answer of each line, by heading."""
    found: dict[str, list[tuple[bool, str, str]]] = {}
    for line in FORMS.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            found[line.strip("[]")] = section = []
        elif line and not line.startswith("#"):
            label, gold, answer = line.split(" | ")
            section.append((label == "1", gold, answer))
    return found


@pytest.mark.parametrize("heading", rows())
async def test_the_forms_of_a_heading_are_graded_as_labeled(heading: str) -> None:
    matcher = Layered(math=heading.startswith("formulas"))
    await matcher.start()
    wrong = [
        (label, gold, answer)
        for label, gold, answer in rows()[heading]
        if (await matcher.verdict("?", answer, [gold])).right != label
    ]
    await close_shared()
    assert not wrong


REPEATED = [
    "and ", "not ", "of the ", "1, ", "x < ", "(", "[", r"\frac", "one hundred ", "'s ", "but ",
    r"\cup ", "**", "]1,", "i + ", ", not ", "by ", "5'", "2 to 3 ", "half past ", "1,000", "or ",
    "first ", "\u4e00", "\u548c",
]  # fmt: skip


@pytest.mark.parametrize("part", REPEATED)
def test_long_repetitions_are_compared_without_backtracking(part: str) -> None:
    """A pattern that backtracks would not finish on these."""
    text = (part * MAX_CHARS)[: MAX_CHARS - 1] + "!"
    assert not any(compare(text, gold)[0] for gold in ("Paris", "5 km", r"(2,\infty)"))
