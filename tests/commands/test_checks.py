"""The list of checks, as a start makes them."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from agentenv import tool
from agentenv.assembly.checks.checks import REQUIRES, START, Check, CheckResult, CheckRunner, select
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.parts.assembly import Assembly, once
from agentenv.assembly.run.rundir import RunDirectory
from agentenv.base.config import load_config
from agentenv.base.errors import ConfigError
from agentenv.engines.embedded.embedded_config import EmbeddedConfig
from agentenv.engines.scripted import ScriptedConfig
from agentenv.engines.vllm import VLLMConfig
from agentenv.lab.diagnosis.doctor import CHECKS
from agentenv.launchers import sft, train
from agentenv.training.supervised.assembly import TrainingAssembly
from tests.support.golden import Said
from tests.support.json_files import change_json
from tests.support.warehouse import ROOT

QUICKSTART = ROOT / "configs" / "quickstart.toml"


async def found(
    config: Path, folder: Path, overrides: Sequence[str] = (), checks: Sequence[Check] = START
) -> dict[str, CheckResult]:
    """The results of these checks of a training run in `folder`, by name."""
    settings = load_config(TrainConfig, config, overrides)
    async with AsyncExitStack() as stack:
        run = RunDirectory(folder / "run", resume=False)
        assembly = TrainingAssembly(settings, run.path, stack, lambda text: None)
        chosen = select(checks, settings, "configuration", "measured")
        runner = CheckRunner()
        return {one.name: await runner.run(one, assembly) for one in chosen}


def failed(results: dict[str, CheckResult]) -> list[str]:
    return [name for name, one in results.items() if one.state == "failed"]


async def test_a_run_that_can_start_passes_each_check_of_training(
    warehouse: Path, tmp_path: Path
) -> None:
    results = await found(warehouse, tmp_path)
    assert [*results] == [check.name for check in START if TrainConfig in check.configs]
    assert {one.state for one in results.values()} == {"passed"}


async def test_bf16_in_the_file_of_deepspeed_is_refused_without_a_gpu(
    warehouse: Path, tmp_path: Path
) -> None:
    (path := tmp_path / "ds.json").write_text('{"bf16": {"enabled": true}}')
    keys = ["learner.optimizer=adamw", f"learner.deepspeed_config={path}"]
    results = await found(warehouse, tmp_path, keys)
    assert failed(results) == ["DeepSpeed's file"]
    assert "from learner.dtype" in results["DeepSpeed's file"].message


def test_check_names_are_unique() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)


LACKING = """
from agentenv import ToolEnv, register


class LackingEnv(ToolEnv):
    def __init__(self, task):
        import no_such_scales


register("me/Lacking-v0", "lacking_env:LackingEnv")
"""


async def test_dependents_of_a_failed_check_are_skipped_and_an_exception_is_a_failure(
    warehouse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment that cannot be created: the doctor continues and prints a summary."""
    (tmp_path / "lacking_env.py").write_text(LACKING)
    monkeypatch.syspath_prepend(tmp_path)
    results = await found(warehouse, tmp_path, ["env.module=lacking_env", "env.id=me/Lacking-v0"])
    assert failed(results) == ["first episodes"]
    for name in ("callable tools", "observations", "graders", "prompts"):
        assert results[name].state == "skipped"
        assert results[name].message == REQUIRES.format("first episodes")

    async def broken(_: object) -> None:
        raise KeyError("no such part")

    result = await CheckRunner(catches=True).run(Check("a", "parts", (), broken), None)
    assert result.state == "failed"
    assert "such part' (test_checks.py" in result.message


MISTAKES = [  # of a run whose model, rows and environment exist: override, check, problem, remedy
    ("learner.groups_per_minibatch=4", "sizes divide",
     "does not divide queue.groups_per_step = 2", ""),
    ("limits.max_tree_seconds=1", "time-outs", "max_tree_seconds = 1 ends trees before",
     "an outer deadline must be longer than the inner one"),
    ("env.id=me/Nope-v0", "classes of environments", "env.id: no environment is registered as", ""),
    ("run.setup=nowhere:nothing", "set-up", "run.setup: 'nowhere:nothing'", ""),
    ("engine={name='embedded', max_model_len=2048}", "context", "engine.max_model_len = 2048: ",
     "set at most that"),
    ("limits.max_response_tokens=2000", "context", "exceed the engine's context",
     "lower them, or choose an engine"),
    ("python={}", "environments", "[python]: not used by me/Warehouse-v0", "remove the table"),
    ("limits.max_prompt_tokens=4", "prompts", "limits.max_prompt_tokens", ""),
    ("train={num_epochs=0.01,max_logprob_gap=1}", "number of updates",
     "train.num_epochs = 0.01 of 24 questions are less than one step", ""),
]  # fmt: skip


@pytest.mark.parametrize(("override", "name", "problem", "remedy"), MISTAKES)
async def test_each_mistake_fails_exactly_one_check_with_its_remedy(
    warehouse: Path, tmp_path: Path, override: str, name: str, problem: str, remedy: str
) -> None:
    results = await found(warehouse, tmp_path, [override])
    assert failed(results) == [name]
    assert problem in results[name].message
    assert results[name].remedy.startswith(remedy)


EARLY = [  # of a run with a set-up: overrides, check, problem
    (["eval.timeout_s=1"], "time-outs", "eval.timeout_s = 1 ends evaluations before"),
    (["python={timeout_s=9999}"], "time-outs",
     "python.timeout_s = 9999 lets one call take longer than limits.max_seconds = 60"),
    (["env.module=nowhere"], "classes of environments",
     "env.module: 'nowhere' cannot be imported"),
    (["env.kwargs.corpsu=x"], "classes of environments",
     "env.kwargs.corpsu: unknown to agentenv/Quickstart-v0"),
    (["env.tools=[{name='nowhere:tool'}]"], "classes of environments",
     "env.tools[0].name: 'nowhere:tool' cannot be loaded"),
    (["grader.kind=custom"], "classes of environments",
     'grader.kind = "custom" needs grader.path, a Python file'),
    (["model.path=/nowhere"], "model type", "model.path: /nowhere is not a model directory"),
    (["grader={path='/nowhere.py'}"], "files", "grader.path: /nowhere.py: no such file"),
    (["run.setup=agentenv.envs.quickstart.setup:prepar"], "set-up",
     "run.setup: 'agentenv.envs.quickstart"),
    (["engine={name='vllm', servers={python='/nowhere'}}"], "servers",
     "engine.servers.python: /nowhere"),
    (["engine={name='vllm', urls=['http://127.0.0.1:9']}"], "servers",
     "engine.urls: no engine server answers at http://127.0.0.1:9 (Conn"),
]  # fmt: skip
FILES = ("data.train", "eval.sets.heldout.path", "eval.sets.dev.path", "sft.data", "sft.gate")
EARLY += [
    ([f"{key}=/nowhere.jsonl"], "files", f"{key}: /nowhere.jsonl: no such dataset file")
    for key in FILES
]


@pytest.mark.parametrize(("overrides", "name", "problem"), EARLY)
async def test_mistakes_that_do_not_depend_on_the_set_up_are_found_before_it(
    tmp_path: Path, overrides: list[str], name: str, problem: str
) -> None:
    before = START[: [check.name for check in START].index("set-up is run")]
    results = await found(QUICKSTART, tmp_path, overrides, before)
    assert failed(results)[0] == name
    assert problem in f"{results[name].message}; {results[name].remedy}"


async def test_a_grader_of_rows_that_are_here_is_loaded_before_the_set_up(tmp_path: Path) -> None:
    rows, path = tmp_path / "rows.jsonl", tmp_path / "mine.py"
    rows.write_text('{"question": "?", "answer": 1}\n' * 16)
    path.write_text("import no_such_package\n")
    given = [f"data.train={rows}", f"eval.sets={{heldout={{path='{rows}'}}}}"]
    given += ["env={id='agentenv/DeepSearch-v0'}", f"grader={{path='{path}'}}"]
    before = START[: [check.name for check in START].index("set-up is run")]
    results = await found(QUICKSTART, tmp_path, [*given, "checkpoint.best_metric="], before)
    assert "no_such_package" in results[failed(results)[0]].message


async def test_a_part_is_built_once() -> None:
    class Counting(Assembly[TrainConfig]):
        num_built = 0

        @once
        async def model(self) -> Path:
            self.num_built += 1
            return Path("model")

    async with AsyncExitStack() as stack:
        assembly = Counting(None, Path(), stack, print)  # type: ignore[arg-type]
        assert await assembly.model() == await assembly.model() == Path("model")
        assert assembly.num_built == 1


@tool
def answer(text: str) -> str:
    """A tool whose tag is one of the protocol's own."""
    return text


@pytest.mark.parametrize("more", [["--dry-run"], []])
def test_a_tool_that_cannot_be_called_is_refused_with_a_remedy(
    warehouse: Path, tmp_path: Path, more: list[str], said: Said
) -> None:
    tools = "env.tools=[{name='tests.commands.test_checks:answer'}]"
    told = said(train.main, warehouse, tools, f"run.dir={tmp_path}", *more, status=2)
    assert "me/Warehouse-v0: the tag" in told
    assert "renderer.name = 'native'" in told


@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_a_template_that_ends_answers_where_no_engine_stops_is_refused(
    warehouse: Path, tmp_path: Path, said: Said, dry: list[str]
) -> None:
    model = Path(shutil.copytree(warehouse.parent / "model", tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}"
        "{% if m.role == 'assistant' %}<|turn|>{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(model)
    change_json(model / "config.json", vocab_size=len(tokenizer))
    keys = [f"model.path={model}", f"run.dir={tmp_path}/runs"]
    told = said(train.main, warehouse, *keys, *dry, status=2)
    assert "answer with '<|turn|>'" in told
    assert f"eos_token_id in {model}" in told
    left = [str(p) for p in (tmp_path / "runs").rglob("*")]
    assert not (tmp_path / "runs").exists(), left


# Errors are reported before the set-up, the learner or an engine starts.


def test_servers_apply_the_rope_scaling_of_a_model(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    raw = {"max_position_embeddings": 1024, "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert VLLMConfig().max_context(tmp_path) == 4096
    assert VLLMConfig(max_model_len=3000).max_context(tmp_path) == 3000
    assert EmbeddedConfig().max_context(tmp_path) == 1024
    for too_long in (VLLMConfig(max_model_len=4097), EmbeddedConfig(max_model_len=1025)):
        with pytest.raises(ConfigError, match="max_model_len"):
            too_long.max_context(tmp_path)
    assert ScriptedConfig(max_model_len=9999).max_context(tmp_path) == 1024


def test_an_interrupted_setup_leaves_no_folder_and_offers_no_resume(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(run: Path, seed: int) -> None:
        (run / "my-corpus").mkdir()
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("agentenv.envs.quickstart.setup.prepare", prepare)
    runs = tmp_path / "runs"
    assert "interrupted; training had" in said(
        train.main, QUICKSTART, f"run.dir={runs}", status=130
    )
    assert not runs.exists()


def test_files_of_a_fine_tuning_are_checked_before_its_setup(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = "agentenv.envs.quickstart.setup.prepare_chat"
    monkeypatch.setattr(setup, lambda *_: pytest.fail("it was run"))
    config, runs = str(ROOT / "configs" / "sft_quickstart.toml"), tmp_path / "runs"
    arguments = [config, f"run.dir={runs}", f"data.train={tmp_path}/nowhere.jsonl"]
    told = f"data.train: {tmp_path}/nowhere.jsonl: no such file or folder"
    assert told in said(sft.main, *arguments, status=2).replace("\n", " ")
    assert not runs.exists()
