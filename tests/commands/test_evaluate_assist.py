"""An evaluation with Tool-Star's inference-time tools: by command, to rows and report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agentenv.assembly.reports.records import EvalRow, written
from agentenv.base.errors import EXIT_MISSING
from agentenv.envs.quickstart.setup import build_model
from agentenv.evaluation.store import read_rows
from agentenv.launchers import evaluate, train
from tests.commands.evaluating import Run, refused, runner
from tests.support.openai_endpoint import Answer, Json, ScriptedEndpoint, call, reply
from tests.support.warehouse import STOCK

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SUMMARY = "The stock tool was asked. Go on to the answer."


def clumsy(prompt: str, rng: Random) -> str:
    """Misspells an item, which the debugger repairs; then often requests a missing one, which the
    backtracer rewinds; answers with the result once its work has been summarized."""
    if SUMMARY in prompt:
        return f"<answer>{rng.choice([*STOCK.values(), 'unknown'])}</answer>"
    if "<result>" not in prompt:
        return "<think>look</think><stock>bolt</stock>"
    item = rng.choice(["bolts", "nails", "nuts", "screws"])
    return f"<think>{'again and again ' * 8}</think><stock>{item}</stock>"


def counting(prompt: str, rng: Random) -> str:
    """Python that fails, then long thoughts, then the answer."""
    if SUMMARY in prompt:
        return r"<think>So.</think><answer>\boxed{2}</answer>"
    if " <result>\n" not in prompt:
        return "<think>Let me add.</think><python>prnt(1 + 1)</python>"
    return f"<think>{'again and again ' * 60}</think><python>print(2)</python>"


def helpful(body: Json, _: int) -> Answer:
    """The reply of debugger or refiner."""
    if "You repair Python code" in body["messages"][0]["content"]:
        code = "print(2)" if "prnt" in body["messages"][1]["content"] else "bolts"
        return reply(f"```\n{code}\n```", "stop", (40, 5))
    return reply(SUMMARY, "stop", (90, 7))


@pytest.fixture
def helper() -> Iterator[ScriptedEndpoint]:
    with ScriptedEndpoint(helpful) as endpoint:
        yield endpoint


@pytest.fixture
def run(warehouse: Path, tmp_path: Path, helper: ScriptedEndpoint) -> Run:
    """Evaluates with all three helpers into tmp_path/NAME."""
    keys = ["--n", "12", "engine.script=tests.commands.test_evaluate_assist:clumsy"]
    keys += [f"assist.debugger.url={helper.url}", "assist.debugger.tool=stock"]
    keys += ["assist.backtracer.max_uses=1", f"assist.refiner.url={helper.url}"]
    keys += ["assist.refiner.min_response_tokens=100", "limits.max_response_tokens=600"]
    evaluated = runner(warehouse, tmp_path)
    return lambda name, *more: evaluated(name, *keys, "limits.max_tool_calls=20", *more)


def test_rows_and_report_record_the_actions_of_the_helpers(
    run: Run, tmp_path: Path, helper: ScriptedEndpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("out") == 0
    rows = read_rows(tmp_path / "out")
    assert [row.end for row in rows] == ["terminated"] * 12
    for row in rows:
        first = row.tool_calls[0]
        assert (first["arguments"], first["ok"]) == ({"item": "bolt"}, True)
        assert first["info"]["debugger"]["code"] == "bolts"
        assert (row.assist["debugger_uses"], row.assist["debugger_tokens"]) == (1, 45)
        assert (row.assist["refiner_ok"], row.assist["refiner_tokens"]) == (1, 97)
        assert len(row.abandoned) == row.assist.get("backtracer_uses", 0)
    taken_back = [row for row in rows if row.abandoned]
    assert {"unknown item" in row.abandoned[0] for row in taken_back} == {True}
    report = (tmp_path / "out" / "report.md").read_text()
    assert "## Helpers" in report
    assert "1.000 | 100.0%" in report
    assert f"Discarded by backtracking: {len(taken_back)} calls" in report
    assert "Helpers" in capsys.readouterr().out
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["overall"]["assist"]["refiner_uses"] * 2 == len(helper.requests) == 24


def test_a_row_contains_every_step_to_the_answer(run: Run, tmp_path: Path) -> None:
    assert run("out", "--n", "3") == 0
    for row in read_rows(tmp_path / "out"):
        texts = [next(iter(segment.values())) for segment in row.segments]
        assert "<stock>bolt</stock>" in texts[1]
        assert SUMMARY in texts[-2]
        assert not set(row.abandoned) & set(texts)
        messages = [one.content for one in written(row)]
        assert len(messages) == row.num_turns == 1 + len(row.tool_calls)
        assert row.tool_tokens < 300, "a prompt is no tool result"


def test_equal_seeds_give_equal_rows_and_other_helpers_are_another_evaluation(
    run: Run, tmp_path: Path, helper: ScriptedEndpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    def comparable(name: str) -> dict[Any, Any]:
        rows = read_rows(tmp_path / name)
        return {row.key: (row.segments, row.assist, row.abandoned) for row in rows}

    assert run("one") == 0
    assert run("two", "concurrency=2") == 0
    assert comparable("one") == comparable("two")
    asked = len(helper.requests)
    with ScriptedEndpoint(helpful) as elsewhere:
        assert run("one", f"assist.debugger.url={elsewhere.url}") == 0, "it may have moved"
    assert len(helper.requests) == asked, "nothing was asked again"
    assert run("one", "assist.backtracer.max_uses=2") == 2
    assert "assist.backtracer.max_uses: 1 ->" in refused(capsys)


def test_a_debugger_of_a_tool_that_no_environment_has_is_refused(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for dry in ([], ["--dry-run"]):
        assert run("out", "assist.debugger.tool=python", *dry) == 2
        assert "tool 'python'" in refused(capsys)
    assert not (tmp_path / "out").exists()


def test_a_role_is_a_helper(run: Run, tmp_path: Path, helper: ScriptedEndpoint) -> None:
    keys = ["assist.refiner.url={role:refiner}/v1", f"roles.refiner.url={helper.url}"]
    assert run("out", "--n", "1", *keys) == 0
    assert read_rows(tmp_path / "out")[0].assist["refiner_ok"] == 1


def test_an_endpoint_of_chat_messages_has_helpers_too(
    warehouse: Path, tmp_path: Path, helper: ScriptedEndpoint
) -> None:
    """Native calls: the turn with the error is repeated, and the summary begins a new chat."""
    turns = ["nails", "bolts", "answer"]

    def policy(body: Json, number: int) -> Answer:
        said = turns[number - 1]
        if said == "answer":
            return reply("<answer>1240</answer>", usage=(20, 4))
        arguments = json.dumps({"item": said})
        return reply(None, "tool_calls", (30, 60), tool_calls=[call("stock", arguments)])

    with ScriptedEndpoint(policy) as endpoint:
        arguments = [endpoint.url, "--env", "me/Warehouse-v0", "env.module=my_env", "--n", "1"]
        arguments += ["renderer.name=native", "--out", str(tmp_path / "out")]
        arguments += ["assist.backtracer.max_uses=1", f"assist.refiner.url={helper.url}"]
        arguments += ["assist.refiner.min_response_tokens=60", f"data={warehouse.parent}/a.jsonl"]
        assert evaluate.main(arguments) == 0
    first, again, fresh = (body["messages"] for body in endpoint.requests)
    assert again == first
    assert [message["role"] for message in fresh] == ["user"]
    assert fresh[0]["content"].endswith(SUMMARY)
    row: EvalRow = read_rows(tmp_path / "out")[0]
    assert row.success
    assert row.assist["backtracer_ok"] == row.assist["refiner_ok"] == 1
    assert "nails" in row.abandoned[0]


def test_training_has_no_assist_key(warehouse: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main([str(warehouse), "assist.backtracer.max_uses=1"]) == 2
    assert "assist" in refused(capsys)


def test_the_shipped_configuration_is_planned_and_runs_small(
    tmp_path: Path, helper: ScriptedEndpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(CONFIGS / "eval_tool_star.toml")
    planned = ["models/Qwen2.5-7B-tool-star", "--config", config, "--dry-run", "--gpus", "8"]
    assert evaluate.main(planned) == EXIT_MISSING
    assert "debugger server" in capsys.readouterr().out
    row = {"problem": "How much is 1 + 1?", "answer": "2", "id": 1}
    (tmp_path / "aime.jsonl").write_text(json.dumps(row) + "\n")
    build_model(tmp_path / "model", seed=0)
    path = tmp_path / "model" / "config.json"  # the prompt of a benchmark is long here
    path.write_text(path.read_text().replace('_embeddings": 1024', '_embeddings": 4096'))
    small = [str(tmp_path / "model"), "--config", config, "--set", "aime24"]
    small += ["--out", str(tmp_path / "out"), f"sets.aime24.path={tmp_path}/aime.jsonl"]
    small += ["engine.name=scripted", "engine.script=tests.commands.test_evaluate_assist:counting"]
    small += ["engine.max_model_len=4096", "grader.judge.cache="]
    small += ["prompt.template=search+python", "assist.refiner.min_response_tokens=400"]
    small += ["limits.max_prompt_tokens=2000", "limits.max_response_tokens=1500"]
    roles = ("debugger", "judge", "summarizer")
    small += [f"roles.{role}={{url='{helper.url}'}}" for role in roles]
    small += ["search={preset='tool_star', summarizer={url='{role:summarizer}/v1', model='m'}}"]
    assert evaluate.main(small) == 0
    (found,) = read_rows(tmp_path / "out")
    assert (found.end, found.error) == ("terminated", None)
    assert found.assist["debugger_ok"] == found.assist["refiner_ok"] == 1
