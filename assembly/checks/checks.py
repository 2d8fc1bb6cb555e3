"""The checks of a run: one list, in an order that finds mistakes early, with three users.

    a start     START; raises the first failure (`refuse`)
    --dry-run   those of START, and of the model's contract, that start nothing and need no missing
                input (`lab/diagnosis/reading.py`)
    the doctor  all: the machine, START, contracts of the parts, learner and engine started
                (`lab/diagnosis/doctor.py`)

A check is a coroutine. It raises an error "problem; remedy", or `Skip` if it does not apply, and
may return a finding.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress
from operator import methodcaller
from typing import Any, Literal, NamedTuple, get_args

from msgspec import Struct

from agentenv.assembly.checks import start_checks
from agentenv.assembly.keys.evaluation import EvaluateConfig
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.keys.supervised import SupervisedRunConfig
from agentenv.assembly.parts.assembly import Assembly
from agentenv.base.crashes import origin_of
from agentenv.base.errors import AgentEnvError, ConfigError

Stage = Literal[
    "machine",  # without a configuration: these checks take the folder of the runs
    "configuration",  # only the configuration
    "files",
    "model",
    "parts",  # with the servers of roles
    "contract",  # contracts of the parts: slow, only for the doctor
    "started",  # learner and engine start
    "measured",  # learner and engine compute the same
]
Has = Literal["model", "rows", "env", "sft", "machine"]  # inputs that a dry run may lack
TRAIN, EVALUATE, SUPERVISED = (TrainConfig,), (EvaluateConfig,), (SupervisedRunConfig,)
SAMPLING, RUNS = (*TRAIN, *EVALUATE), (*TRAIN, *SUPERVISED)
ALL = (*SAMPLING, *SUPERVISED)


class Check(NamedTuple):
    """A check. `function` takes the assembly. `configs`: the configurations that it applies to. A
    dry run includes it if all inputs in `dry`
    exist; None: never. The doctor omits `slow` checks with --quick, `remote` ones with --offline,
    and those whose check `after` has failed."""

    name: str
    stage: Stage
    configs: tuple[type, ...]
    function: Callable[[Any], Awaitable[object]]
    dry: frozenset[Has] | None = None
    slow: bool = False
    remote: bool = False
    after: str = ""


State = Literal["passed", "failed", "skipped"]


class Skip(AgentEnvError):
    """The check does not apply, or its input is missing; the message has the reason."""


class CheckResult(Struct):
    """The result of a check. `message`: its finding, the problem if it failed, the reason if it was
    skipped."""

    name: str
    state: State
    message: str = ""
    remedy: str = ""
    seconds: float = 0.0


REQUIRES = "requires {!r}, which failed"


class CheckRunner:
    """Runs checks in sequence. If a check raises the same error as an earlier one, it is skipped
    with a reference to it. With `catches`, any exception is a failed check."""

    def __init__(self, timeout_s: float | None = None, *, catches: bool = False) -> None:
        self._timeout_s, self._catches = timeout_s, catches
        self._found: dict[str, str] = {}  # text of an error -> the check that raised it
        self._failed = set[str]()

    async def run(self, check: Check, subject: Any) -> CheckResult:
        """The result of a check of `subject`, an assembly or the folder of the runs."""
        began = time.monotonic()
        if check.after in self._failed:
            self._failed.add(check.name)
            return CheckResult(check.name, "skipped", REQUIRES.format(check.after))
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await check.function(subject)
        except Skip as why:
            result = CheckResult(check.name, "skipped", str(why))
        except TimeoutError:
            late = f"it took longer than {self._timeout_s:g} s"
            result = CheckResult(check.name, "skipped", late)
        except AgentEnvError as error:
            result = self.failure(check.name, error)
        except Exception as error:  # of third-party code, or a bug of the check
            if not self._catches:
                raise
            text = f"raised {type(error).__name__}: {error} ({origin_of(error)})"
            result = self.failure(check.name, ConfigError(text))
        else:
            result = CheckResult(check.name, "passed", found if isinstance(found, str) else "")
        result.seconds = time.monotonic() - began
        return result

    def failure(self, name: str, error: AgentEnvError) -> CheckResult:
        """The result of a check that raised `error`."""
        text = str(error)
        self._failed.add(name)
        if text in self._found:
            return CheckResult(name, "skipped", REQUIRES.format(self._found[text]))
        self._found[text] = name
        problem, _, remedy = text.partition("; ")
        return CheckResult(name, "failed", problem, remedy)


def select(checks: Iterable[Check], config: Any, first: Stage, last: Stage) -> list[Check]:
    """Those of the checks that apply to a configuration, in these stages."""
    stages = get_args(Stage)
    wanted = stages[stages.index(first) : stages.index(last) + 1]
    return [one for one in checks if one.stage in wanted and isinstance(config, one.configs)]


async def refuse(
    assembly: Assembly[Any], last: Stage = "parts", first: Stage = "configuration"
) -> None:
    """Run the checks of a start in these stages, and raise the first error."""
    await refuse_first(select(START, assembly.config, first, last), assembly)


async def refuse_dry(
    assembly: Assembly[Any], checks: Iterable[Check], inputs: Collection[Has]
) -> None:
    """Run those of the checks that a dry run with these inputs can make, from the stage of files,
    and raise the first error."""
    chosen = select(checks, assembly.config, "files", "contract")
    dry = [one for one in chosen if one.dry is not None and one.dry <= {*inputs}]
    await refuse_first(dry, assembly)


async def refuse_first(checks: Iterable[Check], assembly: Assembly[Any]) -> None:
    """Run checks, and raise the first error."""
    for check in checks:
        with suppress(Skip):
            await check.function(assembly)


part = methodcaller  # of a check that builds a part of the assembly


NOTHING: frozenset[Has] = frozenset()
MODEL: frozenset[Has] = frozenset({"model"})
ROWS: frozenset[Has] = frozenset({"rows"})
ENV: frozenset[Has] = frozenset({"rows", "env"})
PROMPT: frozenset[Has] = frozenset({"rows", "env", "model"})
SFT: frozenset[Has] = frozenset({"model", "sft"})
MACHINE: frozenset[Has] = frozenset({"machine"})
EPISODES = "first episodes"

START: tuple[Check, ...] = (
    Check("sizes divide", "configuration", TRAIN, start_checks.sizes, NOTHING),
    Check("time-outs", "configuration", TRAIN, start_checks.time_outs, NOTHING),
    Check("algorithm", "configuration", TRAIN, start_checks.algorithm, NOTHING),
    Check("cold start and renderer", "configuration", TRAIN, start_checks.demonstrations, NOTHING),
    Check("evaluation sets", "configuration", TRAIN, start_checks.evaluation_sets, NOTHING),
    Check("adapter", "configuration", TRAIN, start_checks.adapter, NOTHING),
    Check("helpers", "configuration", EVALUATE, start_checks.helpers, NOTHING),
    Check("roles", "configuration", SAMPLING, start_checks.roles, NOTHING),
    Check("teacher", "configuration", TRAIN, start_checks.teacher, NOTHING),
    Check("disk", "files", RUNS, start_checks.disk, MACHINE),
    Check("hub", "files", ALL, start_checks.of_the_hub),
    Check("files", "files", RUNS, start_checks.files),
    Check("DeepSpeed's file", "files", RUNS, start_checks.deepspeed_file, MACHINE),
    Check("set-up", "files", RUNS, start_checks.set_up, NOTHING),
    Check("classes of environments", "files", TRAIN, start_checks.environment_classes),
    Check("needs of environments", "files", TRAIN, start_checks.needs_of_environments),
    # there are enough GPUs for engine and learner
    Check("GPUs", "files", TRAIN, part("gpus")),
    Check("servers", "files", SAMPLING, start_checks.servers, remote=True),
    Check("rows that are here", "files", TRAIN, start_checks.rows_here, NOTHING),
    Check("graders of rows that are here", "files", TRAIN, start_checks.graders_here),
    Check("model type", "model", RUNS, start_checks.model_type, MODEL),
    Check("teacher's tokens", "model", TRAIN, start_checks.teacher_tokens, MODEL),
    # the directory contains configuration, tokenizer and weights; the endpoint responds
    Check("model", "model", ALL, part("tokenizer"), MODEL),
    Check("teacher's server", "model", TRAIN, start_checks.teacher_server, remote=True),
    Check("context", "model", SAMPLING, start_checks.context, MODEL),
    Check("models of servers", "model", SAMPLING, start_checks.server_commands, MODEL | MACHINE),
    # the renderer can write the prompts of this model
    Check("chat template", "model", ALL, part("renderers"), MODEL),
    Check("end of a turn", "model", ALL, start_checks.turn_end, MODEL),
    Check("rate of the cold start", "model", TRAIN, start_checks.cold_start_rate),
    # from here on the output of the set-up exists
    Check("set-up is run", "model", RUNS, part("set_up")),
    # there is space for new weights in transfer to the engine
    Check("room for weights", "model", TRAIN, start_checks.room_for_weights, MACHINE),
    # every row of the data can be read
    Check("rows", "model", SAMPLING, part("tasks"), ROWS),
    Check("sequence lengths", "model", SUPERVISED, start_checks.sequence_lengths, MODEL),
    Check("environments", "parts", SAMPLING, start_checks.environments, ENV),
    # the environment of each set begins an episode
    Check(EPISODES, "parts", SAMPLING, part("episodes"), ENV),
    Check("callable tools", "parts", SAMPLING, start_checks.callable_tools, PROMPT, after=EPISODES),
    Check("hints", "parts", TRAIN, start_checks.hints, ENV, after=EPISODES),
    Check("special tokens", "parts", SAMPLING, start_checks.control_tokens, PROMPT, after=EPISODES),
    Check("special tokens in questions", "parts", SAMPLING, start_checks.tokens_of_questions, ROWS),
    Check("observations", "parts", SAMPLING, start_checks.observations, ENV, after=EPISODES),
    Check("graders", "parts", SAMPLING, start_checks.graders, after=EPISODES),
    Check("trials of environments", "parts", TRAIN, start_checks.trials, ENV, after=EPISODES),
    # every set has a prompt that fits the limits
    Check("prompts", "parts", SAMPLING, part("questions"), PROMPT, after=EPISODES),
    # the tools that helpers repair exist; those that they repeat are repeatable
    Check("helpers and tools", "parts", EVALUATE, part("check_helpers"), ENV),
    Check("models of helpers", "parts", EVALUATE, part("helpers")),
    # demonstrations can be read, and every stage of the cold start has some
    Check("demonstrations", "parts", TRAIN, part("demonstrations"), SFT),
    # there are enough questions for an update
    Check("number of updates", "parts", TRAIN, part("num_steps")),
)
