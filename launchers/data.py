"""The questions of a run, from its configuration: read, and their prompts held to the limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from agentenv.data_config import RowsConfig
from agentenv.data_files import find_files
from agentenv.dataset import TaskMix, load_mix, load_tasks
from agentenv.errors import DataError
from agentenv.limits import Limits
from agentenv.prompt_fit import PromptFitter
from agentenv.renderer import Renderer
from agentenv.types import Task
from launchers.config import DataConfig, TrainConfig
from launchers.environments import EnvMaker, check_graders

Say = Callable[[str], None]
Resolve = Callable[[str], Path]


class Questions(NamedTuple):
    """The training questions and those of the evaluation sets, by name."""

    train: Sequence[Task]
    eval_sets: dict[str, Sequence[Task]]


def check_files(config: TrainConfig, resolve: Resolve, *, is_new: bool) -> None:
    """Refuse files of questions and demonstrations that are not there, before anything else is
    done. A new run may still put some into its folder by run.setup; another one has its cold start
    behind it. Raises DataError with the key."""
    sft = config.sft if is_new else None
    paths: dict[str, str | list[str]] = {
        "data.train": config.data.train,
        **{f"data.mix[{number}].path": part.path for number, part in enumerate(config.data.mix)},
        **{f"eval.sets.{name}.path": one.path for name, one in config.eval.sets.items()},
        **({} if sft is None else {"sft.data": sft.data, "sft.gate": sft.gate}),
    }
    for key, given in paths.items():
        for path in [given] if isinstance(given, str) else given:
            if not path or (is_new and config.run.setup and "{run}" in path):
                continue
            for file in find_files([resolve(path)]):
                if not file.exists():
                    raise DataError(f"{key}: {file}: there is no such dataset file")


async def load_questions(
    config: TrainConfig, make_env: EnvMaker, renderer: Renderer, resolve: Resolve, say: Say
) -> Questions:
    """All questions of a run, with prompts that fit, and their environments and graders tried."""
    train = await load_training(config.data, config.env.id, resolve, say)
    sets: dict[str, tuple[RowsConfig, Sequence[Task]]] = {"data": (config.data, train)}
    for name, one in config.eval.sets.items():
        key = f"eval.sets.{name}"
        found = await load_set(one.path, config.env.id, one, resolve, say, key, one.max_tasks)
        sets[key] = (one, found)
    check_environments(sets, make_env, whole_run=True)
    await check_graders(make_env, (task for _, tasks in sets.values() for task in tasks))
    fitting = {
        key: await fit_prompts(tasks, rows, make_env, renderer, config.limits, say, key)
        for key, (rows, tasks) in sets.items()
    }
    eval_sets = {name: fitting[f"eval.sets.{name}"] for name in config.eval.sets}
    return Questions(fitting["data"], eval_sets)


async def load_training(
    config: DataConfig, env_id: str, resolve: Resolve, say: Say
) -> Sequence[Task]:
    """The training questions: those of data.train, or the weighted parts of data.mix."""
    if config.mix:
        return await asyncio.to_thread(
            load_mix, config.mix, env_id, config, resolve, say=said(say, "data")
        )
    return await load_set(config.train, env_id, config, resolve, say, "data", config.max_samples)


async def load_set(
    paths: str | list[str],
    env_id: str,
    rows: RowsConfig,
    resolve: Resolve,
    say: Say,
    key: str,
    max_samples: int = 0,
) -> list[Task]:
    """The questions of one set, whose keys begin with `key`."""
    found = [resolve(path) for path in ([paths] if isinstance(paths, str) else paths)]
    return await asyncio.to_thread(
        load_tasks, found, env_id, rows, max_samples=max_samples, say=said(say, key)
    )


def check_environments(
    sets: Mapping[str, tuple[RowsConfig, Sequence[Task]]], make_env: EnvMaker, *, whole_run: bool
) -> None:
    """Refuse what `sets`, by the beginning of their keys, choose and is not there, and what is
    there and never read; of a `whole_run` also environments that no row meets."""
    for key, (rows, _) in sets.items():
        for value, env_id in rows.env_by.items():
            make_env.check_known(env_id, f"{key}.env_by.{value}")
    make_env.check_read((task for _, tasks in sets.values() for task in tasks), all_rows=whole_run)


async def fit_prompts(
    tasks: Sequence[Task],
    rows: RowsConfig,
    make_env: EnvMaker,
    renderer: Renderer,
    limits: Limits,
    say: Say,
    key: str,
) -> Sequence[Task]:
    """The tasks whose prompts fit, a mix part by part."""
    overlong = f"{key}.overlong_prompt"
    fitter = PromptFitter(make_env, renderer, limits, rows.overlong_prompt, overlong, say)
    if isinstance(tasks, TaskMix):
        return TaskMix([await fitter.fit(part) for part in tasks.parts], tasks.weights)
    return await fitter.fit(tasks)


def said(say: Say, key: str) -> Say:
    """`say` with the keys that the text is about in front."""
    return lambda text: say(f"{key}: {text}")
