"""Decoration: text around an answer that names no other is removed before grading. An answer is
right for one gold at most, so the removed text is never a second guess.
"""

from __future__ import annotations

from itertools import product

import pytest

from agentenv.envs.grading.layers import compare
from agentenv.envs.grading.verdict import final_answer

NUMBER, DATE, NAME = ("37", "2,500"), ("May 9, 2005",), ("Marie Curie", "Vienna")
EACH = (*NUMBER, *DATE, *NAME)

KINDS = {  # by kind: templates of one answer, and its golds
    "wrapper": (
        ["[ANSWER]@[/ANSWER]", "\u2705 @", "\u2234 @", "<think>It is 12 or London.</think>@",
         "| Field | Value |\n|---|---|\n| Answer | @ |\n| Confidence | high |"],
        EACH,
    ),
    "confidence": (
        ["@ (p = 0.9)", "@ (90% sure)", "@ (confidence: 90%)", "@\n\nConfidence: 90%",
         "Exact Answer: @\nConfidence: 72%", '{"answer": "@", "confidence": "85%"}'],
        EACH,
    ),
    "reference": (
        ["Q5. @", "@ [1]\n\n[1] National Archives, box 112.", "@ (see Smith et al., 2004, p. 311)",
         "The answer is @, as stated in the 1987 edition of the handbook."],
        EACH,
    ),
    "numbered": (
        ["By Theorem 2.3 the limit equals @.", "So he has @ left at the end of week 2.",
         "Step 1: count the boxes (3).\nStep 2: add the loose ones.\n\nTotal: @"],
        NUMBER,
    ),
    "lead": (
        ["TL;DR: @", "La respuesta es @.", "Die Antwort lautet @.", "A resposta \u00e9 @.",
         "Please mark my answer as @.", "La r\u00e9ponse est @.", "\uc815\ub2f5: @"],
        EACH,
    ),
    "clause": (
        ["Great question! The answer is @.", "Okay, let me think. The answer is @.",
         "@\n\nHope this helps! \U0001f60a", "To the best of my knowledge, @.",
         "I could not verify this online, but I recall that the answer is @.",
         "The question asks for one item only, so I answer: @",
         "Although many people get this one wrong, the right answer is @."],
        EACH,
    ),
    "calculation": (["After dividing 84 by 6 I get @."], NUMBER),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_decoration_around_one_answer_is_removed(kind: str) -> None:
    forms, golds = KINDS[kind]
    answers = [(gold, form.replace("@", gold)) for form in forms for gold in golds]
    assert not [one for gold, one in answers if not compare(one, gold)[0]]


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("Chapter 5", "Chapter 5"), ("It is in Chapter 5.", "Chapter 5"), ("page 12", "page 12"),
        ("72%", "72%"), ("The confidence is 72%.", "72%"), ("Theorem 2.3", "Theorem 2.3"),
        ("Q5", "Q5"), ("week 2", "week 2"), ("Great question!", "Great question!"),
    ],
)  # fmt: skip
def test_a_gold_that_looks_like_decoration_is_kept(answer: str, gold: str) -> None:
    assert compare(answer, gold)[0]


@pytest.mark.parametrize(
    ("one", "other"),
    [("12", "13"), ("May 9, 2005", "June 3, 1999"), ("Marie Curie", "Ann Lee"), ("(B) 45", "D")],
)
@pytest.mark.parametrize(
    "form",
    [
        "<answer>@</answer> (or &)", "\\boxed{@} \\text{ (alt: } & \\text{)}", "@ <&>",
        '<answer alt="&">@</answer>', "@\u00b9\n\n\u00b9 or &", "@ [1]\n\n[1] or &",
        "[ANSWER]@[/ANSWER] [ANSWER]&[/ANSWER]", "@ (90% sure), & (p = 0.1)",
        "@, though a case can be made for &.", "Great question! @. &.", "* @\n* &",
    ],
)  # fmt: skip
def test_a_second_guess_is_not_removed_as_decoration(one: str, other: str, form: str) -> None:
    for first, second in ((one, other), (other, one)):
        answer = form.replace("@", first).replace("&", second)
        assert not any(compare(answer, gold)[0] for gold in (one, other)), answer


@pytest.mark.parametrize(
    "answer", ["page 12 or page 13", "12 (confidence: 13%) or 13", "12\nConfidence: 13%"]
)
def test_an_answer_is_right_for_one_gold_at_most(answer: str) -> None:
    assert sum(bool(compare(answer, gold)[0]) for gold in ("12", "13", "13%")) < 2


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        ("<answer>12</answer> (or 13)", "12 (or 13)"), (r"$\boxed{12}$ or 13", "12 or 13"),
        (r"\boxed{12} cm", "12"), ("<answer>12</answer>.", "12"), ("<answer>5</answer>\nSo.", "5"),
        (r"The answer is $\boxed{12}$. I hope it is correct.", "12"),
        (r"<answer> The final answer is \[ \boxed{12} \] </answer>", "12"),  # of ARPO's prompt
        ("Answer: \\[\n\\boxed{12}\n\\]", "12"), (r"The answer is $x = \boxed{12}$.", "12"),
        (r"The answer is about \boxed{12}.", "12"), (r"The answer is 13. \boxed{12}", "13; 12"),
        ("The answer is 13\n\\boxed{12}", "13; 12"), (r"Answer: 13 or $\boxed{12}$", "13 or; 12"),
        ("3 rows, so <answer>12", "12"), (r"\boxed{12}\,\text{ or } 13", r"12 \,\text{ or } 13"),
        (r"\boxed{12}" + r"\," * 2000 + "x", "12"), (r"\boxed{12}" + " " * 200_000 + "x", "12"),
    ],
)  # fmt: skip
def test_text_joined_to_the_last_box_or_tag_belongs_to_the_answer(
    message: str, answer: str
) -> None:
    assert final_answer(message) == answer


BEFORE = ["The final answer is ", "Answer: ", "**Final answer:** ", "So the answer is exactly "]
BEFORE += ["The answer is then\n", "My final answer is:\n\n", "It is ", "Hence x = ", "# Answer\n"]
AROUND = [r"\[ @ \]", "$@$", "$$\n@\n$$", r"\( @ \)", "@", "\n\\[\n@\n\\]\n", "**@**", "[ @ ]"]
AROUND += [r"\begin{align*} @ \end{align*}", r"\begin{equation} x = @ \end{equation}", "`@`"]


@pytest.mark.parametrize("gold", ["1535", "-3", r"\frac{1}{2}", "Marie Curie", "(1, 2)", "A"])
def test_the_phrase_before_a_box_is_no_answer(gold: str) -> None:
    for before, around, after in product(BEFORE, AROUND, ("", ".", " !", "\n")):
        text = before + around.replace("@", rf"\boxed{{{gold}}}") + after
        assert final_answer(f"<think>.</think><answer> {text} </answer>") == gold, text
