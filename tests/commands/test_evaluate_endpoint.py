"""Evaluation of an OpenAI-compatible endpoint, scripted: both protocols, and every way to fail."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentenv.assembly.reports.records import EvalRow
from agentenv.base.retries import Backoff
from agentenv.base.types import Limits
from agentenv.evaluation.store import load_saved, read_rows
from agentenv.launchers import evaluate
from tests.support.openai_endpoint import Answer, ScriptedEndpoint, call, reply

Json = dict[str, Any]
Evaluate = Callable[..., int]
QUICK = ("engine.num_retries=1", "limits.max_failures=0")


@pytest.fixture
def run(warehouse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evaluate:
    monkeypatch.setattr("agentenv.base.retries.REQUESTS", Backoff(0.01, 60.0))

    def evaluated(endpoint: ScriptedEndpoint, *more: str, n: int = 2) -> int:
        arguments = [endpoint.url, "--env", "me/Warehouse-v0", "env.module=my_env"]
        arguments += ["--out", str(tmp_path / "out"), "--n", str(n)]
        data = [f"data={warehouse.parent}/a.jsonl"]
        return evaluate.main([*arguments, *data, *more])

    return evaluated


@pytest.fixture
def rows(tmp_path: Path) -> Callable[[], list[EvalRow]]:
    return lambda: read_rows(tmp_path / "out")


def tags(body: Json, _: int) -> Answer:
    """The tag protocol, without the stop string in the text, as OpenAI gives it."""
    said = "".join(str(message["content"]) for message in body["messages"])
    if "</result>" not in said:
        return reply("<think>look</think><stock>bolts", usage=(20, 9))
    return reply("<answer>1240</answer>", usage=(40, 5))


def native(body: Json, _: int) -> Answer:
    """Native calls: two at once, one of them unreadable."""
    if body["messages"][-1]["role"] != "tool":
        calls = [call("stock", '{"item": "bolts"}', 1), call("stock", '{"item": ', 2)]
        return reply(None, "tool_calls", (30, 12), tool_calls=calls, reasoning_content="hm")
    return reply("<answer>1240</answer>", usage=(60, 4))


def test_the_tag_protocol_with_results_as_user_turns(run: Evaluate, rows: Any) -> None:
    with ScriptedEndpoint(tags) as endpoint:
        assert run(endpoint, "sampling.top_p=0.9", n=1) == 0
    first, second = endpoint.requests
    (asked,) = first["messages"]
    assert asked["role"] == "user"
    assert asked["content"].endswith("How many bolts are there? (0)")
    assert first["stop"] == ["</stock>"]
    assert (first["model"], first["top_p"], first["max_tokens"]) == ("m", 0.9, 4096)
    assert not {"top_k", "tools", "continue_final_message"} & first.keys()
    assert second["messages"][1:] == [
        {"role": "assistant", "content": "<think>look</think><stock>bolts</stock>"},
        {"role": "user", "content": "<result>\n1240\n</result>"},
    ]
    assert second["max_tokens"] < 4096, "the limit of the response counts what the endpoint said"
    (row,) = rows()
    assert row.success
    assert (row.prompt_tokens, row.action_tokens, row.tool_tokens) == (20, 14, 11)
    assert [next(iter(segment)) for segment in row.segments] == ["env", "policy", "env", "policy"]
    assert row.tool_calls[0]["arguments"] == {"item": "bolts"}


@pytest.mark.parametrize(
    ("keys", "is_described"),
    [
        ((), True),
        (("renderer.tools_in_prompt=none",), False),
        (("prompt.template=no_tools",), False),
    ],
)
def test_the_prompt_of_an_endpoint_lists_the_tools(
    run: Evaluate, keys: tuple[str, ...], is_described: bool
) -> None:
    """The model of an endpoint was not trained on our tags; a prompt without tools stays
    unchanged."""
    with ScriptedEndpoint(tags) as endpoint:
        assert run(endpoint, *keys, n=1) == 0
    prompt = "".join(message["content"] for message in endpoint.requests[0]["messages"])
    assert ("<stock>item</stock>: " in prompt) == is_described


@pytest.mark.parametrize(("owner", "keys"), [("vllm", ()), ("x", ("engine.continuation=prefix",))])
def test_the_tag_protocol_with_continued_assistant_text(
    run: Evaluate, rows: Any, owner: str, keys: tuple[str, ...]
) -> None:
    with ScriptedEndpoint(tags, owner) as endpoint:
        assert run(endpoint, *keys, n=1) == 0
    if owner == "vllm":  # it reports where it stopped, and returns the stop string on request
        assert endpoint.requests[0]["include_stop_str_in_output"]
        assert len(endpoint.requests) == 1
        return
    last = endpoint.requests[1]["messages"][-1]
    begun = "<think>look</think><stock>bolts</stock> <result>\n1240\n</result>"
    assert last == {"role": "assistant", "prefix": True, "content": begun}
    assert rows()[0].success


def test_native_calls(run: Evaluate, rows: Any) -> None:
    with ScriptedEndpoint(native) as endpoint:
        assert run(endpoint, "renderer.name=native", n=1) == 0
    first, second = endpoint.requests
    assert first["tools"][0]["function"]["name"] == "stock"
    assert "stop" not in first
    assistant, good, bad = second["messages"][1:]
    assert [one["id"] for one in assistant["tool_calls"]] == ["id-1", "id-2"]
    assert good == {"role": "tool", "tool_call_id": "id-1", "content": "1240"}
    assert "cannot be read" in bad["content"]
    (row,) = rows()
    assert row.success
    assert [one["ok"] for one in row.tool_calls] == [True, False]
    assert row.segments[1]["policy"].startswith("<think>\nhm\n</think>")
    assert (row.prompt_tokens, row.action_tokens, row.tool_tokens) == (30, 16, 18)


def test_without_usage_tokens_are_estimated_and_limits_hold(run: Evaluate, rows: Any) -> None:
    with ScriptedEndpoint(lambda body, n: reply("a word or two " * 10, "length")) as endpoint:
        assert run(endpoint, "limits.max_response_tokens=30", n=1) == 0
    assert endpoint.requests[0]["max_tokens"] == 30
    (row,) = rows()
    assert (row.end, row.limit, row.action_tokens) == ("truncated", "response_tokens", 35)


@pytest.mark.parametrize(
    ("bad", "num_requests"),
    [(429, 2), (503, 2), (b"<html>busy</html>", 2), (b'{"choices": []}', 2), (b"", 2)],
)
def test_a_transient_failure_is_retried(
    run: Evaluate, rows: Any, bad: Answer, num_requests: int
) -> None:
    def script(body: Json, number: int) -> Answer:
        return bad if number == 1 else reply("<answer>1240</answer>")

    with ScriptedEndpoint(script) as endpoint:
        assert run(endpoint, *QUICK, n=1) == 0
    assert len(endpoint.requests) == num_requests
    assert endpoint.requests[0] == endpoint.requests[1], "with the same seed"
    assert rows()[0].success


@pytest.mark.parametrize(
    ("bad", "says", "num_requests"),
    [
        (429, "answered 429: no (429)", 2),
        (500, "answered 500", 2),
        (400, "answered 400", 1),
        (b"<html>", "JSON is malformed", 2),
        (b'{"choices": [{"message": 3, "finish_reason": "stop"}]}', "not a chat completion", 2),
        (5.0, "no answer in time", 2),
        (reply("", "content_filter"), "ended a turn with 'content_filter'", 1),
    ],
)
def test_a_permanent_failure_is_counted_by_kind_and_not_as_wrong(
    run: Evaluate, rows: Any, bad: Answer, says: str, num_requests: int
) -> None:
    def script(body: Json, number: int) -> Answer:
        text = body["messages"][0]["content"]
        first = "(0)" in text and "bolts" in text
        return bad if first else reply("<answer>310</answer>")

    keys = ("engine.timeout_s=0.5", "concurrency=1", "limits.max_failed_share=0.5")
    with ScriptedEndpoint(script) as endpoint:
        assert run(endpoint, *QUICK, *keys) == 0
    assert len(endpoint.requests) == num_requests + 1
    failed, right = rows()
    assert (failed.end, failed.success, right.end) == ("failed", False, "terminated")
    assert says in str(failed.error)
    assert str(failed.error).partition(":")[0].endswith("Error")


REFUSING = "prompt.template=no_tools", "engine.num_retries=0"


def test_a_trajectory_failed_only_if_its_last_attempt_did(
    run: Evaluate, rows: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Terminal, summary, rows and exit code agree, and the retries are shown."""
    asked = Counter[str]()

    def script(body: Json, _: int) -> Answer:
        question = body["messages"][-1]["content"]
        asked[question] += 1
        return 400 if asked[question] == 1 else reply("<answer>1240</answer>")

    with ScriptedEndpoint(script) as endpoint:
        assert run(endpoint, *REFUSING, n=24) == 0
    found, told = rows(), " ".join(capsys.readouterr().out.split())
    overall = json.loads((tmp_path / "out" / "summary.json").read_text())["overall"]
    assert 24 == len(found) == len(asked) == overall["num_retries"]
    assert overall["num_retries"] == sum(row.num_retries for row in found)
    assert {row.end for row in found} == {"terminated"}
    assert overall["num_failed"] == 0
    assert f"{len(found)} failed attempts were retried" in told


def test_an_endpoint_that_refuses_everything_ends_the_command_with_a_failure(
    run: Evaluate, rows: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """However few questions there are."""
    with ScriptedEndpoint(lambda body, _: 400) as endpoint:
        assert run(endpoint, *REFUSING, n=2) == 1
    assert len(endpoint.requests) == 2 * (1 + Limits().max_failures)
    assert "10 attempts failed" in " ".join(capsys.readouterr().err.split())
    assert {row.end for row in rows()} == {"failed"}


def test_a_refusal_of_the_model_is_an_answer(run: Evaluate, rows: Any) -> None:
    text = "I cannot help with that."
    refusing = reply(None, refusal=text)
    with ScriptedEndpoint(lambda body, n: refusing) as endpoint:
        assert run(endpoint, n=1) == 0
    (row,) = rows()
    assert (row.end, row.success, row.prediction) == ("terminated", False, text)


@pytest.mark.parametrize("empty", [None, " ", "<think>why</think>\n"])
def test_empty_replies_are_counted(
    run: Evaluate, tmp_path: Path, empty: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(body: Json, number: int) -> Answer:
        return 429 if number == 1 else reply(empty if number == 2 else "<answer>310</answer>")

    with ScriptedEndpoint(script) as endpoint:
        assert run(endpoint, *QUICK, "concurrency=1") == 0
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["overall"]["num_empty"] == 1
    report = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    shown = capsys.readouterr()
    assert "empty replies: 1" in report
    assert "replies: 1 (50.0" in shown.out + shown.err
    log = (tmp_path / "out" / "run.log").read_text(encoding="utf-8")
    assert "engine/num_requests 3, " in log
    assert "engine/num_retries 1" in log


@pytest.mark.parametrize("status", [401, 404])
def test_a_status_that_fails_every_request_ends_the_command(
    run: Evaluate, rows: Any, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(body: Json, number: int) -> Answer:
        return reply("<answer>1</answer>") if number == 1 else status

    with ScriptedEndpoint(script) as endpoint:
        assert run(endpoint, "concurrency=1", n=9) == 1
    assert len(endpoint.requests) == 2
    assert f"answered {status}" in " ".join(capsys.readouterr().err.split())
    assert len(rows()) == 1, "what was answered stays"


def test_an_unreachable_server_ends_the_command_but_is_no_bad_input(
    run: Evaluate, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedEndpoint(tags) as endpoint:
        pass
    assert run(endpoint) == 1
    assert "engine.url" in capsys.readouterr().err


def test_the_api_key_is_read_only_from_the_environment(
    run: Evaluate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ScriptedEndpoint(tags) as endpoint:
        assert run(endpoint, "engine.api_key_env=KEY_OF_TEST") == 2
        assert "KEY_OF_TEST is not" in capsys.readouterr().err
        monkeypatch.setenv("KEY_OF_TEST", "s3cret")
        assert run(endpoint, "engine.api_key_env=KEY_OF_TEST", n=1) == 0
        assert endpoint.headers[0]["Authorization"] == "Bearer s3cret"
        kept = "".join(path.read_text() for path in (tmp_path / "out").glob("*.json*"))
        assert "s3cret" not in kept
        assert run(endpoint, "--model", "other", n=1) == 2
        assert "has no 'other'" in " ".join(capsys.readouterr().err.split())
    saved = load_saved(tmp_path / "out")
    assert (saved.subject["model"], saved.subject["name"]) == ("m", "m")


def test_an_evaluation_continues_on_the_same_server_at_another_port(
    run: Evaluate, rows: Any
) -> None:
    with ScriptedEndpoint(tags) as endpoint:
        assert run(endpoint, n=2) == 0
    with ScriptedEndpoint(tags) as other:
        assert run(other, n=3) == 0
    assert len(other.requests) == 2
    assert len(rows()) == 3


def test_a_tokenizer_requires_a_server_that_accepts_token_ids(
    run: Evaluate, warehouse: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedEndpoint(tags) as endpoint:
        assert run(endpoint, "--tokenizer", str(warehouse.parent / "model")) == 2
    assert "omit the tokenizer" in " ".join(capsys.readouterr().err.split())
    assert json.dumps(endpoint.requests) == "[]"


def test_every_row_has_every_key(run: Evaluate, tmp_path: Path) -> None:
    """A wrong answer's, too: nothing that reads the file has to know defaults."""
    with ScriptedEndpoint(lambda body, _: reply("<answer>7</answer>")) as endpoint:
        assert run(endpoint, n=1) == 0
    row = json.loads((tmp_path / "out" / "rows.jsonl").read_text())
    assert tuple(row) == EvalRow.__struct_fields__
    assert row["success"] is False
    assert row["reward"] == 0.0
