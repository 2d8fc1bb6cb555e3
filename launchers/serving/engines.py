"""From [engine] to an engine that samples: in this process, or a pool over servers."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from agentenv.engine import Engine
from agentenv.engines.embedded import EmbeddedConfig
from agentenv.engines.pool.pool import EnginePool
from agentenv.engines.scripted import ScriptedConfig, ScriptedEngine
from agentenv.engines.server import Server
from agentenv.engines.server_config import (
    ROLES,
    RoleConfig,
    ServersConfig,
    SGLangConfig,
    VLLMConfig,
)
from agentenv.errors import ConfigError, EngineError
from agentenv.renderer import read_eos_ids
from agentenv.types import Limits
from launchers.assembly import EngineConfig, check_context, vocab_size
from launchers.serving.servers import ServerFactory

WATCH_INTERVAL_S = 5.0

logger = logging.getLogger(__name__)


async def start_engine(
    config: EngineConfig,
    model: Path,
    tokenizer: Any,
    policy_version: int,
    limits: Limits,
    factory: ServerFactory,
    stack: AsyncExitStack,
    seed: int = 0,
    use: str = "policy",
    *,
    colocated: bool = False,
    lora_rank: int = 0,
    adapter: Path | None = None,
) -> Engine:
    """The engine that the configuration names, serving `model` as `policy_version`; `stack`
    closes it. `use` names the servers that are started for it, `colocated` and `lora_rank`: see
    Served. With an `adapter` the policy is that, on top of `model`. Raises ConfigError if it
    cannot serve that model."""
    if isinstance(config, ScriptedConfig):
        engine: Engine = ScriptedEngine(config, tokenizer, policy_version=policy_version)
    elif isinstance(config, EmbeddedConfig):
        engine = await asyncio.to_thread(_embedded, config, model, policy_version)
    else:
        path = await asyncio.to_thread(model.absolute)  # servers run in another folder
        return await _start_pool(
            config,
            path,
            tokenizer,
            policy_version,
            limits,
            factory,
            stack,
            seed,
            use,
            colocated,
            lora_rank,
            adapter,
        )
    stack.push_async_callback(engine.close)
    return engine


def _embedded(config: EmbeddedConfig, model: Path, policy_version: int) -> Engine:
    from agentenv.engines.embedded.engine import EmbeddedEngine

    try:
        return EmbeddedEngine(config, model, policy_version)
    except EngineError as error:
        raise ConfigError(f"engine: {error}") from error


async def _start_pool(
    config: VLLMConfig | SGLangConfig,
    model: Path,
    tokenizer: Any,
    policy_version: int,
    limits: Limits,
    factory: ServerFactory,
    stack: AsyncExitStack,
    seed: int,
    use: str,
    colocated: bool,
    lora_rank: int,
    adapter: Path | None,
) -> EnginePool:
    maker = server_maker(config, vocab_size(model))
    urls = config.urls
    if config.urls_file:
        urls = await asyncio.to_thread(read_urls, Path(config.urls_file))
    started = not urls
    if started:
        urls = await factory.start(
            "vllm" if isinstance(config, VLLMConfig) else "sglang",
            config.servers or ServersConfig(),
            model,
            name=use,
            key="engine.servers" if use == "policy" else f"{use} engine.servers",
            max_model_len=config.max_model_len,
            trained=True,
            broadcast=config.weights == "broadcast",
            colocated=colocated,
            lora_rank=lora_rank,
        )
    pool = EnginePool(
        [maker(url) for url in urls],
        model,
        policy_version,
        vocab_size=vocab_size(model),
        eos_ids=read_eos_ids(model, tokenizer),
        config=config.pool,
        name=f"agentenv-{secrets.token_hex(6)}",
        seed=seed,
        adapter=adapter,
    )
    stack.push_async_callback(pool.close)
    await pool.start(fresh=started and adapter is None)
    if lora_rank:
        pool.check_adapters()
    if config.weights == "broadcast":
        pool.check_broadcast()
    if pool.max_model_len:
        check_context(limits, pool.max_model_len)
    if config.urls_file:
        watching = asyncio.create_task(watch_urls(Path(config.urls_file), pool, maker))
        stack.callback(watching.cancel)
    return pool


def server_maker(config: VLLMConfig | SGLangConfig, vocabulary: int) -> Callable[[str], Server]:
    """Makes the client of a URL."""
    from agentenv.engines.client import Timeouts
    from agentenv.engines.sglang import SGLangServer
    from agentenv.engines.vllm import VLLMServer

    api_key = os.environ.get(config.api_key_env, "") if config.api_key_env else ""
    if config.api_key_env and not api_key:
        raise ConfigError(f"engine.api_key_env: {config.api_key_env} is not set")
    given = config.timeouts
    timeouts = Timeouts(
        connect_s=given.connect_s, call_s=given.call_s, idle_s=given.idle_s, load_s=given.load_s
    )

    client = VLLMServer if isinstance(config, VLLMConfig) else SGLangServer

    def make(url: str) -> Server:
        return client(
            url,
            entropy_top_k=config.entropy_top_k,
            timeouts=timeouts,
            vocab_size=vocabulary,
            api_key=api_key,
            control_urls=config.control_urls,
        )

    return make


async def watch_urls(path: Path, pool: EnginePool, make: Callable[[str], Server]) -> None:
    """Add servers that appear in the file, and take away those that vanish from it."""
    known = {make(url).name for url in await asyncio.to_thread(read_urls, path)}
    while True:
        await asyncio.sleep(WATCH_INTERVAL_S)
        try:
            servers = [make(url) for url in await asyncio.to_thread(read_urls, path)]
        except ConfigError as error:  # half written, or wrong: what is there stays
            logger.warning("%s", error)
            continue
        for server in servers:
            if server.name not in known:
                logger.warning("%s joins", server.name)
                pool.add_server(server)
        for name in known - {server.name for server in servers}:
            logger.warning("%s leaves", name)
            pool.remove_server(name)
        known = {server.name for server in servers}


def read_urls(path: Path) -> list[str]:
    """One URL a line; empty lines and # comments are skipped. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"engine.urls_file: {path} cannot be read: {error}") from error
    urls = [line.partition("#")[0].strip() for line in lines]
    urls = [url for url in urls if url]
    if not urls:
        raise ConfigError(f"engine.urls_file: {path} names no server")
    if len(set(urls)) < len(urls):
        raise ConfigError(f"engine.urls_file: {path} names a server twice")
    return urls


# Models beside the policy: [roles.judge], [roles.summarizer], ..., whose URLs environments and
# graders read as "{role:judge}".

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
    read = {name: key for key in READERS for name in _named(_plain(getattr(config, key, None)))}
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


async def start_roles(config: C, resolve: Any, factory: ServerFactory) -> C:
    """Start the servers of all roles; the configuration with their URLs in place of the names."""
    check_roles(config)
    return fill_roles(config, await start_servers(getattr(config, "roles", {}), resolve, factory))


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
        (urls[name],) = await factory.start(
            role.engine,
            role,
            model,
            name=name,
            key=f"roles.{name}",
            max_model_len=role.max_model_len,
        )
    return urls


def fill_roles(config: C, urls: Mapping[str, str]) -> C:
    """`config` with each {role:NAME} in its reading tables replaced by a URL."""
    changed: dict[str, Any] = {}
    for key in READERS:
        table = getattr(config, key, None)
        plain = _plain(table)
        if table is not None and any(True for _ in _named(plain)):
            changed[key] = msgspec.convert(_filled(plain, urls), type(table))
    return msgspec.structs.replace(config, **changed) if changed else config


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
