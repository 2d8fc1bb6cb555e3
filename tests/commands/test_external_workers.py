"""Rollout workers started externally, and the jobs of Slurm and Kubernetes that start them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from agentenv.assembly.keys.cluster import SpreadCluster
from agentenv.assembly.run.exits import first_reason
from agentenv.base.errors import EXIT_BAD_INPUT, ConfigError, WorkerError
from agentenv.launchers import train
from agentenv.processes.supervisor import ADDRESS_VARIABLE, TOKEN_VARIABLE
from agentenv.training.loop.training import Training
from agentenv.training.workers.rollout_worker import seen_from_here
from agentenv.training.workers.worker_process import DRAIN_VARIABLE, WAIT_VARIABLE
from tests.commands.test_rollout_workers import SLOW, end, log_of, run, trees
from tests.support.polling import until
from tests.support.ports import free_port
from tests.support.runs import rows_of
from tests.support.toy_rank import toy_ranks
from tests.support.warehouse import ROOT

TOKEN = "0123456789abcdef"
QUICKSTART = ROOT / "configs" / "quickstart.toml"
RUN_S = 300.0


# Workers that join.

EXTERNAL = [
    "cluster.kind=external", "cluster.workers=3", "cluster.min_workers=1", "cluster.host=127.0.0.1",
    "eval.sets={}", "queue.max_staleness=1", *SLOW,
]  # fmt: skip


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with toy_ranks():
        yield


@pytest.fixture
def start(warehouse: Path, port: int, tmp_path: Path, light: None) -> Iterator[Any]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(token: str = TOKEN, **variables: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(ROOT), str(warehouse.parent)])
        own = {ADDRESS_VARIABLE: f"127.0.0.1:{port}", TOKEN_VARIABLE: token, "PYTHONPATH": path}
        own |= {WAIT_VARIABLE: "60", DRAIN_VARIABLE: "30", **variables}
        command = [sys.executable, "-m", "agentenv.training.workers.rollout_worker"]
        with (tmp_path / f"{len(started)}.log").open("wb") as log:
            worker = subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=log)
        started.append(worker)
        return worker

    yield begin
    for process in started:
        process.kill()
        process.wait()


def test_workers_join_and_leave_a_run(warehouse: Path, port: int, start: Any) -> None:
    """The run begins with one worker; a second one joins, then the first one is terminated."""
    calm = run(warehouse, "calm-beside-external", "eval.sets={}", "queue.max_staleness=1", *SLOW)
    first = start()

    async def join_and_leave(training: Training) -> None:
        await until(lambda: training.state.step >= 1)
        start()
        workers = training.loop.feeder.workers
        assert workers is not None
        await until(lambda: workers.stats()["up"] == 2)
        first.send_signal(signal.SIGTERM)
        await until(lambda: first.poll() is not None)
        await until(lambda: training.state.step >= 8)
        end()

    keys = [*EXTERNAL, f"cluster.port={port}", "train.num_steps=10000"]
    with pytest.raises(asyncio.CancelledError):
        run(warehouse, "external", *keys, during=join_and_leave)
    found = warehouse.parent / "runs" / "workers-external"
    both = trees(found)
    assert {index: both[index] for index in trees(calm)} == trees(calm)
    last = [row for row in rows_of(found) if "workers/up" in row][-1]
    assert last["workers/lost"] == last["workers/trees_moved"] == 0
    assert re.search(r"worker-\d leaves", log_of(found))
    assert first.wait(RUN_S) != 0, "its place may be wanted again, elsewhere"


@pytest.mark.parametrize("is_over", [True, False], ids=["over", "interrupted"])
def test_a_worker_exits_successfully_when_the_run_ends(
    warehouse: Path, port: int, start: Any, tmp_path: Path, is_over: bool
) -> None:
    """With another status its supervisor restarts it: the controller may come back."""
    worker = start()
    keys = [*EXTERNAL, f"cluster.port={port}"]
    if is_over:
        run(warehouse, "over", *keys)
        assert worker.wait(RUN_S) == 0
        return

    async def interrupt(training: Training) -> None:
        await until(lambda: training.state.step >= 1)
        end()

    with pytest.raises(asyncio.CancelledError):
        run(warehouse, "not-over", *keys, "train.num_steps=10000", during=interrupt)
    assert worker.wait(RUN_S) != 0
    assert "without reporting the" in (tmp_path / "0.log").read_text()


def test_a_worker_with_another_secret_is_refused(
    warehouse: Path, port: int, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = start("fedcba9876543210", **{WAIT_VARIABLE: "1"})
    keys = [*EXTERNAL, f"cluster.port={port}"]
    monkeypatch.setattr(SpreadCluster, "start_timeout_s", 15.0)
    with pytest.raises((BaseExceptionGroup, WorkerError)) as ended:
        run(warehouse, "strangers", *keys)
    told = str(first_reason(ended.value))
    assert "connected within 15" in told
    assert f"connects to 127.0.0.1:{port}" in told
    assert stranger.wait(RUN_S) != 0
    assert "the same AGENTENV_WORKER_TOKEN?" in (tmp_path / "0.log").read_text()


def test_a_run_needs_a_secret(
    warehouse: Path, light: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE)
    with pytest.raises((BaseExceptionGroup, ConfigError)) as ended:
        run(warehouse, "secretless", *EXTERNAL)
    assert TOKEN_VARIABLE in str(first_reason(ended.value))


def test_loopback_is_seen_from_another_machine() -> None:
    assert seen_from_here("http://127.0.0.1:8000/v1", "10.0.0.7") == "http://10.0.0.7:8000/v1"
    assert seen_from_here("http://localhost:8000", "10.0.0.7") == "http://10.0.0.7:8000"
    assert seen_from_here("http://node-3:8000", "10.0.0.7") == "http://node-3:8000"


# Jobs.


def rendered(capsys: pytest.CaptureFixture[str], path: Path, *overrides: str) -> str:
    keys = [*overrides, f"cluster.script={path}"]
    assert train.main([str(QUICKSTART), *keys, "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert f"wrote {path}" in told
    command = "kubectl apply -f" if "cluster.kind=kubernetes" in overrides else "sbatch"
    assert f"next: {command} {path}" in " ".join(told.split())
    return path.read_text()


EXTERNAL_RANKS = ("learner.launch=external", "learner.num_ranks=4", "learner.address=0.0.0.0:29400")


@pytest.mark.parametrize("more", [(), EXTERNAL_RANKS])
def test_a_script_for_slurm(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, more: tuple[str, ...]
) -> None:
    path = tmp_path / "job.sh"
    keys = ("cluster.kind=slurm", "cluster.workers=6", "cluster.nodes=3", "run.name=it's a run")
    script = rendered(capsys, path, *keys, 'cluster.options=["--partition=long"]', *more)
    subprocess.run(["bash", "-n", path], check=True)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    subprocess.run([shellcheck, path], check=True)
    options = re.findall(r"(?m)^#SBATCH (.*)$", script)
    assert {"--nodes=3", "--ntasks-per-node=2", "--partition=long", "--requeue"} <= {*options}
    assert script.index("#SBATCH") < script.index("set -euo")
    assert ("agentenv.learners.ranks.rank_process" in script) is bool(more)
    assert "run.name=it" in script


class Job:
    """A script of Slurm, with an srun that starts its tasks on this machine."""

    def __init__(self, tmp_path: Path, warehouse: Path, name: str, *keys: str) -> None:
        srun = tmp_path / "bin" / "srun"
        srun.parent.mkdir()
        srun.write_text(SRUN)
        srun.chmod(0o755)
        self.script, self.run = tmp_path / "job.sh", warehouse.parent / "runs" / name
        self.log = tmp_path / "job.log"
        own = ["cluster.kind=slurm", f"run.name={name}", "eval.sets={}"]
        own.append(f"cluster.port={free_port()}")
        arguments = [str(warehouse), *own, *keys, f"cluster.script={self.script}"]
        assert train.main([*arguments, "--dry-run"]) == 0
        self.variables = {
            "PATH": f"{srun.parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(warehouse.parent)]),
            "SLURM_JOB_ID": "7",
        }

    @contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        """The queued job; its remaining processes are killed in the end."""
        with self.log.open("wb") as output:
            job = subprocess.Popen(
                ["bash", self.script],
                env=os.environ | self.variables,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            yield job
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)


def test_the_script_of_slurm_runs(tmp_path: Path, warehouse: Path) -> None:
    """Whole: the controller ends with 0, and the workers with it."""
    job = Job(tmp_path, warehouse, "slurm")
    with job.started() as process:
        status = process.wait(RUN_S)
    assert status == 0, job.log.read_text()
    assert "workers at 0.0.0.0" in job.log.read_text()
    assert "step   4/4" in job.log.read_text()


def test_a_requeued_job_resumes_on_another_host(tmp_path: Path, warehouse: Path) -> None:
    """The controller is killed before there is a checkpoint, and the job starts on another host;
    another job is refused, since the first one may still be there."""
    job = Job(tmp_path, warehouse, "queued-again", "checkpoint.every=1000")
    lock = job.run / "lock"
    with job.started() as process:
        while not (job.run / "config.json").is_file():
            assert process.poll() is None, job.log.read_text()
            time.sleep(0.05)
        holder = json.loads(lock.read_bytes())
        os.kill(holder["pid"], signal.SIGKILL)
        assert process.wait(RUN_S) != 0
    assert holder["job"] == "slurm--7"
    lock.write_text(json.dumps(holder | {"host": "another-host"}))
    other = {"SLURM_JOB_ID": "8"}
    mine, job.variables = job.variables, job.variables | other
    with job.started() as process:
        assert process.wait(RUN_S) == EXIT_BAD_INPUT
    assert "cannot check" in job.log.read_text()
    job.variables = mine
    with job.started() as process:
        assert process.wait(RUN_S) == 0, job.log.read_text()
    assert "step   4/4" in job.log.read_text()


SRUN = """#!/bin/bash
# As srun: so many tasks of a command, each with its number.
while [[ $1 == --* ]]; do
    case $1 in --ntasks=*) tasks=${1#--ntasks=} ;; esac
    shift
done
for ((task = 0; task < tasks; task++)); do SLURM_PROCID=$task "$@" & done
trap 'kill $(jobs -p)' TERM
wait
"""

KUBERNETES = (
    "cluster.kind=kubernetes",
    "cluster.image=registry.example/agentenv:1",
    "cluster.claim=work",
    "cluster.workers=5",
    "run.dir=/shared/runs",
)


def test_manifests_for_kubernetes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = rendered(capsys, tmp_path / "run.yaml", *KUBERNETES, "cluster.gpus=2")
    found = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(text)}
    name = "agentenv-quickstart"
    assert {*found} == {
        *((kind, name) for kind in ("Secret", "ConfigMap", "Service", "NetworkPolicy")),
        *(("Job", f"{name}-{part}") for part in ("controller", "worker")),
    }
    assert len(found["Secret", name]["stringData"]["token"]) == 32
    assert stat.S_IMODE((tmp_path / "run.yaml").stat().st_mode) == 0o600, "for the token"
    held = found["ConfigMap", name]["data"]["config.toml"]
    assert held.strip() == QUICKSTART.read_text().strip()
    controller, workers = (found["Job", f"{name}-{part}"]["spec"] for part in PARTS)
    assert controller["podReplacementPolicy"] == "Failed", "two would write one run"
    assert workers["backoffLimit"] == 5 * controller["backoffLimit"]
    assert workers["completions"] == workers["parallelism"] == 5
    assert workers["completionMode"] == "Indexed"
    service = found["Service", name]["spec"]
    labels = controller["template"]["metadata"]["labels"]
    assert service["selector"] == labels
    assert service["clusterIP"] == "None"  # engine servers have separate ports
    assert found["NetworkPolicy", name]["spec"]["podSelector"]["matchLabels"] == labels
    for job in (controller, workers):
        pod = job["template"]["spec"]
        (container,) = pod["containers"]
        assert pod["restartPolicy"] == "Never", "for the policy of failures"
        rule = job["podFailurePolicy"]["rules"][0]
        assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [EXIT_BAD_INPUT])
        (drained,) = job["podFailurePolicy"]["rules"][1]["onPodConditions"]
        assert drained == {"type": "DisruptionTarget", "status": "True"}, "required up to 1.34"
        assert pod["securityContext"]["fsGroup"] == 1000, "the user of the image writes the claim"
        rights = pod["securityContext"] | container["securityContext"]
        assert rights["runAsNonRoot"]
        assert not rights["allowPrivilegeEscalation"]
        assert rights["capabilities"] == {"drop": ["ALL"]}
        assert rights["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["workingDir"] == "/shared"
        assert container["image"] == "registry.example/agentenv:1"
        mounted = {one["name"] for one in container["volumeMounts"]}
        assert mounted == {one["name"] for one in pod["volumes"]}
        variables = {one["name"]: one for one in container["env"]}
        token = variables[TOKEN_VARIABLE]["valueFrom"]["secretKeyRef"]
        assert token == {"name": name, "key": "token"}
    variables = {one["name"]: one.get("value") for one in container["env"]}
    port = service["ports"][0]["port"]
    assert variables[ADDRESS_VARIABLE] == f"{name}:{port}"
    assert pod["terminationGracePeriodSeconds"] > float(variables[DRAIN_VARIABLE])
    (container,) = controller["template"]["spec"]["containers"]
    lives = container["livenessProbe"]["exec"]["command"]
    assert lives == container["startupProbe"]["exec"]["command"]
    assert lives[-2:] == ["ctl", "/shared/runs/quickstart"]
    limits = controller["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == 2


PARTS = ("controller", "worker")


@pytest.mark.parametrize("keys", [(), ("cluster.gpus=2", "cluster.workers=1")], ids=["", "gpus"])
def test_manifests_fit_the_schemas(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, keys: tuple[str, ...]
) -> None:
    """Of Kubernetes itself: a key that it does not have is refused."""
    text = rendered(capsys, tmp_path / "run.yaml", *KUBERNETES, *keys)
    for manifest in yaml.safe_load_all(text):
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    manifest["spec"]["compleations"] = 5
    with pytest.raises(kubernetes_validate.ValidationError, match="compleations"):
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
