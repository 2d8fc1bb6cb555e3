"""The endpoint with the stock clients: each key of their types is in the table, and each turn that
the policy may sample comes back as it was served, with the same tokens."""

from __future__ import annotations

import asyncio
import json
import typing
from collections.abc import AsyncIterator, Callable, Iterator
from random import Random
from typing import Any, ClassVar

import anthropic
import openai
import pytest
import typing_extensions
from anthropic.types import message_create_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params

from agentenv.endpoint.messages import KEYS, read_body
from agentenv.endpoint.structured import fits
from agentenv.engines.scripted import ScriptedEngine
from tests.support.sources import ROOT
from tests.test_endpoint import KEY, PATHS, SCHEMA, Client, Json, parts, serving

DATA: Json = json.loads((ROOT / "tests" / "fixtures" / "endpoint.json").read_text())


def members(kind: Any) -> Iterator[Any]:
    """The objects of a type: members of its unions and lists, at any depth."""
    if typing_extensions.is_typeddict(kind):
        yield kind
    elif not isinstance(kind, type) and typing.get_origin(kind) is not typing.Literal:
        for one in typing.get_args(kind):
            yield from members(one)


BODIES = {
    "chat": [completion_create_params.CompletionCreateParamsBase],
    "responses": [response_create_params.ResponseCreateParamsBase],
    "messages": [
        message_create_params.MessageCreateParamsBase,
        beta_create_params.MessageCreateParamsBase,
    ],
}
FREE = (
    "definition", "metadata", "client_metadata", "parameters", "input_schema", "schema", "headers",
)  # fmt: skip


def check_object(kind: Any, name: str, place: str, seen: set[Any]) -> None:
    """Each key of a client's object is in the table, as is its type, and what it holds."""
    if (kind, name) in seen:
        return
    seen.add((kind, name))
    hints, table, types = typing.get_type_hints(kind), KEYS[name], KEYS.get(f"{name}_type")
    own = [one for one in typing.get_args(hints.get("type")) if isinstance(one, str)]
    if types is not None and own:
        assert set(own) <= listed(types), place
        if not types.done.issuperset(own):
            return
    assert hints.keys() <= listed(table), (place, hints.keys() - listed(table))
    for key, hint in hints.items():
        if key in table.within:
            for one in members(hint):
                check_object(one, table.within[key], f"{place}.{key}", seen)
        elif key in table.done and key not in ("tools", *FREE):
            assert not [*members(hint)], f"{place}.{key}"


def listed(table: Any) -> set[str]:
    own = table.sampling, table.unserved, table.served
    groups = [table.done, table.neutral, *own, *table.refused.values()]
    found = set().union(*groups)
    assert sum(map(len, groups)) == len(found), "each key is in one group"
    assert table.usual.keys() <= set().union(table.unserved, *table.refused.values())
    return found


@pytest.mark.parametrize("api", BODIES)
def test_each_key_of_a_stock_client_is_in_the_table(api: str) -> None:
    for kind in BODIES[api]:
        check_object(kind, api, api, set())
        for tool in members(typing.get_type_hints(kind)["tools"]):
            own = typing.get_args(typing.get_type_hints(tool)["type"])
            if {"function", "custom", "namespace"} & {*own}:
                check_object(tool, "tool", f"{api}.tools", set())


KINDS = {
    "chat": "Chat completions", "responses": "Responses", "messages": "Messages",
    "choice": "`tool_choice`", "named": "A tool in `tool_choice`", "format": "A form of replies",
    "schema": "`json_schema`", "setting": "An object without an effect", "message": "A message",
    "part": "A part of a content", "part_type": "Types of parts", "call": "A call of a message",
    "call_type": "Types of calls", "called": "The function of a call", "tool": "A tool",
    "item": "An item of Responses", "item_type": "Types of items",
    "thread_type": "Types of `thread`",
}  # fmt: skip


def page() -> str:
    """The table of the keys, for docs/endpoint-keys.md."""
    lines = [
        "# Keys of calls",
        "",
        "Made from `agentenv/endpoint/keys.toml` by `python -m tests.test_endpoint_clients`. A key "
        "that is missing, null, or has its usual value makes no difference. Neutral keys have no "
        "effect, a text stands for neutral parts; both are counted (`env/endpoint/ignored/KEY`). "
        "Every other key is refused.",
    ]
    for kind, table in KEYS.items():
        lines += ["", f"## {KINDS.get(kind, f'`{kind}`')}", ""]
        groups: dict[str, Any] = {
            "done": table.done,
            "neutral in a run, done by `serve`": table.sampling,
            "neutral in a run, refused by `serve`": table.unserved,
            "refused in a run, done by `serve`": table.served,
            "neutral": table.neutral,
            **{f"refused ({remedy})": keys for remedy, keys in sorted(table.refused.items())},
        }
        for title, keys in groups.items():
            usual = {key: f" unless {json.dumps(one)}" for key, one in table.usual.items()}
            shown = ", ".join(f"`{key}`{usual.get(key, '')}" for key in sorted(keys))
            lines += [f"- {title}: {shown}"] if keys else []
    return "\n".join(lines) + "\n"


def test_the_page_has_the_table() -> None:
    assert (ROOT / "docs" / "endpoint-keys.md").read_text(encoding="utf-8") == page()


# Turns of the policy, each returned by the stock clients, streamed and not.

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "lima"}}\n</tool_call>'
TURNS: dict[str, str] = DATA["turns"]


def random_turn(rng: Random) -> str:
    parts = ["Fine. ", "\n", " ", CALL, "<think>", "</think>", "<tool_call>", "</tool_call>", "{",
             '{"name": "search", "arguments": {}}', '"', "\\", "é", "[1]", "null", ":"]  # fmt: skip
    return "".join(rng.choice(parts) for _ in range(rng.randrange(1, 9)))


class Seen:
    """The prompts of an engine, and its next turns."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.turns: list[str] = []

    def __call__(self, prompt: str, rng: Random) -> str:
        self.prompts.append(prompt)
        return self.turns.pop() if self.turns else "The end."


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
async def client(seen: Seen) -> AsyncIterator[Client]:
    async with serving(script=seen) as one:
        yield one


Openai, Anthropic = openai.AsyncOpenAI, anthropic.AsyncAnthropic


async def answered(api: Any, asked: Json, streamed: bool, final: str) -> Any:
    """The whole reply of a stock client."""
    if not streamed:
        return await api.create(**asked)
    async with api.stream(**asked) as stream:
        return await getattr(stream, final)()


async def chat(client: Openai, *, streamed: bool, offered: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "Where?"}]
    more: Any = {"tools": [named("chat", "search")]} if offered else {}
    for _ in range(2):
        asked: Any = {"model": "policy", "messages": messages, "max_tokens": 150, **more}
        found = await answered(client.chat.completions, asked, streamed, "get_final_completion")
        message = found.choices[0].message
        messages.append(message.model_dump(exclude_unset=True, exclude={"parsed"}))
        for call in messages[-1].get("tool_calls") or ():
            call.pop("index", None)
            call["function"].pop("parsed_arguments", None)
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "ok"}
            for call in message.tool_calls or ()
        ]
        messages += results or [{"role": "user", "content": "Go on."}]


async def responses(client: Openai, *, streamed: bool, offered: bool) -> None:
    tools: Any = [{**named("responses", "search"), "strict": False}]
    items: list[Any] = [{"role": "user", "content": "Where?"}]
    more: Any = {"tools": tools} if offered else {}
    for _ in range(2):
        asked: Any = {"model": "policy", "input": items, "max_output_tokens": 150, **more}
        found = await answered(client.responses, asked, streamed, "get_final_response")
        calls = [item for item in found.output if item.type == "function_call"]
        items += [item.model_dump(exclude_unset=True) for item in found.output]
        for item in items:
            item.pop("parsed_arguments", None)
            for part in item.get("content") or () if item.get("type") == "message" else ():
                part.pop("parsed", None)
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "ok"}
            for call in calls
        ]
        items += results or [{"role": "user", "content": "Go on."}]


async def messages(client: Anthropic, *, streamed: bool, offered: bool) -> None:
    turns: list[Any] = [{"role": "user", "content": "Where?"}]
    more: Any = {"tools": [named("anthropic", "search")]} if offered else {}
    for _ in range(2):
        asked: Any = {"model": "policy", "messages": turns, "max_tokens": 150, **more}
        found = await answered(client.messages, asked, streamed, "get_final_message")
        turns.append({"role": "assistant", "content": found.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "ok"}
            for block in found.content
            if block.type == "tool_use"
        ]
        turns.append({"role": "user", "content": results or "Go on."})


CLIENTS: dict[str, Any] = {"chat": chat, "responses": responses, "messages": messages}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("api", CLIENTS)
async def test_whatever_is_served_is_accepted_when_it_returns(
    seen: Seen, client: Client, api: str, streamed: bool
) -> None:
    rng = Random(11)
    turns = [*TURNS.values(), *(random_turn(rng) for _ in range(20))]
    async with connected(api, client.url) as sdk:
        for turn in turns:
            for offered in (True, False):
                seen.turns, seen.prompts = [turn], []
                await CLIENTS[api](sdk, streamed=streamed, offered=offered)
                sampled = f"<|im_start|>assistant\n{turn}<|im_end|>"
                assert sampled in seen.prompts[1], (turn, seen.prompts[1])


def connected(api: str, url: str) -> Any:
    if api == "messages":
        return Anthropic(base_url=url, api_key=KEY, max_retries=0)
    return Openai(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


@pytest.mark.parametrize("streamed", [False, True])
async def test_without_tools_a_call_is_a_text(seen: Seen, client: Client, streamed: bool) -> None:
    turn = f"I look.\n{CALL}"
    for more in ({}, {"tools": [named("chat", "search")], "tool_choice": "none"}):
        seen.turns = [turn]
        body = {"model": "policy", "messages": [{"role": "user", "content": "q"}], **more}
        reply = await client.ask("/v1/chat/completions", body)
        message = reply["choices"][0]["message"]
        assert message["content"] == turn
        assert "tool_calls" not in message


def test_half_of_a_surrogate_pair_in_a_body_is_replaced() -> None:
    body = read_body(rb'{"a": "\ud83d", "b": "\ud83d\ude00", "c": "\\ud83d", "d": "\udE00x"}')
    assert body == {"a": "�", "b": "\U0001f600", "c": "\\ud83d", "d": "�x"}
    assert json.dumps(body)


# Tools of other types.

ONE_TEXT = '<tool_call>\n{{"name": "{}", "arguments": {{"input": "ls"}}}}\n</tool_call>'
OTHERS: dict[str, list[Json]] = DATA["tools"]
NESTED = OTHERS["responses"][1]


def asked(api: str, tools: list[Json], **more: Any) -> Json:
    question = [{"role": "user", "content": "q"}]
    key = "input" if api == "responses" else "messages"
    size = {"max_tokens": 100} if api == "anthropic" else {}
    return {"model": "policy", key: question, "tools": tools, **size, **more}


@pytest.mark.parametrize("api", OTHERS)
async def test_tools_of_other_types_are_left_out_or_become_functions(
    seen: Seen, client: Client, api: str
) -> None:
    seen.turns = [ONE_TEXT.format("shell")]
    body = asked(api, OTHERS[api])
    reply = await client.ask(PATHS[api], body)
    assert '"shell"' in seen.prompts[0]
    assert "web_search" not in seen.prompts[0]
    if api == "anthropic":
        assert reply["content"][-1]["name"] == "shell"
    elif api == "chat":
        (call,) = reply["choices"][0]["message"]["tool_calls"]
        assert (call["type"], call["custom"]) == ("custom", {"name": "shell", "input": "ls"})
        result = {"role": "tool", "tool_call_id": call["id"], "content": "a.txt"}
        body["messages"] += [reply["choices"][0]["message"], result]
    else:
        (item,) = reply["output"]
        assert (item["type"], item["input"]) == ("custom_tool_call", "ls")
        result = {"type": "custom_tool_call_output", "call_id": item["call_id"]}
        body["input"] += [item, {**result, "output": "a.txt"}]
    if api != "anthropic":
        await client.ask(PATHS[api], body)
        assert ONE_TEXT.format("shell") + "<|im_end|>" in seen.prompts[1]
    served = [tool for tool in OTHERS[api] if tool["type"] not in ("custom", "namespace")]
    if served:
        status, data = await client.post(PATHS[api], asked(api, served))
        assert status == 400
        assert b"unsupported_value" in data or b"invalid_request_error" in data


@pytest.mark.parametrize("searched", [False, True], ids=["by the program", "by a server"])
async def test_a_deferred_tool_is_offered_once_a_result_refers_to_it(
    seen: Seen, client: Client, searched: bool
) -> None:
    """Where a server would search the tools, all are offered, since no server does."""
    server: list[Json] = [{"type": "tool_search_tool_regex_20251119", "name": "regex"}]
    tools = [named("anthropic", "find"), *server * searched]
    tools += [{**named("anthropic", name), "defer_loading": True} for name in ("bell", "lamp")]
    call = {"type": "tool_use", "id": "x", "name": "find", "input": {"query": "ring"}}
    found = [{"type": "tool_reference", "tool_name": "bell"}]
    result = {"type": "tool_result", "tool_use_id": "x", "content": found}
    body = asked("anthropic", tools)
    await client.ask(PATHS["anthropic"], body)
    seen.turns = [CALL.replace("search", "bell")]
    body["messages"] += [{"role": "assistant", "content": [call]}]
    body["messages"] += [{"role": "user", "content": [result]}]
    reply = await client.ask(PATHS["anthropic"], body)
    assert reply["content"][-1]["name"] == "bell"
    names = ("find", "bell", "lamp")
    shown = [[name for name in names if f'"{name}"' in prompt] for prompt in seen.prompts]
    assert shown == [[*names]] * 2 if searched else [["find"], ["find", "bell"]]
    assert "<tool_response>\nbell\n</tool_response>" in seen.prompts[1]


async def test_a_namespace_is_its_functions(seen: Seen, client: Client) -> None:
    """Two functions of one name have different names for the policy."""
    for space, name in (("agents", "spawn"), ("others", "others__spawn")):
        seen.turns, seen.prompts = [turn := CALL.replace('"search"', f'"{name}"')], []
        body = asked("responses", [NESTED, {**NESTED, "name": "others"}])
        reply = await client.ask("/v1/responses", body)
        (item,) = reply["output"]
        assert (item["name"], item["namespace"]) == ("spawn", space)
        result = {"type": "function_call_output", "call_id": item["call_id"]}
        body["input"] += [item, {**result, "output": "a.txt"}]
        await client.ask("/v1/responses", body)
        assert turn in seen.prompts[1]


# Keys.

REFUSED: dict[str, list[tuple[Any, ...]]] = DATA["refused"]
USUAL: dict[str, Json] = DATA["usual"]


@pytest.mark.parametrize("api", REFUSED)
async def test_a_key_is_done_or_neutral_or_refused_by_its_name(
    seen: Seen, client: Client, api: str
) -> None:
    tools = [named(api, "search")]
    for key, value, *place in REFUSED[api]:
        body = {**asked(api, tools), key: value}
        status, data = await client.post(PATHS[api], body)
        assert (status, (place or [key])[0] in data.decode()) == (400, True), (key, data)
    await client.ask(PATHS[api], asked(api, tools, **USUAL[api]))
    assert seen.prompts[-1].count(" policy reads text]") == 2


async def test_allowed_tools_are_those_that_the_policy_sees(seen: Seen, client: Client) -> None:
    tools = [named("chat", "search"), named("chat", "other")]
    mode = {"mode": "auto", "tools": [FORCED["chat"]]}
    allowed = {"type": "allowed_tools", "allowed_tools": mode}
    await client.ask(PATHS["chat"], asked("chat", tools, tool_choice=allowed))
    assert '"search"' in seen.prompts[0]
    assert '"other"' not in seen.prompts[0]


async def test_a_conversation_adds_and_removes_tools(seen: Seen, client: Client) -> None:
    tools = [named("anthropic", "search"), {**named("anthropic", "late"), "defer_loading": True}]
    late = {"type": "tool_reference", "name": "late"}
    new = {"type": "tool_definition", "definition": named("anthropic", "new")}
    gone = {"type": "tool_reference", "name": "search"}
    changes = [("addition", late), ("addition", new), ("removal", gone)]
    parts = [{"type": f"tool_{kind}", "tool": tool} for kind, tool in changes]
    added = {"type": "additional_tools", "role": "developer", "tools": [named("responses", "new")]}

    def offered() -> list[str]:
        return [
            name for name in ("search", "late", "new") if f'"name": "{name}"' in seen.prompts[-1]
        ]

    for number, names in enumerate(("search", "search late", "search late new", "late new")):
        content = [{"type": "text", "text": "Go on."}, *parts[:number]]
        messages = [{"role": "user", "content": content}]
        body = asked("anthropic", tools, messages=messages)
        await client.ask(PATHS["anthropic"], body)
        assert offered() == names.split()
    thread = {"type": "continue", "previous_message_id": "msg_1"}
    changed = [{"role": "user", "content": parts[1:2]}]
    body |= {"tools": None, "thread": thread, "messages": changed}
    status, data = await client.post(PATHS["anthropic"], body)
    assert (status, b"needs all of them" in data) == (400, True), data
    more: Json = {"input": [{"role": "user", "content": "Go on."}, added]}
    for _ in range(2):
        body = asked("responses", [named("responses", "search")], **more)
        reply = await client.ask(PATHS["responses"], body)
        assert offered() == ["search", "new"]
        more = {"input": "And now?", "previous_response_id": reply["id"]}


SINGLE: dict[str, Json] = {
    "chat": {"parallel_tool_calls": False},
    "responses": {"parallel_tool_calls": False},
    "anthropic": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
}
FORCED: dict[str, Json] = {
    "chat": {"type": "function", "function": {"name": "search"}},
    "responses": {"type": "function", "name": "search"},
    "anthropic": {"type": "tool", "name": "search"},
}


def named(api: str, name: str) -> Json:
    """A tool."""
    own = {"name": name, "parameters": SCHEMA}
    if api == "anthropic":
        return {"name": name, "input_schema": SCHEMA}
    return {"type": "function", "function": own} if api == "chat" else {"type": "function", **own}


@pytest.mark.parametrize("api", SINGLE)
async def test_one_call_at_most_and_forced_calls(seen: Seen, api: str) -> None:
    tools = [named(api, "search"), named(api, "other")]
    Guided.guides.clear()
    async with serving(None, seen, Guided, constraints="all") as client:
        seen.turns = [f"{CALL}\n{CALL}", CALL, CALL]
        reply = await client.ask(PATHS[api], asked(api, tools, **SINGLE[api]))
        _, text, calls, _ = parts(api, reply)
        assert (len(calls), text) == (1, "")
        every = {"type": "any"} if api == "anthropic" else "required"
        await client.ask(PATHS[api], asked(api, tools, tool_choice=FORCED[api]))
        await client.ask(PATHS[api], asked(api, tools, tool_choice=every))
    free, one, both = Guided.guides
    assert (free, "search" in one, "other" in one) == ("", True, False)
    assert ("search" in both, "other" in both) == (True, True)
    assert all("other" in prompt for prompt in seen.prompts)


class Guided(ScriptedEngine):
    """Records grammars, and ends turns at stop strings as engines do."""

    guides: ClassVar[list[str]] = []

    async def generate(self, prompt_ids: Any, sampling: Any, **more: Any) -> Any:
        self.guides.append(sampling.guide)
        return await super().generate(prompt_ids, sampling, **more)


PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
FORMS: dict[str, Json] = DATA["forms"]


@pytest.mark.parametrize("api", FORMS)
async def test_the_form_of_a_reply_is_in_the_prompt(seen: Seen, client: Client, api: str) -> None:
    await client.ask(PATHS[api], asked(api, [], **FORMS[api]))
    assert json.dumps(PLACE) in seen.prompts[0]


@pytest.mark.parametrize(
    ("text", "is_right"),
    [('{"place": "Lima"}', True), ('{"place": 5}', False), ("{}", False), ("Lima", False)],
)
def test_a_reply_is_checked_against_its_form(text: str, is_right: bool) -> None:
    assert fits(text, PLACE) == is_right


@pytest.mark.parametrize("schema", [{"$ref": "http://x/y"}, {"$ref": "#"}, {"pattern": "(a+)+$"}])
def test_a_check_of_a_form_ends(schema: Json) -> None:
    fits(json.dumps("a" * 40 + "!"), schema)


async def test_what_was_handed_out_is_found_by_its_id(seen: Seen, client: Client) -> None:
    """A later call names an earlier reply, or parts of it, instead of sending them."""
    tools = [named("responses", "search")]
    turn = f"<think>\nlook\n</think>\n\nI look.\n{CALL}"

    async def second(path: str, first: Json, then: Any) -> str:
        seen.turns, seen.prompts = [turn], []
        reply = await client.ask(path, first)
        await client.ask(path, then(reply))
        return seen.prompts[1]

    def result(reply: Json) -> Json:
        (call,) = (item for item in reply["output"] if item["type"] == "function_call")
        kind = "function_call_output"
        return {"type": kind, "call_id": call["call_id"], "output": "ok"}

    body: Json = asked("responses", tools, instructions="Be brief.")
    question = body["input"]

    def emptied(item: Json) -> Json:
        return {**item, "content": []} if item["type"] == "reasoning" else item

    def reference(item: Json) -> Json:
        return {"type": "item_reference", "id": item["id"]}

    def sent(form: Callable[[Json], Json]) -> Callable[[Json], Json]:
        return lambda r: {**body, "input": [*question, *map(form, r["output"]), result(r)]}

    forms = [sent(form) for form in (dict, emptied, reference)]
    forms += [lambda r: {**body, "input": [result(r)], "previous_response_id": r["id"]}]
    prompts = {await second(PATHS["responses"], body, form) for form in forms}
    assert len(prompts) == 1
    asking = asked("anthropic", [named("anthropic", "search")], system="Be brief.")

    def results(reply: Json) -> Json:
        block = {"type": "tool_result", "tool_use_id": reply["content"][-1]["id"]}
        return {"role": "user", "content": [{**block, "content": "ok"}]}

    def repeated(r: Json) -> Json:
        said = {"role": "assistant", "content": r["content"]}
        return {**asking, "messages": [*asking["messages"], said, results(r)]}

    def continued(r: Json) -> Json:
        thread = {"type": "continue", "previous_message_id": r["id"]}
        settings = {"model": "policy", "max_tokens": 100}
        return {**settings, "messages": [results(r)], "thread": thread}

    whole = await second(PATHS["anthropic"], asking, repeated)
    begun = {**asking, "thread": {"type": "create"}}
    short = await second(PATHS["anthropic"], begun, continued)
    assert short == whole
    assert turn in whole


async def test_the_sdk_runs_its_own_tools(seen: Seen, client: Client) -> None:
    """Its second call is a thread's."""
    seen.turns = [CALL]

    @anthropic.beta_tool
    def search(query: str) -> str:
        """Look it up.

        Args:
            query: what
        """
        return f"found-{query}"

    with anthropic.Anthropic(base_url=client.url, api_key=KEY, max_retries=0) as sdk:
        runner = sdk.beta.messages.tool_runner(
            model="policy",
            max_tokens=100,
            tools=[search],
            messages=[{"role": "user", "content": "the question"}],
        )
        await asyncio.to_thread(runner.until_done)
    assert len(seen.prompts) == 2
    assert all(text in seen.prompts[1] for text in ("question", "found-lima"))


if __name__ == "__main__":
    (ROOT / "docs" / "endpoint-keys.md").write_text(page(), encoding="utf-8")
