"""What is refused about [assist] before anything is asked."""

from __future__ import annotations

from collections.abc import Mapping

from agentenv.assist import Assist
from agentenv.env import Env
from agentenv.errors import ConfigError
from launchers.evaluation.run_config import EvaluateConfig


def check_assist(config: EvaluateConfig) -> None:
    """Raises ConfigError for a table without any helper, and for a refiner that no limit lets
    begin."""
    if config.assist is None:
        return
    if config.assist == type(config.assist)():
        raise ConfigError(
            "assist: no helper is given; expected [assist.debugger], [assist.backtracer] or "
            "[assist.refiner]"
        )
    refiner = config.assist.refiner
    if refiner is None:
        return
    rooms = {
        name: one.limits.max_response_tokens
        for name, one in config.sets.items()
        if one.limits is not None
    }
    if all(room <= refiner.min_response_tokens for room in rooms.values()):
        raise ConfigError(
            f"assist.refiner.min_response_tokens = {refiner.min_response_tokens} is never reached: "
            f"limits.max_response_tokens is {max(rooms.values())}; expected less than that"
        )


async def check_envs(assist: Assist, envs: Mapping[str, Env]) -> None:
    """Raises ConfigError where a set's env cannot go back, or none has the tool that the debugger
    is for. Closes the envs."""
    modes = {name: env.fork_mode for name, env in envs.items()}
    fitting = [name for name, env in envs.items() if assist.fits(env)]
    for env in envs.values():
        await env.close()
    config = assist.config
    if config.backtracer is not None:
        for name, mode in modes.items():
            if mode == "none":
                raise ConfigError(
                    f"assist.backtracer: the environment of sets.{name} cannot be forked, so no "
                    "turn can be taken again; take the table out"
                )
    if config.debugger is not None and not fitting:
        raise ConfigError(
            f"assist.debugger: no set's environment has a tool {config.debugger.tool!r}; name "
            "the one that runs code with assist.debugger.tool, or take the table out"
        )
