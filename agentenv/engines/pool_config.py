"""Settings of the engine pool: budgets, deadlines, concurrency."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class PoolConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a pool treats its servers and the requests on them."""

    max_retries: Annotated[
        int, Meta(ge=0, description="times a turn is sent again after its server was lost")
    ] = 5
    first_backoff_s: Annotated[
        float, Meta(gt=0, description="longest wait before the first retry; doubles with each")
    ] = 0.5
    max_backoff_s: Annotated[float, Meta(gt=0, description="longest wait before a retry")] = 30.0
    max_outage_s: Annotated[
        float, Meta(gt=0, description="the run ends when all servers are gone for this long")
    ] = 600.0
    load_timeout_s: Annotated[
        float, Meta(gt=0, description="deadline of one server for one update of its weights")
    ] = 600.0
    broadcast_timeout_s: Annotated[
        float,
        Meta(gt=0, description="deadline of a broadcast for its group, and for each tensor"),
    ] = 60.0
    poll_interval_s: Annotated[
        float, Meta(gt=0, description="between two looks at a server's health and load")
    ] = 1.0
    poll_timeout_s: Annotated[
        float, Meta(gt=0, description="a server that does not say its load for this long is lost")
    ] = 60.0
    initial_concurrency: Annotated[
        int, Meta(ge=1, description="requests in flight on a server, before its load is known")
    ] = 64
    max_concurrency: Annotated[
        int, Meta(ge=1, description="most requests in flight on one server, whatever its load")
    ] = 2048
    check_weights: Annotated[
        bool,
        Meta(
            description="after each update, compare the servers' checksums with those of the "
            "published directory and of the first server that took it (where an engine tells "
            "none: the log-prob of a token)"
        ),
    ] = True
