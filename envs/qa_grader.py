r"""Graders for questions with short answers: exact match, and the tool reward of ARPO.

Only what the policy wrote is graded: a page that says \boxed{Paris} earns nothing.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from fractions import Fraction

from agentenv.grader import Grade
from agentenv.types import Message, Task

TOOL_BONUS = 0.1
BONUS_TOOLS = ("search", "python")

# digits are bounded so that comparing stays instant, whatever the policy writes
_NUMBER = re.compile(
    r"([+-]?)(?:(\d{1,3}(?:,\d{3}){1,10}|\d{1,40})(?:\.(\d{0,40}))?|\.(\d{1,40}))(?:/(\d{1,40}))?"
)
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_MAX_ANSWER_CHARS = 2000


class ExactMatch:
    r"""Reward 1 when the answer equals one of the golds after normalising, else 0.

    The answer is the last \boxed{} of the last message, else what its last answer tags hold,
    else what is left of it without its thoughts.
    """

    async def grade(
        self, task: Task, written: Sequence[Message], calls: Mapping[str, int]
    ) -> Grade:
        """Compare the last message with the golds."""
        answer = final_answer(written[-1].content) if written else ""
        right = any(same_answer(answer, gold) for gold in task.answers)
        return Grade(float(right), right, {"accuracy": float(right)}, _verdict(right, answer))


class ToolReward:
    r"""The hierarchical reward of ARPO and Tool-Star on what the policy wrote.

    -1 for a bad format; else 1 for a right answer and 0 for a wrong one; and 0.1 more for a right
    answer after both a search and a Python call really succeeded. The parts add up to the reward.
    The released code, which grades tool text too and gives partial credit, is to be another class
    beside this one: it shares nothing but `check_format`'s first two rules.
    """

    async def grade(
        self, task: Task, written: Sequence[Message], calls: Mapping[str, int]
    ) -> Grade:
        """Check the format of all turns together, then the answer, then the calls."""
        text = "\n".join(message.content for message in written)
        problem, answer = check_format(text)
        if problem:
            parts = {"format": -1.0, "accuracy": 0.0, "tool_bonus": 0.0}
            return Grade(-1.0, False, parts, f"bad format: {problem}")
        right = any(same_answer(answer, gold) for gold in task.answers)
        bonus = right and all(calls.get(name, 0) > 0 for name in BONUS_TOOLS)
        parts = {
            "format": 0.0,
            "accuracy": float(right),
            "tool_bonus": TOOL_BONUS if bonus else 0.0,
        }
        reason = _verdict(right, answer) + (", with search and python" if bonus else "")
        return Grade(sum(parts.values()), right, parts, reason)


def check_format(text: str) -> tuple[str, str]:
    r"""What is wrong with the format ("" if nothing), and the content of the last \boxed{}."""
    num_open, num_close = text.count("<think>"), text.count("</think>")
    if num_open != num_close or not num_open:
        return f"{num_open} <think> and {num_close} </think>, expected pairs", ""
    if text.count("<answer>") != 1 or text.count("</answer>") != 1:
        return "expected exactly one <answer> and one </answer>", ""
    before, _, rest = text.partition("<answer>")
    if "</answer>" in before:
        return "</answer> stands before <answer>", ""
    answer = last_boxed(rest.partition("</answer>")[0])
    if answer is None:
        return r"no balanced \boxed{} inside the answer", ""
    return "", answer


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...}, braces inside balanced; None when there is none."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    start += len(r"\boxed{")
    depth = 1
    for place in range(start, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[start:place].strip()
    return None


def final_answer(text: str) -> str:
    """The answer that a message gives, tagged or plain."""
    _, tag, rest = text.rpartition("<answer>")
    body = rest.partition("</answer>")[0] if tag else text.rpartition("</think>")[2]
    boxed = last_boxed(body)
    return body.strip() if boxed is None else boxed


def same_answer(answer: str, gold: str) -> bool:
    """Equal as numbers if the gold is a number, else equal as normalised text."""
    if len(answer) > _MAX_ANSWER_CHARS:
        return False
    number = as_number(gold)
    if number is not None:  # dropping punctuation would make 5 of -5 and 314 of 3.14
        return (
            as_number(answer.strip().lstrip("$\N{EURO SIGN}\N{POUND SIGN} ").rstrip("%. "))
            == number
        )
    wanted = normalise(gold)
    if not wanted:  # a gold of nothing but punctuation or an article
        return answer.strip() == gold.strip()
    return normalise(answer) == wanted


def as_number(text: str) -> Fraction | None:
    """A plain number such as -5, 1,234.50, .5 or 3/4; None for anything else."""
    match = _NUMBER.fullmatch(text.strip().replace("\N{MINUS SIGN}", "-"))
    if match is None:
        return None
    sign, whole, decimals, only_decimals, denominator = match.groups(default="")
    decimals += only_decimals
    if denominator and not int(denominator):
        return None
    digits = int((whole.replace(",", "") + decimals) or "0")
    value = Fraction(digits, 10 ** len(decimals) * int(denominator or 1))
    return -value if sign == "-" else value


def normalise(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces; compatibility forms unified."""
    text = unicodedata.normalize("NFKC", text).lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", text).split())


def _verdict(right: bool, answer: str) -> str:
    return f"{'right' if right else 'wrong'} answer: {answer[:200]}"
