"""Evaluates a run or a model: `python launchers/evaluate.py RUN_OR_MODEL --env ID --n 200`.

The same env API, actor and engine as in training. Of a run, environment, limits, sampling and
questions are those of its configuration; of a model directory they are given as key=value.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads starve other processes

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from agentenv.actor import Actor
from agentenv.config import build_config, override_kinds
from agentenv.data_config import RowsConfig
from agentenv.engines.embedded_config import EmbeddedConfig
from agentenv.engines.launch_config import RoleConfig
from agentenv.engines.remote_config import SGLangConfig, VLLMConfig
from agentenv.engines.scripted import ScriptedConfig
from agentenv.errors import AgentEnvError, ConfigError, DataError
from agentenv.evaluate import Report, evaluate, make_report
from agentenv.limits import Limits
from agentenv.native import NativeConfig
from agentenv.prompt import PromptConfig
from agentenv.renderer import TagsConfig
from agentenv.shared import close_shared
from agentenv.tree import TrajectoryTree
from agentenv.types import Task
from launchers.assembly import (
    check_context,
    context_length,
    import_from_working_directory,
    load_tokenizer,
    make_renderer,
)
from launchers.checkpoints import find_checkpoint
from launchers.command import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, first_reason
from launchers.config import Sampling
from launchers.data import check_environments, fit_prompts, load_set
from launchers.env_config import TABLES, EnvConfig, GraderTable, PythonTable, SearchTable
from launchers.environments import EnvMaker, check_graders, tables_of, try_env
from launchers.keys import key_table
from launchers.rl import report
from launchers.rundir import CONFIG_FILE, trajectory_row
from launchers.serving.engines import start_engine
from launchers.serving.roles import start_roles
from launchers.serving.servers import ServerFactory
from launchers.view import View


class EvaluateConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an evaluation reads; of a run, everything comes from the run."""

    env: EnvConfig
    python: PythonTable = None
    search: SearchTable = None
    grader: GraderTable = None
    data: Annotated[
        str | list[str], Meta(description="file, folder or pattern of questions, or a list of them")
    ]
    rows: RowsConfig = RowsConfig()
    prompt: PromptConfig = PromptConfig()
    renderer: TagsConfig | NativeConfig = TagsConfig()
    limits: Limits = Limits()
    sampling: Sampling = Sampling()
    engine: EmbeddedConfig | ScriptedConfig | VLLMConfig | SGLangConfig = EmbeddedConfig()
    roles: Annotated[
        dict[str, RoleConfig],
        Meta(description="models beside the policy by name, [roles.judge]"),
    ] = field(default_factory=dict)
    num_samples: Annotated[int, Meta(ge=1, description="trajectories a question")] = 1
    concurrency: Annotated[int, Meta(ge=1, description="questions in flight")] = 256
    seed: Annotated[int, Meta(ge=0, description="seed of sampling")] = 0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 failed with a reason, 2 bad input, 130 interrupted."""
    arguments = _parse(argv)
    import_from_working_directory()
    view = View()
    try:
        model, raw, run = _subject(arguments)
        if arguments.env:
            raw.setdefault("env", {})["id"] = arguments.env
        override_kinds(EvaluateConfig, raw, arguments.overrides)
        config = build_config(EvaluateConfig, raw, str(arguments.subject))
        trees, tokenizer = asyncio.run(_evaluate(config, model, run, arguments.n, view.say))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (AgentEnvError, ExceptionGroup) as error:
        reason = first_reason(error)
        if reason is None:
            raise
        view.fail(str(reason))
        return EXIT_BAD_INPUT if isinstance(reason, ConfigError | DataError) else EXIT_FAILED
    first = config.data if isinstance(config.data, str) else config.data[0]
    result = make_report(Path(first).stem, trees)
    view.show(report.report_table(result, f"{config.env.id} by {model}"))
    if arguments.out is not None:
        _write(arguments.out, result, trees, tokenizer)
        view.say(f"written to {arguments.out}: report.json, trajectories.jsonl")
    return 0


async def _evaluate(
    config: EvaluateConfig,
    model: Path,
    run: Path,
    num_tasks: int,
    say: Callable[[str], None],
) -> tuple[list[TrajectoryTree], Any]:
    def resolve(text: str) -> Path:
        return Path(text.replace("{run}", str(run)))

    async with AsyncExitStack() as stack:
        logs = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="agentenv-evaluate-"))
        stack.push(partial(_remove_unless_failed, logs))
        factory = ServerFactory(logs, stack, say)
        tokenizer = await asyncio.to_thread(load_tokenizer, model)
        tasks: Sequence[Task] = await load_set(
            config.data, config.env.id, config.rows, resolve, say, "rows", num_tasks
        )
        check_context(config.limits, context_length(config.engine, model))
        renderer = make_renderer(config.renderer, config.prompt, tokenizer, model)
        config = await start_roles(config, resolve, factory)
        stack.push_async_callback(close_shared)
        make_env = EnvMaker(config.env, tables_of(config), resolve, config.limits, config.prompt)
        check_environments({"rows": (config.rows, tasks)}, make_env, whole_run=False)
        await try_env(make_env, tasks[0])
        await check_graders(make_env, tasks)
        tasks = await fit_prompts(
            tasks, config.rows, make_env, renderer, config.limits, say, "rows"
        )
        engine = await start_engine(
            config.engine, model, tokenizer, 0, config.limits, factory, stack, config.seed
        )
        actor = Actor(
            engine,
            renderer,
            make_env,
            config.limits,
            config.sampling.params(),
            f"{config.seed if config.sampling.seed is None else config.sampling.seed}/eval",
        )
        trees = await evaluate(
            actor, tasks, num_samples=config.num_samples, concurrency=config.concurrency
        )
    return trees, tokenizer


def _remove_unless_failed(logs: Path, failed: type[BaseException] | None, *_: object) -> None:
    """The servers' logs stay when they may say why."""
    if failed is None:
        shutil.rmtree(logs, ignore_errors=True)


def _subject(arguments: argparse.Namespace) -> tuple[Path, dict[str, Any], Path]:
    """Model directory, configuration so far, and the run directory, of a run, of a checkpoint in
    one, or of a model directory by itself."""
    subject: Path = arguments.subject
    for run in (subject, *list(subject.absolute().parents)[:2]):
        if (run / CONFIG_FILE).is_file() and (run / "checkpoints").is_dir():
            break
    else:
        return subject, {}, subject
    raw = _of_run(run, arguments.set)
    if not raw:  # of launchers/sft.py or dpo.py
        return find_checkpoint(subject, best=arguments.checkpoint == "best"), {}, run
    if run != subject:
        return subject, raw, run
    return find_checkpoint(run, best=arguments.checkpoint == "best"), raw, run


def _of_run(run: Path, set_name: str) -> dict[str, Any]:
    saved = msgspec.json.decode((run / CONFIG_FILE).read_bytes(), type=dict[str, Any])
    if "eval" not in saved:
        return {}
    sets = saved["eval"]["sets"]
    name = set_name or saved["eval"]["report"] or next(iter(sets), "")
    if name not in sets:
        raise ConfigError(f"--set {name}: {run} has the evaluation sets {sorted(sets)}")
    return {
        "env": saved["env"],
        **{name: saved[name] for name in TABLES if saved.get(name) is not None},
        "data": sets[name]["path"],
        "rows": {key: sets[name][key] for key in RowsConfig.__struct_fields__ if key in sets[name]},
        "prompt": saved.get("prompt", {}),
        "renderer": saved.get("renderer", {"name": "tags"}),
        "limits": saved["limits"],
        "sampling": saved["sampling"]["eval"],
        "engine": saved["engine"],
        "roles": saved.get("roles", {}),
        "seed": saved["run"]["seed"],
    }


def _write(out: Path, result: Report, trees: list[TrajectoryTree], tokenizer: Any) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(
        json.dumps(msgspec.to_builtins(result), indent=2) + "\n", encoding="utf-8"
    )
    with (out / "trajectories.jsonl").open("w", encoding="utf-8") as file:
        for tree in trees:
            for trajectory in tree.trajectories():
                row = trajectory_row(tree, trajectory, tokenizer)
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="launchers/evaluate.py",
        description="Evaluate a run, a checkpoint or a model through the env API.",
        epilog=key_table(EvaluateConfig),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("subject", type=Path, metavar="RUN_OR_MODEL")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    parser.add_argument("--env", default="", help="environment id; of a run: its own")
    parser.add_argument("--n", type=int, default=0, help="first n questions; 0: all")
    parser.add_argument("--set", default="", help="evaluation set of the run; default: reported")
    parser.add_argument(
        "--checkpoint", choices=("last", "best"), default="last", help="which one of a run"
    )
    parser.add_argument("--out", type=Path, help="directory for report.json and trajectories.jsonl")
    return parser.parse_intermixed_args(argv)


if __name__ == "__main__":
    sys.exit(main())
