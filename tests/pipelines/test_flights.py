"""Orders between two steps: one that fails is told to who placed it, and ends the run only where it
breaks the learner."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentenv.errors import EnvError, LearnerError
from agentenv.pipelines.rl.inflight import Orders


@pytest.mark.parametrize(
    ("error", "told", "ends"),
    [
        (EnvError("the judge is away"), EnvError, False),
        (ExceptionGroup("of a group of tasks", [EnvError("the judge is away")]), EnvError, False),
        (OSError(28, "full"), OSError, False),
        (LearnerError("a rank died"), LearnerError, True),
        (ExceptionGroup("of a group of tasks", [LearnerError("a rank died")]), LearnerError, True),
        (ZeroDivisionError(), LearnerError, True),
    ],
)
async def test_an_order_that_fails(error: Exception, told: type[Exception], ends: bool) -> None:
    orders = Orders()

    async def work() -> Any:
        raise error

    placed = asyncio.create_task(orders.place(work))
    await asyncio.sleep(0)
    if ends:
        with pytest.raises(type(error)):
            await orders.carry_out()
    else:
        await orders.carry_out()
    with pytest.raises(told):
        await placed
