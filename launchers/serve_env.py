"""Serves an environment over the OpenEnv protocol:
`agentenv serve-env SUBJECT [key.sub=value ...]`.

SUBJECT is a run, the configuration of one, or the id of an environment, with its questions in
data.train. The splits of the server are "train" and the evaluation sets, by name
(docs/openenv.md). It serves until Ctrl-C.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from msgspec.structs import force_setattr

from agentenv.assembly.keys.help import KeysParser, add_key_help
from agentenv.assembly.keys.rl import DataConfig, EvalConfig
from agentenv.assembly.parts.assembly import load_set
from agentenv.assembly.parts.environments import EnvMaker, EnvSettings
from agentenv.assembly.run.exits import exit_code_of, run_until_done
from agentenv.assembly.run.rundir import CONFIG_FILE
from agentenv.assembly.run.terminal import View
from agentenv.base.config import Reporter, Resolve, Tree, build_config, read_toml, resolver
from agentenv.base.errors import ConfigError
from agentenv.base.overrides import blaming, override_kinds
from agentenv.base.types import Limits
from agentenv.contract.env import close_shared
from agentenv.contract.server_config import ClientKeyEnv, ListenHost, ListenPort, read_key
from agentenv.endpoint.openenv import EnvServer
from agentenv.evaluation.store import load_run_config
from agentenv.launchers.command import until_stopped
from agentenv.text.prompt import PromptConfig


class ServeEnvConfig(EnvSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of `agentenv serve-env`; for a run, all but the last come from the run."""

    limits: Limits = Limits()
    prompt: PromptConfig = PromptConfig()
    data: DataConfig
    eval: EvalConfig = EvalConfig()
    host: ListenHost = "127.0.0.1"
    port: ListenPort = 8000
    api_key_env: ClientKeyEnv = ""

    def __post_init__(self) -> None:
        force_setattr(self, "eval", self.eval.with_sources_of(self.data))


_OF_RUN = (*EnvSettings.__struct_fields__, "data", "eval")


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 stopped, 1 failed with a reason, 2 bad input, 130 interrupted during
    the start-up."""
    parser = KeysParser(
        prog="agentenv serve-env",
        usage="agentenv serve-env SUBJECT [key.sub=value ...]",
        description="Serve an environment over the OpenEnv protocol, until Ctrl-C.",
    )
    subject = "run, CONFIG.toml of a run, or environment id (with data.train=FILE)"
    parser.add_argument("subject", metavar="SUBJECT", help=subject)
    parser.add_argument("overrides", nargs="*", default=[], metavar="key.sub=value")
    add_key_help(parser, ServeEnvConfig)
    return exit_code_of(partial(_run, parser.parse_intermixed_args(argv)), "stopping")


def _run(arguments: argparse.Namespace, view: View) -> int:
    raw, folder = _settings_of(arguments.subject)
    override_kinds(ServeEnvConfig, raw, arguments.overrides, view.log)
    if "data" not in raw:
        raise ConfigError(
            f"{arguments.subject}: neither a run nor a configuration with [data]; to serve an "
            "environment by its id, set its questions with data.train=FILE"
        )
    with blaming(arguments.subject, arguments.overrides):
        config = build_config(ServeEnvConfig, raw, arguments.subject)
    run_until_done(_until_stopped(config, resolver(folder), view), view)
    return 0


def _settings_of(subject: str) -> tuple[Tree, Path]:
    """The settings of the subject, and the folder that {run} expands to."""
    path = Path(subject)
    if (path / CONFIG_FILE).is_file():
        raw, folder = load_run_config(path), path
    elif path.suffix == ".toml":
        raw = read_toml(path)
        run = raw.get("run", {})
        folder = Path(run.get("dir", "runs")) / (run.get("name") or path.stem)
    elif path.is_dir():
        raise ConfigError(f"{subject}: not the folder of a run (no {CONFIG_FILE} in it)")
    else:
        raw, folder = {"env": {"id": subject}}, Path()
    return {
        key: value for key, value in raw.items() if key in _OF_RUN and value is not None
    }, folder


async def _until_stopped(config: ServeEnvConfig, resolve: Resolve, view: View) -> None:
    view.wait_for("reading the questions", "the address")
    async with AsyncExitStack() as stack:
        stack.push_async_callback(close_shared)
        server = await env_server(config, resolve, view.log)
        stack.push_async_callback(server.close)
        await server.start(config.host, config.port)
        url = f"http://{config.host}:{server.port}"
        await until_stopped(view, _address(server.name, url, config.api_key_env))


def _address(name: str, url: str, key_variable: str) -> list[str]:
    """How to stop the server, query it, and train on it."""
    key = f' -H "Authorization: Bearer ${key_variable}"' if key_variable else ""
    return [
        f"{name} is at {url}",
        "Ctrl-C stops the server; in another terminal:",
        f"  curl {url}/metadata{key}",
        "or in the configuration of a run (docs/openenv.md):",
        '  env.id = "agentenv/OpenEnv-v0"',
        f'  env.kwargs.url = "{url}"',
        f'  data.train = "openenv:{url}"',
    ]


async def env_server(config: ServeEnvConfig, resolve: Resolve, report: Reporter) -> EnvServer:
    """The server, which does not listen yet. Raises ConfigError and DataError."""
    key = read_key(config.api_key_env, "api_key_env")
    env_id, make_env = config.env.id, EnvMaker(config, resolve)
    splits = {"train": await load_set(config.data, env_id, resolve, report)}
    for name, one in config.eval.sets.items():
        splits[name] = await load_set(one, env_id, resolve, report, name)
    make_env.check_read([task for tasks in splits.values() for task in tasks])
    return EnvServer(
        env_id.rpartition("/")[2].rpartition(":")[2],
        make_env,
        splits,
        key=key,
        timeout_s=config.limits.max_seconds,
    )
