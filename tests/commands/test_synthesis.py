"""A synthesis in its directory: requests, the sorting of questions, written files and errors."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentenv.assembly.keys.supervised import ChatDataConfig
from agentenv.assembly.parts.assembly import make_renderer
from agentenv.base.config import build_config
from agentenv.base.model_files import load_tokenizer
from agentenv.base.tree import Trajectory
from agentenv.data.dataset import load_tasks
from agentenv.data.rows import RowsConfig
from agentenv.evaluation.store import read_rows
from agentenv.lab.recipes.sampling import HintHooks
from agentenv.launchers import synthesize
from agentenv.rollout.actor import Actor
from agentenv.text.prompt import PromptConfig
from agentenv.text.renderer import TagsConfig
from agentenv.training.supervised.dialogues import RowFormat, find_sources, read_conversation
from agentenv.training.supervised.encoding import ChatEncoder
from tests.commands.evaluating import refused
from tests.commands.synthesizing import HINT, HINTS, KINDS, Run, arguments_of, runner
from tests.support.golden import Golden
from tests.support.json_files import rows_in


@pytest.fixture
def run(warehouse: Path, tmp_path: Path, questions: Path) -> Run:
    return runner(warehouse, tmp_path, questions)


def test_questions_are_sorted_by_how_they_were_answered(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("out", *HINTS) == 0
    out = tmp_path / "out"
    sft, rl = rows_in(out / "sft.jsonl"), rows_in(out / "rl.jsonl")
    assert Counter(row["kind"] for row in sft) == {"easy": 2, "plain": 2, "doubted": 2}
    ways = {kind: {row["way"] for row in sft if row["kind"] == kind} for kind in KINDS}
    assert ways["easy"] == {"direct"}
    assert ways["plain"] <= {"tools", "hints"}, "drawn from what both ways gave"
    assert ways["doubted"] == {"hints"}
    assert Counter(row["kind"] for row in rl) == {"hard": 2, "twice": 2}
    rejected = rows_in(out / "rejected.jsonl")
    (twice,) = [row for row in rejected if row["what"] == "question"]
    assert (twice["reason"], twice["detail"]) == ("duplicate", "of ask ask-1")
    assert twice["id"] == "ask-11"
    reasons = Counter((row["way"], row["reason"]) for row in rejected if row["what"] != "question")
    assert reasons["tools", "answered_directly"] == 4
    assert reasons["tools", "repeated_call"] == 4
    assert reasons["direct", "wrong"] == 16
    rows = read_rows(out / "trajectories")
    assert len(rows) == len(sft) + sum(reasons.values()), "every trajectory is accounted for"
    summary = json.loads((out / "summary.json").read_text())
    assert summary["classes"] == {"direct": 2, "tools": 4, "hard": 4, "unfinished": 0}
    assert summary["by_kind"]["doubted"] == {"direct": 0, "tools": 2, "hard": 0, "unfinished": 0}
    assert (summary["num_questions"], summary["not_asked"]) == (11, {"duplicate": 1})
    assert (summary["num_sft"], summary["num_rl"]) == (6, 4)
    assert summary["trajectories"]["tools"]["rejected"]["repeated_call"] == 4
    told = capsys.readouterr().out
    assert "sft.jsonl, 4 questions" in told
    assert "repeated_call" in told


def test_training_reads_the_synthesized_dialogues_and_questions(run: Run, tmp_path: Path) -> None:
    assert run("out", *HINTS, "prompt.template=direct", "limits.max_prompt_tokens=700") == 0
    out = tmp_path / "out"
    config = build_config(ChatDataConfig, {"train": "sft", "dataset_info": str(out)}, "test")
    (source,) = find_sources(config, ["sft"])
    rows = rows_in(source.path)
    texts = {}
    for row in rows:
        system, user, answer = read_conversation(row, source.form).messages
        assert (system.role, user.role, answer.role) == ("system", "user", "assistant")
        assert "briefly as you" in system.content, "the prompt of answers with tools"
        assert user.content.startswith("How many")
        texts[row["way"]] = answer.content
    assert texts["direct"].endswith("Perhaps 1240.</think><answer>1240</answer>")
    assert "</think><stock>nuts</stock><result>\n310\n</result><think>so</think>" in texts["tools"]
    assert texts["hints"].startswith(f"<think>Some. {HINT} ")
    tasks = load_tasks([out / "rl.jsonl"], "me/Warehouse-v0", RowsConfig())
    assert {task.kind for task in tasks} == {"hard", "twice"}
    assert tasks[0].answers == ("310",)
    assert tasks[0].metadata["level"] == 0, "what else the row had is kept"


def test_a_dialogue_is_trained_on_the_tokens_of_its_rollout(
    run: Run, tmp_path: Path, warehouse: Path
) -> None:
    assert run("out", *HINTS) == 0
    model = warehouse.parent / "model"
    renderer = make_renderer(TagsConfig(), PromptConfig(), load_tokenizer(model), model)
    encoder = ChatEncoder(renderer)
    rows = {row.key: row for row in read_rows(tmp_path / "out" / "trajectories")}
    learned = [row for row in rows_in(tmp_path / "out" / "sft.jsonl") if row["way"] != "direct"]
    assert len(learned) == 4
    for one in learned:
        example = encoder.encode(read_conversation(one, RowFormat()))
        row = rows[f"ask.{one['way']}", one["id"], one["sample"]]
        texts = [part.get("policy", "") + part.get("eos", "") for part in row.segments]
        assert renderer.decode(example.token_ids[example.mask]) == "".join(texts)
        whole = [part.get("env", "") + text for part, text in zip(row.segments, texts, strict=True)]
        assert renderer.decode(example.token_ids) == "".join(whole)


def test_questions_of_other_files_can_be_kept_out(
    run: Run, tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = tmp_path / "tests.jsonl"
    row = json.loads(questions.read_text().splitlines()[2])
    tests.write_text(json.dumps({**row, "question": row["question"].lower()}) + "\n")
    assert run("out", f"exclude=['{tests}']") == 0
    found = [r for r in rows_in(tmp_path / "out" / "rejected.jsonl") if r["what"] == "question"]
    reasons = [(row["id"], row["reason"]) for row in found]
    assert reasons == [("ask-3", "excluded"), ("ask-11", "duplicate")]
    assert str(tests) in found[0]["detail"]
    assert run("none", f"exclude=['{questions}']") == 2
    assert "of 11 questions" in refused(capsys)


def test_a_hint_is_read_by_policy_and_grader_but_never_trained(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = []
    rollout = Actor.rollout

    async def kept(self: Actor, *rest: Any, **keys: Any) -> Any:
        tree = await rollout(self, *rest, **keys)
        if self.make_hooks is HintHooks:
            trees.append((tree, self.renderer))
        return tree

    monkeypatch.setattr(Actor, "rollout", kept)
    assert run("out", *HINTS) == 0
    assert len(trees) == 16
    tree, renderer = trees[0]
    (leaf,) = tree.leaves()
    found = Trajectory(tree.path(leaf))
    trained = renderer.decode(
        [token for token, mask in zip(found.token_ids, found.loss_mask, strict=True) if mask]
    )
    whole = renderer.decode(found.token_ids)
    assert f"<think>Some. {HINT}" in whole
    assert HINT not in trained
    assert "Some." not in trained
    rows = [r for r in read_rows(tmp_path / "out" / "trajectories") if r.dataset == "ask.hints"]
    row = next(row for row in rows if row.kind == "doubted")
    assert row.success
    assert row.segments[1]["policy"].startswith(f"<think>Some. {HINT}")
    assert HINT not in row.segments[0]["env"]
    assert row.metadata["hint"] == {"place": "uncertain", "text": HINT, "sample": row.sample}


def test_a_chain_without_room_gets_no_hint(run: Run, tmp_path: Path) -> None:
    long = f"hints.verification=['{'x' * 300}']"
    assert run("out", "hints.phrases=['perhaps']", long, "hints.place=uncertain") == 0
    rows = read_rows(tmp_path / "out" / "trajectories")
    assert {row.dataset for row in rows} == {"ask.direct", "ask.tools"}


@pytest.mark.golden("synthesize")
def test_bad_input_is_refused_before_anything_is_written(
    warehouse: Path, questions: Path, tmp_path: Path, golden: Golden
) -> None:
    for key in (
        "hints.plase=either",
        "filter.max_tool_calls=0",
        "assist.refiner.url=http://x",
        "renderer.name=native",
        "exclude=['no.jsonl']",
        "data=nowhere.jsonl",
        "limits.max_prompt_tokens=900",
    ):
        arguments = arguments_of(warehouse, tmp_path / "out", questions)
        golden.run(synthesize, *arguments, key, status=2)
    assert not (tmp_path / "out").exists()


def test_a_directory_of_something_else_is_refused(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("do not touch")
    assert run("mine") == 2
    assert "contains 'thesis.tex'" in refused(capsys)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
