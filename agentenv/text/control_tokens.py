"""Control tokens: the strings that structure a conversation for a model, and must not be forged.

With a tokenizer, `control_tokens` chooses among its added tokens. Without one, as for an endpoint
of chat messages, `KNOWN` matches those of every family in docs/learner.md by their form.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentenv.base.model_files import special_tokens
from agentenv.contract.env import tally
from agentenv.text.call_syntax import CALL_TEXTS

_TABLE = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
FAMILIES: dict[str, str] = tomllib.loads(_TABLE)  # regular expressions
NUM_SHOWN_CHARS = 40
BROKEN = "control_tokens/num_broken"  # a count of texts
SIGN = re.compile(r"[^\w\s]|_")  # neither of a word nor blank


def broken(pattern: re.Pattern[str] | None, text: str, *, counted: bool = False) -> str:
    """The text with a space after the first character of every match, also of one in another. If
    `counted`, it is a text of a tool, user or program."""
    found = None if pattern is None else pattern.search(text)
    if pattern is None or found is None:
        return text
    if counted:
        shown = text[found.start() :][:NUM_SHOWN_CHARS]
        problem = "a space breaks a control token in the text of a tool, user or program"
        tally(BROKEN).add(1, f"{problem}: {shown!r}")
    return pattern.sub(r"\1 ", text)


def pattern_of(texts: Collection[str], forms: Iterable[str] = (), firsts: str = "") -> Any:
    """A pattern for `broken` of texts, and of regular expressions that begin with one of the
    characters `firsts`; None for none."""
    found = "|".join((*forms, *map(re.escape, texts)))
    first = "".join(map(re.escape, sorted({*firsts, *(text[0] for text in texts)})))
    # the first character is matched before the lookahead, which is 50 times faster
    return re.compile(f"([{first}])(?<=(?=(?:{found})).)", re.DOTALL) if found else None


KNOWN = pattern_of(CALL_TEXTS, FAMILIES.values(), "<[]\uff5c")


def control_tokens(tokenizer: Any, eos_ids: Collection[int] = ()) -> dict[int, str]:
    """The control tokens among the added tokens of a tokenizer: special and named ones, those that
    end a turn, and those that its chat template, a call of any style, or a known family writes. The
    others, such as line breaks and tags of HTML, are text."""
    decoder: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    added = {token: str(one.content) for token, one in decoder.items()}
    named = {str(one) for one in getattr(tokenizer, "all_special_tokens", ())}
    own = {*special_tokens(tokenizer), *eos_ids}
    found = {token: text for token, text in added.items() if token in own or text in named}
    rest = {token: text for token, text in added.items() if token not in found}
    if rest:
        written = "\n".join((*CALL_TEXTS, *_written(tokenizer)))
        found |= {
            token: text
            for token, text in rest.items()
            if KNOWN.match(text) or (SIGN.search(text) and text in written)
        }
    return found


def _written(tokenizer: Any) -> Iterator[str]:
    """The texts in the source of the chat template, and what it writes for messages and calls."""
    from jinja2 import Environment  # slow to load

    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return
    sources = template.values() if isinstance(template, dict) else [str(template)]
    with suppress(Exception):  # not a valid template
        for source in sources:
            parts = Environment(autoescape=False).lex(source)
            yield from (text for _, kind, text in parts if kind in ("data", "string"))
    call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {}}}
    more: dict[str, Any] = {"tool": {"name": "f", "tool_call_id": "call00000"}}
    more["called"] = {"role": "assistant", "tool_calls": [call]}
    for roles in ("user assistant user", "system user", "user called tool assistant"):
        chat = [{"role": role, "content": "q", **more.get(role, {})} for role in roles.split()]
        with suppress(Exception):  # any error of template code: it writes no such chat
            keys = {"add_generation_prompt": True, "tokenize": False}
            yield str(tokenizer.apply_chat_template(chat, **keys))
