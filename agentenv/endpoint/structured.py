"""Structured output: the prompt has the form of a reply; replies of another form are counted."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from agentenv.base.errors import ForeignError
from agentenv.base.untrusted import decode
from agentenv.endpoint.messages import ApiError, Given, Json, get

NEXT_TO = "Reply with JSON alone, which matches this schema:"
# keywords whose check may take any time, or needs a package
UNCHECKED = ("pattern", "patternProperties", "format")


def schema_of(form: Json, where: str) -> Json | None:
    """The JSON schema of `response_format`, `text.format` or `output_config.format`; None for
    text. Raises ApiError."""
    kind = form.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        what = f"expected text, json_object or json_schema, got {kind!r:.60}"
        raise ApiError("unsupported", what, f"{where}.type")
    inner = get(form, "json_schema", dict, form, f"{where}.")
    schema: Json = get(inner, "schema", dict, {}, f"{where}.")
    if problem := _problem(json.dumps(schema)):
        raise ApiError("invalid", f"not a JSON schema: {problem}", f"{where}.schema")
    return schema


def with_form(messages: Sequence[Given], schema: Json | None) -> list[Given]:
    """The messages, with the form of the reply at the end of their system message."""
    if schema is None or not messages:
        return [*messages]
    text = f"{NEXT_TO}\n{json.dumps(schema, ensure_ascii=False)}"
    if messages[0].role != "system":
        return [Given("system", text), *messages]
    first = messages[0]._replace(text=f"{messages[0].text}\n\n{text}")
    return [first, *messages[1:]]


def fits(text: str, schema: Json) -> bool:
    """Whether a text is JSON that matches a schema, `UNCHECKED` keywords apart."""
    try:
        value = decode(text)
    except ForeignError:
        return False
    try:
        return bool(_checker(json.dumps(schema)).is_valid(value))
    except Exception:  # a reference that leads nowhere, or to itself
        return False


@lru_cache(maxsize=64)
def _problem(schema: str) -> str:
    package = importlib.import_module("jsonschema")
    try:
        package.Draft202012Validator.check_schema(decode(schema))
    except package.SchemaError as error:
        return str(error.message)[:200]
    return ""


@lru_cache(maxsize=64)
def _checker(schema: str) -> Any:
    package = importlib.import_module("jsonschema")  # slow to load
    ignored = dict.fromkeys(UNCHECKED, lambda *_: ())
    kind = package.validators.extend(package.Draft202012Validator, ignored)
    return kind(decode(schema))
