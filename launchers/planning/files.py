"""What a configuration reads and is not there: files, folders, keys, environments of engines."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agentenv.engines.launch_config import LaunchConfig, ServersConfig
from agentenv.engines.remote_config import RemoteConfig, VLLMConfig
from agentenv.errors import ConfigError
from envs.search.config import SearchConfig
from envs.search.providers import PROVIDERS, WebConfig
from launchers.serving.server_commands import EngineName, find_python

Resolve = Callable[[str], Path]


def missing_files(config: Any, resolve: Resolve) -> Iterator[str]:
    """Lines "key = value", with what is wrong where that is not plain absence."""
    made = bool(getattr(getattr(config, "run", None), "setup", ""))
    registry = str(getattr(getattr(config, "data", None), "dataset_info", ""))
    for key, path in _paths(config):
        if not path or (made and "{run}" in path):
            continue
        if registry and key.startswith("data.") and key != "data.dataset_info":
            continue  # names in the registry
        if not _is_there(resolve(path)):
            yield f"{key} = {path}"
    yield from _missing_keys(config)
    yield from _missing_engines(config)


def _paths(config: Any) -> Iterator[tuple[str, str]]:
    data = getattr(config, "data", None)
    for name in ("train", "eval", "dataset_info"):
        yield from _each(f"data.{name}", getattr(data, name, ""))
    if isinstance(data, str | list):
        yield from _each("data", data)
    for number, part in enumerate(getattr(data, "mix", ())):
        yield from _each(f"data.mix[{number}].path", part.path)
    sets = getattr(getattr(config, "eval", None), "sets", {})
    for key, table in (("eval.sets", sets), ("sets", getattr(config, "sets", {}))):
        for name, one in table.items():
            yield from _each(f"{key}.{name}.path", one.path)
    for table, names in (
        ("sft", ("data", "gate")),
        ("learner", ("deepspeed_config",)),
        ("grader", ("path",)),
        ("python", ("interpreter",)),
        ("search", ("arpo_cache",)),
    ):
        for name in names:
            value = getattr(getattr(config, table, None), name, "") or ""
            yield from _each(f"{table}.{name}", os.path.expanduser(value))
    backend = getattr(getattr(config, "search", None), "backend", None)
    yield from _each("search.backend.corpus", getattr(backend, "corpus", ""))


def _each(key: str, paths: str | list[str]) -> Iterator[tuple[str, str]]:
    for path in [paths] if isinstance(paths, str) else paths:
        yield key, path


def _is_there(path: Path) -> bool:
    if path.exists():
        return True
    return any(mark in path.name for mark in "*?[") and any(path.parent.glob(path.name))


def _missing_keys(config: Any) -> Iterator[str]:
    search = getattr(config, "search", None)
    if isinstance(search, SearchConfig) and isinstance(search.backend, WebConfig):
        variable = PROVIDERS[search.backend.provider].key_variable
        if variable and not os.environ.get(variable):
            yield f"the environment variable {variable} ({search.backend.provider})"


def _missing_engines(config: Any) -> Iterator[str]:
    engine = getattr(config, "engine", None)
    wanted: list[tuple[EngineName, LaunchConfig, str]] = []
    if isinstance(engine, RemoteConfig) and not (engine.urls or engine.urls_file):
        name: EngineName = "vllm" if isinstance(engine, VLLMConfig) else "sglang"
        wanted.append((name, engine.servers or ServersConfig(), "engine.servers"))
    for role_name, role in getattr(config, "roles", {}).items():
        if not role.url:
            wanted.append((role.engine, role, f"roles.{role_name}"))
    for name, servers, key in wanted:
        try:
            find_python(name, servers, key)
        except ConfigError as error:
            yield str(error)
