"""ToolEnv: an episode, its calls, retries and grading."""

from __future__ import annotations

import asyncio

import pytest

from agentenv.base import errors
from agentenv.base.deadline import WorkClock, working
from agentenv.base.types import MALFORMED_CALL, UNKNOWN_TOOL, Limit, Message, ToolCall
from agentenv.contract.env import close_shared
from agentenv.contract.tool_env import PIECE_CHARS
from tests.support.begun import begun
from tests.support.counting_tools import ANSWER, Counter, LastMessage, call, make
from tests.support.virtual_clock import on_virtual_clock


async def test_an_episode() -> None:
    counter = Counter()
    env = make(counter, prompt="Count.")
    messages, info = await env.reset(seed=1)
    assert messages == [Message("system", "Count."), Message("user", "how many?")]
    assert info["tools"] == [
        {"name": "counter", "description": "Counts.", "parameters": Counter.schema}
    ]
    observation, reward, terminated, truncated, info = await env.step(call(by=2))
    assert observation == [Message("tool", "2", name="counter")]
    assert (reward, terminated, truncated) == (0.0, False, False)
    (record,) = info["tool_calls"]
    assert record.pop("duration_s") >= 0
    called = {"name": "counter", "arguments": {"by": 2}, "info": {"seen": 2}}
    assert record == {**called, "ok": True, "error": None}
    observation, reward, terminated, truncated, info = await env.step(ANSWER)
    assert (observation, reward, terminated, truncated) == ([], 1.0, True, False)
    assert info == {"tool_calls": [], "success": True, "parts": {"calls": 1.0}, "reason": "looked"}
    await env.close()
    assert not counter.open


async def test_several_calls_run_in_order() -> None:
    async with begun(make(Counter(), Counter(name="other"))) as env:
        calls = (ToolCall("counter", {}), ToolCall("other", {"by": 5}), ToolCall("counter", {}))
        observation, *_ = await env.step(Message("assistant", "", calls))
        expected = [("counter", "1"), ("other", "5"), ("counter", "2")]
        assert [(message.name, message.content) for message in observation] == expected


async def test_the_policy_reads_tool_errors_and_they_do_not_count() -> None:
    async with begun(make(Counter(errors.ToolError("count what?")))) as env:
        observation, *_, info = await env.step(call())
        assert observation[0].content == "count what?"
        assert (info["tool_calls"][0]["ok"], info["tool_calls"][0]["error"]) == (
            False,
            "count what?",
        )
        observation, *_, info = await env.step(call("bing"))
        assert "'bing'" in observation[0].content
        assert info["tool_calls"][0]["name"] == UNKNOWN_TOOL  # a metric has its name
        *_, info = await env.step(ANSWER)
        assert info["parts"] == {"calls": 0.0}


async def test_the_record_of_a_huge_error_keeps_head_and_tail() -> None:
    """It is stored in the tree, the journal, the archive and frames of workers; the policy reads
    its text like any result."""
    text = "head" + "x" * 5_000_000 + "tail"
    fault = errors.ToolError(text, {"log": text, "tries": [{"code": text, "number": 3}]})
    async with begun(make(Counter(fault))) as env:
        observation, *_, info = await env.step(call())
        assert observation[0].content == text
        (record,) = info["tool_calls"]
        (tried,) = record["info"]["tries"]
        for kept in (record["error"], record["info"]["log"], tried["code"]):
            assert kept.startswith("headx")
            assert kept.endswith("xtail")
            assert len(kept) < 5000
        assert tried["number"] == 3


@pytest.mark.parametrize("half", ["", chr(0xD83D)], ids=["text", "half a pair"])
async def test_the_check_of_a_very_long_result_does_not_block_the_loop(half: str) -> None:
    size = 8 * PIECE_CHARS
    counter = Counter(errors.ToolError("\u597d" * (size - 1) + half + "\u597d" * size))
    async with begun(make(counter)) as env:
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(others())
        observation, *_ = await env.step(call())
        beside.cancel()
        expected = "\u597d" * (size - 1) + "?" * len(half) + "\u597d" * size
        assert observation[0].content == expected
        assert turns > 10


@pytest.mark.parametrize("arguments", [{}, {"problem": ["x"]}, {"other": 1}])
async def test_the_policy_may_call_the_reserved_name_of_malformed_calls(
    arguments: dict[str, object],
) -> None:
    async with begun(make(Counter())) as env:
        action = Message("assistant", "", (ToolCall(MALFORMED_CALL, arguments),))
        *_, info = await env.step(action)
        assert not info["tool_calls"][0]["ok"]


@on_virtual_clock
async def test_infrastructure_is_retried_and_never_shown() -> None:
    counter = Counter(errors.InfraError("gone"), errors.InfraError("gone"))
    async with begun(make(counter), seed=4) as env:
        loop = asyncio.get_running_loop()
        start = loop.time()
        observation, *_ = await env.step(call())
        assert observation[0].content == "1"
        assert 0.3 <= loop.time() - start <= 0.45  # 0.1 and 0.2 s, jittered


@on_virtual_clock
async def test_the_seconds_of_a_failed_attempt_are_recorded_as_waiting() -> None:
    """Two tries of 3 s, one of which fails; the break between them is 0.1 s, and up to half as
    long again."""
    async with begun(make(Counter(errors.InfraError("gone"), latency_s=3.0))) as env:
        with working(WorkClock()) as clock:
            *_, info = await env.step(call())
            assert clock() == pytest.approx(3.0)
        (record,) = info["tool_calls"]
        assert record["duration_s"] - record["waited_s"] == pytest.approx(3.0)


@pytest.mark.parametrize(("outage_s", "num_tries"), [(0.0, 3), (60.0, 12)])
@on_virtual_clock
async def test_an_infrastructure_outage_is_awaited_for_outage_s_and_then_fails(
    outage_s: float, num_tries: int
) -> None:
    """0.1 s, doubled up to 10 s, each up to half as long again, so 11 waits until 60 s are over."""
    counter = Counter(*[errors.InfraError(f"gone {i}") for i in range(99)])
    async with begun(make(counter, outage_s=outage_s), seed=4) as env:
        with pytest.raises(errors.OutageError, match=f"failed {num_tries} times"):
            await env.step(call())
        assert outage_s <= asyncio.get_running_loop().time() <= outage_s + 15


@on_virtual_clock
async def test_a_tool_outage_is_logged_once_a_minute_and_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """However many rollouts wait for it."""
    await close_shared()  # state of other tests
    counter = Counter(*[errors.InfraError("connection refused")] * 400)
    envs = [make(counter, outage_s=100.0) for _ in range(8)]
    for env in envs:
        await env.reset(seed=4)
    await asyncio.gather(*(env.step(call()) for env in envs), return_exceptions=True)
    for env in envs:
        await env.close()
    await close_shared()
    told = [one for one in caplog.records if "retrying for up to 100 s" in one.message]
    assert len(told) == 2
    assert told[0].message.endswith("connection refused")
    assert told[0].shown  # type: ignore[attr-defined]


@on_virtual_clock
async def test_a_tool_that_hangs_is_stopped() -> None:
    counter = Counter(latency_s=1000)
    env = make(counter, tool_timeout_s=2, num_retries=1, outage_s=0)
    await env.reset()
    start = asyncio.get_running_loop().time()
    with pytest.raises(errors.EnvError, match="result within 2"):
        await env.step(call())
    assert asyncio.get_running_loop().time() - start < 5
    with pytest.raises(errors.EnvError, match="not closed within"):
        await env.close()


async def test_a_bug_in_a_tool_is_named_with_the_call() -> None:
    async with begun(make(Counter(ZeroDivisionError()))) as env:
        with pytest.raises(errors.CrashError, match=r"'counter'.*ZeroDivisionError"):
            await env.step(call())


async def test_finish_grades_the_messages_so_far() -> None:
    async with begun(make(Counter())) as env:
        await env.step(call())
        reward, info = await env.finish(Limit.TURN_TOKENS, ANSWER)
        assert (reward, info["success"]) == (1.0, True)
        grader = env.grader
        assert isinstance(grader, LastMessage)
        assert grader.seen == [call(), ANSWER]


async def test_an_env_may_only_be_used_between_reset_and_close() -> None:
    env = make(Counter())
    with pytest.raises(errors.EnvError, match="step before reset"):
        await env.step(call())
    await env.close()
    await env.reset()
    await env.close()
    with pytest.raises(errors.EnvError, match="fork before reset"):
        await env.fork()


async def test_a_second_reset_starts_afresh() -> None:
    counter = Counter()
    async with begun(make(counter)) as env:
        await env.step(call())
        await env.reset()
        assert (await env.step(call()))[0][0].content == "1"
        assert len(counter.open) == 1


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(errors.ConfigError, match="share a name"):
        make(Counter(), Counter())


async def test_the_prompt_may_be_a_function() -> None:
    env = make(prompt=lambda task: [Message("user", f"{task.id}: {task.question}")])
    assert (await env.reset())[0] == [Message("user", "t: how many?")]
