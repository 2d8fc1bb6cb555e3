"""The calls of a program are the turns of one branch: the same tree as in process, contexts by
their kinds, credit on the tokens of all of them."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from agentenv.assembly.reports.records import noted, readable, trajectory_rows
from agentenv.base.errors import EnvError
from agentenv.base.model_files import load_tokenizer
from agentenv.base.tree import Node, TrajectoryTree
from agentenv.base.types import Limits, Message, NextTurn, PastTurn, SamplingParams, Task
from agentenv.contract.env import Env, StepResult, close_shared
from agentenv.contract.plan import Independent, RolloutPlan
from agentenv.endpoint.capture import Endpoint
from agentenv.endpoint.difference import difference
from agentenv.endpoint.messages import Given, ServedCall, alteration, in_order
from agentenv.engines.embedded.embedded_config import EmbeddedConfig
from agentenv.engines.embedded.engine import EmbeddedEngine
from agentenv.engines.scripted import Script, ScriptedConfig, ScriptedEngine
from agentenv.envs.quickstart.setup import build_tokenizer
from agentenv.learners.algorithms.arpo import ARPO
from agentenv.learners.algorithms.credit import TreeCredit, tree_credit
from agentenv.learners.trees.encoded_tree import encode
from agentenv.rollout.actor import Actor
from agentenv.rollout.journal import Journal
from agentenv.rollout.metrics import rollout_metrics
from agentenv.rollout.program_conversation import ProgramConversation
from agentenv.text.native import NativeRenderer
from agentenv.text.renderer import TagRenderer
from tests.support.chat_models import QWEN3, make_tokenizer
from tests.support.polling import until
from tests.support.programs import TOOLS, Client, Json, Program, ProgramEnv
from tests.support.toy import CharTokenizer, CountingEnv
from tests.test_endpoint import FINE, KEY, PATHS, damaged, name_of, request

TASK = Task("t", "toy", "how many?", ("2",))


@dataclass(frozen=True)
class ForkOnce(Independent):
    """Roots fork once at each tool result, with the same forks for any order of events."""

    fork_window: int = 4

    def on_start(self, tree: TrajectoryTree) -> int:
        return 2

    def on_fork_point(self, tree: TrajectoryTree, node: Node, entropies: Any, rng: Random) -> int:
        return int("+" not in node.branch)


def searches(prompt: str, rng: Random) -> str:
    if prompt.count("<result>") < 2:
        return f"<think>{rng.random()}</think><search>q{rng.randrange(9)}</search>"
    return f"<think>done</think><answer>{rng.randrange(3)}</answer>"


def grown(
    make_env: Callable[[Task], Env],
    script: Script = searches,
    plan: RolloutPlan | None = None,
    model: Path | None = None,
    stop: tuple[str, ...] = (),
    tokenizer: Any = None,
    renderer: Any = None,
    tokens_per_s: float = 0.0,
    **limits: Any,
) -> TrajectoryTree:
    tokenizer = tokenizer or (CharTokenizer() if model is None else load_tokenizer(model))

    async def grow() -> TrajectoryTree:
        config = ScriptedConfig(max_model_len=90_000, tokens_per_s=tokens_per_s)
        engine: Any = ScriptedEngine(config, tokenizer, script=script)
        if model is not None:
            engine = EmbeddedEngine(EmbeddedConfig(), model, 0, tokenizer)
        limited, sampling = Limits(strict=True, **limits), SamplingParams(max_tokens=1, stop=stop)
        texts = renderer or TagRenderer(tokenizer)
        actor = Actor(engine, texts, make_env, limited, sampling, seed=7)
        try:
            return await actor.rollout(TASK, plan or Independent(1))
        finally:
            await close_shared()
            await engine.close()

    return asyncio.run(grow())


class Counting(ProgramEnv):
    """Its refused calls are counted."""

    refused = "count"


def captured(
    program: Program, script: Script = searches, kind: type[ProgramEnv] = ProgramEnv, **more: Any
) -> TrajectoryTree:
    return grown(lambda task: kind(task, program), script, **more)


FIGURES = (
    "action_ids", "logprobs", "entropies", "version_spans", "observation_ids", "reward", "end",
    "num_forks",
)  # fmt: skip


def places(tree: TrajectoryTree) -> dict[Any, Any]:
    """All that a tree holds, by branch and depth."""
    key = {node.index: (node.branch, len(tree.path(node))) for node in tree.nodes}
    figures = attrgetter(*FIGURES)
    return {key[node.index]: (key.get(node.parent), *figures(node)) for node in tree.nodes}


async def loop(client: Client) -> float:
    """The usual agent loop: query, run the calls, query again."""
    messages: list[Json] = [{"role": "user", "content": client.task.question}]
    calls = 0
    while True:
        message = await client.ask(messages)
        messages.append(message)
        for call in message.get("tool_calls", ()):
            calls += 1
            query = json.loads(call["function"]["arguments"])["query"]
            messages.append(result(f"{calls}:{query}", call["id"]))
        if not message.get("tool_calls"):
            return float(calls)


@pytest.mark.parametrize("plan", [Independent(3), ForkOnce(8), ARPO(group_size=16).plan(256)])
def test_the_tree_is_that_of_the_same_environment_in_process(plan: RolloutPlan) -> None:
    own = grown(CountingEnv, plan=plan)
    other = captured(loop, plan=plan)
    assert len(own.leaves()) >= 3
    assert not own.failures()
    assert places(other) == places(own)
    assert not other.is_captured, "nothing but extensions"


class ThreeTimes(CountingEnv):
    """Replies to any text of the policy, three times."""

    async def step(self, action: Message) -> StepResult:
        self.calls.append(action.content)
        number = len(self.calls)
        if number > 3:
            return [], float(number), True, False, {"success": True}
        return [Message("tool", f"result {number}")], 0.0, False, False, {}


async def three_times(client: Client) -> float:
    messages: list[Json] = [{"role": "user", "content": client.task.question}]
    for number in range(1, 4):
        messages += [await client.ask(messages), result(f"result {number}")]
    await client.ask(messages)
    return 4.0


def test_the_tree_is_that_of_the_embedded_engine_too(quickstart_model: Path) -> None:
    """One request at a time: batches change the last bits of results."""
    keys: dict[str, Any] = {"model": quickstart_model, "stop": tuple("aeiou")}
    keys |= {"max_response_tokens": 900, "max_prompt_tokens": 100}
    own = grown(cast(Any, ThreeTimes), **keys)
    other = grown(lambda task: ProgramEnv(task, three_times), **keys)
    assert len(own.nodes) == 5
    assert own.leaves()[0].end == "terminated"
    assert places(other) == places(own)


def test_a_failed_step_is_repeated_by_a_replayed_program() -> None:
    """The calls before are answered with the same actions."""
    failed: list[ProgramEnv] = []

    class Flaky(ProgramEnv):
        async def step(self, action: Message) -> StepResult:
            result = await super().step(action)
            if self.session.counts["calls"] == 3 and not failed:
                failed.append(self)
                raise EnvError("on purpose")
            return result

    tree = grown(lambda task: Flaky(task, loop))
    assert failed
    assert not tree.failures()
    assert tree.num_retaken == 1
    assert places(tree) == places(grown(CountingEnv))


def test_a_captured_tree_is_restored_from_its_journal(tmp_path: Path) -> None:
    """Side contexts are not duplicate nodes."""

    async def grow() -> tuple[TrajectoryTree, TrajectoryTree]:
        tokenizer = CharTokenizer()
        engine = ScriptedEngine(ScriptedConfig(max_model_len=90_000), tokenizer, script=said)
        limits, sampling = Limits(strict=True), SamplingParams(max_tokens=1)
        make_env = partial(ProgramEnv, program=sub_agent)
        actor = Actor(engine, TagRenderer(tokenizer), make_env, limits, sampling, seed=7)
        journal = Journal(tmp_path, settings="s", incarnation=1)
        try:
            record = journal.record(0)
            tree = await actor.rollout(TASK, ForkOnce(8), record=record)
        finally:
            await journal.close()
            await close_shared()
        later = Journal(tmp_path, settings="s", incarnation=2)
        recorded = await later.recall(0, TASK)
        await later.close()
        assert recorded is not None
        assert recorded.is_finished
        return tree, recorded.tree

    tree, again = asyncio.run(grow())
    assert places(again) == places(tree)
    assert [node.continues for node in again.nodes] == [node.continues for node in tree.nodes]


# Programs that change their contexts, each with the text of one kind.


def said(prompt: str, rng: Random) -> str:
    """Every turn is distinguishable from all others."""
    return f"answer number {rng.randrange(10**9)} to it"


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def system(text: str) -> Json:
    return {"role": "system", "content": text}


def result(content: Any, id: str = "x") -> Json:
    return {"role": "tool", "tool_call_id": id, "content": content}


async def retry(client: Client) -> None:
    await client.abandon([user("one")], ProgramEnv.last)
    await client.ask([user("one")])


async def votes(client: Client) -> None:
    for _ in range(3):
        await client.ask([user("one")])


async def parallel(client: Client) -> None:
    await asyncio.gather(client.ask([user("one")]), client.ask([user("two")]))


async def delegated(client: Client) -> Json:
    """A worker in between; then the planner continues, with this message."""
    messages = [system("planner"), user("plan it")]
    messages.append(await client.ask(messages))
    worker = await client.ask([system("worker"), user("work")])
    messages.append(result(worker["content"]))
    return await client.ask(messages)


async def sub_agent(client: Client) -> None:
    await delegated(client)


async def compaction(client: Client) -> None:
    messages = [system("agent"), user("a long task")]
    messages += [await client.ask(messages), result("a long result")]
    messages.append(await client.ask(messages))
    summary = messages[-1]["content"]
    await client.ask([system("agent"), user(f"so far: {summary}")])


async def compaction_not_used(client: Client) -> None:
    """It requests a summary and continues without it."""
    messages = [system("agent"), user("a long task")]
    messages.append(await client.ask(messages))
    await client.ask([*messages, result("sum it up", "y")])
    await client.ask([*messages, result("a long result")])


async def compaction_apart_not_used(client: Client) -> None:
    """The summary is requested in a separate context and not used."""
    messages = [system("agent"), user("a long task")]
    messages.append(await client.ask(messages))
    quoted = messages[-1]["content"]
    await client.ask([system("agent"), user(f"sum up: {quoted}")])
    messages.append(result("a long result"))
    await client.ask(messages)


async def growing(client: Client) -> None:
    """One conversation in one message of the user, as of DSPy."""
    for steps in range(3):
        await client.ask([system("agent"), user(f"a task{', a step' * steps}. Go on.")])


def altering(change: Callable[[Json], Json]) -> Program:
    """Returns the first turn changed."""

    async def program(client: Client) -> None:
        messages = [user("one")]
        message = await client.ask(messages)
        await client.ask([*messages, change(message), result("ok")])

    return program


def calling(prompt: str, rng: Random) -> str:
    return f"<think>I think {rng.random()}</think>I say it.<search>q{rng.randrange(9)}</search>"


def with_arguments(message: Json, text: str, **more: str) -> Json:
    (call,) = message["tool_calls"]
    function = {**call["function"], "arguments": text}
    return {**message, "tool_calls": [{**call, **more, "function": function}]}


def rewritten(message: Json) -> Json:
    arguments = json.loads(message["tool_calls"][0]["function"]["arguments"])
    return with_arguments(message, json.dumps(arguments, indent=1))


ALTERED: dict[str, Callable[[Json], Json]] = {
    "trimmed": lambda m: {**m, "content": m["content"] + " \n"},
    "text": lambda m: {**m, "content": "I say nothing."},
    "json_rewritten": rewritten,
    "arguments": lambda m: with_arguments(m, '{"query": "other"}'),
    "call_ids": lambda m: with_arguments(m, m["tool_calls"][0]["function"]["arguments"], id="mine"),
    "calls": lambda m: {k: v for k, v in m.items() if k != "tool_calls"},
    "thoughts_dropped": lambda m: {k: v for k, v in m.items() if k != "reasoning_content"},
    "thoughts_changed": lambda m: {**m, "reasoning_content": "I thought"},
}


@pytest.mark.parametrize("cause", ALTERED)
def test_an_altered_message_is_never_mapped_to_sampled_tokens(cause: str) -> None:
    tree = captured(altering(ALTERED[cause]), calling)
    root, first, context, last = tree.nodes
    assert context.parent is None
    assert context.continues == first.index
    assert context.info == {"context": "altered", "cause": cause}
    assert (last.parent, last.end) == (context.index, "terminated")
    assert not first.observation_ids
    assert not contains(context.observation_ids, root.observation_ids + first.action_ids)
    counted = {"calls": 2, "context/altered": 1, f"altered/{cause}": 1, "discarded": 0}
    assert ProgramEnv.last.counts == {**counted, "ignored/tool_call_id": 1}


@pytest.mark.parametrize(
    ("client", "blanks"),
    [
        ({"User-Agent": "OpenAI/JS 6.9.1"}, False),
        ({"User-Agent": "mine/1.0", "X-Stainless-Lang": "js"}, False),
        ({"User-Agent": "ai-sdk/openai-compatible/2.0 runtime/bun/1.3"}, False),
        ({"User-Agent": "node"}, False),
        ({"User-Agent": "pydantic-ai/2.68.0", "X-Stainless-Lang": "python"}, False),
        ({"User-Agent": "OpenAI/Python 3.57", "X-Stainless-Lang": "python"}, True),
        ({}, True),
    ],
)
def test_arguments_are_served_as_the_client_writes_json(
    client: dict[str, str], blanks: bool
) -> None:
    """A client reads the arguments, and writes them again: in JavaScript without blanks."""

    async def program(http: Client) -> None:
        http.headers |= client
        message = await http.ask([user("one")])
        (call,) = message["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        again = json.dumps(arguments, separators=None if blanks else (",", ":"))
        await http.ask([user("one"), with_arguments(message, again), result("ok", call["id"])])

    tree = captured(program, calling)
    assert [node.parent for node in tree.nodes] == [None, 0, 1]
    assert not tree.is_captured


def test_thoughts_in_the_text_are_restored_if_a_program_drops_them() -> None:
    class InText(ProgramEnv):
        thoughts = "text"

    tree = captured(altering(ALTERED["thoughts_dropped"]), calling, InText)
    assert [node.parent for node in tree.nodes] == [None, 0, 1]
    assert places(tree) == places(captured(altering(lambda message: message), calling))


def contains(whole: Any, part: Any) -> bool:
    return part.tobytes() in whole.tobytes()


KINDS: dict[str, tuple[Program, list[str]]] = {
    "retry": (retry, ["retry"]),
    "votes": (votes, ["repeated", "repeated"]),
    "parallel": (parallel, ["parallel"]),
    "sub_agent": (sub_agent, ["sub_agent", "resumed"]),
    "compaction": (compaction, ["compaction"]),
    "edited": (compaction_not_used, ["edited"]),
    "growing": (growing, ["edited", "edited"]),
    "not used": (compaction_apart_not_used, ["compaction", "resumed"]),
}


@pytest.mark.parametrize("name", KINDS)
def test_contexts_have_their_kinds_and_one_leaf(name: str) -> None:
    program, kinds = KINDS[name]
    tree = captured(program, said, tokens_per_s=100.0 if name == "retry" else 0.0)
    assert [node.info["context"] for node in tree.nodes if "context" in node.info] == kinds
    (leaf,) = tree.leaves()
    history = tree.history(leaf)
    assert history[-1] is leaf
    sampled = {node.index for node in tree.nodes if node.action_ids}
    lost = sampled - {node.index for node in history}
    discards = {one for node in tree.nodes for one in node.info.get("discards", ())}
    assert lost == discards
    assert len(lost) == (name == "retry"), "the answer that did not arrive"
    credit = tree_credit(tree, group_size=1, estimator=lambda returns: returns)
    assert credit is not None
    for index in sampled:
        assert credit.adv_pos[index] == float(index not in lost), "once, and only what was used"
    encoded_right(tree, credit)


def encoded_right(tree: TrajectoryTree, credit: TreeCredit) -> None:
    """The learner sees each context by itself: before each sampled token its own prefix alone."""
    encoded = encode(tree, credit, policy_version=0)
    ids, depth = np.frombuffer(encoded.token_ids, np.int32), encoded.ints("depth")
    pred, trained = encoded.ints("pred"), np.flatnonzero(encoded.actions())
    seen = []
    for token in trained.tolist():
        path = [token]
        while pred[path[-1]] >= 0:
            path.append(pred[path[-1]])
        assert depth[token] == len(path) - 1
        seen.append(tuple(ids[path[::-1]].tolist()))
    wanted = []
    for node in tree.nodes:
        before = [t for one in tree.path(node)[:-1] for t in one.action_ids + one.observation_ids]
        if credit.weight[node.index]:
            sizes = range(1, len(node.action_ids) + 1)
            wanted += [(*before, *node.action_ids[:size]) for size in sizes]
    assert sorted(seen) == sorted(wanted)


def test_a_fork_in_one_context_is_a_fork_of_the_leaf() -> None:
    """The sub-agent's tokens, shared by the planner's forks, carry the advantages of both."""

    async def program(client: Client) -> float:
        last = await delegated(client)
        return float(last["content"].split()[2]) % 7

    tree = captured(program, said, plan=ForkOnce(8))
    assert not tree.failures()
    assert sorted(node.branch for node in tree.leaves()) == ["0", "0.2+1", "1", "1.2+1"]
    credit = tree_credit(tree, group_size=4)
    assert credit is not None
    for node in tree.nodes:
        if node.action_ids:
            assert credit.weight[node.index] == (1 if node.end else 2)
    encoded_right(tree, credit)


def test_a_replay_that_differs_refuses_the_fork_and_names_the_difference() -> None:
    times = iter(range(100))

    async def program(client: Client) -> None:
        messages = [user("one"), user(f"Ticket {next(times)} of it")]
        messages += [await client.ask(messages), result("ok")]
        await client.ask(messages)

    tree = captured(program, said, plan=ForkOnce(8), max_failures=0)
    errors = [leaf.error or "" for leaf in tree.failures()]
    assert len(errors) == 2
    for error in errors:
        pattern, texts = error.rpartition("own = '")[2][:-3], re.findall(r"'(Ticket \d+)", error)
        assert len({*texts}) == 2
        assert len({re.sub(pattern, "", text) for text in texts}) == 1, "the remedy"


def test_no_remedy_ignores_every_word() -> None:
    for rest, is_shown in (("", False), (" on a branch", True)):
        then, now = (
            {"tools": [], "messages": [{"role": "tool", "text": word + rest}]}
            for word in ("main", "next")
        )
        shown = difference(then, now)
        assert ("normalise" in shown) == is_shown
        assert r"own = '\w+'" not in shown


def test_messages_without_calls_are_altered_by_their_own_causes() -> None:
    then = Given("assistant", "I say it.", "I think.")
    changes = {
        "trimmed": {"text": "I say it. "},
        "text": {"text": "I say nothing."},
        "thoughts_dropped": {"thoughts": ""},
        "thoughts_changed": {"thoughts": "No."},
    }
    for cause, change in changes.items():
        assert alteration(then._replace(**change), then) == cause


QUESTIONS = [[user("vote")]] * 3 + [[user("vote"), user(f"critic {n}")] for n in range(2)]


async def in_turn(client: Client) -> None:
    for messages in QUESTIONS:
        await client.ask(messages)


async def at_once(client: Client) -> None:
    await asyncio.gather(*map(client.ask, QUESTIONS))


async def in_threads(client: Client) -> None:
    def ask(messages: list[Json]) -> None:
        body = {"model": "policy", "messages": messages, "tools": TOOLS}
        headers = {**client.headers, "Content-Type": "application/json"}
        asked = urllib.request.Request(client.url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(asked) as reply:
            json.load(reply)

    with ThreadPoolExecutor(5) as threads:
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(threads, ask, one) for one in QUESTIONS))


async def in_choices(client: Client) -> None:
    await client.ask(QUESTIONS[0], n=3)
    await asyncio.gather(*map(client.ask, QUESTIONS[3:]))


@pytest.mark.parametrize("program", [in_turn, at_once, in_threads, in_choices])
def test_all_delivered_answers_are_trained_however_the_program_waits(program: Program) -> None:
    for _ in range(20):
        tree = captured(program, said)
        (leaf,) = tree.leaves()
        trained = Counter(
            bytes(tree.path(node)[0].observation_ids)
            for node in tree.history(leaf)
            if node.action_ids
        )
        assert sorted(trained.values()) == [1, 1, 3]


Discarding = type("Discarding", (ProgramEnv,), {"discards": True})  # abandoned answers
VOTE = [user("vote")]


async def goes_on(client: Client, *, at_once: bool = False) -> None:
    asked = [client.ask(VOTE) for _ in range(3)]
    votes = await asyncio.gather(*asked) if at_once else [await one for one in asked]
    await client.ask([*VOTE, votes[1], result("ok")])


async def takes_back(client: Client) -> None:
    before = [*VOTE, await client.ask(VOTE)]
    await client.ask([*before, result("bad")])
    before.append(result("good"))
    await client.ask([*before, await client.ask(before), result("go on")])


async def drops_thoughts(client: Client) -> None:
    """Some of its turns have none."""
    messages = [*VOTE]
    for number in range(4):
        message = await client.ask(messages)
        messages += [{"role": "assistant", "content": message["content"]}, result(f"{number}")]


async def asks_others(client: Client) -> None:
    """Whose answers are quoted, or used outside of calls."""
    shown = [user("example"), {"role": "assistant", "content": "an answer"}]
    one, two = [*shown, result("one")], [*shown, result("two")]
    answers = await asyncio.gather(client.ask(one), client.ask(two))
    await client.ask([*two, answers[1], result("go on")])
    await client.ask([*VOTE, user(answers[0]["content"])])


def half_thought(prompt: str, rng: Random) -> str:
    number = rng.randrange(10**6)
    return f"<think>hm</think>turn {number}" if number % 2 else f"turn {number}"


ABANDONED = {
    goes_on: 2, partial(goes_on, at_once=True): 2, takes_back: 1, in_turn: 0, at_once: 0,
    drops_thoughts: 0, asks_others: 0,
}  # fmt: skip


@pytest.mark.parametrize("program", ABANDONED)
def test_an_answer_is_abandoned_where_another_one_takes_its_place(program: Program) -> None:
    for kind, number in ((Discarding, ABANDONED[program]), (ProgramEnv, 0)):
        tree = captured(program, half_thought, kind, plan=Forks(2))
        assert not tree.failures(), tree.failures()[0].error
        for leaf in tree.leaves():
            assert leaf.info["endpoint"].get("abandoned", 0) == number
            assert len(tree.history(leaf)) + number == len(tree._taken(leaf.branch))


def test_a_repeated_key_of_idempotency_gets_the_stored_answer() -> None:
    async def program(client: Client) -> None:
        client.headers["Idempotency-Key"] = "one"
        await client.abandon([user("one")], ProgramEnv.last)
        first = await client.ask([user("one")])
        assert await client.ask([user("one")]) == first
        session = ProgramEnv.last
        session.lost(session.handed["0_0"].request)  # a connection that ends after another
        assert not session.take_lost()
        with pytest.raises(EnvError, match="another call"):
            await client.ask([user("two")])

    tree = captured(program, said, Counting, tokens_per_s=100.0)
    (leaf,) = tree.leaves()
    assert [node is leaf for node in tree.history(leaf) if node.action_ids] == [True]
    assert "context" not in leaf.info


def test_a_lost_last_answer_is_not_trained() -> None:
    async def program(client: Client) -> None:
        await client.ask([user("one")])
        await client.abandon([user("two")], ProgramEnv.last)
        await until(lambda: len(ProgramEnv.last.handed) == 2)

    tree = captured(program, said, tokens_per_s=100.0)
    (leaf,) = tree.leaves()
    assert leaf.info["discards"] == [leaf.index]
    assert leaf.info["endpoint"]["discarded"] == 1


def test_replies_of_another_form_are_counted_and_keys_without_an_effect() -> None:
    """Also parts that are no text, and a result that answers no call."""

    async def program(client: Client) -> None:
        form = {"type": "json_object"}
        image = result([{"type": "image_url"}])
        await client.ask([user("one"), image], response_format=form, presence_penalty=1, user="me")

    for text, invalid in (("{}", 0), ("no", 1)):
        (leaf,) = captured(program, lambda prompt, rng: text).leaves()  # noqa: B023
        counts = leaf.info["endpoint"]
        assert counts.get("invalid_output", 0) == invalid
        ignored = {name for name in counts if name.startswith("ignored/")}
        keys = ("presence_penalty", "user", "part.image_url", "tool_call_id")
        assert ignored == {f"ignored/{key}" for key in keys}


def test_each_trajectory_shows_its_refused_and_ignored_keys_once() -> None:
    """Also a fork, whose program repeats its calls."""

    async def program(client: Client) -> None:
        messages = [user("one")]
        for _ in range(3):
            with pytest.raises(EnvError, match="logprobs is not"):
                await client.ask(messages, logprobs=True)
            messages += [await client.ask(messages, user="me"), result("ok")]

    tree = captured(program, said, Counting, plan=Forks(2))
    shown = {"ignored/user": 3, "refused/unsupported_value/logprobs": 3, "ignored/tool_call_id": 2}
    assert [row["endpoint"] for row in trajectory_rows(tree, lambda ids: "")] == [shown] * 2
    assert rollout_metrics([tree], 0)["rollout/refused"] == 2


def test_tokens_of_a_branch_are_counted() -> None:
    async def program(client: Client) -> None:
        url = client.url.replace("chat/completions", "messages/count_tokens")
        message = await client.ask([user("one " * 100)])
        known = [user("one " * 100), message]
        for messages, low in (([user("x" * 400)], 90), (known, 300), ([*known, user("?")], 300)):
            body = {"model": "policy", "messages": messages}
            async with client.http.post(url, json=body, headers=client.headers) as response:
                counted = (await response.json())["input_tokens"]
            assert low < counted < 1000

    assert captured(program, said).leaves()[0].end == "terminated"


def test_concurrent_calls_are_replayed_in_any_order() -> None:
    """Each call gets its own reply, and its continuation extends the right turn, to the token."""
    runs = iter(range(100))

    async def program(client: Client) -> None:
        one, two = [system("planner"), user("one")], [system("worker"), user("two")]
        asked = [one, two] if next(runs) % 2 == 0 else [two, one]
        first = asyncio.ensure_future(client.ask(asked[0]))
        await asyncio.sleep(0.05)
        second = await client.ask(asked[1])
        found = [await first, second]
        if asked[0] is two:
            found.reverse()
        await client.ask([*one, found[0], result(found[1]["content"])])
        await client.ask([*two, found[1], result(found[1]["content"])])

    def grow(turns: int) -> TrajectoryTree:
        nonlocal runs
        runs = iter([0, *[turns] * 9])
        return captured(program, said, plan=Forks(4))

    assert places(grow(1)) == places(grow(0))
    tree = grow(1)
    assert not tree.failures(), tree.failures()[0].error
    assert len(tree.leaves()) == 3
    assert [node.info.get("context") for node in tree.nodes].count("edited") == 0


def test_concurrent_calls_are_replayed_in_the_order_of_their_answers() -> None:
    """The program notes which answer came first."""
    runs = iter(range(100))

    async def program(client: Client) -> None:
        came: list[str] = []

        async def work(name: str, after_s: float) -> None:
            await asyncio.sleep(after_s)
            await client.ask([system(name), user("Go.")])
            came.append(name)

        first_s = 0.0 if next(runs) == 0 else 0.1
        await asyncio.gather(work("one", first_s), work("two", 0.05))
        messages: list[Json] = [user(" ".join(came))]
        messages += [await client.ask(messages), result("result")]
        await client.ask(messages)

    tree = captured(program, said, plan=Forks(2), tokens_per_s=300)
    assert not tree.failures(), tree.failures()[0].error
    assert len(tree.leaves()) == 2


def test_a_call_that_overtakes_a_replayed_one_is_no_difference() -> None:
    runs = iter(range(100))

    async def program(client: Client) -> None:
        async def work(name: str, after_s: float) -> None:
            await asyncio.sleep(after_s)
            messages: list[Json] = [system(name), user("Go.")]
            messages += [await client.ask(messages), result("result")]
            await client.ask(messages)

        await asyncio.gather(work("one", 0.05), work("two", 0.3 if next(runs) == 0 else 0.0))

    tree = captured(program, said, plan=Forks(2))
    assert not tree.failures(), tree.failures()[0].error
    assert len(tree.leaves()) == 2


@dataclass(frozen=True)
class Forks(ForkOnce):
    """One root."""

    def on_start(self, tree: TrajectoryTree) -> int:
        return 1


def test_an_altered_context_can_be_forked() -> None:
    """Like one that continues token for token; so can a message of the user in its middle."""
    assert len(captured(growing, said, plan=Forks(4)).leaves()) == 3
    for role in ("tool", "user"):

        async def program(client: Client, role: str = role) -> float:
            messages: list[Json] = [system("planner"), user("plan it")]
            for number in range(2):
                message = await client.ask(messages)
                message["content"] += " "
                messages += [message, {**result(f"result {number}"), "role": role}]
            last = await client.ask(messages)
            return float(last["content"].split()[2]) % 7

        keys: dict[str, Any] = {"tokenizer": build_tokenizer()} if role == "user" else {}
        tree = captured(program, said, plan=Forks(8), **keys)
        assert not tree.failures(), tree.failures()[0].error
        assert sorted(node.branch for node in tree.leaves()) == ["0", "0.1+1", "0.2+1"]
        for leaf in tree.leaves():
            assert [bool(node.action_ids) for node in tree.history(leaf)].count(True) == 3
        credit = tree_credit(tree, group_size=3)
        assert credit is not None
        encoded_right(tree, credit)


def test_stop_strings_and_token_limits_of_a_program_are_applied() -> None:
    """The turn is sent back as it was served."""

    async def program(client: Client) -> None:
        messages = [user("one")]
        first = await client.ask(messages, stop=["number"])
        assert first["content"] == "answer"
        messages += [first, result("ok")]
        second = await client.ask(messages, max_tokens=4)
        assert second["content"] == "answ"[:4]
        messages += [second, result("go on")]
        await client.ask(messages)

    tree = captured(program, said)
    assert not tree.failures()
    texts = ["".join(map(chr, node.action_ids)) for node in tree.nodes[1:3]]
    assert texts == ["answer number", "answ"]
    assert [node.parent for node in tree.nodes] == [None, 0, 1, 2]
    assert [node.observation_ids[0] for node in tree.nodes[1:3]] == [0, 0], "the end of the turn"


def test_the_next_turn_of_a_program_passes_between_processes() -> None:
    """As environments in separate processes return it."""
    prompt = Message("user", "go on"), PastTurn(0)
    then = NextTurn(prompt=prompt, kind="edited", tools=({"name": "x"},))
    info = msgspec.msgpack.decode(msgspec.msgpack.encode({"turn": then, "other": 1}))
    talk = ProgramConversation(TagRenderer(CharTokenizer()), 100)
    talk.begin([], info)
    assert (talk._next, talk.tools) == (then, ({"name": "x"},))
    assert info == {"other": 1}


def test_a_call_after_the_end_of_a_branch_is_refused_by_name() -> None:
    async def ask() -> Any:
        endpoint = Endpoint()
        await endpoint.start()
        session = endpoint.open()
        client = Client(session.variables, TASK)
        try:
            waiting = asyncio.create_task(client.ask([user("one")]))
            await session.next()
            session.close()
            with pytest.raises(Exception, match="branch of this"):
                await waiting
            with pytest.raises(Exception, match="branch of this"):
                await client.ask([user("one")])
            endpoint.forget(session)
            with pytest.raises(Exception, match="branch has this"):
                await client.ask([user("one")])
        finally:
            await client.http.close()
            await endpoint.close()

    asyncio.run(ask())


ODD_TOOLS: list[Any] = [
    {"type": "object", "required": 0, "properties": {"a": {}, "b": {}}},
    {"type": "object", "required": [1], "properties": {"a": {}, "b": {}}},
    {"type": "object", "properties": {"a": {"enum": 3}}},
    {"type": "object", "properties": {"a": {"type": 3}}},
    {"type": "object", "properties": {"a": 3}},
    {"type": "object", "properties": {"a": {"anyOf": 3}}},
    {"type": "object", "properties": {"a": {"items": {"type": {}}}}},
]


def test_a_schema_that_no_renderer_could_read_is_refused() -> None:
    async def program(client: Client) -> None:
        for schema in ODD_TOOLS:
            tools = [{"type": "function", "function": {"name": "odd", "parameters": schema}}]
            with pytest.raises(EnvError, match=r"expected|got"):
                await client.ask([user("one")], tools)
        await client.ask([user("one")])

    (leaf,) = captured(program, said, Counting).leaves()
    assert leaf.end == "terminated"
    kind = "refused/invalid_value/tools[].function.parameters".replace("[]", "")
    assert leaf.info["endpoint"][kind] == len(ODD_TOOLS)
    (leaf,) = (tree := captured(program, said, max_failures=0)).leaves()
    assert (leaf.error or "").startswith("CallRefusedError: ")
    assert noted(leaf)[kind] == 1
    (row,) = trajectory_rows(tree, lambda ids: "")
    assert (row["end"], row["error"], row["endpoint"]) == ("failed", leaf.error, noted(leaf))
    assert "tools[0].function.parameters" in row["error"]
    assert f"; {leaf.error}\n" in readable({**row, "segments": [{}, {"env": "x"}]})


def test_a_body_that_cannot_be_read_and_an_unknown_route_are_refused_calls() -> None:
    large = gzip.compress(b" " * 10**8)
    bodies = {"gzip": large, "deflate": b"damaged", "br": b"{}", "zstd": b"{}"}

    async def program(client: Client) -> None:
        for coding, body in bodies.items():
            headers = {**client.headers, "Content-Encoding": coding, "Connection": "close"}
            await client.http.post(client.url, data=body, headers=headers)
        other = client.url.replace("chat/completions", "embeddings")
        lost = await client.http.post(other, json={}, headers=client.headers)
        assert lost.headers["x-should-retry"] == "false"
        await client.ask([user("one")])

    counts = captured(program, said, Counting).leaves()[0].info["endpoint"]
    refused = {name: count for name, count in counts.items() if name.startswith("refused/")}
    expected = {
        "refused/request_too_large": 1, "refused/malformed": 1,
        "refused/unsupported_value/Content-Encoding": 2, "refused/not_found/v1/embeddings": 1,
    }  # fmt: skip
    assert refused == expected


@pytest.mark.parametrize("thought", ["", "<think>hm</think>"])
def test_a_program_goes_on_after_an_empty_turn(thought: str) -> None:
    def says(prompt: str, rng: Random) -> str:
        return "there" if prompt.count("<|im_start|>user") > 1 else thought

    async def program(client: Client) -> None:
        messages = [user("one")]
        for _ in range(2):
            messages.append(await client.ask(messages, tools=None))
        assert [one["content"] for one in messages[1:]] == ["", "there"]
        messages.append(user("two"))
        await client.ask(messages, tools=None)

    (leaf,) = (tree := captured(program, says, tokenizer=make_tokenizer(QWEN3))).leaves()
    assert (leaf.end, leaf.error, len(tree.path(leaf))) == ("terminated", None, 4)
    counts = leaf.info["endpoint"]
    assert (counts["context/extends"], counts["ignored/message.empty"]) == (2, 2)


def test_a_participant_and_the_description_of_a_namespace_are_counted() -> None:
    tools = [{"type": "namespace", "name": "n", "description": "d", "tools": TOOLS}]

    async def program(client: Client) -> None:
        await client.ask([{**user("one"), "name": "Ann"}], tools=tools)

    counts = captured(program, said).leaves()[0].info["endpoint"]
    assert {"ignored/message.name", "ignored/tools.namespace.description"} <= counts.keys()


def test_results_stand_in_the_order_of_their_calls() -> None:
    """Templates write no ids, and programs that run calls at once return them as they end."""
    turn = Given("assistant", "", calls=tuple(ServedCall(id, "search", "{}") for id in "abc"))
    results = [Given("tool", id, answers=id) for id in "axcb"]
    found = [*in_order([turn, *results, Given("user", "b"), turn, *results[:1]])]
    assert [one.text for one in found] == ["", "a", "b", "c", "x", "b", "", "a"]


def test_a_call_that_cannot_be_rendered_fails_its_own_trajectory() -> None:
    """The run continues after any request of the program."""

    async def program(client: Client) -> None:
        function = {"name": "search", "arguments": '{"query": "x"}'}
        calls = [{"id": f"{n}", "type": "function", "function": function} for n in range(2)]
        invented = {"role": "assistant", "content": "", "tool_calls": calls}
        await client.ask([user("one"), invented, user("two")])

    tree = captured(program, said, tokenizer=make_tokenizer(QWEN3), max_failures=0)
    (leaf,) = tree.leaves()
    assert leaf.end == "failed"
    assert (leaf.error or "").startswith("EnvError: cannot render")


ORDERS = ("su", "us", "sus", "uss", "ssu", "susus")
AFTER = ("s", "ts", "tus", "su", "sts", "d")


@pytest.mark.parametrize("protocol", ["tags", "native"])
@pytest.mark.parametrize("order", [*ORDERS, *(f"u a{after}" for after in AFTER)])
def test_a_message_of_the_system_may_stand_anywhere(protocol: str, order: str) -> None:
    """Its text is in the prompt, once, as it stands or as a message of the user."""
    tokenizer = make_tokenizer(QWEN3)
    renderer = NativeRenderer(tokenizer) if protocol == "native" else TagRenderer(tokenizer)
    roles = {"s": "system", "d": "developer", "u": "user", "t": "tool"}
    prompts: list[str] = []

    def keeping(prompt: str, rng: Random) -> str:
        prompts.append(prompt)
        return "fine"

    async def program(client: Client) -> None:
        messages: list[Json] = []
        for group in order.split(" a"):
            for sign in group:
                messages.append({**result(f"text-{len(messages)}-"), "role": roles[sign]})
            messages.append(await client.ask(messages))

    tree = captured(program, keeping, tokenizer=tokenizer, renderer=renderer)
    assert not tree.failures(), tree.failures()[0].error
    for place, sign in enumerate(order.replace(" ", "")):
        assert prompts[-1].count(f"text-{place}-") == (sign != "a")
    assert not tree.is_captured


@pytest.mark.parametrize("protocol", ["tags", "native"])
def test_damaged_calls_of_programs_raise_the_right_error(protocol: str) -> None:
    """200 programs, 2,000 calls: each call has its name, no program ends another one's rollout."""
    tokenizer, seen, rng = make_tokenizer(QWEN3), Counter[str](), Random(5)
    renderer = NativeRenderer(tokenizer) if protocol == "native" else None

    async def program(client: Client) -> None:
        whole = request("chat")
        for _ in range(10):
            path, data, key, allowed = damaged("chat", rng, whole)
            headers = client.headers if key == KEY else {"Authorization": f"Bearer {key}"}
            url = client.url.removesuffix(PATHS["chat"]) + path
            try:
                async with client.http.post(url, data=data, headers=headers) as response:
                    status, reply = response.status, await response.read()
            except ValueError:  # a key that no header takes
                continue
            name = name_of("chat", path, status, reply)
            assert set(name.split("|")) & (allowed | {"unsupported"}), (data, status, reply)
            seen[name] += 1
            if status == 200 and reply.startswith(b"{") and rng.random() < 0.5:
                message = json.loads(reply)["choices"][0]["message"]
                whole["messages"] = [*whole["messages"], message, result("ok")]
        await client.ask([user("the end")])

    for _ in range(100):
        tree = captured(
            program, said, Counting, tokenizer=tokenizer, renderer=renderer, max_failures=0
        )
        for leaf in tree.leaves():
            assert leaf.end == "terminated" or "cannot be rendered" in (leaf.error or ""), leaf
    assert seen[FINE] > 100
    assert len(seen) >= 4
