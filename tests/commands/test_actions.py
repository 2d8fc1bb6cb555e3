"""Actions between two steps: a failure is reported to the asker, and ends the run only if it breaks
the learner or is a bug."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentenv.base.errors import EnvError, LearnerError
from agentenv.training.loop.loop import PendingActions


@pytest.mark.parametrize(
    ("error", "told", "ends"),
    [
        (EnvError("the judge is away"), EnvError, False),
        (OSError(28, "full"), OSError, False),
        (LearnerError("a rank died"), LearnerError, True),
        (ZeroDivisionError(), LearnerError, True),
    ],
)
async def test_an_action_that_fails(error: Exception, told: type[Exception], ends: bool) -> None:
    actions = PendingActions()

    async def work() -> Any:
        raise error

    try:
        async with asyncio.TaskGroup() as actions.group:
            placed = asyncio.create_task(actions.run(work))
            await asyncio.wait([placed])
    except ExceptionGroup:
        assert ends
    else:
        assert not ends
    with pytest.raises(told):
        await placed


async def test_an_action_waits_for_the_end_of_a_step_and_survives_its_client() -> None:
    actions, done = PendingActions(), []

    async def work() -> int:
        done.append(len(done))
        return done[-1]

    async with asyncio.TaskGroup() as actions.group:
        async with actions.weights_at_rest:
            placed = [asyncio.create_task(actions.run(work)) for _ in range(2)]
            await asyncio.sleep(0.01)
            assert not done
            placed[0].cancel()  # the client disconnected, its action remains
        assert await placed[1] == 1
    assert done == [0, 1]
    actions.group = None
    with pytest.raises(LearnerError, match="is ending"):
        await actions.run(work)
