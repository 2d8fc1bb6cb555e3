"""Control tokens: the strings that structure a conversation for a model, and must not be forged.

With a tokenizer, `control_tokens` chooses among its added tokens. Without one, as for an endpoint
of chat messages, `KNOWN` matches those of every family in docs/learner.md by their form.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from agentenv.base.errors import SHOWN
from agentenv.base.model_files import special_tokens
from agentenv.contract.env import shared
from agentenv.text.call_syntax import CALL_TEXTS

logger = logging.getLogger(__name__)

FAMILIES = {  # regular expressions; a family that shares a form with an earlier one needs no entry
    "ChatML, Llama 3, Phi, GLM, Granite, Cohere, OLMo, LFM2, gpt-oss, Kimi": r"<\|[^\s<>|]+\|?>",
    "Gemma 4": r"<[^\s<>|]+\|>",
    "DeepSeek, Hunyuan": r"<?\uff5c[^\s<>\uff5c]+\uff5c>?",
    "Llama 2, Mistral": (
        r"</?s>|<</?SYS>>|\[/?(?:INST|AVAILABLE_TOOLS|TOOL_(?:CALLS|RESULTS|CONTENT)|SYSTEM_PROMPT"
        r"|MODEL_SETTINGS|ARGS|CALL_ID|THINK|IMG(?:_BREAK|_END)?|(?:BEGIN_)?AUDIO|TRANSCRIBE"
        r"|PREFIX|MIDDLE|SUFFIX)\]"
    ),
    "Gemma, Phi, InternLM": r"<(?:start|end)_of_\w+>|</?(?:bos|eos|pad|unk|mask|sop|eop|eo[ahms])>",
    "GLM": r"\[(?:[gs]?MASK|sop|eop)\]",
    "MiniMax": r"\][^\s\[\]]*~[^\s\[\]]*[\[\]]|\[e~\[|\]<\][^\[\]]*\[>\[|</?minimax:\w+",
    "InternLM": r"\[UNUSED_TOKEN_\d+\]|<TOKENS_UNUSED_\d+>",
    "EXAONE": r"\[\|[^\s\[\]|]+\|\]|\[(?:BOS|EOS|PAD|UNK|CLS|SEP)\]",
    "Cohere, Nemotron": r"</?(?:[A-Z]+_TOKEN|SPECIAL_\d+|extra_id_\d+|PAD|UNK|CLS|SEP|EOS|BOS)>",
    "Qwen, Hermes": r"</?(?:tools|tool_(?:call|response|output|list|result)s?|think)>",
    "StarCoder, Granite": r"<(?:fim|file|repo|issue|jupyter|commit|gh|empty)_\w+>",
    "LongCat, Seed, Ernie": r"</?(?:longcat_\w+|seed:[\w/]+|mask:\d+)>",
}
PROBE = "qProbeq"
NUM_SHOWN_CHARS = 40


def broken(pattern: re.Pattern[str] | None, text: str, *, counted: bool = False) -> str:
    """The text with a space after the first character of every match, also of one in another. If
    `counted`, it is a text of a tool or user."""
    found = None if pattern is None else pattern.search(text)
    if pattern is None or found is None:
        return text
    if counted:
        shared("control tokens", BrokenTokens).add(text[found.start() :][:NUM_SHOWN_CHARS])
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
    added = {token: str(one.content) for token, one in _added(tokenizer).items()}
    named = {str(one) for one in getattr(tokenizer, "all_special_tokens", ())}
    own = {*special_tokens(tokenizer), *eos_ids}
    found = {token: text for token, text in added.items() if token in own or text in named}
    rest = {token: text for token, text in added.items() if token not in found}
    if rest:
        written = "\n".join((*CALL_TEXTS, *_written(tokenizer)))
        found |= {
            token: text
            for token, text in rest.items()
            if KNOWN.match(text) or (_is_mark(text) and text in written)
        }
    return found


def _added(tokenizer: Any) -> Mapping[int, Any]:
    found: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return found


def _is_mark(text: str) -> bool:
    """Whether a text has a character that is neither of a word nor blank."""
    return any(not (char.isalnum() or char.isspace()) for char in text)


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
    asked, said = {"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": PROBE}
    system = {"role": "system", "content": PROBE}
    for chat in ([asked, said, asked], [system, asked], [asked, called, result, said]):
        with suppress(Exception):  # any error of template code: it writes no such chat
            yield str(
                tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            )


class BrokenTokens:
    """Counts the texts of tools and users in which control tokens were broken."""

    def __init__(self) -> None:
        self.number = 0

    def add(self, text: str) -> None:
        """Count a text; the first one is reported."""
        if not self.number:
            logger.warning(
                "the text of a tool or user contains a control token, which a space breaks: %r "
                "(env/control_tokens/num_broken)",
                text,
                extra=SHOWN,
            )
        self.number += 1

    def stats(self) -> dict[str, float]:
        """The number as a metric."""
        return {"control_tokens/num_broken": float(self.number)}
