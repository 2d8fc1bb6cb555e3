"""Log-probs of given texts from a server of vLLM or SGLang, by routes that both have without an
option of ours: the server may be shared, and nothing of it changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from msgspec import Struct

from agentenv.base.errors import ConfigError, EngineError, reported_as
from agentenv.base.types import Limits
from agentenv.contract.engine import check_context
from agentenv.contract.http_client import Logprob, ServerClient, reply_bytes
from agentenv.contract.server_config import RoleConfig, read_key
from agentenv.text.endpoint import Models

Rows = list[dict[int, float]]  # of each token, by id: log-probs, nats
SAMPLE = "A teacher reads 12,345 tokens: \u00e9, \u6f22\u5b57, <tool> and\n\tblanks."
CALL_S = 600.0  # of a request, which may wait for others
Triple = tuple[float | None, int, str | None]


class ScoredToken(Struct):
    logprob: Logprob


class Choice(Struct):
    prompt_logprobs: list[dict[int, ScoredToken] | None]


class VLLMScores(Struct):
    choices: list[Choice]


class ScoredMeta(Struct):
    input_token_logprobs: list[Triple]
    input_top_logprobs: list[list[Triple] | None] | None = None


class SGLangScores(Struct):
    meta_info: ScoredMeta


class TokenIds(Struct):
    tokens: list[int]


async def by_vllm(
    http: ServerClient, ids: Sequence[int], start: int, top_k: int, keys: Mapping[str, Any]
) -> Rows:
    """For each token from `start` on the log-probs of itself and of the `top_k` likeliest ids in
    its place, if any text may be written, at temperature 1. `keys`: "model", and others."""
    body = {"prompt": list(ids), "max_tokens": 1, "prompt_logprobs": top_k, **keys}
    most = reply_bytes(len(ids), top_k + 2)
    found = await http.call_as(VLLMScores, "POST", "/v1/completions", body, max_bytes=most)
    rows = found.choices[0].prompt_logprobs[start:]
    return [{token: one.logprob for token, one in (row or {}).items()} for row in rows]


async def by_sglang(
    http: ServerClient, ids: Sequence[int], start: int, top_k: int, _: Mapping[str, Any] = {}
) -> Rows:
    """As `by_vllm`."""
    body = {
        "input_ids": list(ids),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": start - 1,
        "top_logprobs_num": top_k,
    }
    most = reply_bytes(len(ids), top_k + 1)
    found = await http.call_as(SGLangScores, "POST", "/generate", body, max_bytes=most)
    own, num = found.meta_info, len(ids) - start
    likeliest = own.input_top_logprobs or [None] * num
    return [
        {token: logprob for logprob, token, _ in (one, *(more or ())) if logprob is not None}
        for one, more in zip(own.input_token_logprobs[-num:], likeliest[-num:], strict=True)
    ]


class ScoringServer:
    """A server of `engine`, vllm or sglang, that only scores."""

    def __init__(self, engine: str, url: str, api_key: str = "") -> None:
        self._http = ServerClient(url, api_key=api_key, call_s=CALL_S, fresh_posts=True)
        self._score, self._model = (by_vllm if engine == "vllm" else by_sglang), ""
        self.name = self._http.name

    async def connect(self, tokenizer: Any, top_k: int = 0) -> int:
        """The number of tokens that it reads. Raises ConfigError if `tokenizer` gives other tokens
        of a sample, which has the added ones, or likeliest ids are missing, EngineError for no such
        server or one that does not score, ValueError for one without a model."""
        model, *_ = (await self._http.call_as(Models, "GET", "/v1/models")).data
        self._model = model.id
        text = "".join([SAMPLE, *sorted(tokenizer.get_added_vocab())])
        body = {"model": model.id, "prompt": text, "add_special_tokens": False}
        found = await self._http.call_as(TokenIds, "POST", "/tokenize", body)
        if found.tokens != tokenizer.encode(text, add_special_tokens=False):
            raise ConfigError(f"{self.name} has another tokenizer than the policy")
        rows = await self.scored(found.tokens, 1, top_k)
        if (least := min(map(len, rows))) < max(1, top_k):
            raise ConfigError(f"{self.name} gives {least} of the {top_k} likeliest ids of a token")
        return model.max_model_len or 0

    async def scored(self, ids: Sequence[int], start: int, top_k: int = 0) -> Rows:
        """See `by_vllm`."""
        return await self._score(self._http, ids, start, top_k, {"model": self._model})

    async def close(self) -> None:
        await self._http.close()


async def teaching_server(
    role: RoleConfig, url: str, tokenizer: Any, limits: Limits, top_k: int, stack: AsyncExitStack
) -> ScoringServer:
    """The server of `roles.teacher`, connected; `stack` closes it. Raises ConfigError if it does
    not fit."""
    server = ScoringServer(
        role.engine, url, read_key(role.api_key_env, "roles.teacher.api_key_env")
    )
    stack.push_async_callback(server.close)
    caught = EngineError, ConfigError, ValueError
    end = "; expected a server of vLLM or SGLang with the policy's tokens"
    with reported_as(ConfigError, "roles.teacher", *caught, end=end):
        most = await server.connect(tokenizer, top_k)
    check_context(limits, most - 1, "roles.teacher")  # it writes a token
    return server
