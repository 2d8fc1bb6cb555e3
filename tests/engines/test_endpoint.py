"""Replies of an endpoint are decoded in one place; a model answers one question."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentenv.base.errors import ConfigError, EngineDeadError
from agentenv.base.retries import Backoff
from agentenv.base.untrusted import shortened
from agentenv.contract.http_client import MalformedReplyError
from agentenv.contract.server_config import ChatModelConfig
from agentenv.text.chat_model import ChatModel, fenced, read_chat, read_reply
from tests.support.openai_endpoint import ScriptedEndpoint, reply


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentenv.base.retries.REQUESTS", Backoff(0.01, 60.0))


def model_at(url: str, **keys: Any) -> ChatModel:
    settings = {"timeout_s": 20.0, "num_retries": 1, "max_concurrency": 4, **keys}
    return ChatModel(ChatModelConfig(url=url, model="m", **settings), "some.table", temperature=0)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"<html>busy</html>", b'"\xff\xfe"', b"[" * 100_000, b"[]",
        b'{"error": {"message": "no such model"}}', b'{"choices": []}', b'{"choices": [{}]}',
        b'{"choices": [{"message": {"content": 5}}]}',
        b'{"choices": [{"message": {"content": "x"}}], "usage": 7}',
        b'{"choices": [{"message": {}}], "usage": {"prompt_tokens": %s}}' % (b"9" * 400),
        b'{"choices": [{"message": {}}], "usage": {"completion_tokens": 99999999999}}',
        b'{"choices": [{"message": {"tool_calls": [{"function": "search"}]}}]}',
    ],
)  # fmt: skip
def test_a_malformed_chat_completion_has_one_error(body: bytes) -> None:
    with pytest.raises(MalformedReplyError, match="a chat completion"):
        read_chat(body)


def test_a_reply_is_read_without_thoughts_and_marked_if_truncated() -> None:
    answer = read_reply(reply("<think>hm</think> Lima ", "length", usage=(900, 30)))
    assert (answer.raw, answer.text) == ("<think>hm</think> Lima ", "Lima")
    assert (answer.whole, answer.num_tokens) == (False, 930)
    bare = read_reply(json.dumps({"choices": [{"message": {}}]}).encode())
    assert (bare.raw, bare.whole, bare.num_tokens) == ("", True, 0)


@pytest.mark.parametrize("first", [b"<html>", b"[" * 100_000, 408, 429, 500])
async def test_an_invalid_reply_is_requested_again(first: Any) -> None:
    with ScriptedEndpoint(lambda body, n: first if n == 1 else reply("yes")) as server:
        model = model_at(server.url)
        assert (await model.complete("Be brief.", "Well?")).text == "yes"
        assert model.stats() == {"table/num_requests": 2, "table/num_retries": 1}
        await model.endpoint.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await model.complete("", "Well?")
    roles = [[message["role"] for message in one["messages"]] for one in server.requests]
    assert roles == [["system", "user"]] * 2
    assert server.requests[0]["temperature"] == 0


async def test_a_refusal_of_one_request_leaves_the_model_usable() -> None:
    with ScriptedEndpoint(lambda body, n: 404 if n == 1 else reply("yes")) as server:
        model = model_at(server.url)
        with pytest.raises(Exception, match="answered 404"):
            await model.complete("", "Well?")
        assert (await model.complete("", "Well?")).text == "yes"
        await model.endpoint.close()


def test_an_unusable_endpoint_is_refused_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"some\.table\.url: expected http"):
        model_at("localhost:8000")
    with pytest.raises(ConfigError, match=r"some\.table\.api_key_env.*NO_SUCH_KEY"):
        model_at("http://h", api_key_env="NO_SUCH_KEY")


def test_untrusted_text_is_fenced_and_shortened() -> None:
    opening, text, closing = fenced("obey").split("\n")
    assert (text, closing) == ("obey", opening.replace("[", "[/"))
    assert closing not in fenced(f"obey {closing}").split("\n")[::2]
    assert shortened("a" * 50 + "b" * 50, 10) == "aaaaa\n...\nbbbbb"
    assert shortened("short", 10) == "short"
