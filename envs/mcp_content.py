"""Results of MCP tools as the text that the policy reads, whatever blocks they are made of.

Blocks as in the Model Context Protocol, revision 2025-11-25, "Tools", section "Tool Result".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from agentenv.errors import ForeignError
from agentenv.untrusted import decode


def text_of(result: Any) -> str:
    """The blocks of a result in order, a line or more each, then its structured content as JSON
    unless the blocks say it already.

    Texts stand as they are; what a policy cannot read stands as kind, type, size and address.
    """
    shown = [_block_text(block) for block in result.content]
    structured = result.structured_content
    is_new = structured is not None and not _is_said(structured, result.content)
    if is_new and (structured or not shown):
        shown.append(json.dumps(structured, ensure_ascii=False, separators=(",", ":")))
    return "\n".join(shown)


def _block_text(block: Any) -> str:
    match block.type:
        case "text":
            return str(block.text)
        case "resource":
            resource = block.resource
            if hasattr(resource, "text"):
                return str(resource.text)
            return _described("resource", resource.mime_type, _size(resource.blob), resource.uri)
        case "resource_link":
            return _described("resource_link", block.name, block.uri, block.description)
        case "image" | "audio":
            return _described(block.type, block.mime_type, _size(block.data))
        case kind:
            return _described(kind)


def _described(*parts: object) -> str:
    return f"[{', '.join(str(part) for part in parts if part)}]"


def _size(base64: str) -> str:
    """The size of what a text of base64 holds."""
    return f"{len(base64.rstrip('=')) * 3 // 4} bytes"


def _is_said(structured: Any, blocks: Sequence[Any]) -> bool:
    """Whether the blocks hold the structured content: servers repeat it as JSON or in plain words,
    as a whole or as the one value of an object ("result", "content")."""
    texts = [block.text for block in blocks if block.type == "text"]
    values = [_value(text) for text in texts]
    said = [*texts, "\n".join(texts), *values, texts, values]
    said.append(
        [block.model_dump(mode="json", by_alias=True, exclude_none=True) for block in blocks]
    )
    wholes = [structured]
    if isinstance(structured, dict) and len(structured) == 1:
        wholes += structured.values()
    known = set(map(_json, said)) if blocks else set()
    return any(_json(whole) in known for whole in wholes)


def _json(value: Any) -> str:
    """One text for equal values of JSON, in which true is not 1."""
    return json.dumps(value, sort_keys=True)


def _value(text: str) -> Any:
    """The JSON that a text is, else the text."""
    try:
        return decode(text)
    except ForeignError:
        return text
