"""A synthesis in its directory: what is asked, how questions are sorted, what is written and
refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agentenv.actor import Actor
from agentenv.config import build_config
from agentenv.data_config import RowsConfig
from agentenv.dataset import load_tasks
from agentenv.engines.scripted import ScriptedEngine
from agentenv.errors import EngineError
from agentenv.prompt import PromptConfig
from agentenv.renderer import TagsConfig, read_eos_ids
from agentenv.tree import Trajectory
from launchers import synthesize
from launchers.assembly import load_tokenizer, make_renderer
from launchers.evaluation.store import read_rows
from launchers.supervised.chat_config import ChatDataConfig, RowFormat
from launchers.supervised.chat_encoding import ChatEncoder
from launchers.supervised.conversations import read_conversation
from launchers.supervised.dataset_info import find_sources
from launchers.synthesis.hinted import HintedActor
from tests.support.openai_endpoint import Answer, ScriptedEndpoint, reply
from tests.support.warehouse import ROOT, STOCK

Run = Callable[..., int]
KINDS = {"easy": "bolts", "plain": "nuts", "doubted": "rivets", "hard": "nuts", "twice": "bolts"}
HINT = "I should look."
HINTS = ("hints.phrases=['perhaps']", f"hints.verification=['{HINT}']", "hints.place=uncertain")


def policy(prompt: str, rng: Random) -> str:
    """Knows what is easy; finds what is plain with the tool, what is doubted only behind a hint;
    asks twice for what is twice."""
    kind = next(kind for kind in KINDS if f"({kind}" in prompt)
    item, found = KINDS[kind], prompt.rpartition("<result>")[2].split("<")[0].strip()
    if "solves problems" in prompt:  # the language-only prompt
        answer = STOCK[item] if kind == "easy" else rng.randrange(9)
        return f"<think>Some. Perhaps {answer}.</think><answer>{answer}</answer>"
    call = f"</think><stock>{item}</stock>"
    if HINT in prompt and "<result>" not in prompt:
        return f" {rng.randrange(99)}{call}"
    if kind == "doubted" and HINT not in prompt:
        return "<think>never</think><answer>none</answer>"
    if "<result>" not in prompt:
        return f"<think>look {rng.randrange(99)}{call}"
    if kind == "twice" and prompt.count("<result>") == 1:
        return f"<think>again{call}"
    return f"<think>so</think><answer>{'none' if kind == 'hard' else found}</answer>"


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    rows = [
        {
            "question": f"How many {item} are there? ({kind} {n})",
            "answer": STOCK[item],
            "kind": kind,
            "level": n,
        }
        for kind, item in KINDS.items()
        for n in range(2)
    ]
    rows.append({**rows[0], "question": rows[0]["question"].upper().replace("(EASY", "(easy")})
    path = tmp_path / "ask.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run(warehouse: Path, tmp_path: Path, questions: Path) -> Run:
    """Synthesizes with the scripted engine into tmp_path/NAME."""

    def synthesized(name: str, *more: str) -> int:
        arguments = [str(warehouse.parent / "model"), "--env", "me/Warehouse-v0"]
        arguments += ["env.module=my_env", "--out", str(tmp_path / name), f"data={questions}"]
        arguments += ["engine.name=scripted", f"engine.script={__name__}:policy"]
        arguments += ["limits.max_prompt_tokens=640", "limits.max_response_tokens=320"]
        arguments += ["filter.require_box=false", "num_samples=2"]
        return synthesize.main([*arguments, *more])

    return synthesized


@pytest.fixture
def num_asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """[0] counts the turns that the engine was asked for."""
    count = [0]
    generate = ScriptedEngine.generate

    async def counted(self: ScriptedEngine, *rest: Any, **keys: Any) -> Any:
        count[0] += 1
        return await generate(self, *rest, **keys)

    monkeypatch.setattr(ScriptedEngine, "generate", counted)
    return count


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(out: Path) -> dict[str, str]:
    names = ("sft.jsonl", "rl.jsonl", "rejected.jsonl", "summary.json", "dataset_info.json")
    return {name: (out / name).read_text() for name in names}


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


def test_questions_are_sorted_by_how_they_were_answered(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("out", *HINTS) == 0
    out = tmp_path / "out"
    sft, rl = rows_of(out / "sft.jsonl"), rows_of(out / "rl.jsonl")
    assert Counter(row["kind"] for row in sft) == {"easy": 2, "plain": 2, "doubted": 2}
    ways = {kind: {row["way"] for row in sft if row["kind"] == kind} for kind in KINDS}
    assert ways["easy"] == {"direct"}
    assert ways["plain"] <= {"tools", "hints"}, "drawn from what both ways gave"
    assert ways["doubted"] == {"hints"}
    assert Counter(row["kind"] for row in rl) == {"hard": 2, "twice": 2}
    rejected = rows_of(out / "rejected.jsonl")
    (twice,) = [row for row in rejected if row["what"] == "question"]
    assert (twice["reason"], twice["id"], twice["detail"]) == (
        "duplicate",
        "ask-11",
        "of ask ask-1",
    )
    reasons = Counter((row["way"], row["reason"]) for row in rejected if row["what"] != "question")
    assert reasons["tools", "answered_directly"] == 4
    assert reasons["tools", "repeated_call"] == 4
    assert reasons["direct", "wrong"] == 16
    rows = read_rows(out / "trajectories")
    assert len(rows) == len(sft) + sum(reasons.values()), "every trajectory is accounted for"
    summary = json.loads((out / "summary.json").read_text())
    assert summary["classes"] == {"direct": 2, "tools": 4, "hard": 4, "unfinished": 0}
    assert summary["by_kind"]["doubted"] == {"direct": 0, "tools": 2, "hard": 0, "unfinished": 0}
    assert summary["right"] == {"neither": 4, "tools_only": 4, "direct_only": 0, "both": 2}
    assert (summary["num_questions"], summary["not_asked"]) == (11, {"duplicate": 1})
    assert (summary["num_sft"], summary["num_rl"]) == (6, 4)
    assert summary["trajectories"]["tools"]["rejected"]["repeated_call"] == 4
    told = capsys.readouterr().out
    assert "6 dialogues in sft.jsonl, 4 questions in rl.jsonl" in told
    assert "repeated_call" in told


def test_the_dialogues_and_questions_are_those_that_training_reads(
    run: Run, tmp_path: Path
) -> None:
    assert run("out", *HINTS, "prompt.template=direct", "limits.max_prompt_tokens=700") == 0
    out = tmp_path / "out"
    config = build_config(ChatDataConfig, {"train": "sft", "dataset_info": str(out)}, "test")
    (source,) = find_sources(config, ["sft"])
    rows = rows_of(source.path)
    texts = {}
    for row in rows:
        system, user, answer = read_conversation(row, source.form).messages
        assert (system.role, user.role, answer.role) == ("system", "user", "assistant")
        assert "as briefly as you can" in system.content, "the prompt of answers with tools"
        assert user.content.startswith("How many")
        texts[row["way"]] = answer.content
    assert texts["direct"].endswith("Perhaps 1240.</think><answer>1240</answer>")
    assert "</think><stock>nuts</stock><result>\n310\n</result><think>so</think>" in texts["tools"]
    assert texts["hints"].startswith(f"<think>Some. {HINT} ")
    tasks = load_tasks([out / "rl.jsonl"], "me/Warehouse-v0", RowsConfig())
    assert {task.kind for task in tasks} == {"hard", "twice"}
    assert tasks[0].answers == ("310",)
    assert tasks[0].metadata["level"] == 0, "what else the row had is kept"


def test_a_dialogue_is_trained_as_the_tokens_that_were_rolled_out(
    run: Run, tmp_path: Path, warehouse: Path
) -> None:
    assert run("out", *HINTS) == 0
    model = warehouse.parent / "model"
    renderer = make_renderer(TagsConfig(), PromptConfig(), load_tokenizer(model), model)
    encoder = ChatEncoder(renderer, read_eos_ids(model, renderer.tokenizer))
    rows = {row.key: row for row in read_rows(tmp_path / "out" / "trajectories")}
    learned = [row for row in rows_of(tmp_path / "out" / "sft.jsonl") if row["way"] != "direct"]
    assert len(learned) == 4
    for one in learned:
        example = encoder.encode(read_conversation(one, RowFormat()))
        row = rows[f"ask.{one['way']}", one["id"], one["sample"]]
        texts = [part.get("policy", "") + part.get("eos", "") for part in row.segments]
        assert renderer.decode(example.token_ids[example.mask]) == "".join(texts)
        whole = [part.get("env", "") + text for part, text in zip(row.segments, texts, strict=True)]
        assert renderer.decode(example.token_ids) == "".join(whole)


def test_the_same_command_asks_nothing_and_writes_the_same(
    run: Run, tmp_path: Path, num_asked: list[int]
) -> None:
    assert run("out", *HINTS) == 0
    first, count = written(tmp_path / "out"), num_asked[0]
    assert count > 40
    assert run("out", *HINTS) == 0
    assert num_asked[0] == count
    assert written(tmp_path / "out") == first
    assert run("out", *HINTS, "filter.drop_repeated_calls=false") == 0
    assert num_asked[0] == count, "other filters ask nothing"
    assert len(rows_of(tmp_path / "out" / "sft.jsonl")) == 8


@pytest.mark.parametrize("share", [0.2, 0.7])
def test_a_command_that_was_cut_off_goes_on(run: Run, tmp_path: Path, share: float) -> None:
    assert run("out", *HINTS, "concurrency=1") == 0
    first = written(tmp_path / "out")
    path = tmp_path / "out" / "trajectories" / "rows.jsonl"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    assert run("out", *HINTS, "concurrency=7") == 0
    assert written(tmp_path / "out") == first


def test_more_samples_reuse_what_is_there(run: Run, tmp_path: Path, num_asked: list[int]) -> None:
    assert run("out", *HINTS, "direct.num_samples=1") == 0
    before = {row.key for row in read_rows(tmp_path / "out" / "trajectories")}
    count = num_asked[0]
    assert run("out", *HINTS, "--n", "4", "direct.num_samples=2") == 0
    after = {row.key for row in read_rows(tmp_path / "out" / "trajectories")}
    assert before < after
    assert num_asked[0] == count + 4 + 2 * 2, "chains, and hints into two of them"


def test_what_was_answered_directly_need_not_be_asked_with_tools(run: Run, tmp_path: Path) -> None:
    assert run("out", "skip_easy=true") == 0
    rows = read_rows(tmp_path / "out" / "trajectories")
    assert {row.kind for row in rows if row.dataset == "ask.tools"} == {*KINDS} - {"easy"}
    assert {row.dataset for row in rows} == {"ask.direct", "ask.tools"}, "no [hints], no hints"


def test_questions_of_other_files_can_be_kept_out(
    run: Run, tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = tmp_path / "tests.jsonl"
    row = json.loads(questions.read_text().splitlines()[2])
    tests.write_text(json.dumps({**row, "question": row["question"].lower()}) + "\n")
    assert run("out", f"exclude=['{tests}']") == 0
    found = [r for r in rows_of(tmp_path / "out" / "rejected.jsonl") if r["what"] == "question"]
    assert [(r["id"], r["reason"]) for r in found] == [
        ("ask-3", "excluded"),
        ("ask-11", "duplicate"),
    ]
    assert str(tests) in found[0]["detail"]
    assert run("none", f"exclude=['{questions}']") == 2
    assert "no question is left of 11" in refused(capsys)


def test_failures_are_told_and_asked_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generate, broken = ScriptedEngine.generate, [True]

    async def failing(self: ScriptedEngine, prompt_ids: Any, *rest: Any, **keys: Any) -> Any:
        if broken[0] and "(hard 1" in self.tokenizer.decode(list(prompt_ids)):
            raise EngineError("out of memory")
        return await generate(self, prompt_ids, *rest, **keys)

    monkeypatch.setattr(ScriptedEngine, "generate", failing)
    assert run("out", *HINTS, "limits.max_failures=0") == 0
    assert "4 trajectories failed; the same command" in capsys.readouterr().out
    out = tmp_path / "out"
    found = rows_of(out / "rejected.jsonl")
    assert [r["id"] for r in found if r["reason"] == "unfinished"] == ["ask-8"]
    assert {r["detail"] for r in found if r["reason"] == "failed"} == {"EngineError: out of memory"}
    assert len(rows_of(out / "rl.jsonl")) == 3
    broken[0] = False
    assert run("out", *HINTS, "limits.max_failures=0") == 0
    assert run("whole", *HINTS, "limits.max_failures=0") == 0
    assert written(out) == written(tmp_path / "whole")


def test_a_hint_is_read_by_policy_and_grader_and_trained_by_nobody(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = []
    rollout = Actor.rollout

    async def kept(self: Actor, *rest: Any, **keys: Any) -> Any:
        tree = await rollout(self, *rest, **keys)
        if isinstance(self, HintedActor):
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


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        (["hints.verification=['Other.']", "hints.phrases=['perhaps']"], "hints.verification"),
        ([*HINTS, "sampling.temperature=0.5"], "sampling.temperature: 1.0 -> 0.5"),
        ([*HINTS, "direct.prompt.template=direct"], "prompt.template"),
    ],
)
def test_trajectories_of_another_kind_are_refused(
    run: Run, tmp_path: Path, keys: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("out", *HINTS, "--n", "2") == 0
    before = written(tmp_path / "out")
    assert run("out", "--n", "2", *keys) == 2
    text = refused(capsys)
    assert named in text
    assert "choose another --out" in text
    assert written(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["hints.plase=either"], "hints.plase: unknown key; did you mean hints.place"),
        (["filter.max_tool_calls=0"], "filter.max_tool_calls"),
        (["assist.refiner.url=http://x"], "assist"),
        (["renderer.name=native"], "renderer.name = 'native'"),
        (["exclude=['no.jsonl']"], "no.jsonl"),
        (["data=nowhere.jsonl"], "nowhere.jsonl"),
        (["limits.max_prompt_tokens=900"], "exceed the engine's context"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    run: Run, tmp_path: Path, keys: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("out", *keys) == 2
    assert says in refused(capsys)
    assert not (tmp_path / "out").exists()


def test_a_directory_of_something_else_is_refused(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("do not touch")
    assert run("mine") == 2
    assert "holds 'thesis.tex'" in refused(capsys)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_the_shipped_configuration_is_planned_for_eight_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = str(ROOT / "configs" / "synthesize_tools.toml")
    subject = ["models/Qwen2.5-3B-Instruct", "--config", config]
    assert synthesize.main([*subject, "--dry-run", "--gpus", "8"]) == 0
    assert "nothing was started" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert synthesize.main([*subject, "--dry-run", "--gpus", "4"]) == 2


def speaking(body: dict[str, Any], _: int) -> Answer:
    """The policy as an endpoint gives it: without the stop string."""
    said = "".join(str(message["content"]) for message in body["messages"])
    return reply(policy(said, Random(body["seed"])).removesuffix("</stock>"), usage=(90, 9))


@pytest.mark.usefixtures("warehouse")
def test_an_endpoint_of_chat_messages_works_as_an_engine_does(
    tmp_path: Path, questions: Path
) -> None:
    with ScriptedEndpoint(speaking) as endpoint:
        arguments = [endpoint.url, "--model", "m", "--env", "me/Warehouse-v0", f"data={questions}"]
        arguments += ["env.module=my_env", "--out", str(tmp_path / "out"), *HINTS]
        arguments += ["engine.continuation=prefix", "filter.require_box=false", "num_samples=2"]
        assert synthesize.main(arguments) == 0
    sft = rows_of(tmp_path / "out" / "sft.jsonl")
    assert Counter(row["kind"] for row in sft) == {"easy": 2, "plain": 2, "doubted": 2}
    (text, *_) = (row["conversations"][1]["value"] for row in sft if row["way"] == "hints")
    assert text.startswith(f"<think>Some. {HINT} ")
    hinted = [body["messages"][-1] for body in endpoint.requests if HINT in str(body)]
    assert {message["role"] for message in hinted} == {"assistant"}
    assert all(message["prefix"] for message in hinted)


@pytest.mark.usefixtures("warehouse")
def test_an_endpoint_that_cannot_go_on_gets_no_hints(
    tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedEndpoint(lambda body, number: 500) as endpoint:
        arguments = [endpoint.url, "--model", "m", "--env", "me/Warehouse-v0", f"data={questions}"]
        arguments += ["env.module=my_env", "--out", str(tmp_path / "out"), *HINTS]
        assert synthesize.main(arguments) == 2
    assert "does not go on with a text" in refused(capsys)
