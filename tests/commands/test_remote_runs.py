"""Whole runs on real servers: training on vLLM that survives kill -9 of its engine, a short one on
SGLang, and evaluation on externally started servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentenv.envs.quickstart.setup import build_model
from agentenv.launchers import evaluate, train
from agentenv.training.supervised import teaching
from agentenv.training.supervised.teaching import Teaching
from tests.engines.server_process import FORKING, ServerProcess
from tests.engines.sglang_server import SGLangProcess, require_sglang
from tests.engines.vllm_server import VLLMProcess, require_vllm
from tests.support.forks import TRAIN
from tests.support.warehouse import ROOT

pytestmark = pytest.mark.timeout(1200)

SMALL = ["queue.groups_per_step=4", "learner.groups_per_minibatch=4"]
SMALL += ["eval.sets.heldout.phases=false"]
VLLM = [
    "engine.name=vllm",
    "train.num_steps=5",
    'sft.stages=[{rows="copy",num_steps=2}]',
    "sft.gate_every=2",
]
# Every group is trained, so that each step hands weights over.
SHARED = [
    "engine.name=vllm", "engine.weights=ipc", "algorithm.group_size=4",
    'sft.stages=[{rows="mixed",num_steps=60}]', "sft.gate_every=60",
]  # fmt: skip
# As much cold start as gives outcomes that differ within a group, so that updates train.
SGLANG = [
    "engine.name=sglang",
    "train.num_steps=2",
    "algorithm.group_size=4",
    'sft.stages=[{rows="mixed",num_steps=120}]',
    "sft.gate_every=120",
]


def rows_of(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return [row for row in map(json.loads, lines) if "policy_version" in row]


def servers_below(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """API servers of vLLM among the descendants, below their guards."""
    return [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "vllm.entrypoints.openai.api_server" in child.cmdline()[1:4]
    ]


def start(folder: Path, *keys: str) -> subprocess.Popen[bytes]:
    """A training run in `folder`/run, with its output in `folder`/out."""
    config = ROOT / "tests" / "support" / "small_quickstart.toml"
    command = [sys.executable, *TRAIN, str(config), *SMALL, *keys]
    with (folder / "out").open("wb") as out:
        return subprocess.Popen(
            [*command, f"run.dir={folder}", "run.name=run"],
            env={**os.environ, "PYTHONPATH": FORKING},
            stdout=out,
            stderr=out,
            cwd=ROOT,
        )


@pytest.fixture(scope="module")
def on_vllm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose engine was killed after its first step."""
    require_vllm()
    folder = tmp_path_factory.mktemp("vllm")
    with start(folder, *VLLM) as training:
        try:
            while training.poll() is None and not rows_of(folder / "run"):
                time.sleep(0.05)
            killed = servers_below(training)
            for server in killed:
                server.kill()
            assert len(killed) == 1, (folder / "out").read_text()
            assert training.wait(800) == 0, (folder / "out").read_text()
        finally:
            training.kill()
    return folder / "run"


@pytest.mark.engine_vllm
@pytest.mark.parametrize(("how", "num_steps"), [("true", 5), ("at_once", 2)])
def test_weights_stay_in_memory_if_learner_and_vllm_share_a_device(
    tmp_path: Path, how: str, num_steps: int
) -> None:
    """Server and learner start side by side. In turn the server is killed after its first step: the
    one that takes its place gets a directory, while the learner sleeps or not."""
    require_vllm()
    run, out = tmp_path / "run", tmp_path / "out"
    keys = [*SHARED, f"resources.colocated={how}", f"train.num_steps={num_steps}"]
    with start(tmp_path, *keys) as training:
        try:
            while how == "true" and training.poll() is None and not rows_of(run):
                time.sleep(0.05)
            for server in servers_below(training) if how == "true" else ():
                server.kill()
            assert training.wait(800) == 0, out.read_text()
        finally:
            training.kill()
    rows = rows_of(run)
    assert [row["step"] for row in rows] == [*range(1, num_steps + 1)]
    assert rows[-1]["trees/failed"] == 0
    for row in rows:
        parts = [row[f"handover/{name}_s"] for name in ("sleep", "wake", "publish", "load")]
        assert row["handover/total_s"] == pytest.approx(sum(parts))
        assert (parts[0] > 0) == (how == "true")
        assert row.get("parity/logprob_gap_max", 0.0) < 1e-3
    trained = [row for row in rows if row["trees/trained"]]
    assert trained
    server = (run / "servers" / "policy.log").read_text()
    assert "for the learner" in server
    assert server.count("memory opened in") >= (2 if how == "true" else num_steps)
    if how == "true":
        assert rows[-1]["engine/outage_s"] > 0
    else:
        assert "directory" not in (run / "run.log").read_text()


@pytest.mark.engine_vllm
def test_a_teacher_that_dies_is_started_again(tmp_path: Path) -> None:
    require_vllm()
    build_model(tmp_path / "teacher", seed=5)
    keys = ["engine.name=embedded", "algorithm={name='distill', teach_top_k=4}", *VLLM[2:]]
    keys += ["train.num_steps=60", "eval.sets.heldout.every=100"]
    with start(tmp_path, *keys, f"roles.teacher.model={tmp_path / 'teacher'}") as training:
        try:
            while training.poll() is None and not rows_of(tmp_path / "run"):
                time.sleep(0.05)
            for server in servers_below(training):
                server.kill()
            assert training.wait(800) == 0, (tmp_path / "out").read_text()
        finally:
            training.kill()
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [*range(1, 61)]
    assert all(row["teacher/gap"] < 0 < row["learner/grad_norm"] for row in rows)
    assert "killed by SIGKILL" in (tmp_path / "run" / "run.log").read_text()


@pytest.mark.engine_vllm
@pytest.mark.usefixtures("here")
def test_a_teacher_that_is_lost_ends_the_run_which_resumes_with_another(
    warehouse: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    require_vllm()
    build_model(tmp_path / "teacher", seed=5)
    servers = [VLLMProcess(tmp_path / "teacher", tmp_path / f"{n}.log") for n in range(2)]
    teach, num_calls = Teaching.teach, 0

    async def lost(self: Any, groups: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            servers[0].kill()
        return await teach(self, groups)

    monkeypatch.setattr(teaching, "NUM_RETRIES", 1)
    monkeypatch.setattr(Teaching, "teach", lost)
    keys = [str(warehouse), "engine.name=embedded", "run.name=lost", "train.num_steps=3"]
    keys += ["algorithm.name=distill", "checkpoint.every=0", "limits.max_response_tokens=40"]
    try:
        for server in servers:
            server.wait_ready()
        assert train.main([*keys, f"roles.teacher.url={servers[0].url}"]) == 1
        assert f"{servers[0].url} is lost" in " ".join(capsys.readouterr().err.split())
        assert (warehouse.parent / "runs/lost/checkpoints/step-000001").is_dir()
        assert train.main([*keys, f"roles.teacher.url={servers[1].url}", "--resume"]) == 0
    finally:
        for server in servers:
            server.kill()
    rows = rows_of(warehouse.parent / "runs" / "lost")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all("teacher/gap" in row for row in rows)


@pytest.fixture(scope="module")
def on_sglang(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two updates."""
    require_sglang()
    folder = tmp_path_factory.mktemp("sglang")
    with start(folder, *SGLANG) as training:
        try:
            assert training.wait(1000) == 0, (folder / "out").read_text()
        finally:
            training.kill()
    return folder / "run"


@pytest.mark.engine_vllm
def test_kill_9_of_the_engine_costs_no_rollout(on_vllm: Path) -> None:
    rows = rows_of(on_vllm)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    last = rows[-1]
    assert last["engine/outage_s"] > 0  # and retries, where requests were under way
    assert last["trees/failed"] == 0
    assert all(row["failed/trajectories"] == 0 for row in rows)
    assert last["trees/offered"] == last["trees/trained"] + last["trees/filtered"] == 20
    assert "killed by SIGKILL" in (on_vllm / "run.log").read_text()


@pytest.mark.engine_sglang
def test_two_updates_that_train_on_sglang(on_sglang: Path) -> None:
    """The cold start is the first version, each update the next one."""
    rows = rows_of(on_sglang)
    assert [row["policy_version"] for row in rows] == [2, 3]
    assert 0 < rows[0]["trees/trained"] < rows[1]["trees/trained"]
    for row in rows:  # the samples are not seeded: an update may meet equal returns alone
        assert (row["learner/num_tokens"] > 0) == (row["learner/num_equal_groups"] < 4)
    assert any(row["learner/num_tokens"] > 0 for row in rows)
    last = rows[-1]
    assert (last["trees/offered"], last["trees/failed"], last["engine/retries"]) == (8, 0, 0)
    assert last["engine/sampled_tokens"] < 4000  # it is slow here


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("on_vllm", marks=pytest.mark.engine_vllm),
        pytest.param("on_sglang", marks=pytest.mark.engine_sglang),
    ],
)
def test_engine_and_learner_agree_and_no_server_remains(
    engine: str, request: pytest.FixtureRequest
) -> None:
    run: Path = request.getfixturevalue(engine)
    key = "parity/logprob_gap_max"
    gaps = [row[key] for row in rows_of(run) if key in row]
    assert gaps
    assert max(gaps) < 1e-4
    log = str(run)
    left = [
        p.pid for p in psutil.process_iter(["cmdline"]) if log in " ".join(p.info["cmdline"] or [])
    ]
    assert left == []


@pytest.mark.engine_vllm
def test_evaluating_on_a_vllm_server_with_other_weights(on_vllm: Path, tmp_path: Path) -> None:
    """It loads the weights of the run, and greedy samples are those of the embedded engine."""
    server = VLLMProcess(on_vllm / "model", tmp_path / "server.log")
    check_evaluation("vllm", server, on_vllm, tmp_path, 8)


@pytest.mark.engine_sglang
def test_evaluating_on_an_sglang_server_with_other_weights(on_sglang: Path, tmp_path: Path) -> None:
    server = SGLangProcess(on_sglang / "model", tmp_path / "server.log")
    check_evaluation("sglang", server, on_sglang, tmp_path, 4)


def check_evaluation(
    engine: str, server: ServerProcess, run: Path, folder: Path, num_tasks: int
) -> None:
    try:
        server.wait_ready()
        found = {}
        for name, keys in (
            (engine, [f'engine.urls=["{server.url}"]']),
            ("embedded", ["engine.device=cpu"]),
        ):
            out = folder / name
            arguments = [str(run), "--n", str(num_tasks), "--out", str(out), *keys]
            greedy = [f"engine.name={name}", "sampling.temperature=0"]
            assert evaluate.main([*arguments, *greedy]) == 0
            lines = (out / "rows.jsonl").read_text().splitlines()
            found[name] = sorted(
                (row["task"], str(row["segments"])) for row in map(json.loads, lines)
            )
        assert len(found[engine]) == num_tasks
        assert found[engine] == found["embedded"]
    finally:
        server.stop()
