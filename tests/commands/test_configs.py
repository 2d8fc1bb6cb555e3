"""Every shipped configuration: read, planned for 8 GPUs, and run for a step on the CPU.

The runs change only the keys in the lists below: paths, the sizes of model and data, and the
machine.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from agentenv.assembly.reports.records import EvalRow
from agentenv.base.errors import EXIT_MISSING
from agentenv.evaluation.store import read_rows
from agentenv.launchers import dpo, evaluate, serve, sft, synthesize, train
from tests.commands.test_published_values import RUNS
from tests.support.dense import TEXTS, make, save_encoder
from tests.support.openai_endpoint import ScriptedEndpoint
from tests.support.published import SYSTEM, make_workspace
from tests.support.retriever import retriever
from tests.support.warehouse import ROOT

CONFIGS = ROOT / "configs"
TRAINED = ("arpo_deep_search_8b", "aepo_deep_search_14b", "tool_star_rl_3b")  # one of each recipe
COMMANDS = {
    **dict.fromkeys(("quickstart", "distill_quickstart", *RUNS), train.main),
    **dict.fromkeys(("sft_quickstart", "sft_cold_start"), sft.main),
    **dict.fromkeys(("dpo_quickstart", "dpo_self_critic"), dpo.main),
    **dict.fromkeys(("server_judge", "server_summarizer"), serve.main),
}
EVALUATIONS = ("eval_reasoning", "eval_deep_search")
# Of other tests, among them tests/pretrained.py.
OTHERS = ("synthesize_tools", "eval_tool_star", "gsm8k_135m")

SMALL_RL = (
    "model.path={folder}/runs/cold-start", "data.train={folder}/rl.jsonl",
    "search.backend={{name='bm25', corpus='{folder}/kb.jsonl'}}", "search.arpo_cache=",
    "search.cache={folder}/search.db", "limits.max_prompt_tokens=64",
    "limits.max_response_tokens=192", "limits.max_turn_tokens=64",
    "limits.max_tool_result_tokens=48", "queue.groups_per_step=2", "learner.groups_per_minibatch=1",
    "learner.num_ranks=1", "engine.name=embedded", "engine.max_model_len=1024",
    "train={{num_steps=1}}",
)  # fmt: skip
SMALL_EVALUATION = (
    "num_samples=1", "prompt.template={folder}/rl.jsonl", "limits.max_prompt_tokens=2048",
    "limits.max_response_tokens=256", "limits.max_turn_tokens=96",
    "limits.max_tool_result_tokens=48", "engine.name=embedded", "engine.max_model_len=4096",
    "search.backend={{name='bm25', corpus='{folder}/kb.jsonl'}}", "search.mode=snippets",
    "search.cache=", "grader.judge.cache=",
)  # fmt: skip
SMALL_SUPERVISED = (
    "model.path={folder}/runs/cold-start",
    "data.dataset_info={folder}/dataset_info.json",
    "data.max_samples=48",
    "data.max_length=512",
    "learner.num_ranks=1",
)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a cold-started quick-start model and of data in the published schemas."""
    folder = tmp_path_factory.mktemp("published")
    make_workspace(folder)
    return folder


def arguments(name: str, folder: Path, overrides: tuple[str, ...], *more: str) -> list[str]:
    """The command line of a run `name` in `folder`."""
    where = [f"run.dir={folder}/runs", f"run.name={name}"]
    filled = [override.format(folder=folder) for override in overrides]
    return [str(CONFIGS / f"{name}.toml"), *where, *filled, *more]


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_every_shipped_configuration_has_a_test() -> None:
    found = {path.stem for path in CONFIGS.glob("*.toml")}
    assert found == {*COMMANDS, *EVALUATIONS, *OTHERS}


@pytest.mark.parametrize("name", [*COMMANDS, *EVALUATIONS, "synthesize_tools"])
def test_a_dry_run_of_a_configuration_fits_eight_gpus(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of a published one, no fewer."""
    monkeypatch.chdir(tmp_path)
    main, given = COMMANDS.get(name, evaluate.main), [str(CONFIGS / f"{name}.toml"), "--dry-run"]
    if name not in COMMANDS:
        main = synthesize.main if name == "synthesize_tools" else main
        given = ["models/Qwen3-14B-ARPO", "--config", *given]
    expected = 0 if name in ("quickstart", "sft_quickstart") else EXIT_MISSING
    assert main([*given, "--gpus", "8"]) == expected
    told = capsys.readouterr().out
    assert "nothing was started" in told
    assert "more than checkpoint.finish_s" not in told
    if name in EVALUATIONS:
        assert "GPU 4, 5, 6, 7: 60.0" in told  # the judge has 0.75 of each, as theirs
    assert list(tmp_path.iterdir()) == []
    if name in RUNS:
        assert main([*given, "--gpus", "7"]) == 2
        assert "engine.servers.gpus: 4 GPUs" in capsys.readouterr().err
    elif name not in COMMANDS:
        assert main([*given, "--gpus", "4"]) == 2


@pytest.mark.heavy
@pytest.mark.parametrize("name", TRAINED)
def test_a_step_of_reinforcement_learning(
    name: str, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = tomllib.loads((CONFIGS / f"{name}.toml").read_text(encoding="utf-8"))
    own = [f"eval.sets.{one}.path={small}/rl.jsonl" for one in values["eval"]["sets"]]
    own += [f"eval.sets.{one}.max_tasks=1" for one in values["eval"]["sets"]]
    if "prompt" in values:  # taken from another training file
        own.append(f"prompt.template={small}/rl.jsonl")
    assert train.main(arguments(name, small, SMALL_RL, *own)) == 0
    (step,) = [row for row in rows_of(small / "runs" / name) if "trees/offered" in row]
    assert step["trees/trained"] >= 1
    assert step["learner/num_steps"] >= 1
    assert step["learner/grad_norm"] > 0
    assert step["rollout/tool_calls"] > 0
    left_out = "engine.name = embedded does not have these keys, ignored: servers = "
    assert left_out in capsys.readouterr().out
    assert left_out in (small / "runs" / name / "run.log").read_text(encoding="utf-8")


@pytest.mark.heavy
def test_a_step_of_the_cold_start(small: Path) -> None:
    overrides = ("data.eval_split=8", "sft.num_steps=1")
    assert sft.main(arguments("sft_cold_start", small, SMALL_SUPERVISED, *overrides)) == 0
    (step,) = [row for row in rows_of(small / "runs/sft_cold_start") if "sft/loss" in row]
    assert step["sft/grad_norm"] > 0


@pytest.mark.heavy
def test_a_step_of_preferences(small: Path) -> None:
    overrides = ("data.dataset_info=", f"data.train={small}/pairs.jsonl", "dpo.num_steps=1")
    assert dpo.main(arguments("dpo_self_critic", small, SMALL_SUPERVISED, *overrides)) == 0
    (step,) = [row for row in rows_of(small / "runs/dpo_self_critic") if "dpo/loss" in row]
    assert step["dpo/loss"] == pytest.approx(0.6931, abs=1e-3), "ln 2 before the first step"


@pytest.mark.heavy
@pytest.mark.usefixtures("here")
def test_a_round_of_the_self_critic(small: Path) -> None:
    """With the command of docs/reproduce.md; then preferences are trained on its pairs."""
    few = ("self_critic.num_questions=6", f"prompt.template={small}/rl.jsonl")
    few += ("self_critic.threshold=0",)  # the right form alone: so small a model is hardly right
    own = ("run.name=critic", f"eval.sets.test.path={small}/rl.jsonl", "eval.sets.test.max_tasks=2")
    overrides = arguments("tool_star_rl_3b", small, SMALL_RL, *few, *own)
    assert dpo.main([*overrides, "--self-critic", "1"]) == 0
    (found,) = [row for row in rows_of(small / "runs/critic") if "self_critic/num_steps" in row]
    assert found["self_critic/num_steps"] >= 1
    assert found["self_critic/grad_norm"] > 0
    assert found["policy_version"] == 1
    left = f"data.train={small}/runs/critic/pairs/*.jsonl"
    again = ("data.dataset_info=", left, "dpo.num_steps=1", "run.name=of-critic")
    assert dpo.main(arguments("dpo_self_critic", small, SMALL_SUPERVISED, *again)) == 0


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "sets"),
    [("eval_reasoning", "gsm8k,hotpotqa,webwalker"), ("eval_deep_search", "webwalker")],
)
def test_an_evaluation(name: str, sets: str, small: Path) -> None:
    """Of two questions a set, graded by the rules and a judge."""
    rows = evaluate_small(name, sets, small)
    assert all(SYSTEM in row.segments[0]["env"] for row in rows)


@pytest.mark.heavy
def test_an_evaluation_with_helpers_and_wikipedia(small: Path, tmp_path: Path) -> None:
    """Of two questions: one set searches the web, one the passages of E5 and FAISS."""
    pytest.importorskip("faiss")
    (tmp_path / "encoder").mkdir()
    keys = make(tmp_path, save_encoder(tmp_path / "encoder"))
    index = [f"backend.{key}={getattr(keys, key)}" for key in ("index", "corpus", "encoder")]
    with retriever("backend.name=faiss", *index) as address:
        url = f"sets.hotpotqa.search.backend.url={address}"
        refiner = "assist.refiner.min_response_tokens=64"
        rows = evaluate_small("eval_tool_star", "gsm8k,hotpotqa", small, url, refiner)
    told = {row.dataset: str([one["env"] for one in row.segments if "env" in one]) for row in rows}
    assert TEXTS[0] in told["hotpotqa"]
    assert TEXTS[0] not in told["gsm8k"]


def evaluate_small(name: str, sets: str, small: Path, *more: str) -> list[EvalRow]:
    """The rows of two questions of each of the sets by configs/NAME.toml."""
    out = small / "evals" / name
    paths = [f"sets.{one}.path={small}/{one}.jsonl" for one in sets.split(",")]
    verdict = {"choices": [{"message": {"content": "CORRECT"}}]}  # everything is right
    with ScriptedEndpoint(lambda *_: verdict) as helper:
        changed = [override.format(folder=small) for override in SMALL_EVALUATION]
        roles = tomllib.loads((CONFIGS / f"{name}.toml").read_text(encoding="utf-8"))["roles"]
        changed += [f"roles.{role}={{url='{helper.url}'}}" for role in roles]
        subject = [str(small / "runs" / "cold-start"), "--config", str(CONFIGS / f"{name}.toml")]
        asked = ["--set", sets, "--n", "2", "--out", str(out)]
        assert evaluate.main([*subject, *asked, *paths, *changed, *more]) == 0
    rows = read_rows(out)
    assert len(rows) == 2 * len(paths)
    assert [row.error for row in rows if row.end == "failed"] == []
    assert all(row.action_tokens for row in rows)
    assert (out / "report.md").is_file()
    return rows


@pytest.mark.usefixtures("here")
def test_a_step_of_the_quick_starts_of_supervised_training(tmp_path: Path) -> None:
    rows = "data.max_samples=64"
    assert sft.main(arguments("sft_quickstart", tmp_path, (), "sft.num_steps=1", rows)) == 0
    run = tmp_path / "runs" / "sft_quickstart"
    pairs = [f"model.path={run}", f"data.train={run}/data/pairs.jsonl"]
    pairs += [f"data.eval={run}/data/pairs-heldout.jsonl", "dpo.num_steps=1", rows]
    assert dpo.main(arguments("dpo_quickstart", tmp_path, (), *pairs)) == 0
