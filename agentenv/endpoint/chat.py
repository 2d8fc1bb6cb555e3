"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Literal

from agentenv.base.types import Role
from agentenv.base.untrusted import decode
from agentenv.endpoint.messages import (
    ERRORS,
    INPUT,
    KEYS,
    MAX_CALLS,
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_TOOLS,
    ApiError,
    Event,
    Given,
    Handed,
    Json,
    Request,
    ServedCall,
    ServedTurn,
    TokenLogprob,
    check_keys,
    checked,
    get,
    input_text,
    number,
    objects,
    read_call,
    read_tool,
    separated,
    stops,
    text_of,
)
from agentenv.endpoint.structured import schema_of, with_form

ROLES: dict[str, Role] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant",
    "tool": "tool",
}  # fmt: skip


class Chat:
    """The dialect of `/v1/chat/completions`."""

    path = "/v1/chat/completions"
    done = b"data: [DONE]\n\n"  # the end of a stream

    def read(self, body: Json, handed: Handed) -> Request:
        """Raises ApiError."""
        shared = common(body, "chat")
        found = objects(body.get("messages"), "messages", MAX_MESSAGES)
        ignored = shared["ignored"]
        messages = [_message(one, f"messages[{i}]", ignored) for i, one in enumerate(found)]
        options = get(body, "stream_options", dict, {})
        schema = schema_of(get(body, "response_format", dict, {}), "response_format")
        return request_of(
            separated(messages, ignored),
            schema,
            usage_in_stream=get(options, "include_usage", bool, False),
            n=number(body, "n", int, 1, MAX_CHOICES) or 1,
            max_tokens=number(body, "max_completion_tokens", int, 1, 1 << 24)
            or number(body, "max_tokens", int, 1, 1 << 24)
            or 0,
            stop=stops(body, "stop"),
            logprobs=get(body, "logprobs", bool, False),
            **shared,
        )

    def reply(self, request: Request, answers: Sequence[ServedTurn]) -> Json:
        """All choices."""
        choices = []
        for index, answer in enumerate(answers):
            given = answer.message
            text = given.text or (None if given.calls else "")
            message: Json = {"role": "assistant", "content": text, "refusal": None}
            if given.thoughts:
                message["reasoning_content"] = given.thoughts
            if given.calls:
                message["tool_calls"] = [_call(one, request) for one in given.calls]
            if answer.raw is not None:
                message["raw"] = answer.raw
            last = {"stop_reason": answer.stop, "logprobs": logprobs_of(answer.logprobs)}
            head = {"index": index, "message": message, "finish_reason": answer.finish}
            choices.append(head | last)
        return {**_head(request), "choices": choices, "usage": _usage(answers)}

    def writer(self, request: Request, index: int) -> ChatWriter:
        return ChatWriter(request, index)

    def usage(self, request: Request, answers: Sequence[ServedTurn]) -> Json:
        """The last event of a stream that requests the usage."""
        return {**_head(request, ".chunk"), "choices": [], "usage": _usage(answers)}


class ChatWriter:
    """One choice of a stream."""

    def __init__(self, request: Request, index: int) -> None:
        self._request, self._index = request, index
        self._head = _head(request, ".chunk")

    def start(self) -> Iterable[Event]:
        yield self._event({"role": "assistant", "content": ""})

    def thoughts(self, delta: str) -> Iterable[Event]:
        yield self._event({"reasoning_content": delta})

    def text(self, delta: str) -> Iterable[Event]:
        yield self._event({"content": delta})

    def finish(self, answer: ServedTurn) -> Iterable[Event]:
        """The calls, and the end of the turn."""
        for place, call in enumerate(answer.message.calls):
            yield self._event({"tool_calls": [{"index": place, **_call(call, self._request)}]})
        more = {} if answer.raw is None else {"raw": answer.raw}
        last = {"stop_reason": answer.stop, "logprobs": logprobs_of(answer.logprobs)}
        yield self._event(more, answer.finish, last)

    def _event(self, delta: Json, finish: str | None = None, more: Json | None = None) -> Event:
        choice = {"index": self._index, "delta": delta, "finish_reason": finish, **(more or {})}
        return "", {**self._head, "choices": [choice]}


Api = Literal["chat", "responses", "messages"]
BOUNDS: dict[str, tuple[type, float, float]] = {  # of sampling, in all APIs
    "temperature": (float, 0, 100), "top_p": (float, 1e-9, 1), "top_k": (int, -1, 1 << 24),
    "min_p": (float, 0, 1), "repetition_penalty": (float, 1e-3, 100),
    "seed": (int, -(2**63), 2**64 - 1),
}  # fmt: skip


def request_of(messages: Sequence[Given], schema: Json | None, **keys: Any) -> Request:
    """The checked request, whose messages get the form of the reply."""
    return checked(Request(messages=tuple(with_form(messages, schema)), schema=schema, **keys))


def common(body: Json, api: Api) -> Json:
    """The fields that the APIs share. Raises ApiError for a key that is not supported."""
    ignored: set[str] = set()
    check_keys(body, api, ignored)
    sampling = {key for key in BOUNDS.keys() & body if body[key] is not None}
    unserved = {key for key in KEYS[api].unserved & body.keys() if number(body, key, float, -2, 2)}
    chosen = {key: number(body, key, *BOUNDS[key]) for key in sampling}
    return {
        "model": get(body, "model", str, ""), "stream": get(body, "stream", bool, False),
        "session": get(body, "prompt_cache_key", str, ""), "raw": get(body, "raw", bool, False),
        "own_sampling": sampling | unserved, "ignored": ignored, "body": body,
        **chosen, **read_tools(body, api, ignored),
    }  # fmt: skip


def read_tools(body: Json, api: Api, ignored: set[str]) -> Json:
    """The tools that the policy may call. Those of a type that a server would run are left out."""
    found: list[Json] = []
    custom: set[str] = set()
    namespaces: dict[str, tuple[str, str]] = {}
    given = objects(body.get("tools") or [], "tools", MAX_TOOLS)
    for tool, namespace, where in _flat(given, "tools", ignored):
        kind = str(tool.get("type") or ("custom" if api == "messages" else "function"))
        if kind not in (("custom",) if api == "messages" else ("function", "custom")):
            ignored.add(f"tools.{kind[:40]}")
            continue
        check_keys(tool, "tool", ignored, where)
        own = get(tool, kind, dict, {}, where) if api == "chat" else tool
        if kind == "custom" and api != "messages":
            own = {**own, "parameters": ONE_TEXT}
        schema = "input_schema" if api == "messages" else "parameters"
        read = read_tool(own, schema, f"{where}{kind}." if api == "chat" else where)
        name = read["name"]
        if namespace and any(one["name"] == name for one in found):
            read["name"] = f"{namespace}__{name}"
        if namespace:
            namespaces[read["name"]] = namespace, name
        if kind == "custom" and api != "messages":
            custom.add(read["name"])
        found.append(read)
    choice = body.get("tool_choice")
    names, is_forced = _choice(choice)
    if given and not found and names != ():
        what = "none of these tools is run by the program; add a function, or omit tools"
        raise ApiError("unsupported", what, "tools")
    chosen = [tool for tool in found if names is None or tool["name"] in names]
    if is_forced and not chosen:
        raise ApiError("invalid", "forces a call of a tool that is not in tools", "tool_choice")
    disabled = isinstance(choice, dict) and choice.get("disable_parallel_tool_use")
    return {
        "tools": tuple(found if is_forced else chosen),
        "forced": tuple(str(tool["name"]) for tool in chosen) if is_forced else (),
        "single": bool(disabled) or body.get("parallel_tool_calls") is False,
        "custom": frozenset(custom),
        "namespaces": namespaces,
    }


ONE_TEXT = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}


def _flat(tools: Sequence[Json], where: str, ignored: set[str]) -> Iterator[tuple[Json, str, str]]:
    """Each tool with its namespace, if any, and its place."""
    for place, tool in enumerate(tools):
        spot = f"{where}[{place}]."
        if tool.get("type") != "namespace":
            yield tool, "", spot
            continue
        check_keys(tool, "tool", ignored, spot)
        if tool.get("description"):
            ignored.add("tools.namespace.description")
        inner = objects(tool.get("tools") or [], f"{spot}tools", MAX_TOOLS)
        for one, _, there in _flat(inner, f"{spot}tools", ignored):
            yield one, str(tool.get("name")), there


def _choice(choice: Any) -> tuple[Collection[str] | None, bool]:
    """The names of the tools that may be called, None for all, and whether one must be."""
    value = choice.get("type") if isinstance(choice, dict) else choice
    match value:
        case None | "auto":
            return None, False
        case "none":
            return (), False
        case "required" | "any":
            return None, True
        case "allowed_tools":
            allowed = get(choice, "allowed_tools", dict, choice, "tool_choice.")
            where = "tool_choice.allowed_tools"
            tools = objects(allowed.get("tools"), f"{where}.tools", MAX_TOOLS)
            return {_name(tool) for tool in tools}, allowed.get("mode") == "required"
        case "function" | "tool" | "custom":
            return {_name(choice)}, True
    what = f"expected auto, none, required or the name of a tool, got {value!r:.60}"
    raise ApiError("unsupported", what, "tool_choice")


def _name(tool: Json) -> str:
    """The name in a reference to a tool."""
    return str((tool.get("function") or tool.get("custom") or tool).get("name"))


def read_role(raw: Json, where: str) -> Role:
    """The role of a message; developer becomes system."""
    try:
        return ROLES[raw["role"]]
    except (KeyError, TypeError):
        what = f"expected one of {', '.join(ROLES)}, got {raw.get('role')!r:.60}"
        raise ApiError("invalid", what, f"{where}.role") from None


def _message(raw: Json, where: str, ignored: set[str]) -> Given:
    role, text = read_role(raw, where), raw.get("content")
    if type(text) is not str:
        text = text_of(text, f"{where}.content", ("text", "refusal"))
    if role == "tool":
        answers = get(raw, "tool_call_id", str, "", where + ".")
        return Given("tool", text, "", (), answers, get(raw, "name", str, "") or None)
    if raw.get("name"):
        ignored.add("message.name")
    if role != "assistant":
        return Given(role, text)
    thoughts = raw.get("reasoning_content") or raw.get("reasoning") or ""
    if not isinstance(thoughts, str):
        raise ApiError("invalid", "expected a text", f"{where}.reasoning_content")
    found = objects(raw.get("tool_calls") or [], f"{where}.tool_calls", MAX_CALLS)
    calls = [_read_call(one, f"{where}.tool_calls[{n}]") for n, one in enumerate(found)]
    text = text or get(raw, "refusal", str, "", where + ".")
    return Given("assistant", text, thoughts, tuple(calls))


def _read_call(raw: Json, where: str) -> ServedCall:
    if custom := get(raw, "custom", dict, {}, where + ".") if "custom" in raw else None:
        return read_call(raw.get("id"), custom.get("name"), {INPUT: custom.get("input")}, where)
    function = get(raw, "function", dict, {}, where + ".")
    return read_call(raw.get("id"), function.get("name"), function.get("arguments"), where)


def _head(request: Request, part: str = "") -> Json:
    kind = f"chat.completion{part}"
    return {"id": request.id, "object": kind, "created": request.created, "model": request.model}


def _call(call: ServedCall, request: Request) -> Json:
    if call.name in request.custom:
        custom = {"name": call.name, "input": input_text(decode(call.arguments))}
        return {"id": call.id, "type": "custom", "custom": custom}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _usage(answers: Sequence[ServedTurn]) -> Json:
    prompt = answers[0].num_prompt_tokens if answers else 0
    sampled = sum(answer.num_tokens for answer in answers)
    cached = answers[0].num_cached_tokens if answers else 0
    return {
        "prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip


def logprobs_of(tokens: Sequence[TokenLogprob] | None) -> Json | None:
    """The log-probs of a choice, in OpenAI's form."""
    return None if tokens is None else {"content": list(token_logprobs(tokens)), "refusal": None}


def token_logprobs(tokens: Sequence[TokenLogprob]) -> Iterator[Json]:
    """Each token with its log-prob, without alternatives."""
    for text, logprob in tokens:
        yield {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}


def openai_error(error: ApiError) -> Json:
    """An error in the form of both of OpenAI's APIs."""
    _, kind, code, _ = ERRORS[error.name]
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": code}}
