"""Serves models until Ctrl-C (docs/serve.md).

`agentenv serve SUBJECT [key.sub=value ...]` serves a policy (of a run, a checkpoint or a model
directory) over OpenAI's and Anthropic's APIs. `agentenv serve CONFIG.toml` serves auxiliary models,
such as a judge or a summarizer, that several runs and evaluations share.
"""

from __future__ import annotations

import argparse
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentenv.assembly.keys.cluster import ServeConfig
from agentenv.assembly.keys.evaluation import PolicyConfig
from agentenv.assembly.keys.help import KeysParser
from agentenv.assembly.parts.assembly import Assembly, constraints_of, start_engine
from agentenv.assembly.run.exits import exit_code_of, run_until_done
from agentenv.assembly.run.rundir import RunDirectory
from agentenv.assembly.run.terminal import View
from agentenv.assembly.serving.gpus import gpus_for_others
from agentenv.assembly.serving.servers import ServerFactory, start_servers
from agentenv.base.config import Reporter, build_config, resolver
from agentenv.base.errors import ConfigError
from agentenv.base.installation import require_train
from agentenv.base.offload import in_thread
from agentenv.base.types import Limits
from agentenv.contract.server_config import read_key
from agentenv.evaluation.subject import Subject, configured, find_subject
from agentenv.launchers.command import add_subject, make_parser, parse, run_command, until_stopped

if TYPE_CHECKING:
    from agentenv.endpoint.policy import PolicyHandler

NUM_KEY_BYTES = 24


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 stopped, 1 failed with a reason, 2 bad input."""
    if any(text.endswith(".toml") and "=" not in text for text in argv[:1]):
        parser = make_parser(
            "agentenv serve",
            "Serve models that assist the policy, until Ctrl-C.",
            ServeConfig,
            example="configs/server_judge.toml",
            resumes=False,
        )
        return run_command(parse(parser, argv), ServeConfig, serve)
    parser = KeysParser(
        prog="agentenv serve",
        usage="agentenv serve SUBJECT [key.sub=value ...] [options]",
        description="Serve the policy of a run, a checkpoint or a model directory over the APIs of "
        "OpenAI and Anthropic; with CONFIG.toml as SUBJECT, models such as a judge.",
    )
    add_subject(parser, PolicyConfig, "model directory or id on the hub")
    return exit_code_of(partial(_run, parser.parse_intermixed_args(argv)), "stopping")


async def serve(config: ServeConfig, run: RunDirectory, view: View, resume: str) -> None:
    """Start all servers, print their addresses, and wait for a signal."""
    async with AsyncExitStack() as stack:
        factory = ServerFactory(run.path, stack, view.log)
        urls = await start_servers(config.roles, resolver(run.path), factory)
        shown = "{0} is at {1}: 'roles.{0}={{url=\"{1}\"}}'".format
        await until_stopped(view, [shown(*one) for one in urls.items()])


def _run(arguments: argparse.Namespace, view: View) -> int:
    """Serve the subject of the arguments; returns the exit code."""
    require_train("torch", "transformers")
    subject = find_subject(arguments.subject, checkpoint=arguments.checkpoint, report=view.log)
    if subject.model is None:
        raise ConfigError(f"{arguments.subject} is an endpoint; expected a run or a model")
    known = {key: value for key, value in subject.raw.items() if key in _OF_RUN}
    subject, build = subject._replace(raw=known), partial(build_config, PolicyConfig)
    config = configured(arguments, subject, PolicyConfig, build, view.log)
    view.wait_for("starting the engine", "the address")
    with gpus_for_others(config):
        served = serve_policy(config, subject, view.log, partial(until_stopped, view))
        run_until_done(served, view)
    return 0


_OF_RUN = ("prompt", "renderer", "sampling", "engine")


async def serve_policy(
    config: PolicyConfig,
    subject: Subject,
    report: Reporter,
    until: Callable[[Sequence[str]], Awaitable[None]],
) -> None:
    """Start the engine, listen, and serve until `until` returns, which gets lines about how to
    reach the model."""
    from agentenv.endpoint.server import ApiServer

    key = read_key(config.api_key_env, "api_key_env") or secrets.token_urlsafe(NUM_KEY_BYTES)
    async with AsyncExitStack() as stack:
        assembly = PolicyAssembly(config, subject.run, stack, report, subject=subject)
        handler = await assembly.handler()
        name, created = handler.names[0], int(time.time())
        created_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created))
        model = {
            "id": name, "object": "model", "type": "model", "display_name": name,
            "owned_by": "agentenv", "root": str(subject.model), "created": created,
            "created_at": created_at, "max_model_len": handler.max_model_len,
        }  # fmt: skip
        server = ApiServer(lambda _: handler, lambda: [model], created, key)
        stack.push_async_callback(server.close)
        await server.start(config.host, config.port)
        url = f"http://{config.host}:{server.port}"
        shown = f"${config.api_key_env}" if config.api_key_env else key
        lines = [
            f"{name} is at {url}",
            f"OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={shown}",
            f"ANTHROPIC_BASE_URL={url} ANTHROPIC_API_KEY={shown}",
            "Ctrl-C stops the server; in another terminal, with the variables above:",
            f'  curl {url}/v1/models -H "Authorization: Bearer $OPENAI_API_KEY"',
        ]
        await until(lines)


@dataclass(eq=False)
class PolicyAssembly(Assembly[PolicyConfig]):
    """Builds the parts of one served policy."""

    subject: Subject = field(kw_only=True)

    async def model(self) -> Path:
        """The directory of the subject."""
        return await self.own_model(str(self.subject.model))

    async def handler(self) -> PolicyHandler:
        """The endpoint's handler, with its engine started."""
        from agentenv.endpoint.policy import PolicyHandler

        config = self.config
        context = await in_thread(config.engine.max_context, await self.model())
        limits = Limits(max_prompt_tokens=1, max_response_tokens=context - 1)
        renderer: Any = await self.renderer(config.prompt)
        engine = await start_engine(self, limits, ServerFactory(None, self.stack, self.report))
        sampling = config.sampling.params()
        names = (config.name or self.subject.name, str(self.subject.model))
        constraints = constraints_of(config.engine, config.sampling, "sampling", "engine")
        prefix, most = secrets.token_hex(4), config.max_tokens
        return PolicyHandler(
            engine, renderer, sampling, context, names, most, prefix=prefix, constraints=constraints
        )
