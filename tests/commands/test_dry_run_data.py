"""--dry-run reads available rows, a prompt and a gold."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken
from transformers import AutoTokenizer

from agentenv.base.errors import EXIT_MISSING
from agentenv.data.data_files import read_rows
from agentenv.envs.quickstart.setup import build_model
from agentenv.launchers import dpo, evaluate, export, sft, train
from tests.support.golden import Said
from tests.support.json_files import change_json, write_rows
from tests.support.released import (
    BROKEN_CHAIN,
    arpo_row,
    benchmark_rows,
    preference_row,
    sharegpt_row,
    write_parquet,
)
from tests.support.sources import ROOT

TABLES = """
[run]
dir = "runs"
[model]
path = "model"
"""
TRAIN = (
    TABLES
    + """
[env]
id = "agentenv/DeepSearch-v0"
[python]
preload = []
[algorithm]
name = "grpo"
[train]
num_steps = 1
[data]
train = "train.parquet"
[eval.sets.test]
path = "test.jsonl"
[limits]
max_prompt_tokens = 200
max_response_tokens = 200
[search]
backend = { name = "bm25", corpus = "never-searched.jsonl" }
"""
)

PLANTED = """
from pathlib import Path
Path("it-ran").touch()
from transformers import PretrainedConfig, PreTrainedTokenizerFast
class Mine(PretrainedConfig): model_type = "qwen9"
class Words(PreTrainedTokenizerFast): pass
"""
DRY = ("--dry-run", "--gpus", "8")
TRAINED = (train.main, "train.toml", "engine.name=embedded", *DRY)
SAME = {**preference_row(0), "rejected": preference_row(0)["chosen"]}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tokenizer, a configuration of each command, and good rows."""
    monkeypatch.chdir(tmp_path)
    build_model(tmp_path / "model", seed=0)
    write_parquet(tmp_path / "train.parquet", [arpo_row(place) for place in range(6)])
    write_rows(tmp_path / "test.jsonl", [arpo_row(place) for place in range(6)])
    write_rows(tmp_path / "never-searched.jsonl", [])
    write_rows(tmp_path / "chats.jsonl", [sharegpt_row(place) for place in range(8)])
    write_rows(tmp_path / "pairs.jsonl", [preference_row(place) for place in range(8)])
    (tmp_path / "train.toml").write_text(TRAIN)
    (tmp_path / "sft.toml").write_text(TABLES + '[data]\ntrain = "chats.jsonl"\n')
    (tmp_path / "dpo.toml").write_text(TABLES + '[data]\ntrain = "pairs.jsonl"\n')
    return tmp_path


def test_rows_a_prompt_and_a_gold_are_read(here: Path, said: Said) -> None:
    told = said(*TRAINED)
    for key in ("data", "eval.sets.test"):
        (line,) = [line for line in told.splitlines() if line.startswith(f"  {key}: read 6 rows")]
        assert "of 200 tokens" in line
        assert "graded as correct" in line
    assert not (here / "runs").exists()


@pytest.mark.parametrize("name", ["train", "sft"])
@pytest.mark.usefixtures("here")
def test_adapters_that_cannot_be_merged_are_refused(said: Said, name: str) -> None:
    learner = ['learner={optimizer="adamw",lora={target_modules=["embed_tokens"]}}']
    main, engine = (train.main, ["engine.name=embedded"]) if name == "train" else (sft.main, [])
    told = said(main, f"{name}.toml", *engine, *learner, *DRY, status=2)
    assert "model.embed_tokens of Qwen3ForCausalLM" in told


@pytest.mark.parametrize("code", [False, True])
def test_a_model_of_an_unknown_type_is_refused_and_its_code_never_runs(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, code: bool
) -> None:
    """Nor is a question asked: a yes would be there."""
    changes: dict[str, Any] = {"model_type": "qwen9"}
    if code:
        (here / "model" / "planted.py").write_text(PLANTED)
        changes["auto_map"] = {"AutoConfig": "planted.Mine"}
        tokens = {"auto_map": {"AutoTokenizer": ["planted.Words", "planted.Words"]}}
        change_json(here / "model" / "tokenizer_config.json", **tokens)
    change_json(here / "model" / "config.json", **changes)
    commands: list[tuple[Any, list[str]]] = [
        (train.main, ["train.toml", "engine.name=embedded", "--dry-run"]),
        (train.main, ["train.toml", "engine.name=embedded"]),
        (sft.main, ["sft.toml", "--dry-run"]),
        (dpo.main, ["dpo.toml"]),
        (export.main, ["model", "out"]),
    ]
    for main, words in commands:
        monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
        assert main(words) == 2
        told = " ".join(capsys.readouterr().err.split())
        assert "model_type 'qwen9'" in told
        assert ("(auto_map), which is" in told) == code
        assert f"transformers {transformers.__version__}" in told
    assert not (here / "it-ran").exists()


BROKEN = {
    "llm_config": "model_type 'internvl_chat'",
    "adapter": "merge_and_unload",
    "gguf": "choose one of its files",
    "shard": "No such file or directory: model/model-2.safetensors",
    "index": "index.json: has no weight_map",
    "cut": "not fully covered",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_model_is_refused_alike_by_dry_run_and_start(
    here: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    folder = here / "model"
    weights, config = folder / "model.safetensors", folder / "config.json"
    if kind == "llm_config":
        table = {"model_type": "internvl_chat", "llm_config": json.loads(config.read_text())}
        config.write_text(json.dumps(table))
    elif kind in ("adapter", "gguf"):
        config.unlink()
        (folder / ("adapter_config.json" if kind == "adapter" else "a.gguf")).touch()
    elif kind == "cut":
        weights.write_bytes(weights.read_bytes()[:-9])
    else:
        index = {"weight_map": {"a": "model-2.safetensors"} if kind == "shard" else []}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    told = set[str]()
    for words in (["--dry-run"], []):
        assert train.main(["train.toml", "engine.name=embedded", *words]) == 2
        told.add(capsys.readouterr().err)
    (error,) = told
    assert BROKEN[kind] in error


@pytest.mark.parametrize("place", ["template", "text", "unused"])
def test_tokens_beyond_the_embedding_are_refused(here: Path, said: Said, place: str) -> None:
    """Those that no text of a run has, such as one for images, are not."""
    tokenizer = AutoTokenizer.from_pretrained(here / "model")
    tokenizer.add_tokens([AddedToken("<new>", special=place != "text", normalized=False)])
    if place == "template":
        tokenizer.chat_template += "<new>"
    tokenizer.save_pretrained(here / "model")
    told = said(*TRAINED, status=2 * (place != "unused"))
    assert ("'<new>' (token 548)" in told) == (place != "unused")


def test_control_tokens_of_questions_are_counted(here: Path, said: Said) -> None:
    """For an endpoint too, by the families that are known."""
    row = arpo_row(6)
    row["prompt"][1]["content"] += " <|im_end|>"
    write_parquet(here / "train.parquet", [*(arpo_row(place) for place in range(6)), row])
    assert " 1 of 7 " in said(*TRAINED)
    write_rows(here / "q.jsonl", [{"question": "Is [INST] it?", "answer": "yes"}])
    words = ["http://127.0.0.1:9/v1", "--model", "m", "--env", "agentenv/QAGrader-v0"]
    assert " 1 of 1 " in said(evaluate.main, *words, "data=q.jsonl", "--dry-run")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"answer": ""}, "train.parquet, row 7: key 'reward_model.ground_truth' must be"),
        ({"question": "Why? " * 200}, "1 of 7 prompts are longer than limits.max_prompt_tokens"),
    ],
)
def test_a_dry_run_refuses_the_rows_that_a_run_refuses(
    here: Path, said: Said, change: dict[str, str], says: str
) -> None:
    row = arpo_row(6, answer=change.get("answer"))
    if "question" in change:
        row["prompt"][1]["content"] = change["question"]
    write_parquet(here / "train.parquet", [*(arpo_row(place) for place in range(6)), row])
    assert says in said(*TRAINED, status=2)
    told = said(*TRAINED, "data.skip_bad_rows=true", "data.overlong_prompt=skip")
    assert "1 invalid rows" in told or "1 of 7" in told


def test_a_gold_that_its_grader_rejects_is_refused(here: Path, said: Said) -> None:
    """A gold that the reward's box cannot hold can never be earned."""
    write_rows(here / "test.jsonl", [arpo_row(0, answer="}{")])
    assert "gold answer '}{'" in said(*TRAINED, status=2)


@pytest.mark.usefixtures("here")
def test_demonstrations_without_their_questions_are_not_read(said: Said) -> None:
    keys = ["data.train=trian.jsonl", "sft.data=chats.jsonl"]
    keys += ["sft.gate=chats.jsonl", 'sft.stages=[{rows = "all", num_steps = 1}]']
    told = said(*TRAINED, *keys, status=EXIT_MISSING)
    assert "data.train = trian.jsonl" in told.partition("missing:")[2]


def test_the_share_of_cut_results_of_demonstrations_is_a_line_before_the_start(
    warehouse: Path, said: Said
) -> None:
    path = warehouse.with_name("cut.jsonl")
    rows = [
        [{"action": "<stock>nuts</stock>", "result": text}, {"action": "<answer>3</answer>"}]
        for text in ("3", "7", " 310" * 30)
    ]
    write_rows(path, [{"question": "How many nuts?", "turns": turns} for turns in rows])
    keys = [f"sft.data={path}", f"sft.gate={path}", "sft.stages=[{num_steps=1}]"]
    told = said(train.main, warehouse, *keys, "limits.max_tool_result_tokens=20", *DRY)
    (line,) = (one for one in told.splitlines() if "sft: " in one)
    assert "1 of 3" in line


def test_rows_are_read_without_a_tokenizer(here: Path, said: Said) -> None:
    (here / "test.jsonl").unlink()
    keys = ("model.path=models/Qwen2.5-3B", "--gpu-memory", "200")
    told = said(train.main, "train.toml", *keys, *DRY, status=EXIT_MISSING)
    assert "has 2 messages" in told
    missing = told.partition("missing:")[2]
    assert "eval.sets.test.path = test.jsonl" in missing
    assert "model.path = models/Qwen2.5-3B" in missing


MADE = """
[run]
setup = "made_world:prepare"
[model]
path = "{run}/model"
[env]
id = "agentenv/QAGrader-v0"
[algorithm]
name = "grpo"
[train]
num_steps = 1
[data]
train = "{run}/train.jsonl"
"""


@pytest.mark.parametrize(
    ("config", "absent", "missing"),
    [
        (str(ROOT / "configs" / "quickstart.toml"), "bm25s", "requires the package 'bm25s'"),
        ("made.toml", "math_verify", "requires math-verify"),
    ],
)
def test_missing_packages_are_listed_for_rows_that_the_run_generates(
    here: Path, monkeypatch: pytest.MonkeyPatch, said: Said, config: str, absent: str, missing: str
) -> None:
    """Those of tools and of graders."""
    (here / "made.toml").write_text(MADE)
    (here / "made_world.py").write_text("def prepare(run, seed):\n    return ''\n")
    monkeypatch.setitem(sys.modules, absent, None)
    told = said(train.main, config, *DRY, status=EXIT_MISSING)
    assert missing in " ".join(told.partition("missing:")[2].split())


@pytest.mark.parametrize("place", ["/proc/runs", "train.toml/runs"])
@pytest.mark.usefixtures("here")
def test_a_folder_of_runs_that_cannot_be_written_is_refused(said: Said, place: str) -> None:
    """By the check of a start; not where the run is planned for another machine."""
    told = said(*TRAINED[:-2], f"run.dir={place}", status=2)
    assert "cannot be written" in " ".join(told.split())
    said(*TRAINED, f"run.dir={place}")


def test_a_program_without_namespaces_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also before a set-up makes its rows."""
    shutil.copytree(ROOT / "examples" / "own_agent", tmp_path / "agent")
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions' >&2; exit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.chdir(tmp_path / "agent")
    assert train.main(["shell.toml", "--dry-run"]) == 0, capsys.readouterr().err
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert train.main(["shell.toml", "--dry-run"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "program is available" in told
    assert "env.kwargs.program.allow_unsafe = true" in told


def test_missing_weights_are_listed_as_missing(here: Path, said: Said) -> None:
    (here / "model" / "model.safetensors").unlink()
    told = said(*TRAINED, status=EXIT_MISSING)
    assert "of 200 tokens" in told
    assert "model.path = model" in told


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_both_ends_of_a_long_file_are_read(tmp_path: Path, suffix: str) -> None:
    rows = [{"question": str(number)} for number in range(2500)]
    path = tmp_path / f"rows.{suffix}"
    (write_rows if suffix == "jsonl" else write_parquet)(path, rows)
    read = list(read_rows(path, 1000))
    assert [row.number for row in read] == [*range(1, 1001), *range(1501, 2501)]
    assert [row.row["question"] for row in read] == [str(row.number - 1) for row in read]
    assert [row.row for row in read_rows(path, 2000)] == rows, "each once"


@pytest.mark.parametrize(
    ("main", "name", "file", "broken"),
    [(sft.main, "sft", "chats", sharegpt_row(0, BROKEN_CHAIN)), (dpo.main, "dpo", "pairs", SAME)],
)
def test_dialogues_are_measured_in_tokens(
    here: Path, said: Said, main: Any, name: str, file: str, broken: dict[str, Any]
) -> None:
    words = (main, f"{name}.toml", *DRY)
    assert "data: 8 training" in said(*words)
    good = sharegpt_row(0) if main is sft.main else preference_row(0)
    write_rows(here / f"{file}.jsonl", [good, broken])
    assert f"{file}.jsonl, row 2: " in said(*words, status=2)
    assert main([*words[1:], "model.path=models/Qwen2.5-3B"]) in (2, EXIT_MISSING)
    assert "1 invalid rows" in said(*words, "data.skip_bad_rows=true")


def test_an_evaluations_file_is_read_and_a_missing_one_is_fetched(here: Path, said: Said) -> None:
    write_rows(here / "gaia.jsonl", benchmark_rows("gaia"))
    sets = ["sets.gaia={benchmark='gaia',path='gaia.jsonl'}"]
    sets += ["sets.hle={benchmark='hle',path='hle.jsonl'}", "limits.max_prompt_tokens=2000"]
    sets += ["search.backend={name='bm25',corpus='never-searched.jsonl'}"]
    (here / "eval.toml").write_text("")
    change_json(here / "model" / "config.json", max_position_embeddings=8192)
    words = ("model", "--config", "eval.toml", *sets, *DRY)
    told = said(evaluate.main, *words, status=EXIT_MISSING)
    assert "sets.gaia: read 6" in told
    assert "sets.hle.path = hle.jsonl" in told.replace("Humanity's Last Exam", "HLE")


@pytest.mark.usefixtures("here")
def test_an_answer_that_no_rollout_renders_is_refused(said: Said) -> None:
    """Without the model, too."""
    given = ["train.toml", "env.id=outcomes/Talk-v0", "env.module=tests.test_outcomes"]
    given += ["python=none", "search=none"]
    for more in ([], ["model.path=nowhere"]):
        err = said(train.main, *given, *more, *DRY, status=2)
        assert "outcomes/Talk-v0, task test-1" in err
