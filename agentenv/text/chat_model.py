"""The chat API of an OpenAI-compatible endpoint: its replies, and auxiliary models for independent
questions. An invalid reply is a MalformedReplyError.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

from msgspec import Meta, Struct

from agentenv.base.secrets import SECRETS
from agentenv.contract.http_client import Count, read_as
from agentenv.contract.server_config import ChatModelConfig
from agentenv.text.call_syntax import without_thoughts
from agentenv.text.control_tokens import KNOWN, broken
from agentenv.text.endpoint import Json, ModelEndpoint

CHAT_PATH = "/chat/completions"
MAX_TOKENS = 1 << 20  # of a turn, as counted by its server


class ChatFunction(Struct):
    """A tool call of the model, which is checked when it is executed. `arguments` is a JSON text or
    a JSON value."""

    name: Any = None
    arguments: Any = None


class ChatCall(Struct):
    """A tool call."""

    id: str | None = None
    function: ChatFunction | None = None


class ChatMessage(Struct):
    """The model's message; `reasoning_content` and `reasoning` are two names of its thoughts; `raw`
    is the whole turn as sampled, from `agentenv serve`."""

    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    raw: str | None = None
    tool_calls: list[ChatCall] | None = None


class ChatChoice(Struct):
    """`stop_reason` (vLLM) and `matched_stop` (SGLang) name the stop string or token, if any."""

    message: ChatMessage
    finish_reason: str | None = None
    stop_reason: Any = None
    matched_stop: Any = None


class ChatUsage(Struct):
    """In tokens."""

    prompt_tokens: Count | None = None
    completion_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None


class ChatReply(Struct):
    """A reply to /chat/completions."""

    choices: Annotated[list[ChatChoice], Meta(min_length=1)]
    usage: ChatUsage | None = None


class ModelReply(Struct, frozen=True):
    """A reply of a model: its text with and without thoughts; `whole` unless it was truncated;
    `num_tokens` of request and reply together, 0 if not reported."""

    raw: str
    text: str
    whole: bool
    num_tokens: int


def read_chat(reply: Any) -> ChatReply:
    """Decode a reply from bytes or plain values. Raises MalformedReplyError."""
    return read_as(ChatReply, reply, "not a chat completion")


def read_reply(reply: Any) -> ModelReply:
    """The model's reply, without secrets. Raises MalformedReplyError."""
    found = read_chat(reply)
    choice, usage = found.choices[0], found.usage or ChatUsage()
    raw = SECRETS.known(choice.message.content or "")
    num_tokens = (usage.prompt_tokens or 0) + (usage.completion_tokens or 0)
    return ModelReply(
        raw, without_thoughts(raw).strip(), choice.finish_reason != "length", num_tokens
    )


def fenced(text: str, *, name: str = "DATA", digest_of: str = "") -> str:
    """Untrusted text for a model, without control tokens, between marks that the text cannot
    contain: they are derived from the text, or from `digest_of`, which must determine the text."""
    digest = hashlib.sha256((digest_of or text).encode(errors="replace")).hexdigest()
    mark = f"{name}-{digest[:16]}"
    return f"[{mark}]\n{broken(KNOWN, text)}\n[/{mark}]"


class ChatModel:
    """An auxiliary model behind an endpoint, for independent questions: judge, summarizer, helpers.

    `table` is the configuration table of `config`, `settings` are further keys of each request.
    `start` of its `endpoint` is necessary only if no model is named.
    """

    def __init__(self, config: ChatModelConfig, table: str, **settings: Any) -> None:
        self.name = table.rpartition(".")[2]
        self.endpoint = ModelEndpoint(config, table)
        self._settings = {**settings, "max_tokens": config.max_tokens, **config.extra_body}

    async def complete(self, system: str, user: str) -> ModelReply:
        """Ask one question. Raises EngineError if the endpoint rejects it, or all attempts fail."""
        return await self.reply(self.body(system, user))

    def body(self, system: str, user: str) -> Json:
        """A request with one question and an optional system prompt."""
        prompt = [{"role": "system", "content": system}] if system else []
        messages = [*prompt, {"role": "user", "content": user}]
        return {"model": self.endpoint.model, "messages": messages, **self._settings}

    async def reply(self, body: Json) -> ModelReply:
        """The reply to such a request. Raises EngineError."""
        return await self.endpoint.send(CHAT_PATH, body, read_reply, str(body["messages"]))

    def stats(self) -> dict[str, float]:
        """The number of requests, and of retries among them."""
        counts = self.endpoint.counts
        return {
            f"{self.name}/num_requests": counts["requests"],
            f"{self.name}/num_retries": counts["retries"],
        }

    async def close(self) -> None:
        """Close the connections; idempotent."""
        await self.endpoint.close()
