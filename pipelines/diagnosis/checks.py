"""The checks of a machine and of a configuration, in the order that finds mistakes early: the
machine; what the configuration alone tells; files, model, parts, as every command checks them; what
they promise; at last, with learner and engine started, whether both mean the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from agentenv.config import Tree, load_config
from agentenv.errors import AgentEnvError, ConfigError
from agentenv.pipelines.config.rl import RunConfig, TrainConfig
from agentenv.pipelines.config.verl_keys import refuse_verl_keys
from agentenv.pipelines.diagnosis.budget import BUDGET
from agentenv.pipelines.diagnosis.context import Patient
from agentenv.pipelines.diagnosis.machine import MACHINE, Machine
from agentenv.pipelines.diagnosis.protocol import PROTOCOL, STARTED
from agentenv.pipelines.diagnosis.results import Judge, Verdict
from agentenv.pipelines.diagnosis.world import WORLD
from agentenv.pipelines.rl.parts import TrainingAssembly
from agentenv.pipelines.setup.checks import CHECKS, Needs, findings
from agentenv.pipelines.setup.data import Say

ASKING = ("servers",)  # checks of the commands that ask what is elsewhere
BEFORE_STARTED: Needs = "parts"


async def examine(
    path: Path | None,
    overrides: Sequence[str],
    *,
    is_offline: bool,
    is_quick: bool,
    say: Say,
) -> AsyncIterator[Verdict]:
    """All verdicts, one after the other. The set-up of a run is run in a folder that is removed
    afterwards. Raises ConfigError for overrides without a configuration."""
    if path is None and overrides:
        raise ConfigError(f"{overrides[0]!r}: keys belong to --config CONFIG")
    judge, config = Judge(), None
    verdict = Verdict("configuration", "passed")
    if path is not None:
        try:
            config = load_config(TrainConfig, path, overrides, say=say, check=_refuse_others)
        except AgentEnvError as error:
            verdict = judge.of_error("configuration", error)
    folder = Path((RunConfig() if config is None else config.run).dir)
    async for one in judge.judge(MACHINE, Machine(folder, is_quick)):
        yield one
    if path is not None:
        yield verdict
    if config is None:
        return
    with TemporaryDirectory(prefix="agentenv-doctor-") as place:
        async with AsyncExitStack() as stack:
            assembly = TrainingAssembly(config, Path(place), None, stack, say)
            patient = Patient(config, assembly, is_offline, is_quick)
            async for one in _examine(patient, judge):
                yield one


def _refuse_others(raw: Tree, source: str) -> None:
    """What is no configuration of training. Raises ConfigError that says what looks at it."""
    if "sets" in raw and not {"algorithm", "train"} & raw.keys():
        raise ConfigError(
            f"{source} is a configuration of agentenv evaluate, which does not say whom to "
            f"ask; agentenv evaluate SUBJECT --config {source} --dry-run looks whether all of "
            "it is there, and doctor.py without --config at the machine"
        )
    refuse_verl_keys(raw, source)


async def _examine(patient: Patient, judge: Judge) -> AsyncIterator[Verdict]:
    left_out = ASKING if patient.is_offline else ()
    async for finding in findings(patient.assembly, BEFORE_STARTED, left_out):
        yield judge.of_finding(finding)
    for probes in (BUDGET, PROTOCOL, WORLD):
        async for verdict in judge.judge(probes, patient):
            yield verdict
    if not patient.is_quick:
        before = [check.name for check in CHECKS if check.needs != "started"]
        async for finding in findings(patient.assembly, "started", before):
            yield judge.of_finding(finding)
    async for verdict in judge.judge(STARTED, patient):
        yield verdict
