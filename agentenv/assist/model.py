"""A model that helps: one question at a time to an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import hashlib
from random import Random
from typing import Any

import msgspec
from msgspec import Struct

from agentenv.assist.config import HelperConfig
from agentenv.engines.openai_config import OpenAIConfig
from agentenv.engines.openai_endpoint import Endpoint, MalformedReplyError
from agentenv.errors import ConfigError, EngineError, InfraError
from agentenv.tool_syntax import after_thoughts

PATH = "/chat/completions"
GAP = "\n...\n"


class Said(Struct, frozen=True):
    """A reply without its thoughts; `whole` unless it was cut off; `num_tokens` of request and
    reply together, 0 where the server does not say."""

    text: str
    whole: bool
    num_tokens: int


class HelperModel:
    """`start` finds the model and refuses a server that is not there; `name` is for messages."""

    def __init__(self, name: str, config: HelperConfig) -> None:
        self.name = name
        self.config = config
        if not config.url.startswith(("http://", "https://")):
            raise ConfigError(f"assist.{name}.url: expected http(s)://HOST, got {config.url!r}")
        self._endpoint = Endpoint(
            OpenAIConfig(
                url=config.url,
                model=config.model,
                api_key_env=config.api_key_env,
                timeout_s=config.timeout_s,
                num_retries=config.num_retries,
                max_concurrency=config.max_concurrency,
            ),
            table=f"assist.{name}",
        )

    async def start(self) -> None:
        """Raises ConfigError."""
        await self._endpoint.start()

    async def ask(self, system: str, user: str) -> Said:
        """Raises InfraError when there is no reply within the deadline and the retries."""
        config = self.config
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        body = {
            "model": self._endpoint.model,
            "messages": messages,
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
            **config.extra_body,
        }
        try:
            async with asyncio.timeout(config.timeout_s):
                return await self._endpoint.send(PATH, body, _said, Random(user))
        except TimeoutError:
            raise InfraError(f"no reply within {config.timeout_s:g} s") from None
        except EngineError as error:
            raise InfraError(str(error)) from error

    def fenced(self, text: str) -> str:
        """Text for the model to read, within marks that the text cannot hold."""
        if len(text) > self.config.max_input_chars:
            half = self.config.max_input_chars // 2
            text = text[:half] + GAP + text[-half:]
        mark = f"DATA-{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:16]}"
        return f"[{mark}]\n{text}\n[/{mark}]"

    async def close(self) -> None:
        """Idempotent."""
        await self._endpoint.close()


def _said(reply: Any) -> Said:
    try:
        choice = reply["choices"][0]
        content = choice["message"].get("content")
        usage = reply.get("usage") or {}
        num_tokens = sum(int(usage.get(f"{part}_tokens") or 0) for part in ("prompt", "completion"))
        if not isinstance(content, str | None):
            raise TypeError
    except (LookupError, TypeError, AttributeError, ValueError):
        shown = msgspec.json.encode(reply)[:200].decode(errors="replace")
        raise MalformedReplyError(f"no chat completion: {shown}") from None
    text = after_thoughts(content or "").strip()
    return Said(text, choice.get("finish_reason") != "length", num_tokens)
