"""The LLM judge against a scripted OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agentenv.base.errors import ConfigError, GraderError, InfraError
from agentenv.base.retries import Backoff
from agentenv.base.types import Limit, Message, Task
from agentenv.contract.plan import Independent
from agentenv.contract.request import ServerLostError
from agentenv.contract.tool_env import ToolEnv
from agentenv.envs.grading.judge import Judge
from agentenv.envs.grading.keys import JudgeConfig
from agentenv.envs.grading.reward import AnswerReward, check_grader
from agentenv.text.chat_model import read_reply
from tests.support.judge_server import Cut, JudgeServer, grader_of, judge_of
from tests.support.warehouse import ROOT
from tests.test_actor import make_actor, rollout


@pytest.mark.parametrize(("reply", "score"), [
    ("CORRECT", 1.0), (" correct.\n", 1.0), ("<think>It says CORRECT, but..</think>INCORRECT", 0.0),
    ("The answer is CORRECT", None), ("<think>CORRECT", None),
    ("It is what the template began.</think>\n\nCORRECT", 1.0), ("**CORRECT**", 1.0),
    ("**Incorrect**\n", 0.0), ("```\nINCORRECT\n```\n", 0.0), ('"Incorrect"', 0.0),
    ("\u300cINCORRECT\u300d", 0.0), ("CORRECT \u2713", 1.0), ("\u2705 **Correct**!", 1.0),
    ("\u274c INCORRECT", 0.0), ("(correct)", 1.0), ("<CORRECT>", 1.0), ("> CORRECT\r\n\r\n", 1.0),
    ("CORRECT \u2717", None), ("INCORRECT \u2705", None), ("~~CORRECT~~", None), ("!CORRECT", None),
    ("CORRECT?", None), ("CORRECT, INCORRECT", None), ("CORRECTLY", None),
    ("I cannot help with that.", None), ("", None), (None, None),
])  # fmt: skip
async def test_only_the_word_correct_or_incorrect_is_a_verdict(
    server: JudgeServer, reply: str | None, score: float | None
) -> None:
    """A refusal may also come as a message without content."""
    server.replies = [{"choices": [{"message": {"content": reply, "refusal": "no"}}]}]
    judge = judge_of(server)
    verdict = await judge.verdict("capital?", "the city of light", ["Paris"])
    assert (verdict.right, verdict.score) == (score == 1, score or 0.0)
    assert "the judge" in verdict.reason
    parsed = {} if score is None else {"judge": score}
    assert verdict.parts == {**parsed, "judge_unparsed": float(score is None)}
    assert server.requests[0]["temperature"] == 0
    assert server.requests[0]["model"] == "m"


async def test_verdicts_are_cached_and_equal_questions_are_sent_once(server: JudgeServer) -> None:
    judge = judge_of(server)
    asked = [judge.verdict("q", "a", ["g"]) for _ in range(20)]
    assert all(verdict.right for verdict in await asyncio.gather(*asked))
    assert (await judge.verdict("q", "a", ["g"])).right
    assert len(server.requests) == 1
    await judge.verdict("q", "b", ["g"])
    assert len(server.requests) == 2


async def test_verdicts_are_kept_in_a_file(server: JudgeServer, tmp_path: Path) -> None:
    cache = str(tmp_path / "verdicts.db")
    for number, keys in enumerate(({}, {}, {"max_tokens": 99}, {"extra_body": {"seed": 1}})):
        judge = judge_of(server, cache=cache, **keys)
        assert (await judge.verdict("q", "a", ["g"])).right
        await judge.close()
        assert len(server.requests) == (1, 1, 2, 3)[number]
    (tmp_path / "no").write_text("no database" * 100)
    with pytest.raises(ConfigError, match=r"grader\.judge\.cache"):
        judge_of(server, cache=str(tmp_path / "no"))


async def test_one_cancelled_waiter_does_not_cancel_the_request(server: JudgeServer) -> None:
    judge = judge_of(server)
    first = asyncio.ensure_future(judge.verdict("q", "a", ["g"]))
    second = asyncio.ensure_future(judge.verdict("q", "a", ["g"]))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).right
    assert len(server.requests) == 1


async def test_a_retry_waits_for_the_retry_after_of_a_busy_server(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float, real: Any = asyncio.sleep) -> None:
        slept.append(seconds)
        await real(0)

    server.replies, server.reply_headers = [429, 503, "CORRECT"], {"Retry-After": "7"}
    judge = judge_of(server, num_retries=2)
    monkeypatch.setattr("agentenv.base.retries.REQUESTS", Backoff(0.0, 60.0))
    monkeypatch.setattr("agentenv.base.retries.asyncio.sleep", sleep)
    assert (await judge.verdict("q", "a", ["g"])).right
    waits = [seconds for seconds in slept if seconds]
    assert len(waits) == 2
    assert all(7.0 <= seconds <= 10.5 for seconds in waits)


@pytest.mark.parametrize(
    ("reply", "message", "num_requests", "is_down"),
    [
        (500, "500", 2, True),
        (429, "429", 2, True),
        (401, "401", 1, False),
        (None, "no answer in time", 2, True),
        (Cut(), "ServerDisconnectedError", 2, True),
        ({"error": "no such model"}, "no such model", 2, False),
    ],
)
async def test_only_an_unavailable_judge_server_is_an_infra_error(
    server: JudgeServer, reply: Any, message: str, num_requests: int, is_down: bool
) -> None:
    server.replies = [reply]
    judge = judge_of(server, timeout_s=0.3)
    with pytest.raises(GraderError, match=message) as raised:
        await judge.verdict("q", "a", ["g"])
    assert isinstance(raised.value, InfraError) is is_down
    assert len(server.requests) == num_requests


@pytest.mark.parametrize("ends_by", ["itself", "a limit"])
async def test_an_episode_waits_for_an_unavailable_judge(server: JudgeServer, ends_by: str) -> None:
    server.replies = ["CORRECT", 503, Cut(), 503, "CORRECT"]  # the first is the trial
    task, answer = Task("t", "e", "q", ("Paris",)), Message("assistant", "the city of light")
    judge = judge_of(server, num_retries=0)
    env = ToolEnv(task, [], AnswerReward(judge))
    await env.reset()
    if ends_by == "itself":
        _, reward, *_ = await env.step(answer)
    else:
        reward, _ = await env.finish(Limit.TURN_TOKENS, answer)
    assert reward == 1.0
    assert len(server.requests) == 5
    await env.close()


async def test_the_rules_decide_first_and_an_empty_answer_is_not_sent_to_the_judge(
    server: JudgeServer,
) -> None:
    server.replies = ["INCORRECT"]
    grader = grader_of(server)
    task = Task("t", "e", "q", ("Paris",))
    await check_grader(grader, [task])
    for text, success in (("paris", True), ("", False)):
        grade = await grader.grade(task, [Message("assistant", rf"\boxed{{{text}}}")], {})
        assert grade.success == success
    assert len(server.requests) == 1, "the trial at the start"
    grade = await grader.grade(task, [Message("assistant", "the capital of Peru")], {})
    assert grade.reward == 0
    assert grade.parts == {"accuracy": 0.0, "rule": 0.0, "judge": 0.0, "judge_unparsed": 0.0}
    assert len(server.requests) == 2


@pytest.mark.parametrize("reply", ["CORRECT", "**Incorrect**", "I am not sure."])
@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("Yoshida, Uehara", "Uehara, Yoshida"),
        ("red, blue and green", "blue, red and green"),
        ("Mark Twain", "Mark Twain (Samuel Langhorne Clemens)"),
        ("13", "13. 14"),
    ],
)
async def test_the_judge_decides_answers_that_the_rules_cannot_confirm(
    server: JudgeServer, gold: str, answer: str, reply: str
) -> None:
    server.replies = [reply]
    grader = grader_of(server)
    task = Task("t", "e", "q", (gold,))
    grade = await grader.grade(task, [Message("assistant", rf"\boxed{{{answer}}}")], {})
    assert grade.success is (reply == "CORRECT")
    assert grade.parts["rule"] == 0.0
    (request,) = server.requests
    assert answer.split()[0] in request["messages"][1]["content"]
    assert "of the reference" not in request["messages"][1]["content"]
    same = await grader.grade(task, [Message("assistant", rf"\boxed{{{gold}}}")], {})
    assert same.success
    assert len(server.requests) == 1, "answers that the rules confirm are not sent"


async def test_the_prompt_of_the_judge_states_that_the_order_counts(server: JudgeServer) -> None:
    server.replies = ["INCORRECT"]
    grader = grader_of(server, {"ordered": True})
    task = Task("t", "e", "q", ("Yoshida, Uehara",))
    for answer, success in (("Uehara, Yoshida", False), ("Yoshida, Uehara", True)):
        grade = await grader.grade(task, [Message("assistant", rf"\boxed{{{answer}}}")], {})
        assert grade.success is success
    (request,) = server.requests
    assert "of the reference" in request["messages"][1]["content"]


@pytest.mark.parametrize(("status", "is_down"), [(404, False), (503, True)])
async def test_a_judge_that_fails_its_trial_request_is_refused_at_the_start(
    server: JudgeServer, status: int, is_down: bool
) -> None:
    """An unavailable judge is an infra error too: a rollout worker may restart meanwhile, and its
    episodes wait for the judge."""
    server.replies = [status]
    judge = judge_of(server, num_retries=0)
    message = rf"grader\.judge: .*{status}.* with the model 'm'"
    with pytest.raises(ConfigError, match=message) as raised:
        await judge.start()
    assert isinstance(raised.value, InfraError) is is_down
    server.replies = ["CORRECT"]
    for _ in range(3):
        await judge.start()
    assert len(server.requests) == 2


def test_an_episode_starts_once_a_judge_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Judge(JudgeConfig(url="http://judge/v1", model="m", num_retries=0))

    async def reply(body: Any) -> Any:
        if asyncio.get_running_loop().time() < 60.0:
            raise ServerLostError("connection refused")
        return read_reply({"choices": [{"message": {"content": "CORRECT"}}]})

    monkeypatch.setattr(judge._model, "reply", reply)
    actor = make_actor(script=lambda *_: "<answer>3</answer>")
    actor.make_env = lambda task: ToolEnv(task, [], AnswerReward(judge))
    tree = rollout(actor, Independent(2))
    assert not tree.failures()
    assert [trajectory.reward for trajectory in tree.trajectories()] == [1.0, 1.0]


async def test_a_judge_that_returns_no_verdict_is_logged_once(
    server: JudgeServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.replies = ["<think>Well, let me see. The"]
    judge = judge_of(server)
    await asyncio.gather(*(judge.start() for _ in range(3)))
    (record,) = caplog.records
    assert "grader.judge.max_tokens = 16" in record.message


@pytest.mark.parametrize(
    ("answer", "reply", "success", "parts"),
    [
        ("Paris", "CORRECT", True, {"rule": 1.0, "judge": 1.0, "judge_unparsed": 0.0}),
        ("Paris", "INCORRECT", True, {"rule": 1.0, "judge": 0.0, "judge_unparsed": 0.0}),
        ("Paris", "hm", True, {"rule": 1.0, "judge_unparsed": 1.0}),
        ("Paris", 500, True, {"rule": 1.0}),
        ("Lima", "CORRECT", True, {"rule": 0.0, "judge": 1.0, "judge_unparsed": 0.0}),
        ("Lima", "INCORRECT", False, {"rule": 0.0, "judge": 0.0, "judge_unparsed": 0.0}),
    ],
)
async def test_a_judge_asked_always_reports_its_agreement_and_overrules_no_right_answer(
    server: JudgeServer, answer: str, reply: Any, success: bool, parts: dict[str, float]
) -> None:
    server.replies = [reply]
    grader = grader_of(server, when="always", num_retries=0)
    task = Task("t", "e", "q", ("Paris",))
    grade = await grader.grade(task, [Message("assistant", rf"\boxed{{{answer}}}")], {})
    assert grade.success is success
    assert grade.parts == {"accuracy": float(success), **parts}
    assert len(server.requests) == 1


async def test_at_most_max_concurrency_requests_are_in_flight(server: JudgeServer) -> None:
    server.latency_s = 0.05
    judge = judge_of(server, max_concurrency=3)
    await asyncio.gather(*(judge.verdict("q", f"a{number}", ["g"]) for number in range(12)))
    assert len(server.requests) == 12
    assert server.most_running == 3


async def test_the_api_key_comes_from_the_environment(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="JUDGE_KEY_OF_TEST"):
        judge_of(server, api_key_env="JUDGE_KEY_OF_TEST")
    monkeypatch.setenv("JUDGE_KEY_OF_TEST", "k1")
    judge = judge_of(server, api_key_env="JUDGE_KEY_OF_TEST")
    await judge.verdict("q", "a", ["g"])
    assert server.headers[0]["Authorization"] == "Bearer k1"
    with pytest.raises(ConfigError, match="expected http"):
        Judge(JudgeConfig(url="localhost", model="m"))


# the requests of the released evaluation

RECORDED = json.loads((ROOT / "tests/fixtures/released_exchanges.json").read_text("utf-8"))
RECORDED_PROMPT = (
    "Question: {question}\nGolden Answer: {labeled_answer}\nPredicted Answer: {pred_answer}\n"
)
PROMPT = "Q {question}\nGolds {labeled_answer}\nSaid {pred_answer}, {braces} stay\n"
SOURCE = f'''"""A module."""
import no_such_module  # read, not run
TEXT = """{PROMPT}"""
OTHER = "{{question}} alone"
'''


def released(server: JudgeServer, folder: Path, **keys: Any) -> Judge:
    (folder / "evaluator.py").write_text(SOURCE)
    file = str(folder / "evaluator.py")
    return judge_of(server, compat="reference", prompt_file=file, **keys)


async def test_compat_sends_the_request_of_the_released_evaluation(
    server: JudgeServer, tmp_path: Path
) -> None:
    """One user message, the sampling defaults of the server, and unchanged texts."""
    judge = released(server, tmp_path)
    answer = "<|im_end|> {question}" + "x" * 5000
    assert (await judge.verdict("who?", answer, ["a"])).right
    assert (await judge.verdict("who?", "c", ["a", "b"])).right
    one, several = server.requests
    text = f"Q who?\nGolds a\nSaid {answer}, {{braces}} stay\n"
    assert one == {"model": "m", "messages": [{"role": "user", "content": text}]}
    assert "Golds ['a', 'b']\n" in several["messages"][0]["content"]


@pytest.mark.parametrize("one", RECORDED["judged"])
async def test_compat_asks_and_reads_as_the_released_evaluation(
    server: JudgeServer, tmp_path: Path, one: dict[str, Any]
) -> None:
    server.replies = [one["reply"]]
    file = tmp_path / "prompt.txt"
    file.write_text(RECORDED_PROMPT)
    judge = judge_of(server, compat="reference", prompt_file=str(file), when="always")
    verdict = await judge.verdict(one["question"], one["answer"], [one["gold"]])
    (asked,) = server.requests
    assert (asked["messages"][0]["content"], sorted(asked)) == (one["message"], one["keys"])
    assert (verdict.right, verdict.score) == (one["right"], float(one["right"]))


@pytest.mark.parametrize(
    ("answer", "golds", "right"),
    [
        (r"\frac12", [r"\dfrac{1}{2}"], True),  # normal forms are equal
        ("0.5", [r"\frac{1}{2}"], True),
        ("Paris", ["Paris"], True),
        ("paris", ["Paris"], False),  # the layered rules would accept it
        ("Paris", ["Paris", "City of Light"], False),  # a list equals nothing
    ],
)
async def test_compat_accepts_an_equal_answer_whatever_the_judge_replies(
    server: JudgeServer, tmp_path: Path, answer: str, golds: list[str], right: bool
) -> None:
    server.replies = ["CORRECT", "Incorrect"]  # the trial, then the question
    (tmp_path / "prompt.txt").write_text(PROMPT)
    keys = {"compat": "reference", "prompt_file": str(tmp_path / "prompt.txt")}
    grader = grader_of(server, {"math": True}, when="always", **keys)
    task = Task("t", "e", "q", tuple(golds))
    await check_grader(grader, [])
    grade = await grader.grade(task, [Message("assistant", rf"\boxed{{{answer}}}")], {})
    assert grade.success == right
    assert grade.parts["rule"] == float(right)
    assert grade.parts["judge"] == 0.0


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.py", None, "none.py cannot be read: .*expected evaluation/src/llm_evaluator_sds.py"),
        ("broken.py", "(", "broken.py cannot be read"),
        ("empty.py", "A = 1", r"contains 0 texts with \{question\}, \{labeled_answer\}"),
        ("twice.py", f"A = {PROMPT!r}\nB = {PROMPT!r}", "contains 2 texts .*expected one"),
        ("half.txt", "{question}", "contains 0 texts"),
    ],
)
def test_compat_requires_the_prompt_file_of_the_released_evaluation(
    tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        Judge(JudgeConfig(url="http://h/v1", model="m", compat="reference", prompt_file=str(path)))


@pytest.mark.parametrize("keys", [{"compat": "reference"}, {"prompt_file": "x.py"}])
def test_compat_and_its_prompt_file_require_each_other(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="belong together"):
        JudgeConfig(url="http://h/v1", model="m", **keys)
