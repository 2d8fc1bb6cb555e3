"""Requirements of a turn: one call at most, a forced call, the form of a schema.

The last two are grammars of the sampling:

structural tags of xgrammar, in JSON, which vLLM and SGLang accept. Text and thoughts may precede
the first call; thoughts may precede the JSON of a schema.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from agentenv.base.errors import EnvError
from agentenv.base.types import NextTurn
from agentenv.text.call_syntax import CALL_CLOSE, CALL_ENDS, CALL_OPEN, THOUGHT_CLOSE, THOUGHT_OPEN
from agentenv.text.renderer import ContextRenderer

Json = dict[str, Any]


class CallForm(NamedTuple):
    """A call as text: its opening mark, the text from there to the arguments, with the name of the
    tool, that after them, and xgrammar's style of the arguments."""

    mark: str
    head: str
    end: str
    style: str = "json"


FORMS = {
    "hermes": CallForm(CALL_OPEN, '\n{{"name": "{}", "arguments": ', f"}}\n{CALL_CLOSE}"),
    "qwen_xml": CallForm(
        CALL_OPEN, "\n<function={}>\n", f"\n</function>\n{CALL_CLOSE}", "qwen_xml"
    ),
    "glm": CallForm(CALL_OPEN, "{}\n", f"\n{CALL_CLOSE}", "glm_xml"),
}
OTHER_THOUGHTS = ("harmony", "atem", "gemma")  # styles without <think>; the prompt has the schema


def single_ends(style: str, turn: NextTurn) -> tuple[str, ...]:
    """The text that ends a turn of at most one call, if no grammar does."""
    ends = turn.single and not turn.forced and style in CALL_ENDS
    return (CALL_ENDS[style],) if ends else ()


def guide_of(
    turn: NextTurn,
    renderer: ContextRenderer,
    tools: Sequence[Mapping[str, Any]],
    prefix: Sequence[int],
) -> str:
    """The grammar of a turn after `prefix`; empty: any text. Raises EnvError for a format of calls
    without a grammar."""
    if turn.forced:
        parts = forced_calls(renderer.style, tools, turn.forced, single=turn.single)
    elif turn.schema is not None and renderer.style not in OTHER_THOUGHTS:
        parts = [{"type": "json_schema", "json_schema": turn.schema}]
    else:
        return ""
    whole = {"type": "sequence", "elements": [_thought(renderer.opens_thought(prefix)), *parts]}
    return json.dumps({"type": "structural_tag", "format": whole})


def forced_calls(
    style: str, tools: Sequence[Mapping[str, Any]], names: Collection[str], *, single: bool
) -> list[Json]:
    """The parts of a turn that calls one of the named tools, only once if `single`; `style` is that
    of the renderer. Raises EnvError for a style without a grammar."""
    form = FORMS.get(style)
    if form is None:
        known = ", ".join(FORMS)
        raise EnvError(
            f"tool_choice: no grammar forces a call in the format {style}, only in {known}; use "
            "auto or none"
        )
    schemas = [(str(one["name"]), one["parameters"]) for one in tools if one["name"] in names]
    free = {"type": "any_text", "excludes": [THOUGHT_OPEN]}
    text = {"type": "tag", "begin": "", "content": free, "end": form.mark}
    first = {"type": "or", "elements": [_call(form, *one) for one in schemas]}
    parts: list[Json] = [text, first]
    if not single:
        more = [_call(form, *one, mark=form.mark) for one in schemas]
        parts.append({"type": "triggered_tags", "triggers": [form.mark], "tags": more})
    return parts


def _thought(is_open: bool) -> Json:
    """A thought before the rest; `is_open`: the prompt has begun it."""
    text = {"type": "any_text", "excludes": [THOUGHT_CLOSE]}
    opening = "" if is_open else THOUGHT_OPEN
    thought = {"type": "tag", "begin": opening, "content": text, "end": THOUGHT_CLOSE}
    whole = {"type": "sequence", "elements": [thought, {"type": "regex", "pattern": r"\s*"}]}
    return whole if is_open else {"type": "optional", "content": whole}


def _call(form: CallForm, name: str, schema: Json, mark: str = "") -> Json:
    content = {"type": "json_schema", "json_schema": schema, "style": form.style}
    begin = mark + form.head.format(name)
    return {"type": "tag", "begin": begin, "content": content, "end": form.end}
