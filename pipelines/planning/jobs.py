"""A run as a job of Slurm or as objects of Kubernetes, from the files in `templates/`: printed by
`--dry-run` for `cluster.kind = slurm | kubernetes`.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import jinja2

from agentenv.errors import PACKAGES, ConfigError
from agentenv.learners.messages import ADDRESS_VARIABLE as LEARNER_ADDRESS
from agentenv.learners.messages import TOKEN_VARIABLE as LEARNER_TOKEN
from agentenv.pipelines.config.cluster import KubernetesCluster, SlurmCluster
from agentenv.pipelines.config.rl import TrainConfig
from agentenv.pipelines.run.rundir import CONFIG_FILE, JOB_VARIABLE
from agentenv.pipelines.workers import DRAIN_VARIABLE, WAIT_VARIABLE
from agentenv.supervisor import ADDRESS_VARIABLE, TOKEN_VARIABLE

TRAIN = ("-m", "agentenv.launchers.train")  # arguments of Python
WORKER = ("-m", "agentenv.pipelines.workers.rollout_worker")
RANK = ("-m", "agentenv.learners.worker")
NAME_LENGTH = 40
FACTS = {
    "wait_s": 1800,  # for the controller, which may make or load a model first
    "drain_s": 60,  # of a worker that is told to end
    "grace_s": 300,  # of a controller that is told to end, for its checkpoint
    "num_starts": 100,  # of the controller; each time its workers are started again too
    "controller_cpus": 4,
    "token_variable": TOKEN_VARIABLE,
    "address_variable": ADDRESS_VARIABLE,
    "wait_variable": WAIT_VARIABLE,
    "drain_variable": DRAIN_VARIABLE,
    "job_variable": JOB_VARIABLE,
    "learner_token": LEARNER_TOKEN,
    "learner_address": LEARNER_ADDRESS,
}


def job_of(config: TrainConfig, path: Path, overrides: Sequence[str], run: Path) -> str:
    """The text for sbatch or for kubectl; empty for other kinds of clusters. `path` and `overrides`
    are the arguments of the command, `run` is the folder of the run. Raises ConfigError for keys
    that are missing."""
    cluster = config.cluster
    given = [str(path), *(one for one in overrides if not one.startswith("cluster.script="))]
    if isinstance(cluster, SlurmCluster):
        return _filled(
            "slurm.sh",
            config,
            run,
            tasks_per_node=-(-cluster.workers // cluster.nodes),
            folder=str(Path.cwd()),
            python=sys.executable,
            packages=str(PACKAGES),
            config_file=str(run.absolute() / CONFIG_FILE),
            train=shlex.join([*TRAIN, *given]),
            worker=shlex.join(WORKER),
            rank=shlex.join(RANK),
        )
    if isinstance(cluster, KubernetesCluster):
        _check_kubernetes(config, cluster)
        begun, command = shlex.quote(f"{run}/{CONFIG_FILE}"), shlex.join(["python", *TRAIN, *given])
        return _filled(
            "kubernetes.yaml",
            config,
            run,
            token_value=secrets.token_hex(16),
            controller=[
                *("sh", "-c"),
                f"if [ -f {begun} ]; then exec {command} --resume; fi; exec {command}",
            ],
            worker=["python", *WORKER],
        )
    return ""


def _filled(template: str, config: TrainConfig, run: Path, **values: object) -> str:
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"quote": shlex.quote, "json": json.dumps}
    file = resources.files("agentenv.pipelines.planning") / "templates" / template
    plain = re.sub(r"[^a-z0-9]+", "-", run.name.lower()).strip("-")[:NAME_LENGTH].strip("-")
    text = environment.from_string(file.read_text(encoding="utf-8")).render(
        FACTS | values,
        cluster=config.cluster,
        learner=config.learner,
        name=f"agentenv-{plain or 'run'}",
    )
    return text if text.endswith("\n") else f"{text}\n"


def _check_kubernetes(config: TrainConfig, cluster: KubernetesCluster) -> None:
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
