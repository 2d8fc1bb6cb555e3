"""Starts models beside the policy, a judge or a summarizer, for runs and evaluations to share:
`agentenv serve CONFIG [key.sub=value ...]`, until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

from agentenv.launchers.command import make_parser, parse, run_command
from agentenv.pipelines.config.cluster import ServeConfig
from agentenv.pipelines.run.rundir import RunDirectory
from agentenv.pipelines.run.terminal import View
from agentenv.pipelines.serving.servers import ServerFactory, start_servers


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 stopped, 1 failed with a reason, 2 bad input."""
    parser = make_parser(
        "agentenv serve",
        "Start models beside the policy, until Ctrl-C.",
        ServeConfig,
        example="configs/server_judge.toml",
        resumes=False,
    )
    return run_command(parse(parser, argv), ServeConfig, serve)


async def serve(config: ServeConfig, run: RunDirectory, view: View, resume: str) -> None:
    """Start all, say their addresses, and wait for a signal."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        factory = ServerFactory(run.path, stack, view.say)
        urls = await start_servers(config.roles, run.resolve, factory)
        for name, url in urls.items():
            view.say(f"{name} is at {url}: 'roles.{name}={{url=\"{url}\"}}'")
        await stop.wait()
        view.say("stopping")


if __name__ == "__main__":
    sys.exit(main())
