"""The questions of a run, from its configuration: read, and their prompts held to the limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import agentenv.env
from agentenv.data_config import RowsConfig
from agentenv.dataset import TaskMix, load_mix, load_tasks
from agentenv.env import Env
from agentenv.errors import ConfigError
from agentenv.limits import Limits
from agentenv.prompt_fit import PromptFitter
from agentenv.renderer import Renderer
from agentenv.types import Task
from launchers.config import DataConfig

Say = Callable[[str], None]
Resolve = Callable[[str], Path]


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


async def fit_prompts(
    tasks: Sequence[Task],
    rows: RowsConfig,
    make_env: Callable[[Task], Env],
    renderer: Renderer,
    limits: Limits,
    say: Say,
    key: str,
) -> Sequence[Task]:
    """The tasks whose prompts fit, a mix part by part."""
    for value, env_id in rows.env_by.items():
        try:
            agentenv.env.spec(env_id)
        except ConfigError as error:
            raise ConfigError(f"{key}.env_by.{value}: {error}") from error
    overlong = f"{key}.overlong_prompt"
    fitter = PromptFitter(make_env, renderer, limits, rows.overlong_prompt, overlong, say)
    if isinstance(tasks, TaskMix):
        return TaskMix([await fitter.fit(part) for part in tasks.parts], tasks.weights)
    return await fitter.fit(tasks)


def said(say: Say, key: str) -> Say:
    """`say` with the keys that the text is about in front."""
    return lambda text: say(f"{key}: {text}")
