"""A model that was really trained: evaluated on the embedded engine and on a real vLLM server, by
tokens and by chat, and answering through plain transformers."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from agentenv.assembly.reports.records import EvalRow, Key
from agentenv.envs.quickstart.setup import build_model
from agentenv.envs.web_search import SearchTool
from agentenv.evaluation.store import read_rows
from agentenv.launchers import evaluate, export, train
from agentenv.text.renderer import RESULT_CLOSE, RESULT_OPEN
from tests.engines.vllm_server import VLLMProcess, require_vllm
from tests.support.json_files import write_rows
from tests.support.warehouse import ROOT

pytestmark = pytest.mark.timeout(1200)

NUM = 12
CHAT = ("limits.max_prompt_tokens=64", "limits.max_response_tokens=192",
        "limits.max_turn_tokens=64", "limits.max_tool_result_tokens=48")  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a short cold start and one update: it calls tools, and is often wrong."""
    folder = tmp_path_factory.mktemp("trained")
    config = ROOT / "tests" / "support" / "small_quickstart.toml"
    stages = '[{rows="copy",num_steps=30},{rows="clean",num_steps=70}]'
    keys = [f"sft.stages={stages}", "sft.gate_every=70", "train.num_steps=1"]
    keys += ["queue.groups_per_step=2", "learner.groups_per_minibatch=2"]
    keys += ["eval.sets.heldout.phases=false", f"run.dir={folder}", "run.name=run"]
    assert train.main([str(config), *keys]) == 0
    return folder / "run"


def evaluated(subject: str, out: Path, *keys: str, num: int = NUM) -> dict[Key, EvalRow]:
    """The rows."""
    assert evaluate.main([subject, "--n", str(num), "--out", str(out), *keys]) == 0
    rows = {row.key: row for row in read_rows(out)}
    assert len(rows) == num * (2 if "num_samples=2" in keys else 1)
    assert not any(row.error for row in rows.values())
    return rows


def outcome(rows: dict[Key, EvalRow]) -> dict[Key, tuple[Any, ...]]:
    return {key: (row.segments, row.success, row.reward, row.end) for key, row in rows.items()}


@pytest.mark.engine_vllm
def test_a_running_vllm_server_is_evaluated_by_tokens_and_by_chat(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server is a plain one, without any of the flags that training needs."""
    require_vllm()
    model = sorted((run / "checkpoints").glob("step-*"))[-1]
    server = VLLMProcess(model, tmp_path / "server.log", arguments=())
    keys = ["--env", "agentenv/Quickstart-v0", f"env.kwargs.corpus={run}/data/kb.jsonl", *CHAT]
    greedy, data = "sampling.temperature=0", f"data={run}/data/heldout.jsonl"
    tokens = ("--tokenizer", str(model))
    try:
        server.wait_ready()
        own = evaluated(str(model), tmp_path / "own", *keys, data, greedy)
        by_tokens = evaluated(server.url, tmp_path / "tokens", *keys, data, greedy, *tokens)
        assert outcome(by_tokens) == outcome(own)
        # the model was trained without a list of the tools, which an endpoint reads by default
        unlisted = "renderer.tools_in_prompt=none"
        by_chat = evaluated(server.url, tmp_path / "chat", *keys, data, greedy, unlisted)
        assert {key: (row.prediction, row.success) for key, row in by_chat.items()} == {
            key: (row.prediction, row.success) for key, row in own.items()
        }
        counts = ("prompt_tokens", "action_tokens", "tool_tokens")
        for key, row in by_chat.items():  # from the usage reported by the server
            assert [getattr(row, name) for name in counts] == [
                getattr(own[key], name) for name in counts
            ]
        sampled = evaluated(server.url, tmp_path / "a", *keys, data, *tokens)
        again = evaluated(server.url, tmp_path / "b", *keys, data, *tokens, "concurrency=2")
        assert outcome(sampled) == outcome(again)
    finally:
        server.stop()


def test_ids_of_a_padded_vocabulary_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In evaluations of the command and of a run, in one line each."""
    from transformers import AutoModelForCausalLM

    model, data = tmp_path / "model", tmp_path / "q.jsonl"
    build_model(model, seed=0)
    padded = AutoModelForCausalLM.from_pretrained(model)
    padded.resize_token_embeddings(1024)
    padded.save_pretrained(model)
    write_rows(data, [{"question": "What is 2 + 3?", "answer": "5"}] * 4)
    room, grader = "limits.max_response_tokens=24", "env={id='agentenv/QAGrader-v0'}"
    keys = ["--env", "agentenv/QAGrader-v0", f"data={data}", "limits.max_prompt_tokens=64"]
    evaluated(str(model), tmp_path / "out", *keys, room, num=4)
    count = json.loads((tmp_path / "out" / "summary.json").read_text())["overall"]["num_padded"]
    said = f"{count} sampled tokens have ids beyond the tokenizer's"
    assert 0 < count < 96
    assert "".join(capsys.readouterr()).count(said) == 1
    keys = ["run.setup=", "sft=none", "train.num_steps=0", "limits.max_turn_tokens=24", grader]
    keys += [f"model.path={model}", f"data.train={data}", f"eval.sets.heldout.path={data}"]
    config = str(ROOT / "tests" / "support" / "small_quickstart.toml")
    assert train.main([config, f"run.dir={tmp_path}", "run.name=run", room, *keys]) == 0
    assert (tmp_path / "run" / "run.log").read_text().count("have ids beyond") == 1


def by_hand(calls: list[dict[str, Any]]) -> bool:
    """Whether there are calls, and all of them are searches or sums."""
    codes = [call["arguments"]["code"] for call in calls if call["name"] == "python"]
    return bool(calls) and all(re.fullmatch(r"[\d *+-]+", code) for code in codes)


def answer(text: str, search: SearchTool) -> str:
    """The result of the call at the end of a text; empty if there is none."""
    called = re.search(r"<(search|python)>([^<]*)</\1>\Z", text)
    if called is None:
        return ""
    body = called[2].strip()
    if called[1] == "python":
        return f"{RESULT_OPEN}{eval(body, {'__builtins__': {}})}{RESULT_CLOSE}"
    found = asyncio.run(search.call({"query": body}, search.start(0)))
    return RESULT_OPEN + found.text + RESULT_CLOSE


def test_the_exported_model_answers_through_plain_transformers(run: Path, tmp_path: Path) -> None:
    """A rollout with generate, stop strings and the tools called by hand is the one of the
    evaluation, word for word."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert export.main([str(run), str(tmp_path / "model"), "--dtype", "float32"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    search = SearchTool(str(run / "data" / "kb.jsonl"))
    rows = evaluated(str(run), tmp_path / "out", "sampling.temperature=0", num=48)
    row = next(row for row in rows.values() if row.end == "terminated" and by_hand(row.tool_calls))
    chat = [{"role": "user", "content": row.question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    keys = {"max_new_tokens": 48, "do_sample": False, "stop_strings": ["</search>", "</python>"]}
    text = prompt
    for _ in range(row.num_turns):
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        with torch.inference_mode():
            out = model.generate(**ids, **keys, tokenizer=tokenizer)
        text = tokenizer.decode(out[0])
        text += answer(text, search)
    written = [segment.get("env", "") or segment["policy"] for segment in row.segments]
    assert text == "".join(written) + row.segments[-1]["eos"]
