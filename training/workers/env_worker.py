"""An environment process: `python -m agentenv.training.workers.env_worker`, which
assembly/parts/environments.py starts.
"""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from pathlib import Path

from agentenv.assembly.parts.env_processes import read_env_setup
from agentenv.assembly.parts.environments import EnvMaker, EnvSettings
from agentenv.base.config import Reporter, build_config, resolver
from agentenv.cluster.envs import EnvHost
from agentenv.contract.env import close_shared
from agentenv.processes.link import Link
from agentenv.training.workers.worker_process import main


async def build(
    frame: bytes, link: Link, stack: AsyncExitStack, report: Reporter, number: int
) -> EnvHost:
    """The server of this process's environments."""
    setup = read_env_setup(frame)
    settings = build_config(EnvSettings, setup.settings, "the host")
    stack.push_async_callback(close_shared)
    make = EnvMaker(settings, resolver(Path(setup.folder)))
    return EnvHost(make, link, settings.limits.env_timeout_s)


if __name__ == "__main__":
    sys.exit(main(build))
