"""The engine servers of a run: their processes, and auxiliary models.

This assigns GPUs and ports, writes logs in the run's directory, reports progress until a server is
ready, restarts servers that died, and leaves no process behind, even after kill -9 of the run
(agentenv/processes/supervisor.py). Roles are [roles.judge], [roles.summarizer], ...; environments
and graders refer to their URLs as "{role:judge}".
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from agentenv.assembly.run.kept import find_checkpoint
from agentenv.assembly.serving.gpus import GpuPlan
from agentenv.assembly.serving.server_command import command, environment, find_python, shared_cache
from agentenv.base.deadline import cancel_all
from agentenv.base.errors import ConfigError, EngineError
from agentenv.base.offload import in_thread
from agentenv.base.ports import hold_port, port_of
from agentenv.base.registry import decode_part
from agentenv.base.retries import Backoff, Restarts
from agentenv.contract.http_client import ServerClient
from agentenv.contract.server_config import ROLES, LaunchConfig, RoleConfig, Served, read_key
from agentenv.processes.supervisor import LocalProcess, ProcessSpec, log_tail, open_log

POLL_S = 0.5
MAX_RESTARTS = 10  # of one server in a run
REPORT_EVERY_S = 20.0
NUM_TAIL_LINES, MAX_LINES, TAIL_BYTES = 25, 400, 65536
MAX_LINE = 300  # characters of a log line in a message
BREAKS = Backoff(1.0, 30.0)  # before a restart
LOG_FOLDER = "servers"  # in the run's directory

logger = logging.getLogger(__name__)


class ServerProcess:
    """A server process under its guard, which will answer at `url`. It is restarted when it dies,
    at most MAX_RESTARTS times."""

    def __init__(
        self, spec: ProcessSpec, url: str, start_timeout_s: float, report: Callable[[str], None]
    ) -> None:
        self.spec, self.url, self.log = spec, url, Path(spec.log)
        self._start_timeout_s, self._report = start_timeout_s, report
        self._process = LocalProcess(spec)
        self._restarts = Restarts(MAX_RESTARTS, url, BREAKS)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the server and wait until it responds. Raises EngineError if it fails to start."""
        self._report(f"{self.spec.name}: starting on {self.url}, log in {self.log}")
        await self._start()
        self._tasks.append(asyncio.create_task(self._keep()))

    @property
    def pid(self) -> int:
        """The process id of the guard; the server is its child."""
        return self._process.pid

    async def close(self) -> None:
        """Stop the server with all its processes; idempotent."""
        tasks, self._tasks = self._tasks, []
        await cancel_all(tasks)
        await self._process.stop()

    async def _start(self) -> None:
        await in_thread(self._head_log)
        await self._process.start()
        await self._until_ready()

    def _head_log(self) -> None:
        """Write the command to the log, above the output."""
        with open_log(self.log) as log:
            log.write(f"$ {' '.join(self.spec.command)}\n".encode())

    async def _until_ready(self) -> None:
        loop = asyncio.get_running_loop()
        begin = reported = loop.time()
        server = ServerClient(self.url)
        try:
            while not await server.answers("/health"):
                now = loop.time()
                if self._process.status is not None:
                    raise EngineError(await in_thread(self._failure, await self._process.ended()))
                if now - begin > self._start_timeout_s:
                    await self._process.stop()
                    late = f"did not start within {self._start_timeout_s:g} s"
                    raise EngineError(await in_thread(self._failure, f"{late} (start_timeout_s)"))
                if now - reported >= REPORT_EVERY_S:
                    reported = now
                    last = (await in_thread(self.tail, 1) or ["its log is empty"])[0]
                    self._report(f"{self.spec.name}: {now - begin:.0f} s: {last}")
                await asyncio.sleep(POLL_S)
        finally:
            await server.close()
        self._report(f"{self.spec.name}: ready after {loop.time() - begin:.0f} s")

    async def _keep(self) -> None:
        """Restart the server when it dies, up to the limit."""
        while True:
            how = await self._process.ended()
            logger.warning("%s", await in_thread(self._failure, f"died: it {how}"))
            pause_s = self._restarts.lost()
            if pause_s is None:
                logger.error("%s: died %d times, not restarted", self.spec.name, MAX_RESTARTS)
                return
            await asyncio.sleep(pause_s)
            try:
                await self._start()
            except EngineError as error:
                logger.warning("%s", error)
                await self._process.stop()  # frees its port for the next start

    def tail(self, count: int) -> list[str]:
        """The last `count` lines of its log."""
        lines = log_tail(self.log, TAIL_BYTES).splitlines()
        return [line[:MAX_LINE] for line in lines if line.strip()][-count:]

    def _failure(self, what: str) -> str:
        """The failure as text, with its most likely cause in the log, and the end of the log."""
        lines = self.tail(MAX_LINES)
        cause = root_cause(lines)
        why = f"\n{cause}\n" if cause else "\n"
        tail = "\n".join(f"    {line}" for line in lines[-NUM_TAIL_LINES:])
        return f"{self.spec.name} {what}:{why}the end of {self.log}:\n{tail}"


_EXCEPTION = re.compile(r"(?:\([^)]*\) )?(?:ERROR [^\]]*\] ?)?\s*([\w.]+(?:Error|Exception): \S.*)")
WRAPPERS = ("See root cause above", "Engine core initialization failed", "Rank 0 scheduler died")
NO_MEMORY = re.compile(r"Free memory on device|[Oo]ut of memory|[Nn]ot enough memory")


def root_cause(lines: Sequence[str]) -> str:
    """The most likely cause of a failure: the first exception since the last start, except those
    about the end of another process, with a remedy if one is known; else the last line with
    "error"; else empty.

    Engines compute in child processes: the last exception of a log is that of the parent, which
    only reports the end of a child.
    """
    start = max((i for i, line in enumerate(lines) if line.startswith("$ ")), default=-1)
    lines = lines[start + 1 :]
    found = [match[1].strip() for line in lines if (match := _EXCEPTION.match(line))]
    causes = [one for one in found if not any(wrapper in one for wrapper in WRAPPERS)]
    if not causes:
        return next((line.strip() for line in reversed(lines) if "rror" in line), "")
    if NO_MEMORY.search(causes[0]):
        return (
            f"{causes[0]}\nlower gpu_memory_share of the servers, or free the GPU: nvidia-smi "
            "lists the processes that hold its memory"
        )
    return causes[0]


@dataclass(eq=False)
class ServerFactory:
    """Starts the servers of a run. `folder`: for their logs; None: a temporary one. `stack` stops
    the servers."""

    folder: Path | None
    stack: AsyncExitStack
    report: Callable[[str], None]

    def __post_init__(self) -> None:
        self.processes: list[ServerProcess] = []
        self._ports: set[int] = set()

    @cached_property
    def _folder(self) -> Path:
        folder = self.folder
        if folder is None:
            folder = own = Path(tempfile.mkdtemp(prefix="agentenv-logs-"))
            # kept after a failure, whose reason the logs may show
            self.stack.push(
                lambda failed, *_: None if failed else shutil.rmtree(own, ignore_errors=True)
            )
        return folder.absolute() / LOG_FOLDER

    @cached_property
    def gpus(self) -> GpuPlan:
        """The visible GPUs and their owners."""
        return GpuPlan()

    async def start(self, served: Served, config: LaunchConfig, key: str) -> list[str]:
        """Start the servers of one role and wait for all; returns their URLs.

        `key`: the setting that errors name. Raises ConfigError for an impossible configuration, and
        EngineError for a server that fails to start.
        """
        started = await in_thread(self._made, served, config, key)
        for process in started:
            self.stack.push_async_callback(process.close)
        self.processes += started
        async with asyncio.TaskGroup() as group:
            for process in started:
                group.create_task(process.start())
        return [process.url for process in started]

    def follow(self, added: Callable[[str], None], removed: Callable[[str], None]) -> None:
        """Does nothing: local servers keep their URLs."""

    def _made(self, wanted: Served, config: LaunchConfig, key: str) -> list[ServerProcess]:
        """Each server; `wanted` has their common values."""
        number, on_cpu = config.num_servers, self.check(wanted, config, key)
        python = find_python(wanted.engine, config, key)
        gpus: list[str] = []
        cache_bytes = 0
        if not on_cpu:
            gpus = self.gpus.assign(
                f"{key}.gpus", config.gpus, config.num_gpus, borrows=bool(wanted.colocated)
            )
            if config.servers_per_gpu > 1 or wanted.colocated == "at_once":
                cache_bytes = shared_cache(wanted.model, config, gpus[0])
        made, host = [], "127.0.0.1" if config.host in ("0.0.0.0", "::", "") else config.host
        for index in range(number):
            served = replace(
                wanted,
                model=wanted.model.absolute(),
                port=self._port(config, index, key),
                gpus=config.gpus_of(index, gpus),
                on_cpu=on_cpu,
                cache_bytes=cache_bytes,
            )
            name = f"{wanted.name}-{index}" if number > 1 else wanted.name
            spec = ProcessSpec(
                name,
                command(python, served, config),
                environment(served, config),
                str(self._folder / f"{name}.log"),
                # a working directory without modules that could shadow the engine's
                cwd=str(self._folder),
            )
            url = f"http://{host}:{served.port}"
            made.append(ServerProcess(spec, url, config.start_timeout_s, self.report))
        return made

    def check(self, wanted: Served, config: LaunchConfig, key: str) -> bool:
        """Raises ConfigError for an impossible configuration, or a model that its servers cannot
        serve here. Returns whether they run on the CPU."""
        if config.servers_per_gpu > 1 and wanted.engine != "vllm":
            raise ConfigError(f"{key}.servers_per_gpu: only vLLM's servers can share a GPU")
        if not wanted.model.is_dir():
            raise ConfigError(f"{key}: {wanted.model} is not a model directory")
        on_cpu = self._on_cpu(config, key)
        command("", replace(wanted, on_cpu=on_cpu), config)
        return on_cpu

    def _on_cpu(self, config: LaunchConfig, key: str) -> bool:
        on_cpu = config.device == "cpu" or (config.device == "auto" and not self.gpus.visible)
        if not on_cpu:
            return False
        if config.gpus:
            raise ConfigError(
                f"{key}.gpus: {config.gpus} are given, but the server runs on the CPU "
                f"({'as configured' if config.device == 'cpu' else 'no GPU is visible'})"
            )
        if config.gpus_each > 1:
            raise ConfigError(
                f"{key}: tensor_parallel_size and data_parallel_size need GPUs; none is visible"
            )
        return True

    def _port(self, config: LaunchConfig, index: int, key: str) -> int:
        """The port of a server, reserved until the end of the run, also during restarts."""
        wanted = config.port + index if config.port else 0
        if wanted in self._ports:
            raise ConfigError(f"{key}.port: {wanted} already belongs to another server of this run")
        try:
            held = self.stack.enter_context(hold_port(config.host, wanted))
        except OSError as error:
            raise ConfigError(
                f"{key}.port: {config.host}:{wanted} cannot be used: {error.strerror}"
            ) from error
        port = port_of(held)
        self._ports.add(port)
        return port


# tables of the configuration that may name a role
READERS = ("env", "grader", "search", "python", "assist")
PLACE = re.compile(r"\{role:([^{}]*)\}")

C = TypeVar("C", bound=msgspec.Struct)


def check_roles(config: msgspec.Struct) -> None:
    """Raises ConfigError for roles with an unknown name, missing roles, and unused roles."""
    roles: Mapping[str, RoleConfig] = getattr(config, "roles", {})
    for name in roles:
        if name == "policy":
            raise ConfigError("roles.policy: [engine] serves the policy")
        if name not in ROLES:
            raise ConfigError(f"roles.{name}: unknown role; known: {', '.join(ROLES)}")
    read = {
        name: key
        for key in READERS
        for table in _tables(config, key)
        for name in PLACE.findall(_text(table))
    }
    for name, key in read.items():
        if name not in roles:
            raise ConfigError(
                f"{key} uses {{role:{name}}}, but [roles.{name}] is missing; available: "
                f"{sorted(roles) or 'none'}"
            )
    algorithm = getattr(config, "algorithm", None)
    teach, hint = getattr(algorithm, "teach", 0.0), getattr(algorithm, "hint", "")
    if teach and "teacher" not in roles and not hint:
        raise ConfigError(
            f"algorithm.teach = {teach:g} has no teacher; set roles.teacher.model, with "
            'roles.teacher.engine = "learner" for a model on the learner\'s ranks, its url, or '
            'algorithm.hint = "sibling"'
        )
    for name, role in roles.items():
        if bool(role.url) == bool(role.model):
            raise ConfigError(f"roles.{name}: set exactly one of url and model")
        if role.engine == "learner" and role.url:
            raise ConfigError(f"roles.{name}: the learner loads a model; expected no url")
        if role.engine == "learner" and name != "teacher":
            raise ConfigError(f'roles.{name}.engine = "learner" serves roles.teacher alone')
        if name == "teacher" and teach:
            continue
        if name == "teacher":
            raise ConfigError(
                "roles.teacher is unused: algorithm.teach is 0; set its weight, or "
                'algorithm.name = "distill"'
            )
        if name not in read:
            raise ConfigError(
                f"roles.{name} is unused: no text in {', '.join(READERS)} contains "
                f"'{{role:{name}}}', e.g. grader.judge.url = '{{role:{name}}}/v1'"
            )


async def start_servers(
    roles: Mapping[str, RoleConfig], resolve: Any, factory: ServerFactory
) -> dict[str, str]:
    """Start the servers of all roles; returns their URLs by name."""
    urls: dict[str, str] = {}
    for name, role in roles.items():
        if role.url:
            urls[name] = role.url.rstrip("/")
        if not role.is_launched:
            continue
        model = await in_thread(find_checkpoint, resolve(role.model))
        key = read_key(role.api_key_env, f"roles.{name}.api_key_env")
        served = Served(role.engine, model, name, role.max_model_len, key=key)
        (urls[name],) = await factory.start(served, role, f"roles.{name}")
    return urls


def fill_roles(config: C, urls: Mapping[str, str]) -> C:
    """`config` with each {role:NAME} in the tables READERS replaced by its URL."""
    changed: dict[str, Any] = {}
    for key in READERS:
        table = getattr(config, key, None)
        filled = PLACE.sub(lambda match: urls[match[1]], text := _text(table))
        if filled != text:
            raw = msgspec.json.decode(filled)
            changed[key] = msgspec.convert(raw, type(table), dec_hook=decode_part)
    return msgspec.structs.replace(config, **changed) if changed else config


def _text(table: Any) -> str:
    """A table as JSON."""
    return msgspec.json.encode(table).decode()


def _tables(config: msgspec.Struct, key: str) -> list[Any]:
    """The tables with the name `key`: of all sets of an evaluation, else of the configuration."""
    sets = [one for one in getattr(config, "sets", {}).values() if hasattr(one, key)]
    return [getattr(one, key, None) for one in sets or [config]]
