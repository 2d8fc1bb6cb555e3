"""Resources that all episodes of a process share: search indexes, sandboxes, HTTP sessions.

An env class asks for one by key when it is made; the first asker builds it. Whoever started the
run closes them all at its end. So an env needs no factory and no global of its own:

    index = shared(("bm25", corpus), lambda: BM25Index.load(corpus))
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

T = TypeVar("T")

_resources: dict[Hashable, Any] = {}


def shared(key: Hashable, build: Callable[[], T]) -> T:
    """The live resource of `key`, built now if there is none. `build` may raise ConfigError."""
    if key not in _resources:
        _resources[key] = build()
    return cast(T, _resources[key])


async def close_shared() -> None:
    """Close every shared resource, last built first; those without `close` are just dropped."""
    while _resources:
        _, resource = _resources.popitem()
        close = getattr(resource, "close", None)
        if close is not None:
            outcome = close()
            if inspect.isawaitable(outcome):
                await outcome
