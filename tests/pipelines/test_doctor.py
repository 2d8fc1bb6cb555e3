"""launchers/doctor.py: every check passes where all is well, and of one fault exactly its check
fails, with what to do."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
from msgspec.structs import replace

from agentenv.config import load_config
from agentenv.envs.sandbox import sandbox as sandboxes
from agentenv.envs.search.keys import SearchConfig
from agentenv.envs.search.providers import WebConfig
from agentenv.launchers import doctor
from agentenv.learners import model_check
from agentenv.pipelines.config.rl import TrainConfig
from agentenv.pipelines.diagnosis import budget, checks, machine
from agentenv.pipelines.diagnosis.checks import examine
from agentenv.pipelines.diagnosis.context import Patient
from agentenv.pipelines.diagnosis.escapes import Outcome, known_attacks
from agentenv.pipelines.diagnosis.machine import MACHINE, Machine, requirement, satisfies
from agentenv.pipelines.diagnosis.protocol import check_prefix_hit, check_sampling, refuse_lost_call
from agentenv.pipelines.diagnosis.results import Judge, Probe, Verdict
from agentenv.pipelines.diagnosis.world import respelled, services
from agentenv.pipelines.setup.machine import Machine as PlannedMachine
from agentenv.renderer import TagRenderer, TextCodec
from agentenv.tool_env import Grade
from agentenv.types import Completion, Message, SamplingParams, VersionSpan
from tests.support.toy import CharTokenizer

pytestmark = pytest.mark.timeout(300)


def failed(verdicts: Sequence[Verdict]) -> list[str]:
    return [one.name for one in verdicts if one.state == "failed"]


# The machine.


def looked_at(folder: Path, *names: str) -> list[Verdict]:
    async def look() -> list[Verdict]:
        probes = [probe for probe in MACHINE if probe.name in names]
        return [one async for one in Judge().judge(probes, Machine(folder, is_quick=True))]

    return asyncio.run(look())


def test_a_configuration_of_an_evaluation_is_refused_with_what_looks_at_it() -> None:
    path = Path(__file__).parents[2] / "configs" / "eval_reasoning.toml"

    async def look() -> list[Verdict]:
        found = examine(path, [], is_offline=True, is_quick=True, say=print)
        return [one async for one in found if one.name == "configuration"]

    (verdict,) = asyncio.run(look())
    assert verdict.state == "failed"
    assert "agentenv evaluate" in verdict.told
    assert "--dry-run" in verdict.remedy


@pytest.mark.parametrize("hole", ["", "it printed PWNED"])
def test_every_known_escape_is_tried_unless_it_is_to_be_quick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hole: str
) -> None:
    tried = dict[str, int]()

    async def attack_all(attacks: dict[str, str], rung: str, _: float) -> dict[str, Outcome]:
        tried[rung] = len(attacks)
        return {name: Outcome(hole, "finished", "") for name in attacks}

    monkeypatch.setattr(machine, "attack_all", attack_all)
    probe = [probe for probe in MACHINE if probe.name == "sandbox escapes"]

    async def look() -> Verdict:
        (found,) = [one async for one in Judge().judge(probe, Machine(tmp_path))]
        return found

    verdict = asyncio.run(look())
    assert tried["namespaces"] == len(known_attacks()) > 100
    assert verdict.state == ("failed" if hole else "passed")
    assert ("got through namespaces" in verdict.told) == bool(hole)


LIGHT = ("Python", "versions", "free memory", "free disk", "descriptors")


def test_this_machine_is_in_order(tmp_path: Path) -> None:
    verdicts = looked_at(tmp_path, *LIGHT)
    assert [one.name for one in verdicts] == list(LIGHT)
    assert failed(verdicts) == []


class _Memory(NamedTuple):
    available: float
    total: float


class _Disk(NamedTuple):
    free: float


@pytest.mark.parametrize(
    ("of", "name", "value", "expected", "remedy"),
    [
        (machine, "LEAST_PYTHON", (9, 9), "Python", "9.9 or newer"),
        (importlib.metadata, "requires", lambda _: ["torch>=99; extra == 'train'"], "versions",
         "pip install"),
        (importlib.metadata, "requires", lambda _: ["no-such-thing; extra == 'train'"], "versions",
         "pip install"),
        (psutil, "virtual_memory", lambda: _Memory(1e6, 1e9), "free memory", "end other"),
        (shutil, "disk_usage", lambda _: _Disk(1e6), "free disk", "run.dir"),
        (machine, "allowed_files", lambda: 100, "descriptors", "ulimit"),
    ],
)  # fmt: skip
def test_a_fault_of_the_machine_is_that_of_its_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: Any, name: str, value: Any,
    expected: str, remedy: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(of, name, value)
    verdicts = looked_at(tmp_path, *LIGHT)
    assert failed(verdicts) == [expected]
    (found,) = [one for one in verdicts if one.state == "failed"]
    assert remedy in found.remedy


@pytest.mark.slow
def test_an_escape_from_every_rung_of_the_sandbox_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def escape(zygote: object) -> str:
        return "read a file of the host"

    monkeypatch.setattr(sandboxes, "find_escape", escape)
    (found,) = looked_at(tmp_path, "sandbox escapes")
    assert found.state == "failed"
    assert "read a file of the host" in found.told + found.remedy
    assert "bubblewrap" in found.told + found.remedy


@pytest.mark.parametrize(
    ("version", "wanted", "holds"),
    [
        ("2.13.0+cpu", ">=2.9", True),
        ("0.19.8", ">=0.19,<0.20", True),
        ("0.20.1", ">=0.19,<0.20", False),
        ("1.0", "", True),
        ("1.0", "!=1.0", False),
        ("1.4.2", "~=1.4.1", True),
        ("1.5.0", "~=1.4.1", False),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, wanted: str, holds: bool) -> None:
    assert satisfies(version, wanted) is holds
    assert requirement(f"name[extra]{wanted}; extra == 'x'") == ("name", wanted, "extra == 'x'")


# A configuration.


def examined(
    monkeypatch: pytest.MonkeyPatch, path: Path, *overrides: str, quick: bool = True
) -> dict[str, Verdict]:
    """The verdicts on a configuration by name, without those on the machine."""
    monkeypatch.setattr(checks, "MACHINE", ())

    async def look() -> dict[str, Verdict]:
        found = examine(path, overrides, is_offline=True, is_quick=quick, say=lambda text: None)
        return {one.name: one async for one in found}

    return asyncio.run(look())


EXTRA = (
    *("room for rollouts", "room on the disk", "room in memory", "calls come back"),
    *("special tokens in results", "packed model", "services", "grader sanity"),
    *("conformance of the environment", "log-prob parity", "prefix hit of a fork"),
    "sampling contract",
)


@pytest.mark.slow
def test_of_a_good_configuration_every_check_passes_or_says_why_it_is_skipped(
    warehouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = examined(monkeypatch, warehouse)
    assert failed(list(found.values())) == []
    assert set(EXTRA) <= found.keys()
    skipped = {name: one.told for name, one in found.items() if one.state == "skipped"}
    assert skipped == {
        "services": "no search service is configured",
        **dict.fromkeys(EXTRA[-3:], "--quick starts no engine"),
    }


async def _no_machine(*_: object) -> str:
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "expected", "remedy"),
    [
        ("limits.max_tree_seconds=1", "time-outs", "longer one"),
        ("limits.max_turn_tokens=-1", "configuration", ""),
        ("queue.groups_per_step=3", "sizes divide", ""),
        ("env.id=me/Nope-v0", "classes of environments", "env.module"),
        ("run.setup=nowhere:nothing", "set-up", ""),
        ("limits.max_prompt_tokens=4", "prompts", ""),
    ],
)
def test_a_fault_of_the_configuration_is_that_of_its_check(
    warehouse: Path, monkeypatch: pytest.MonkeyPatch, fault: str, expected: str, remedy: str
) -> None:
    found = examined(monkeypatch, warehouse, fault)
    assert failed(list(found.values())) == [expected]
    assert remedy in found[expected].remedy
    for one in found.values():  # what it is in the way of says so
        if one.state == "skipped" and "needs" in one.told:
            assert one.told == f"needs {expected!r}, which has failed"


def _deaf(self: object, completion: Completion, *_: object) -> Message:
    return Message("assistant", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "name", "value", "expected", "remedy"),
    [
        (budget, "allowed_files", lambda: 100, "room for rollouts", "queue.max_rollouts"),
        (shutil, "disk_usage", lambda _: _Disk(1e3), "room on the disk", "keep_last"),
        (budget, "find_machine", lambda *_: PlannedMachine(0, 0.0, 1e6, "tiny"), "room in memory",
         "--gpus"),
        (TagRenderer, "parse", _deaf, "calls come back", "renderer.name"),
        (TextCodec, "neutralise", lambda self, text, tools: text, "special tokens in results",
         "report it"),
        (model_check, "distance", lambda config: 1.0, "packed model", ""),
    ],
)  # fmt: skip
def test_a_fault_of_a_part_is_that_of_its_check(
    warehouse: Path, monkeypatch: pytest.MonkeyPatch, of: Any, name: str, value: Any,
    expected: str, remedy: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(of, name, value)
    found = examined(monkeypatch, warehouse)
    assert failed(list(found.values())) == [expected]
    assert remedy in found[expected].told + found[expected].remedy


class Grades:
    """A grader that finds right what `right` says of the gold and the answer."""

    def __init__(self, right: Any) -> None:
        self.right = right

    async def grade(self, task: Any, written: Sequence[Message], calls: Any) -> Grade:
        said = written[-1].content.partition("<answer>")[2].partition("</answer>")[0]
        said = said.removeprefix("\\boxed{").removesuffix("}")
        good = bool(self.right(task.answers[0], said))
        return Grade(reward=float(good), success=good)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "problem"),
    [
        (lambda gold, said: False, "finds its own gold"),
        (lambda gold, said: True, "the gold of row"),
        (lambda gold, said: gold == said, "spelled"),
        (lambda gold, said: gold in said, "name a second candidate"),
        (lambda gold, said: said.startswith(gold), "name a second candidate"),  # spelled too
        (lambda gold, said: gold == said.strip(" ."), ""),
    ],
)
def test_a_grader_that_tells_right_from_wrong_badly_is_found(
    warehouse: Path, monkeypatch: pytest.MonkeyPatch, right: Any, problem: str
) -> None:
    import my_env  # type: ignore[import-not-found]

    monkeypatch.setattr(my_env, "ExactMatch", lambda: Grades(right))
    found = examined(monkeypatch, warehouse)
    assert failed(list(found.values())) == (["grader sanity"] if problem else [])
    assert problem in found["grader sanity"].told


def test_an_answer_is_respelled_as_people_write_it() -> None:
    assert respelled("Lima") == ["  Lima ", "Lima.", "LIMA"]
    assert respelled("42") == ["  42 ", "42."]
    assert respelled(r"\frac{1}{2}") == ["  \\frac{1}{2} ", "\\frac{1}{2}."]


@pytest.mark.slow
def test_a_tool_that_holds_up_the_loop_breaks_the_contract(
    warehouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    import my_env

    class Blocking(my_env.WarehouseEnv):  # type: ignore[misc]
        async def step(self, action: Message) -> Any:
            time.sleep(1.2)  # noqa: ASYNC251 (that is the fault)
            return await super().step(action)

    monkeypatch.setattr(my_env, "WarehouseEnv", Blocking)
    found = examined(monkeypatch, warehouse)
    assert failed(list(found.values())) == ["conformance of the environment"]
    assert "held up the event loop" in found["conformance of the environment"].told
    assert "check_tool_env" in found["conformance of the environment"].remedy


# Services.


@pytest.mark.parametrize(
    ("backend", "problem"),
    [
        (WebConfig(provider="serper"), "SERPER_API_KEY"),
        (WebConfig(provider="searxng", url="http://127.0.0.1:9"), "search failed"),
    ],
)
def test_a_search_service_without_key_or_answer_is_told(
    warehouse: Path, monkeypatch: pytest.MonkeyPatch, backend: WebConfig, problem: str
) -> None:
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    monkeypatch.setattr("agentenv.pipelines.diagnosis.world.SERVICE_S", 0.5)
    config = replace(load_config(TrainConfig, warehouse), search=SearchConfig(backend=backend))
    patient = Patient(config, None)  # type: ignore[arg-type]

    async def look(patient: Patient) -> Verdict:
        (found,) = [one async for one in Judge().judge([Probe("services", services)], patient)]
        return found

    found = asyncio.run(look(patient))
    assert found.state == "failed"
    assert problem in found.told + found.remedy
    assert asyncio.run(look(patient._replace(is_offline=True))).state == "skipped"


# Learner and engine.


class Softmax:
    """An engine over fixed logits. `raw`: it tells log-probs of the policy, whatever it samples
    from; `sharpens`: it samples from another temperature than it tells."""

    policy_version = 0

    def __init__(self, *, raw: bool = False, sharpens: float = 1.0, cached: float = 1.0) -> None:
        self.logits = np.random.default_rng(0).normal(size=50) * 1.5
        self.raw, self.sharpens, self.cached = raw, sharpens, cached

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        scaled = _log_softmax(self.logits / sampling.temperature)
        order = np.argsort(-scaled)
        kept = np.ones(len(scaled), bool)
        if sampling.top_k > 0:
            kept[order[sampling.top_k :]] = False
        total = np.cumsum(np.exp(scaled[order]))
        kept[order[1:][total[:-1] >= sampling.top_p]] = False
        chosen = _log_softmax(np.where(kept, scaled, -np.inf))
        drawn = _log_softmax(chosen * self.sharpens)
        rng = Random(f"{sampling.seed}/{session}")
        ids = rng.choices(range(50), np.exp(drawn).tolist(), k=sampling.max_tokens)
        told = _log_softmax(self.logits) if self.raw else chosen
        some = chosen[kept]
        entropy = float(-(np.exp(some) * some).sum())
        return Completion(
            ids, [float(told[one]) for one in ids], [entropy] * len(ids), "length",
            [VersionSpan(0, 0, len(ids))], num_cached_tokens=int(self.cached * len(prompt_ids)),
        )  # fmt: skip


def _log_softmax(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    values = values - values.max()
    found: np.ndarray[Any, Any] = values - math.log(np.exp(values).sum())
    return found


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        (Softmax(), ""),
        (Softmax(raw=True), "temperature = 0.01"),
        (Softmax(sharpens=3.0), "another distribution than it tells"),
    ],
)
def test_an_engine_that_tells_other_log_probs_than_it_samples_from_is_found(
    engine: Any, problem: str
) -> None:
    async def look(of: Any) -> str:
        return await check_sampling(engine, [1, 2, 3])

    verdict = _judged(look)
    assert verdict.state == ("failed" if problem else "passed"), verdict
    assert problem in verdict.told
    if problem:
        assert verdict.remedy


@pytest.mark.parametrize(("cached", "state"), [(1.0, "passed"), (0.0, "failed")])
def test_a_fork_that_computes_its_prefix_again_is_found(cached: float, state: str) -> None:
    engine: Any = Softmax(cached=cached)

    async def look(of: Any) -> str:
        return await check_prefix_hit(engine, list(range(64)))

    verdict = _judged(look)
    assert verdict.state == state
    assert ("prefix cache" in verdict.remedy) is (state == "failed")


def _judged(look: Any) -> Verdict:
    async def main() -> Verdict:
        (verdict,) = [one async for one in Judge().judge([Probe("it", look)], None)]
        return verdict

    return asyncio.run(main())


@pytest.fixture(scope="module")
def embedded(warehouse: Path) -> Iterator[dict[str, Verdict]]:
    """The verdicts with learner and embedded engine started, of which no gap is small enough."""
    with pytest.MonkeyPatch.context() as patch:
        yield examined(
            patch, warehouse, "engine.name=embedded", "train.max_logprob_gap=1e-15",
            "train.stop_logprob_gap=1e-15", quick=False,
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_with_learner_and_engine_the_gap_is_measured_and_judged(
    embedded: dict[str, Verdict],
) -> None:
    assert failed(list(embedded.values())) == ["log-prob parity"]
    assert "train.stop_logprob_gap" in embedded["log-prob parity"].told
    assert embedded["prefix hit of a fork"].state == "passed"
    assert embedded["sampling contract"].state == "passed"
    assert (embedded["learner"].state, embedded["engine"].state) == ("passed", "passed")


# The command.


def test_verdicts_are_told_as_json_and_by_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def wrong(of: object) -> str:
        raise checks.ConfigError("it is broken; mend it")

    probes = [Probe("good", _no_machine), Probe("bad", wrong), Probe("behind it", wrong)]
    monkeypatch.setattr(checks, "MACHINE", probes)
    assert doctor.main(["--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [one["state"] for one in told] == ["passed", "failed", "skipped"]
    assert (told[1]["told"], told[1]["remedy"]) == ("it is broken", "mend it")
    assert doctor.main([]) == 1
    said = capsys.readouterr().out
    assert "remedy: mend it" in said
    assert "needs 'bad', which has failed" in said
    monkeypatch.setattr(checks, "MACHINE", probes[:1])
    assert doctor.main([]) == 0


def test_keys_without_a_configuration_and_files_that_are_not_there_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "MACHINE", ())
    assert doctor.main(["limits.max_turns=3"]) == 2
    assert "--config" in capsys.readouterr().err
    assert doctor.main(["--config", "nowhere.toml"]) == 1
    assert "there is no such configuration file" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("types", [("integer", "integer"), ("string", "array"), ("object",)])
def test_a_call_whose_arguments_are_an_object_comes_back(types: tuple[str, ...]) -> None:
    properties = {f"p{number}": {"type": kind} for number, kind in enumerate(types)}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    schema = {"name": "mul", "description": "Multiply.", "parameters": parameters}
    refuse_lost_call(TagRenderer(CharTokenizer()), [], [schema], schema)
