"""A hand-written policy for the quick start's questions, for dry runs with the scripted engine."""

from __future__ import annotations

import re
from random import Random

SUCCESS = 0.7  # share of turns in which it does not give up
RESULT = re.compile(r"<result>\n(.*?)\n</result>", re.DOTALL)
ENTITY = re.compile(r"(?:shares|founder) of (\w+ \w+)")


def scripted_turn(prompt: str, rng: Random) -> str:
    """The next turn of the policy, in the tag protocol."""
    results = RESULT.findall(prompt)
    if rng.random() > SUCCESS ** (1 / 3):
        return r"<think>I do not know.</think><answer>\boxed{unknown}</answer>"
    step = _next_call(prompt, results)
    if step is None:
        value = results[-1].rstrip(".").rpartition(" is ")[2]
        return rf"<think>I know it.</think><answer>\boxed{{{value}}}</answer>"
    tool, argument = step
    return f"<think>I need {tool}.</think><{tool}>{argument}</{tool}>"


def _next_call(prompt: str, results: list[str]) -> tuple[str, str] | None:
    found = ENTITY.search(prompt)
    if found is None:  # calc
        expression = re.search(r"What is ([0-9*+ -]+)\?", prompt)
        return ("python", expression[1]) if expression and not results else None
    entity = found[1]
    values = [result.rstrip(".").rpartition(" is ")[2] for result in results]
    if "shares" in prompt:  # cost
        count = re.search(r"do (\d+) shares", prompt)
        steps = [("search", f"price of {entity}")]
        if values and count:
            steps.append(("python", f"{values[0]} * {count[1]}"))
    else:
        steps = [("search", f"founder of {entity}")]
        year = re.search(r"in (\d{4})\?", prompt)
        attribute = "birthyear" if year else "birthplace" if " born?" in prompt else "home"
        if values:
            steps.append(("search", f"{attribute} of {values[0]}"))
        if year and len(values) > 1:
            steps.append(("python", f"{year[1]} - {values[1]}"))
    return steps[len(results)] if len(results) < len(steps) else None
