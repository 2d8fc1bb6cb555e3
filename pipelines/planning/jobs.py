"""A run as a job of Slurm, or as objects of Kubernetes: what `--dry-run` prints for
`cluster.kind = slurm | kubernetes`.
"""

from __future__ import annotations

import re
import secrets
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentenv.crashes import PACKAGES
from agentenv.errors import ConfigError
from agentenv.learners.messages import ADDRESS_VARIABLE as LEARNER_ADDRESS
from agentenv.learners.messages import TOKEN_VARIABLE as LEARNER_TOKEN
from agentenv.pipelines.cluster.processes import ADDRESS_VARIABLE, TOKEN_VARIABLE
from agentenv.pipelines.config.cluster import KubernetesCluster, SlurmCluster
from agentenv.pipelines.config.rl import TrainConfig
from agentenv.pipelines.run.rundir import CONFIG_FILE, JOB_VARIABLE
from agentenv.pipelines.workers.main import DRAIN_VARIABLE, WAIT_VARIABLE

WAIT_S = 1800  # for the controller, which may make or load a model first
DRAIN_S = 60  # of a worker that is told to end
GRACE_S = 300  # of a controller that is told to end, for its checkpoint
WORKER = "agentenv.pipelines.workers.rollout_worker"
NAME_LENGTH = 40
NUM_STARTS = 100  # of the controller; each time its workers are started again too
NETWORKING = "networking.k8s.io/v1"


def job_of(config: TrainConfig, path: Path, overrides: Sequence[str], run: Path) -> str:
    """The text for sbatch or for kubectl; empty for other kinds of clusters. `path` and `overrides`
    are the arguments of the command, `run` is the folder of the run."""
    cluster = config.cluster
    arguments = [str(path), *(one for one in overrides if not one.startswith("cluster.script="))]
    if isinstance(cluster, SlurmCluster):
        return slurm_script(config, cluster, arguments, run)
    if isinstance(cluster, KubernetesCluster):
        return manifests(config, cluster, arguments, run)
    return ""


def _name(run: Path) -> str:
    """Of a run, for Slurm and Kubernetes."""
    plain = re.sub(r"[^a-z0-9]+", "-", run.name.lower()).strip("-")[:NAME_LENGTH].strip("-")
    return f"agentenv-{plain or 'run'}"


# Slurm


def slurm_script(
    config: TrainConfig, cluster: SlurmCluster, arguments: Sequence[str], run: Path
) -> str:
    """One job: controller, engine and learner on the first node, rollout workers on all."""
    name, learner = _name(run), config.learner
    own = [
        f"--job-name={name}",
        f"--nodes={cluster.nodes}",
        f"--ntasks-per-node={-(-cluster.workers // cluster.nodes)}",
        f"--cpus-per-task={cluster.cpus_per_worker}",
        *([f"--gpus-per-node={cluster.gpus}"] if cluster.gpus else []),
        f"--time={cluster.time}",
        f"--output={name}-%j.log",
        f"--signal=B:TERM@{GRACE_S}",
        "--requeue",
    ]
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH {option}" for option in [*own, *cluster.options]]
    lines += [
        "",
        "set -euo pipefail",
        f"cd {shlex.quote(str(Path.cwd()))}",
        *cluster.setup,
        f"python={shlex.quote(sys.executable)}",
        f"export PYTHONPATH={shlex.quote(str(PACKAGES))}${{PYTHONPATH:+:$PYTHONPATH}}",
        'secret() { "$python" -c "import secrets; print(secrets.token_hex(16))"; }',
        f"{TOKEN_VARIABLE}=$(secret)",
        f"{ADDRESS_VARIABLE}=$(hostname):{cluster.port}",
        f"{WAIT_VARIABLE}={WAIT_S}",
        f"{DRAIN_VARIABLE}={DRAIN_S}",
        f"export {TOKEN_VARIABLE} {ADDRESS_VARIABLE} {WAIT_VARIABLE} {DRAIN_VARIABLE}",
    ]
    if learner.launch == "external":
        port = learner.address.rpartition(":")[2]
        lines += [
            f"{LEARNER_TOKEN}=$(secret)",
            f"{LEARNER_ADDRESS}=$(hostname):{port}",
            f"export {LEARNER_TOKEN} {LEARNER_ADDRESS}",
        ]
    lines += [
        "",
        "# the controller, which goes on where an earlier start of this job has come to, also on",
        "# another machine",
        f'export {JOB_VARIABLE}="slurm-${{SLURM_CLUSTER_NAME:-}}-${{SLURM_JOB_ID:-$$}}"',
        "resume=()",
        f"if [ -f {shlex.quote(str(run.absolute() / CONFIG_FILE))} ]; then",
        "    resume=(--resume)",
        "fi",
        f'"$python" -m agentenv.launchers.train {shlex.join(arguments)} "${{resume[@]}}" &',
        "controller=$!",
        "trap 'kill -TERM \"$controller\"' TERM INT",
        "",
        "# rollout workers; one that ends before the run is over is started again",
        "# shellcheck disable=SC2016",
        f"srun --overlap --nodes={cluster.nodes} --ntasks={cluster.workers} "
        f"--cpus-per-task={cluster.cpus_per_worker} --kill-on-bad-exit=0 \\",
        f'    bash -c \'until "$0" -m {WORKER}; do sleep 5; done\' "$python" &',
        "workers=$!",
    ]
    if learner.launch == "external":
        lines += [
            "",
            "# ranks of the learner, on the cores of the workers",
            f"srun --overlap --overcommit --nodes={cluster.nodes} --ntasks={learner.num_ranks} "
            '--gpu-bind=none "$python" -m agentenv.learners.worker &',
            "ranks=$!",
        ]
    also = ' "$ranks"' if learner.launch == "external" else ""
    lines += [
        "",
        "# a signal interrupts `wait`: the controller saves first",
        "while :; do",
        '    status=0; wait "$controller" || status=$?',
        '    kill -0 "$controller" 2>/dev/null || break',
        "done",
        f'kill "$workers"{also} 2>/dev/null || true',
        'exit "$status"',
        "",
    ]
    return "\n".join(lines)


# Kubernetes


def manifests(
    config: TrainConfig, cluster: KubernetesCluster, arguments: Sequence[str], run: Path
) -> str:
    """A Secret, a Service by which workers find the controller, a NetworkPolicy that lets only them
    in, and two Jobs. Raises ConfigError for keys that are missing."""
    import yaml  # comes with the extra `train`

    for key in ("image", "claim"):
        if not getattr(cluster, key):
            raise ConfigError(f"cluster.{key}: cluster.kind = kubernetes needs it")
    if config.learner.launch == "external":
        raise ConfigError(
            "learner.launch = external: on Kubernetes the ranks of the learner run beside the "
            "controller; remove it"
        )
    if not str(config.run.dir).startswith(f"{cluster.mount}/"):
        raise ConfigError(
            f"run.dir = {config.run.dir}: workers, and the controller when it starts again, need "
            f"the run's folder; put it below cluster.mount = {cluster.mount}, as "
            f"run.dir={cluster.mount}/runs"
        )
    name = _name(run)
    objects = [
        _object("v1", "Secret", cluster, name, stringData={"token": secrets.token_hex(16)}),
        _object(
            "v1",
            "Service",
            cluster,
            name,
            spec={
                "clusterIP": "None",  # its name is the pod's address, for engine servers as well
                "publishNotReadyAddresses": True,
                "selector": _labels(name, "controller"),
                "ports": [{"name": "workers", "port": cluster.port, "targetPort": cluster.port}],
            },
        ),
        _object(NETWORKING, "NetworkPolicy", cluster, name, spec=_policy(name)),
        # one that takes the place of another waits until that has ended
        _job(
            cluster,
            name,
            "controller",
            _controller(cluster, arguments, run),
            {"podReplacementPolicy": "Failed"},
        ),
        _job(
            cluster,
            name,
            "worker",
            ["python", "-m", WORKER],
            {
                "completions": cluster.workers,
                "parallelism": cluster.workers,
                "completionMode": "Indexed",
                "backoffLimit": NUM_STARTS * cluster.workers,
            },
        ),
    ]
    return "".join(f"---\n{yaml.safe_dump(one, sort_keys=False, width=100)}" for one in objects)


def _labels(name: str, part: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": name, "app.kubernetes.io/component": part}


def _object(
    version: str, kind: str, cluster: KubernetesCluster, name: str, **rest: Any
) -> dict[str, Any]:
    metadata = {"name": name, "namespace": cluster.namespace}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **rest}


def _policy(name: str) -> dict[str, Any]:
    """Workers alone reach the controller, and the engine servers beside it."""
    return {
        "podSelector": {"matchLabels": _labels(name, "controller")},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": _labels(name, "worker")}}]}],
    }


def _controller(cluster: KubernetesCluster, arguments: Sequence[str], run: Path) -> list[str]:
    """Goes on where an earlier start of this run has come to."""
    begun = shlex.quote(f"{run}/{CONFIG_FILE}")
    command = f"exec python -m agentenv.launchers.train {shlex.join(arguments)}"
    return ["sh", "-c", f"if [ -f {begun} ]; then {command} --resume; fi; {command}"]


def _job(
    cluster: KubernetesCluster, name: str, part: str, command: list[str], more: dict[str, Any]
) -> dict[str, Any]:
    """A Kubernetes Job of one part; `more` is what its container has beside that."""
    is_worker = part == "worker"
    cpus = cluster.cpus_per_worker if is_worker else cluster.cpus
    much: dict[str, Any] = {"cpu": str(cpus), "memory": cluster.memory}
    if cluster.gpus and not is_worker:
        much["nvidia.com/gpu"] = cluster.gpus
    token = {"secretKeyRef": {"name": name, "key": "token"}}
    env: list[dict[str, Any]] = [{"name": TOKEN_VARIABLE, "valueFrom": token}]
    if is_worker:
        env += [
            {"name": ADDRESS_VARIABLE, "value": f"{name}:{cluster.port}"},
            {"name": WAIT_VARIABLE, "value": str(WAIT_S)},
            {"name": DRAIN_VARIABLE, "value": str(DRAIN_S)},
        ]
    else:
        env.append({"name": JOB_VARIABLE, "value": f"{cluster.namespace}/{name}"})
    container: dict[str, Any] = {
        "name": part,
        "image": cluster.image,
        "command": command,
        "env": env,
        "resources": {"requests": much, "limits": dict(much)},
        "volumeMounts": [
            {"name": "files", "mountPath": cluster.mount},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    if cluster.secret:
        container["envFrom"] = [{"secretRef": {"name": cluster.secret}}]
    if not is_worker:
        container["ports"] = [{"containerPort": cluster.port}]
    pod = {
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": DRAIN_S + 30 if is_worker else GRACE_S,
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [
            {"name": "files", "persistentVolumeClaim": {"claimName": cluster.claim}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    labels = _labels(name, part)
    template = {"metadata": {"labels": labels}, "spec": pod}
    spec = {"backoffLimit": NUM_STARTS, **more, "template": template}
    return _object("batch/v1", "Job", cluster, f"{name}-{part}", spec=spec)
