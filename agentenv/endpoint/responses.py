"""OpenAI's Responses API. Its store holds what this key was handed out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from agentenv.base.untrusted import decode
from agentenv.endpoint.chat import common, read_role, request_of, token_logprobs
from agentenv.endpoint.messages import (
    INPUT,
    MAX_MESSAGES,
    MAX_TOOLS,
    Event,
    Given,
    Handed,
    Json,
    Request,
    ServedTurn,
    earlier,
    get,
    input_text,
    instructed,
    number,
    objects,
    read_call,
    separated,
    stops,
    text_of,
)
from agentenv.endpoint.structured import schema_of

LOGPROBS = "message.output_text.logprobs"
PARTS = ("input_text", "output_text", "text", "refusal")
ADDED = "additional_tools"  # the type of an item
ECHOED: Json = {  # keys that a response repeats from its request, and their defaults
    "instructions": None, "metadata": {}, "previous_response_id": None, "tool_choice": "auto",
    "tools": [], "text": {"format": {"type": "text"}},
}  # fmt: skip


class Responses:
    """The dialect of `/v1/responses`."""

    path = "/v1/responses"
    done = b""

    def read(self, body: Json, handed: Handed) -> Request:
        """Raises ApiError."""
        previous = get(body, "previous_response_id", str, "")
        turn = earlier(previous, "resp_", handed, "previous_response_id") if previous else None
        added = [*(turn.request.added if turn else ()), *_added(body.get("input"))]
        if added:
            tools = objects(body.get("tools") or [], "tools", MAX_TOOLS)
            body = {**body, "tools": [*tools, *added]}
        shared = common(body, "responses")
        form = get(get(body, "text", dict, {}), "format", dict, {}, "text.")
        schema = schema_of(form, "text.format")
        names = {own: name for name, own in shared["namespaces"].items()}
        messages = _messages(body.get("input"), handed, names)
        if turn is not None:
            messages = [*turn.context, *messages]
        text = get(body, "instructions", str, "")
        messages = instructed(messages, text, again=turn is not None)
        include = get(body, "include", list, [])
        shared["ignored"] |= {f"include.{one}"[:60] for one in include if one != LOGPROBS}
        return request_of(
            separated(messages, shared["ignored"]),
            schema,
            max_tokens=number(body, "max_output_tokens", int, 1, 1 << 24) or 0,
            stop=stops(body, "stop"),
            logprobs=LOGPROBS in include,
            added=tuple(added),
            **shared,
        )

    def reply(self, request: Request, answers: Sequence[ServedTurn]) -> Json:
        return _response(request, answers[0])

    def writer(self, request: Request, index: int) -> ResponsesWriter:
        return ResponsesWriter(request)


class ResponsesWriter:
    """The events of a response; its first delta opens an item."""

    def __init__(self, request: Request) -> None:
        self._request, self._id = request, request.id
        self._numbers = count()
        self._place = -1  # of the item that is open
        self._open = ""  # its type
        self._text = ""  # its text so far

    def start(self) -> Iterable[Event]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=_response(self._request, None))

    def thoughts(self, delta: str) -> Iterable[Event]:
        yield from self._delta("reasoning", delta)

    def text(self, delta: str) -> Iterable[Event]:
        yield from self._delta("message", delta)

    def finish(self, answer: ServedTurn) -> Iterable[Event]:
        for item in _items(answer, self._request):
            if "call_id" in item:
                yield from self._call(item)
                continue
            if item["type"] != self._open and not self._text:  # an empty text
                yield from self._delta(item["type"], "")
            if item["type"] == self._open:
                yield from self._close(item)
        response = _response(self._request, answer)
        yield self._event(f"response.{response['status']}", response=response)

    def _call(self, item: Json) -> Iterable[Event]:
        self._place += 1
        key = "arguments" if item["type"] == "function_call" else "input"
        yield self._item("added", {**item, key: "", "status": "in_progress"})
        at = {"item_id": item["id"], "output_index": self._place}
        kind = f"response.{item['type']}_{key}"
        yield self._event(f"{kind}.delta", delta=item[key], **at)
        yield self._event(f"{kind}.done", **{key: item[key]}, name=item["name"], **at)
        yield self._item("done", item)

    def _delta(self, kind: str, delta: str) -> Iterable[Event]:
        if self._open != kind:
            if self._open:
                yield from self._close(_text_item(self._open, self._id, self._text, ()))
            self._place, self._open, self._text = self._place + 1, kind, ""
            yield self._item("added", _text_item(kind, self._id, None, (), "in_progress"))
            part = _part(kind, "", ())
            yield self._event("response.content_part.added", part=part, **self._at(kind))
        self._text += delta
        if delta:
            more: Json = {"logprobs": []} if kind == "message" else {}
            yield self._event(
                f"response.{_NAME[kind]}.delta", delta=delta, **more, **self._at(kind)
            )

    def _close(self, item: Json) -> Iterable[Event]:
        kind, (part,) = item["type"], item["content"]
        more: Json = {"logprobs": part["logprobs"]} if kind == "message" else {}
        done = {"text": part["text"], **more, **self._at(kind)}
        yield self._event(f"response.{_NAME[kind]}.done", **done)
        yield self._event("response.content_part.done", part=part, **self._at(kind))
        yield self._item("done", item)
        self._open = ""

    def _at(self, kind: str) -> Json:
        item = _ID[kind] + self._id
        return {"item_id": item, "output_index": self._place, "content_index": 0}

    def _item(self, what: str, item: Json) -> Event:
        return self._event(f"response.output_item.{what}", item=item, output_index=self._place)

    def _event(self, kind: str, **data: Any) -> Event:
        return kind, {"type": kind, "sequence_number": next(self._numbers), **data}


_NAME = {"reasoning": "reasoning_text", "message": "output_text"}
_ID = {"reasoning": "rs_", "message": "msg_"}


def _items(answer: ServedTurn, request: Request) -> Iterator[Json]:
    """The items of a turn."""
    given, id = answer.message, request.id
    if given.thoughts:
        yield _text_item("reasoning", id, given.thoughts, ())
    if given.text or not given.calls:
        yield _text_item("message", id, given.text, [*token_logprobs(answer.logprobs or ())])
    for call in given.calls:
        item: Json = {"call_id": call.id, "name": call.name, "status": "completed"}
        if call.name in request.custom:
            item |= {"type": "custom_tool_call", "id": f"ctc_{call.id}"}
            item["input"] = input_text(decode(call.arguments))
        else:
            item |= {"type": "function_call", "id": f"fc_{call.id}", "arguments": call.arguments}
        if call.name in request.namespaces:
            item["namespace"], item["name"] = request.namespaces[call.name]
        yield item


def _text_item(
    kind: str, id: str, text: str | None, logprobs: Sequence[Json], status: str = "completed"
) -> Json:
    content = [] if text is None else [_part(kind, text, logprobs)]
    item: Json = {"type": kind, "id": _ID[kind] + id, "content": content, "status": status}
    item["summary" if kind == "reasoning" else "role"] = [] if kind == "reasoning" else "assistant"
    return item


def _part(kind: str, text: str, logprobs: Sequence[Json]) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _response(request: Request, answer: ServedTurn | None) -> Json:
    """The response before its turn, or with it."""
    max_tokens = request.max_tokens or None
    found: Json = {
        "id": f"resp_{request.id}", "object": "response", "created_at": request.created,
        "model": request.model, "status": "in_progress", "error": None, "output": [],
        "incomplete_details": None, "parallel_tool_calls": True, "store": True,
        "temperature": request.temperature, "top_p": request.top_p,
        "max_output_tokens": max_tokens, "usage": None,
    }  # fmt: skip
    found |= {key: request.body.get(key) or default for key, default in ECHOED.items()}
    if answer is not None:
        found |= {"status": "completed", "output": [*_items(answer, request)]}
        if answer.finish == "length":
            cut = {"reason": "max_output_tokens"}
            found |= {"status": "incomplete", "incomplete_details": cut}
        prompt, sampled = answer.num_prompt_tokens, answer.num_tokens
        found["usage"] = {
            "input_tokens": prompt, "output_tokens": sampled, "total_tokens": prompt + sampled,
            "input_tokens_details": {"cached_tokens": answer.num_cached_tokens},
            "output_tokens_details": {"reasoning_tokens": 0},
        }  # fmt: skip
        if answer.raw is not None:
            found["raw"] = answer.raw
    return found


Names = Mapping[tuple[str, str], str]  # of tools, by their namespace and own name


def _messages(value: Any, handed: Handed, names: Names) -> list[Given]:
    """The items as messages; consecutive items of an assistant's turn form one message."""
    if isinstance(value, str):
        return [Given("user", value)]
    messages: list[Given] = []
    for place, item in enumerate(objects(value or [], "input", MAX_MESSAGES)):
        where = f"input[{place}]"
        if item.get("type") == ADDED:
            continue
        found = _message(item, where, handed, names)
        last = messages[-1] if messages else None
        if last is not None and last.role == found.role == "assistant":
            messages[-1] = last._replace(
                text=last.text + found.text,
                thoughts=last.thoughts + found.thoughts,
                calls=last.calls + found.calls,
            )
        else:
            messages.append(found)
    return messages


def _added(value: Any) -> Iterator[Json]:
    """The tools that the items add."""
    for place, item in enumerate(value if isinstance(value, list) else ()):
        if isinstance(item, dict) and item.get("type") == ADDED:
            yield from objects(item.get("tools"), f"input[{place}].tools", MAX_TOOLS)


def _message(item: Json, where: str, handed: Handed, names: Names) -> Given:
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    if kind == "message":
        text = text_of(item.get("content"), f"{where}.content", PARTS)
        return Given(read_role(item, where), text)
    if kind in ("function_call", "custom_tool_call"):
        custom = kind == "custom_tool_call"
        arguments = {INPUT: item.get("input")} if custom else item.get("arguments")
        own = str(item.get("namespace")), str(item.get("name"))
        name = names.get(own, item.get("name"))
        call = read_call(item.get("call_id"), name, arguments, where)
        return Given("assistant", "", calls=(call,))
    if kind in ("function_call_output", "custom_tool_call_output"):
        text = text_of(item.get("output"), f"{where}.output", PARTS)
        return Given("tool", text, answers=get(item, "call_id", str, "", where + "."))
    if kind == "reasoning":
        text = text_of(item.get("content"), f"{where}.content", ("reasoning_text",))
        known = handed.get(str(item.get("id")).removeprefix(_ID[kind]))
        if not text and known is not None:  # a stream of LangChain keeps its id alone
            text = known.answer.message.thoughts
        return Given("assistant", "", text)
    return _referenced(get(item, "id", str, "", where + "."), handed, f"{where}.id")


def _referenced(id: str, handed: Handed, where: str) -> Given:
    """The part of a reply that an item was."""
    prefix, _, rest = id.partition("_")
    if prefix in ("fc", "ctc"):
        calls = (call for turn in handed.values() for call in turn.answer.message.calls)
        found = next((call for call in calls if call.id == rest), None)
        if found is not None:
            return Given("assistant", "", calls=(found,))
    message = earlier(id, f"{prefix}_", handed, where).answer.message
    if prefix == "rs":
        return Given("assistant", "", message.thoughts)
    return Given("assistant", message.text)
