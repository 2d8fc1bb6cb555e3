"""The difference of two calls of a program: a replay is exact as long as there is none."""

from __future__ import annotations

import json
import re

from agentenv.endpoint.messages import Json, Request
from agentenv.text.contexts import num_common

SHOWN_CHARS = 80  # of a difference
NUM_BEFORE = 12  # characters before it, or after it at the start of a line, that a pattern repeats


def compared(request: Request) -> Json:
    """The compared values of a replay: {"messages": [..], "tools": [..]}, for any API."""
    messages = [
        {**given._asdict(), "calls": [call._asdict() for call in given.calls]}
        for given in request.messages
    ]
    return {"messages": messages, "tools": list(request.tools)}


def difference(then: Json, now: Json) -> str:
    """The first difference of two calls, and how to ignore it."""
    if then["tools"] != now["tools"]:
        return _between("its list of tools", json.dumps(then["tools"]), json.dumps(now["tools"]))
    pairs = zip(then["messages"], now["messages"], strict=False)
    place = next((place for place, (one, other) in enumerate(pairs) if one != other), -1)
    if place < 0:
        return f"it has {len(now['messages'])} messages, not {len(then['messages'])}"
    one, other = then["messages"][place], now["messages"][place]
    key = next(key for key in one if one[key] != other[key])
    texts = [
        value if isinstance(value, str) else json.dumps(value) for value in (one[key], other[key])
    ]
    return _between(f"message {place} ({one['role']}, {key})", *texts)


def _between(where: str, then: str, now: str) -> str:
    """The first difference of two texts."""
    at = num_common(then, now)
    start = max(0, at - SHOWN_CHARS // 2)
    parts = " and ".join(repr(text[start : at + SHOWN_CHARS // 2]) for text in (then, now))
    return f"{where} has {parts}{_remedy(then, now, at)}"


def _remedy(then: str, now: str, at: int) -> str:
    """The setting that ignores two different numbers or words at an offset."""
    start = at - len(re.search(r"\w*$", then[:at])[0])  # type: ignore[index]  # it always matches
    word, other = (re.match(r"\w+", text[start:]) for text in (then, now))
    if word is None or other is None:
        return ""
    before = then[max(0, start - NUM_BEFORE) : start].rpartition("\n")[2]
    after = "" if before else then[start + word.end() :][:NUM_BEFORE].partition("\n")[0]
    if not (before or after):  # it would ignore every word
        return ""
    form = r"\d+" if word[0].isdigit() and other[0].isdigit() else r"\w+"
    pattern = re.escape(before) + form + re.escape(after)
    return f"; to ignore it: env.kwargs.program.normalise = {{ own = '{pattern}' }}"
