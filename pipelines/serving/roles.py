"""Models beside the policy: [roles.judge], [roles.summarizer], ..., whose URLs environments and
graders read as "{role:judge}"."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from agentenv.errors import ConfigError
from agentenv.pipelines.serving.servers import ServerFactory
from agentenv.registry import decode_part
from agentenv.server_config import ROLES, RoleConfig, Served

# tables of the configuration that may name a role
READERS = ("env", "grader", "search", "python", "assist")
PLACE = re.compile(r"\{role:([^{}]*)\}")

C = TypeVar("C", bound=msgspec.Struct)


def check_roles(config: msgspec.Struct) -> None:
    """Refuse roles that have no such name, that are read but not there, and the reverse."""
    roles: Mapping[str, RoleConfig] = getattr(config, "roles", {})
    for name in roles:
        if name == "policy":
            raise ConfigError("roles.policy: the policy is what [engine] serves")
        if name not in ROLES:
            raise ConfigError(f"roles.{name}: unknown role; known: {', '.join(ROLES)}")
    read = {
        name: key
        for key in READERS
        for table in _tables(config, key)
        for name in _named(_plain(table))
    }
    for name, key in read.items():
        if name not in roles:
            raise ConfigError(
                f"{key} names {{role:{name}}}, but there is no [roles.{name}]; there are "
                f"{sorted(roles) or 'none'}"
            )
    for name in roles:
        if name not in read:
            raise ConfigError(
                f"roles.{name} is not read: no text in {', '.join(READERS)} holds "
                f"'{{role:{name}}}', e.g. grader.judge.url = '{{role:{name}}}/v1'"
            )


async def start_servers(
    roles: Mapping[str, RoleConfig], resolve: Any, factory: ServerFactory
) -> dict[str, str]:
    """Start the servers of all roles; their URLs by name."""
    urls: dict[str, str] = {}
    for name, role in roles.items():
        if role.url:
            urls[name] = role.url.rstrip("/")
            continue
        model: Path = resolve(role.model)
        served = Served(role.engine, model, name, role.max_model_len)
        (urls[name],) = await factory.start(served, role, f"roles.{name}")
    return urls


def fill_roles(config: C, urls: Mapping[str, str]) -> C:
    """`config` with each {role:NAME} in its reading tables replaced by a URL."""
    changed: dict[str, Any] = {}
    for key in READERS:
        table = getattr(config, key, None)
        plain = _plain(table)
        if table is not None and any(True for _ in _named(plain)):
            filled = _filled(plain, urls)
            changed[key] = msgspec.convert(filled, type(table), dec_hook=decode_part)
    return msgspec.structs.replace(config, **changed) if changed else config


def _tables(config: msgspec.Struct, key: str) -> list[Any]:
    """The tables of this name: those of all sets of an evaluation, else the configuration's."""
    sets = [one for one in getattr(config, "sets", {}).values() if hasattr(one, key)]
    return [getattr(one, key, None) for one in sets or [config]]


def _plain(table: Any) -> Any:
    return None if table is None else msgspec.to_builtins(table)


def _named(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield from PLACE.findall(value)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _named(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _named(item)


def _filled(value: Any, urls: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return PLACE.sub(lambda match: urls[match[1]], value)
    if isinstance(value, dict):
        return {key: _filled(item, urls) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_filled(item, urls) for item in value]
    return value
