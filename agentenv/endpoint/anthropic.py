"""Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from agentenv.base.untrusted import decode
from agentenv.endpoint.chat import common, request_of
from agentenv.endpoint.messages import (
    ERRORS,
    LEFT_OUT,
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_TOOLS,
    TOOL_REFERENCE,
    ApiError,
    Event,
    Given,
    Handed,
    Json,
    Request,
    ServedCall,
    ServedTurn,
    earlier,
    get,
    instructed,
    number,
    objects,
    part_text,
    read_call,
    stops,
    text_of,
)
from agentenv.endpoint.structured import schema_of

SIGNATURE = "agentenv"  # of thoughts; clients return it with them
RESULT_PARTS = ("text", TOOL_REFERENCE)
TOOL_SEARCH = "tool_search_tool"  # begins the types of the searches that a server runs
CHANGES = ("tool_addition", "tool_removal")


class Anthropic:
    """The dialect of `/v1/messages`."""

    path = "/v1/messages"
    done = b""

    def read(self, body: Json, handed: Handed) -> Request:
        """Raises ApiError."""
        plain = _plain(body)
        shared = common(plain, "messages")
        if plain.get("context_management") != body.get("context_management"):
            shared["ignored"].add("context_management.keep")
        form = get(get(body, "output_config", dict, {}), "format", dict, {}, "output_config.")
        schema = schema_of(form, "output_config.format")
        messages: list[Given] = []
        thread = get(body, "thread", dict, {})
        if thread.get("type") == "continue":
            id = get(thread, "previous_message_id", str, "", "thread.")
            turn = earlier(id, "msg_", handed, "thread.previous_message_id")
            messages += turn.context
            if plain.get("tools") is None:
                own = ("tools", "custom", "namespaces")
                shared |= {key: getattr(turn.request, key) for key in own}
        system = text_of(body.get("system"), "system", ("text",))
        messages = instructed(messages, system, again=bool(messages))
        for place, one in enumerate(objects(body.get("messages"), "messages", MAX_MESSAGES)):
            messages += _messages(one, f"messages[{place}]")
        max_tokens = number(body, "max_tokens", int, 1, 1 << 24)
        if max_tokens is None:
            raise ApiError(
                "invalid", "expected the maximum number of tokens to sample", "max_tokens"
            )
        metadata = get(body, "metadata", dict, {})
        shared["session"] = get(metadata, "user_id", str, "", "metadata.")
        stop = stops(body, "stop_sequences")
        return request_of(messages, schema, max_tokens=max_tokens, stop=stop, **shared)

    def reply(self, request: Request, answers: Sequence[ServedTurn]) -> Json:
        (answer,) = answers
        reply = _head(request) | {"content": list(_blocks(answer)), **_end(answer)}
        reply["usage"] = _usage(answer)
        return reply if answer.raw is None else {**reply, "raw": answer.raw}

    def writer(self, request: Request, index: int) -> AnthropicWriter:
        return AnthropicWriter(request)


def anthropic_error(error: ApiError) -> Json:
    """An error in the form of the API."""
    kind = ERRORS[error.name][3]
    where = f"{error.param}: " if error.param and error.param not in str(error) else ""
    return {"type": "error", "error": {"type": kind, "message": f"{where}{error}"}}


class AnthropicWriter:
    """The events of a message; its first delta opens a block."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._place, self._open = -1, ""

    def start(self) -> Iterable[Event]:
        usage = {"input_tokens": 0, "output_tokens": 0}
        head = _head(self._request) | {"content": [], "usage": usage}
        yield _event("message_start", message=head | {"stop_reason": None, "stop_sequence": None})

    def thoughts(self, delta: str) -> Iterable[Event]:
        yield from self._opened("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        yield self._delta(type="thinking_delta", thinking=delta)

    def text(self, delta: str) -> Iterable[Event]:
        yield from self._opened("text", {"type": "text", "text": ""})
        yield self._delta(type="text_delta", text=delta)

    def finish(self, answer: ServedTurn) -> Iterable[Event]:
        """The calls, and the end of the turn."""
        if self._place < 0 and not answer.message.calls:
            yield from self._opened("text", {"type": "text", "text": ""})
        for call in answer.message.calls:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            yield from self._opened(call.id, block)
            yield self._delta(type="input_json_delta", partial_json=call.arguments)
        yield from self._closed()
        yield _event("message_delta", delta=_end(answer), usage=_usage(answer))
        yield _event("message_stop")

    def _opened(self, kind: str, block: Json) -> Iterator[Event]:
        if self._open != kind:
            yield from self._closed()
            self._place, self._open = self._place + 1, kind
            yield _event("content_block_start", index=self._place, content_block=block)

    def _closed(self) -> Iterator[Event]:
        if self._open == "thinking":
            yield self._delta(type="signature_delta", signature=SIGNATURE)
        if self._open:
            yield _event("content_block_stop", index=self._place)
        self._open = ""

    def _delta(self, **delta: Any) -> Event:
        return _event("content_block_delta", index=self._place, delta=delta)


def _event(kind: str, **data: Any) -> Event:
    return kind, {"type": kind, **data}


def _head(request: Request) -> Json:
    id = f"msg_{request.id}"
    return {"id": id, "type": "message", "role": "assistant", "model": request.model}


def _blocks(answer: ServedTurn) -> Iterator[Json]:
    given = answer.message
    if given.thoughts:
        yield {"type": "thinking", "thinking": given.thoughts, "signature": SIGNATURE}
    if given.text or not given.calls:
        yield {"type": "text", "text": given.text}
    for call in given.calls:
        called = decode(call.arguments)
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": called}


def _end(answer: ServedTurn) -> Json:
    reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[answer.finish]
    if answer.stop is not None and answer.finish == "stop":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stop}


def _usage(answer: ServedTurn) -> Json:
    cached = answer.num_cached_tokens
    prompt = answer.num_prompt_tokens - cached
    return {
        "input_tokens": prompt, "output_tokens": answer.num_tokens,
        "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0,
    }  # fmt: skip


def _plain(body: Json) -> Json:
    """The request without edits of the context that keep all of it, and with the tools that the
    policy may call after its messages."""
    edits = get(get(body, "context_management", dict, {}), "edits", list, [])
    kept = [one for one in edits if not (isinstance(one, dict) and one.get("keep") == "all")]
    if len(kept) < len(edits):
        body = {**body, "context_management": {**body["context_management"], "edits": kept}}
    tools = objects(body.get("tools") or [], "tools", MAX_TOOLS)
    found = _offered(tools, body.get("messages"))
    if found != tools and body.get("tools") is None and body.get("thread"):
        raise ApiError("unsupported", "a change of tools in a thread needs all of them", "tools")
    return body if found == tools else {**body, "tools": found}


def _offered(tools: Sequence[Json], messages: Any) -> list[Json]:
    """The tools after the changes in the messages, without deferred ones that the program has not
    offered yet; a server that searches them would offer all of them."""
    known = [*tools]
    is_searched = any(str(tool.get("type")).startswith(TOOL_SEARCH) for tool in tools)
    found = [tool for tool in tools if is_searched or not tool.get("defer_loading")]
    for kind, change in _changes(messages):
        new = get(change, "definition", dict, {}, f"messages.{kind}.tool.")
        known += [new] if new else []
        name = (new or change).get("name")
        same = [tool for tool in known if tool.get("name") == name][-1:]
        if kind in CHANGES and not same:
            what = f"no tool has the name {name!r:.60}"
            raise ApiError("invalid", what, f"messages.{kind}.tool")
        if kind == "tool_removal" or new:
            found = [tool for tool in found if tool.get("name") != name]
        if kind != "tool_removal" and not any(tool in found for tool in same):
            found += same
    return found


def _changes(content: Any) -> Iterator[tuple[str, Json]]:
    """The parts of a content that offer tools or withdraw them: type and tool of each."""
    if isinstance(content, dict):
        kind = content.get("type")
        if kind == TOOL_REFERENCE:
            yield kind, {"name": content.get("tool_name")}
        elif kind in CHANGES:
            yield kind, get(content, "tool", dict, {}, f"messages.{kind}.")
        content = content.get("content")
    for one in content if isinstance(content, list) else ():
        yield from _changes(one)


def _messages(raw: Json, where: str) -> Iterator[Given]:
    """The messages in a raw one: a user message may contain tool results, which are separate
    messages, in order."""
    role, content = raw.get("role"), raw.get("content")
    if role not in ("user", "assistant", "system"):
        what = f"expected user or assistant, got {role!r:.60}"
        raise ApiError("invalid", what, f"{where}.role")
    if isinstance(content, str) or content is None:
        yield Given(role, text_of(content, where, ()))
        return
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ServedCall] = []
    place = f"{where}.content"
    for number_, block in enumerate(objects(content, place, MAX_CALLS)):
        spot, kind = f"{place}[{number_}]", block.get("type")
        if kind == "text" or (kind in LEFT_OUT and kind != "redacted_thinking"):
            texts.append(part_text(block, spot, ("text",)))
        elif kind == "tool_result" and role == "user":
            if texts:
                yield Given("user", "\n".join(texts))
                texts = []
            text = text_of(block.get("content"), f"{spot}.content", RESULT_PARTS)
            yield Given("tool", text, answers=get(block, "tool_use_id", str, "", spot + "."))
        elif kind == "tool_use" and role == "assistant":
            calls.append(read_call(block.get("id"), block.get("name"), block.get("input"), spot))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(get(block, "thinking", str, "", spot + "."))
        elif kind not in CHANGES and (kind != "redacted_thinking" or role != "assistant"):
            what = f"blocks of type {kind!r:.60} are not supported in a message of role {role}"
            raise ApiError("unsupported", what, spot)
    if role == "assistant":
        yield Given("assistant", "\n".join(texts), "\n".join(thoughts), tuple(calls))
    elif texts or not content:
        yield Given(role, "\n".join(texts))
