r"""Reward, equivalence and evaluation metrics of the released code of ARPO and Tool-Star.

Mathematics is scored by token F1 too, tags in tool results count, and the mere text </search> and
</python> earns a bonus. Source: the reward rule in section 5 of the ARPO paper, and its released
evaluation. Reasons have the original spelling, since reports compare them.
"""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentenv.base.errors import ConfigError, reported_as
from agentenv.base.types import Message, Task
from agentenv.contract.env import Grade
from agentenv.envs.grading.verdict import Matcher, Verdict
from agentenv.envs.grading.words import token_f1

Output = dict[str, Any]

TOOL_BONUS = 0.1
_BOX, _BOX_SPACE = r"\boxed{", "\\boxed "
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_INTEGERS = re.compile(r"(0|-?[1-9][0-9]{0,4000})/(0|-?[1-9][0-9]{0,4000})")


class NoNormalFormError(ValueError):
    """An expression that the released rules cannot normalize."""


class ReleasedReward:
    """The released rule as a grader: token F1 for every kind of question. Tool results, which a
    grader does not get, appear as empty in the text."""

    async def grade(
        self, task: Task, written: Sequence[Message], calls: Mapping[str, int]
    ) -> Grade:
        """Grade the concatenated text of all turns; actual calls do not count."""
        text = "".join(
            message.content + (" <result>\n\n</result>" if message.tool_calls else "")
            for message in written
        )
        output = reference_reward(text, task.answers)
        score, f1 = float(output["score"]), float(output["f1_score"])
        parts = {"format": min(score, 0.0), "accuracy": f1, "tool_bonus": max(0.0, score - f1)}
        return Grade(score, f1 >= 1.0, parts, str(output["reason"]))


def check_reference_format(text: str) -> tuple[bool, str]:
    """(is_valid, reason): whether the whole text, including tool results, has the format."""
    num_open, num_close = text.count("<think>"), text.count("</think>")
    if num_open != num_close:
        return False, "<think> </think> not paired"
    if not num_open:
        return False, "<think> or </think> not found"
    if (text.count("<answer>"), text.count("</answer>")) != (1, 1):
        return False, "<answer> or </answer> not found"
    for tag in ("search", "python"):
        problem = _tool_order(text, tag)
        if problem:
            return False, f"{tag}/result tags are {problem}"
    start, end = text.find("<answer>"), text.find("</answer>")
    if start > end:
        return False, "<answer> must be before </answer>"
    if _BOX not in text[start:end] or "}" not in text[start:end]:
        return False, r"answer is missing \boxed{} format"
    return True, "format is correct"


def reference_reward(text: str, golds: str | Sequence[str]) -> Output:
    """{"score", "reason", "answer", "f1_score"} of a decoded response."""
    valid, reason = check_reference_format(text)
    output: Output = {"score": -1, "reason": f"bad format: {reason}", "answer": "", "f1_score": 0}
    if not valid:
        return output
    answer, problem = _boxed(text.partition("<answer>")[2].partition("</answer>")[0])
    if answer is None:
        return {**output, "reason": f"find box error: {problem}"}
    accepted = [golds] if isinstance(golds, str) else golds
    f1 = max((reference_f1(answer, gold) for gold in accepted), default=0)
    output |= {"answer": answer, "f1_score": f1}
    if not f1:
        return {**output, "score": 0, "reason": f"wrong answer but good format: {answer}"}
    if "</search>" in text and "</python>" in text:
        score = f1 + TOOL_BONUS
        why = f"correct answer and calling search and python at the same time, get score: {score}"
        return {**output, "score": score, "reason": why}
    return {**output, "score": f1, "reason": f"correct answer, get f1 score: {f1}"}


def reference_f1(answer: str, gold: str) -> float:
    """Token F1 without Unicode normalization: lower case, without ASCII punctuation and
    articles."""
    found, wanted = _plain(answer), _plain(gold)
    exclusive = {"yes", "no", "noanswer"}
    if found != wanted and (found in exclusive or wanted in exclusive):
        return 0
    return token_f1(found.split(), wanted.split()) or 0


def reference_extract(text: str) -> str:
    """The prediction that the released evaluation extracts from a response."""
    before = text[: max(text.rfind("</answer>"), 0)]
    start = before.rfind("<answer>")
    body = before[start + len("<answer>") :] if start >= 0 else ""
    found = _last_box((body or text).strip())
    if found.startswith(_BOX) and found.endswith("}"):
        found = found[len(_BOX) : -1]
        if found.startswith(r"\text{") and found.endswith("}"):
            found = found[len(r"\text{") : -1]
    return found or body


def reference_metrics(task: str, prediction: Any, reference: Any) -> dict[str, float]:
    """em, acc, f1 and math_equal of the released evaluation; `task` is "qa" or "math"."""
    golds = [reference]
    if task == "qa" and isinstance(reference, str) and reference.startswith("["):
        golds = [part.strip() for part in re.split(r",\s*", reference.strip("[]"))]
    elif task == "qa" and not isinstance(reference, str):
        golds = list(reference)
    found = _lower(prediction, task == "qa")
    best: dict[str, float] = {"em": 0, "acc": 0, "f1": 0, "math_equal": 0}
    for gold in golds:
        wanted = _lower(gold, task == "qa")
        values = {
            "em": int(found == wanted),
            "acc": int(wanted in found),
            "f1": token_f1(found.split(), wanted.split()),
            "math_equal": int(reference_equal(found, wanted)),
        }
        best = {key: max(best[key], value) for key, value in values.items()}
    return best


def reference_equal(one: str | None, other: str | None) -> bool:
    """Equality of two expressions after the string rules of `reference_normal`."""
    if one is None or other is None:
        return one is other
    try:
        return reference_normal(one) == reference_normal(other)
    except (IndexError, NoNormalFormError):  # compare them unchanged
        return one == other


class ReleasedEquality(Matcher):
    """The rule of the released evaluation, next to its judge, as a matcher: an answer that equals
    the gold is correct without the judge. Several golds are a list there, which no answer
    equals."""

    async def verdict(self, question: str, answer: str, golds: Sequence[str]) -> Verdict:
        """The verdict, with score 0 or 1."""
        right = len(golds) == 1 and reference_equal(answer, golds[0])
        reason = f"{'right' if right else 'wrong'}: by the string rules of the released evaluation"
        return Verdict(right, float(right), reason)


def reference_verdict(reply: str) -> bool:
    """The verdict that the released evaluation reads from a judge's reply: it contains "correct",
    and none of "incorrect", "wrong" and "not correct". If there are <judgment> tags, only the text
    between them counts."""
    begin, end = reply.find("<judgment>"), reply.find("</judgment>")
    if begin >= 0 and end >= 0:
        reply = reply[begin + len("<judgment>") : end]
    text = reply.lower()
    is_rejected = any(word in text for word in ("incorrect", "wrong", "not correct"))
    return "correct" in text and not is_rejected


def reference_normal(text: str) -> str:
    r"""The normal form of an expression. Raises IndexError if \frac or \sqrt has no argument, and
    NoNormalFormError for two units."""
    for old, new in (
        ("\n", ""), (r"\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"),
        (r"\left", ""), (r"\right", ""), (r"^{\circ}", ""), (r"^\circ", ""), (r"\$", ""),
    ):  # fmt: skip
        text = text.replace(old, new)
    if text.count(r"\text{ ") > 1:
        raise NoNormalFormError(text)
    text = text.partition(r"\text{ ")[0].replace(r"\%", "").replace(r"\%", "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = f"0{text}"
    if not text:
        return text
    name, equals, value = text.partition("=")
    if equals and "=" not in value and len(name) <= 2:
        text = value
    head, *roots = text.split(r"\sqrt")
    text = head + "".join(rf"\sqrt{_first_braced(root)}" for root in roots)
    text = _braced_fractions(text.replace(" ", ""))
    if text == "0.5":
        return r"\frac{1}{2}"
    integers = _INTEGERS.fullmatch(text)
    return rf"\frac{{{integers[1]}}}{{{integers[2]}}}" if integers else text


def _first_braced(text: str) -> str:
    return text if text[0] == "{" else f"{{{text[0]}}}{text[1:]}"


def _braced_fractions(text: str) -> str:
    head, *pieces = text.split(r"\frac")
    for piece in pieces:
        if piece[0] == "{":
            head += rf"\frac{piece}"
        elif len(piece) < 2:
            return text
        else:
            head += rf"\frac{{{piece[0]}}}{_first_braced(piece[1:])}"
    return head


def _tool_order(text: str, tag: str) -> str:
    place = 0
    while (start := text.find(f"<{tag}>", place)) >= 0:
        result, end = text.find("<result>", start), text.find(f"</{tag}>", start)
        close = text.find("</result>", result)
        if -1 in (result, end, close):
            return "incomplete"
        if not start < end < result < close:
            return "nested in the wrong order"
        place = close
    return ""


def _boxed(body: str) -> tuple[str | None, str]:
    """The content of the last box, or None and the error that the released code reports."""
    if _BOX_SPACE in body:
        return body.rpartition(_BOX_SPACE)[2].partition("$")[0], ""
    found = _last_box(body)
    if not found.endswith("}") or found.count("{") != found.count("}"):
        return None, "argument of type 'NoneType' is not iterable"
    return (found[len(_BOX) : -1], "") if found.startswith(_BOX) else (None, "")


def _last_box(text: str) -> str:
    r"""The text from the last \boxed, or else \fbox, to its closing brace, or to the end."""
    start = text.rfind(r"\boxed")
    if start < 0:
        start = text.rfind(r"\fbox")
    if start < 0:
        return ""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if text[place] == "}" and depth == 0:
            return text[start : place + 1]
    return text[start:]


def _plain(text: str) -> str:
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _lower(text: Any, articles: bool) -> str:
    text = str(text).lower().strip()
    return " ".join((_ARTICLE.sub(" ", text) if articles else text).split())


# The released prompt of the judge, which this package may not ship.

FIELDS = ("question", "labeled_answer", "pred_answer")
_FIELD = re.compile(rf"\{{({'|'.join(FIELDS)})\}}")


def read_prompt(path: Path) -> str:
    """A text with the three FIELDS in braces: the whole file, or the only such text of a Python
    file, which is parsed and not run. Raises ConfigError."""
    who = f"grader.judge.prompt_file: {path} cannot be read"
    remedy = "; expected evaluation/src/llm_evaluator_sds.py of your copy of ARPO's repository"
    with reported_as(ConfigError, who, OSError, SyntaxError, ValueError, end=remedy):
        text = path.read_text(encoding="utf-8")
        nodes = ast.walk(ast.parse(text)) if path.suffix == ".py" else [ast.Constant(text)]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
    fitting = [one for one in texts if isinstance(one, str) and {*_FIELD.findall(one)} == {*FIELDS}]
    if len(fitting) != 1:
        wanted = ", ".join(f"{{{name}}}" for name in FIELDS)
        raise ConfigError(
            f"grader.judge.prompt_file: {path} contains {len(fitting)} texts with {wanted}; "
            "expected one"
        )
    return fitting[0]


def filled_prompt(prompt: str, question: str, answer: str, golds: Sequence[str]) -> str:
    """The prompt as filled in by the released evaluation: texts unchanged, several golds as the
    repr of a list."""
    labeled = golds[0] if len(golds) == 1 else str(list(golds))
    values = dict(zip(FIELDS, (question, labeled, answer), strict=True))
    return _FIELD.sub(lambda name: values[name[1]], prompt)
