"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from agentenv.base.types import Role
from agentenv.endpoint.messages import (
    ERRORS,
    MAX_CALLS,
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_TOOLS,
    ApiError,
    Event,
    Given,
    Json,
    Request,
    ServedTurn,
    TokenLogprob,
    checked,
    get,
    number,
    objects,
    read_call,
    read_tool,
    refuse_set,
    stops,
    text_of,
)

ROLES: dict[str, Role] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant",
    "tool": "tool",
}  # fmt: skip


class Chat:
    """The dialect of `/v1/chat/completions`."""

    path = "/v1/chat/completions"
    done = b"data: [DONE]\n\n"

    def read(self, body: Json) -> Request:
        """Raises ApiError."""
        refuse_set(body, presence_penalty=0, frequency_penalty=0, logit_bias={},
                   response_format={"type": "text"}, functions=[], top_logprobs=0)  # fmt: skip
        found = objects(body.get("messages"), "messages", MAX_MESSAGES)
        options = get(body, "stream_options", dict, {})
        return checked(
            Request(
                messages=tuple(_message(one, f"messages[{i}]") for i, one in enumerate(found)),
                tools=read_tools(body, nested="function"),
                usage_in_stream=get(options, "include_usage", bool, False),
                n=number(body, "n", int, 1, MAX_CHOICES) or 1,
                max_tokens=number(body, "max_completion_tokens", int, 1, 1 << 24)
                or number(body, "max_tokens", int, 1, 1 << 24)
                or 0,
                stop=stops(body, "stop"),
                logprobs=get(body, "logprobs", bool, False),
                **common(body),
            )
        )

    def reply(self, request: Request, answers: Sequence[ServedTurn]) -> Json:
        """All choices."""
        choices = []
        for index, answer in enumerate(answers):
            given = answer.message
            message: Json = {"role": "assistant", "content": given.text or None, "refusal": None}
            if not given.calls:
                message["content"] = given.text
            if given.thoughts:
                message["reasoning_content"] = given.thoughts
            if given.calls:
                message["tool_calls"] = [_call(one) for one in given.calls]
            if answer.raw is not None:
                message["raw"] = answer.raw
            choice = {"index": index, "message": message, "finish_reason": answer.finish}
            choice["logprobs"] = logprobs_of(answer.logprobs)
            choice["stop_reason"] = answer.stop
            choices.append(choice)
        return {**_head(request), "choices": choices, "usage": _usage(answers)}

    def writer(self, request: Request, index: int) -> ChatWriter:
        return ChatWriter(request, index)

    def usage(self, request: Request, answers: Sequence[ServedTurn]) -> Json:
        """The last event of a stream that requests the usage."""
        return {**_head(request, ".chunk"), "choices": [], "usage": _usage(answers)}

    def error(self, error: ApiError) -> Json:
        return openai_error(error)


class ChatWriter:
    """One choice of a stream."""

    def __init__(self, request: Request, index: int) -> None:
        self._head, self._index = _head(request, ".chunk"), index

    def start(self) -> Iterable[Event]:
        yield self._event({"role": "assistant", "content": ""})

    def thoughts(self, delta: str) -> Iterable[Event]:
        yield self._event({"reasoning_content": delta})

    def text(self, delta: str) -> Iterable[Event]:
        yield self._event({"content": delta})

    def finish(self, answer: ServedTurn) -> Iterable[Event]:
        """The calls, and the end of the turn."""
        for place, call in enumerate(answer.message.calls):
            yield self._event({"tool_calls": [{"index": place, **_call(call)}]})
        more = {} if answer.raw is None else {"raw": answer.raw}
        last = {"stop_reason": answer.stop, "logprobs": logprobs_of(answer.logprobs)}
        yield self._event(more, answer.finish, last)

    def _event(self, delta: Json, finish: str | None = None, more: Json | None = None) -> Event:
        choice = {"index": self._index, "delta": delta, "finish_reason": finish, **(more or {})}
        return "", {**self._head, "choices": [choice]}


def common(body: Json) -> Json:
    """The keys that the APIs share."""
    return {
        "model": get(body, "model", str, ""),
        "stream": get(body, "stream", bool, False),
        "temperature": number(body, "temperature", float, 0, 100),
        "top_p": number(body, "top_p", float, 1e-9, 1),
        "top_k": number(body, "top_k", int, -1, 1 << 24),
        "min_p": number(body, "min_p", float, 0, 1),
        "repetition_penalty": number(body, "repetition_penalty", float, 1e-3, 100),
        "seed": number(body, "seed", int, -(2**63), 2**64 - 1),
        "session": get(body, "prompt_cache_key", str, ""),
        "raw": get(body, "raw", bool, False),
        "body": body,
    }


def read_tools(
    body: Json, *, kind: str = "function", nested: str = "", schema: str = "parameters"
) -> tuple[Json, ...]:
    """The tools, unless the choice of tools is none: of this type, in the key `nested` if any, with
    their JSON schema in the key `schema`."""
    found = []
    for place, tool in enumerate(objects(body.get("tools") or [], "tools", MAX_TOOLS)):
        where = f"tools[{place}]."
        if (tool.get("type") or kind) != kind:
            what = f"expected the type {kind}, got {tool.get('type')!r:.60}"
            raise ApiError("unsupported", what, where + "type")
        own = get(tool, nested, dict, {}, where) if nested else tool
        found.append(read_tool(own, schema, where + (nested and nested + ".")))
    choice = body.get("tool_choice")
    choice = choice.get("type") if isinstance(choice, dict) else choice
    return () if choice == "none" else tuple(found)


def read_role(raw: Json, where: str) -> Role:
    """The role of a message; developer becomes system."""
    role = raw.get("role")
    if not isinstance(role, str) or role not in ROLES:
        what = f"expected one of {', '.join(ROLES)}, got {role!r:.60}"
        raise ApiError("invalid", what, f"{where}.role")
    return ROLES[role]


def _message(raw: Json, where: str) -> Given:
    role = read_role(raw, where)
    text = text_of(raw.get("content"), f"{where}.content", ("text", "refusal"))
    if role == "tool":
        answers = get(raw, "tool_call_id", str, "", where + ".")
        return Given("tool", text, answers=answers, name=get(raw, "name", str, "") or None)
    if role != "assistant":
        return Given(role, text)
    thoughts = raw.get("reasoning_content") or raw.get("reasoning") or ""
    if not isinstance(thoughts, str):
        raise ApiError("invalid", "expected a text", f"{where}.reasoning_content")
    calls = []
    for place, one in enumerate(
        objects(raw.get("tool_calls") or [], f"{where}.tool_calls", MAX_CALLS)
    ):
        spot = f"{where}.tool_calls[{place}]"
        function = get(one, "function", dict, {}, spot + ".")
        calls.append(
            read_call(one.get("id"), function.get("name"), function.get("arguments"), spot)
        )
    return Given("assistant", text, thoughts, tuple(calls))


def _head(request: Request, part: str = "") -> Json:
    kind = f"chat.completion{part}"
    return {"id": request.id, "object": kind, "created": request.created, "model": request.model}


def _call(call: Any) -> Json:
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
