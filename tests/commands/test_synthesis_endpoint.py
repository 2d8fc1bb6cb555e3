"""Synthesis over an endpoint of chat messages."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agentenv.launchers import synthesize
from tests.commands.evaluating import refused
from tests.commands.synthesizing import HINT, HINTS, policy
from tests.support.json_files import rows_in
from tests.support.openai_endpoint import Answer, ScriptedEndpoint, reply


def chat_reply(body: dict[str, Any], _: int) -> Answer:
    """The policy as an endpoint gives it: without the stop string."""
    said = "".join(str(message["content"]) for message in body["messages"])
    return reply(policy(said, Random(body["seed"])).removesuffix("</stock>"), usage=(90, 9))


def arguments(url: str, folder: Path, questions: Path) -> list[str]:
    where = [f"data={questions}", "env.module=my_env", "--out", str(folder / "out")]
    return [url, "--model", "m", "--env", "me/Warehouse-v0", *where, *HINTS]


@pytest.mark.usefixtures("warehouse")
def test_an_endpoint_of_chat_messages_works_as_an_engine_does(
    tmp_path: Path, questions: Path
) -> None:
    with ScriptedEndpoint(chat_reply) as endpoint:
        keys = ["engine.continuation=prefix", "filter.require_box=false", "num_samples=2"]
        assert synthesize.main([*arguments(endpoint.url, tmp_path, questions), *keys]) == 0
    sft = rows_in(tmp_path / "out" / "sft.jsonl")
    assert Counter(row["kind"] for row in sft) == {"easy": 2, "plain": 2, "doubted": 2}
    (text, *_) = (row["conversations"][1]["value"] for row in sft if row["way"] == "hints")
    assert text.startswith(f"<think>Some. {HINT} ")
    hinted = [body["messages"][-1] for body in endpoint.requests if HINT in str(body)]
    assert {message["role"] for message in hinted} == {"assistant"}
    assert all(message["prefix"] for message in hinted)


@pytest.mark.usefixtures("warehouse")
def test_an_endpoint_that_cannot_continue_a_text_gets_no_hints(
    tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedEndpoint(lambda body, number: 500) as endpoint:
        assert synthesize.main(arguments(endpoint.url, tmp_path, questions)) == 2
    assert "does not continue" in refused(capsys)
