"""The doctor's view of the checks: all of them, of this machine and of a configuration."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.markup import escape
from rich.table import Table

from agentenv.config import Tree, load_config
from agentenv.errors import AgentEnvError, ConfigError
from agentenv.pipelines.config.help import refuse_verl_keys
from agentenv.pipelines.config.rl import TrainConfig
from agentenv.pipelines.rl.parts import TrainingAssembly
from agentenv.pipelines.run.arguments import RunConfig
from agentenv.pipelines.run.terminal import View
from agentenv.pipelines.setup.checks import CHECKS, CheckResult, Runner, select
from agentenv.pipelines.setup.data import Say

CHECK_S = 600.0  # of one check, at most
MARKS = {"passed": "[green]pass[/]", "failed": "[bold red]FAIL[/]", "skipped": "[dim]skip[/]"}


async def examine(
    path: Path | None,
    overrides: Sequence[str],
    *,
    is_offline: bool,
    is_quick: bool,
    say: Say,
) -> AsyncIterator[CheckResult]:
    """The result of every check, one after the other. The set-up of a run is run in a folder that
    is removed afterwards. Raises ConfigError for overrides without a configuration."""
    if path is None and overrides:
        raise ConfigError(f"{overrides[0]!r}: keys belong to --config CONFIG")
    runner, config = Runner(CHECK_S), None
    result = CheckResult("configuration", "passed")
    if path is not None:
        try:
            config = load_config(TrainConfig, path, overrides, say=say, explain=_refuse_others)
        except AgentEnvError as error:
            result = runner.failure("configuration", error)
    folder = Path((RunConfig() if config is None else config.run).dir)
    for check in [one for one in CHECKS if one.stage == "machine"]:
        if not (check.slow and is_quick):
            async for one in runner.run([check], folder):
                yield one
    if path is not None:
        yield result
    if config is None:
        return
    with TemporaryDirectory(prefix="agentenv-doctor-") as place:
        async with AsyncExitStack() as stack:
            assembly = TrainingAssembly(config, Path(place), None, stack, say)
            for check in select(config, "configuration", "measured"):
                if check.asks and is_offline:
                    yield CheckResult(check.name, "skipped", "--offline asks nobody")
                elif check.slow and is_quick:
                    why = "--quick starts neither learner nor engine"
                    yield CheckResult(check.name, "skipped", why)
                else:
                    async for one in runner.run([check], assembly):
                        yield one


def _refuse_others(raw: Tree, source: str) -> None:
    """Raises ConfigError for a configuration of another command, with what checks it."""
    if "sets" in raw and not {"algorithm", "train"} & raw.keys():
        raise ConfigError(
            f"{source} is a configuration of agentenv evaluate, which does not say whom to "
            f"ask; agentenv evaluate SUBJECT --config {source} --dry-run checks whether all of "
            "it is there, and doctor.py without --config the machine"
        )
    refuse_verl_keys(raw, source)


def show(result: CheckResult, view: View) -> None:
    """A line, or a few, in the terminal."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=4, no_wrap=True)
    grid.add_column(width=32, no_wrap=True)
    grid.add_column(overflow="fold")
    message = escape(result.message)
    if result.state == "skipped":
        message = f"[dim]{message}[/]"
    grid.add_row(MARKS[result.state], result.name, message)
    if result.remedy:
        grid.add_row("", "", f"[bold]remedy:[/] {escape(result.remedy)}")
    view.console.print(grid)
