"""Deadlines of a configuration that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from agentenv.errors import ConfigError
from agentenv.pipelines.config.rl import TrainConfig


def check_time_outs(config: TrainConfig) -> None:
    """Raises ConfigError for a deadline that is longer than one that it is inside of."""
    problems = list(contradictions(config))
    if problems:
        raise ConfigError(f"{' | '.join(problems)}; an outer deadline must be the longer one")


def contradictions(config: TrainConfig) -> Iterator[str]:
    """Pairs of keys that contradict each other, in words."""
    limits = config.limits
    whole = f"limits.max_seconds = {limits.max_seconds:g}"
    if limits.seconds_of_tree < limits.max_seconds:
        yield (
            f"limits.max_tree_seconds = {limits.seconds_of_tree:g} ends trees before {whole} can "
            "end a trajectory"
        )
    for key, seconds in _timeouts("", {name: getattr(config, name) for name in _OF_TOOLS}):
        if seconds > limits.max_seconds:
            yield f"{key} = {seconds:g} lets one call take longer than {whole}"
    if config.eval.sets and config.eval.timeout_s < limits.max_seconds:
        yield f"eval.timeout_s = {config.eval.timeout_s:g} ends evaluations before {whole}"
    if config.env.workers and config.env.held_s < limits.env_timeout_s:
        yield (
            f"env.held_s = {config.env.held_s:g} kills a process before limits.env_timeout_s = "
            f"{limits.env_timeout_s:g} ends the call"
        )


_OF_TOOLS = ("python", "search", "grader", "env")


def _timeouts(path: str, value: Any) -> Iterator[tuple[str, float]]:
    """Every key `timeout_s` below these tables."""
    if isinstance(value, Struct):
        value = {name: getattr(value, name) for name in value.__struct_fields__}
    elif isinstance(value, list):
        value = {str(number): one for number, one in enumerate(value)}
    if not isinstance(value, dict):
        return
    for name, one in value.items():
        key = f"{path}.{name}" if path else str(name)
        if name == "timeout_s" and isinstance(one, int | float):
            yield key, float(one)
        else:
            yield from _timeouts(key, one)
