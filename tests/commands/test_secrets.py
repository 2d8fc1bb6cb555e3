"""No export contains a secret: neither one of the environment nor a text that looks like one."""

from __future__ import annotations

import gzip
import json
import re
from base64 import b64decode, b64encode
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote_plus

import pytest

from agentenv.base.secrets import REDACTED, Redactor
from agentenv.contract.function_tool import tool
from agentenv.contract.http import HttpClient
from agentenv.launchers import doctor, evaluate, train, view
from tests.support.openai_endpoint import Answer, ScriptedEndpoint, reply

ENVIRONMENT = {
    "SERPER_API_KEY": "q7Rz0pLmX2", "BRIGHTDATA_API_KEY": "9f3b-long-value-of-a-zone",
    "JUDGE_ACCESS": "judge-access-4711", "MAPS_LOGIN": "login-of-the-maps",  # by the configuration
    "SHORT_KEY": "abc", "HOME": "/home/somebody", "CACHE": "redis://:redis-4711@h/0",
    "DATABASE": "postgres://postgres:postgres@localhost/x",  # a word is no secret
}  # fmt: skip
SETTINGS = {
    "grader": {"judge": {"api_key_env": "JUDGE_ACCESS"}},
    "roles": [{"api_key_env": ""}],
    "env": {"tools": [{"kwargs": {"headers": {"X-Login": "Bearer ${MAPS_LOGIN}"}}}]},
}


@pytest.fixture
def redactor() -> Redactor:
    return Redactor(SETTINGS, ENVIRONMENT)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("key q7Rz0pLmX2 sent", f"key {REDACTED} sent"),
        ("9f3b-long-value-of-a-zone", REDACTED),
        ("judge-access-4711!", f"{REDACTED}!"),
        ("login-of-the-maps!", f"{REDACTED}!"),
        ("auth redis-4711", f"auth {REDACTED}"),
        ("dsn=postgres:postgres@localhost", f"dsn={REDACTED}@localhost"),
        ("Authorization: Bearer eyJhbGciOi.J9-x", f"Authorization: Bearer {REDACTED}"),
        ('{"Authorization": "Basic dXNlcjpwYXNz"}', f'{{"Authorization": "Basic {REDACTED}"}}'),
        ("https://user:pa55@host:8080/a?b=1", f"https://{REDACTED}@host:8080/a?b=1"),
        ("https://user:p@55@host/a", f"https://{REDACTED}@host/a"),
        ("postgres://token@db/x", f"postgres://{REDACTED}@db/x"),
        ("http://h/s?q=a&api_key=XY12&n=3", f"http://h/s?q=a&api_key={REDACTED}&n=3"),
        ("http://h/s?access_token=XY12", f"http://h/s?access_token={REDACTED}"),
        ("API_KEY=abcdefgh1234 python x.py", f"API_KEY={REDACTED} python x.py"),
        ("password: 'hunter22222'", f"password: '{REDACTED}'"),
        ("sk-proj-abcdefghij0123456789", REDACTED),
        ("hf_abcdefghijklmnopqrstuv", REDACTED),
    ],
)
def test_secrets_are_removed_from_texts(redactor: Redactor, text: str, expected: str) -> None:
    assert redactor.text(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "the bearer certificates of the bank",
        "a basic mathematics course",
        "write to somebody@example.org about https://example.org/a@b",
        "abc is short, and /home/somebody a folder",
        "key: 42 tokens, max_tokens=4096, ?q=keys",
        "the secret: it was late",
        "postgres stores rows, redis keys",
    ],
)
def test_texts_without_secrets_are_unchanged(redactor: Redactor, text: str) -> None:
    assert redactor.text(text) == text


def test_trees_are_redacted_and_keep_variable_names(redactor: Redactor) -> None:
    tree: dict[str, Any] = {
        "api_key": "anything", "api_key_env": "JUDGE_ACCESS", "X-API-Key": "abc",
        "Private-Token": "abc", "headers": [{"x": "Bearer abcdefg123"}, ("q7Rz0pLmX2", 3, None)],
        "max_tokens": 5, "q7Rz0pLmX2": "as a key", "token_ids": [1, 2],
    }  # fmt: skip
    redacted = {
        "api_key": REDACTED, "api_key_env": "JUDGE_ACCESS", "X-API-Key": REDACTED,
        "Private-Token": REDACTED, "headers": [{"x": f"Bearer {REDACTED}"}, (REDACTED, 3, None)],
        "max_tokens": 5, REDACTED: "as a key", "token_ids": [1, 2],
    }  # fmt: skip
    assert redactor.tree(tree) == redacted
    assert redactor.pieces(["a ", "q7Rz", "0pLmX2"]) == [f"a {REDACTED}", "", ""]
    before = "password: 'hunter22222', "
    assert redactor.known(before + "q7Rz0pL\nmX2") == before + REDACTED


def escaped(text: str) -> list[str]:
    """The text with every character escaped, or apart from the next."""
    codes = (r"\u{:04x}", r"\u{:04X}", r"\x{:02x}", "%{:02X}", "&#{};", "&#x{:x};", "{:02x}")
    return ["".join(map(one.format, text.encode())) for one in codes] + ["\0".join(text)]


@pytest.mark.parametrize("part", ["a", "sk-", "-eyJ", "?key", "bearer ", "&#0", "\\", "://", "-"])
def test_a_text_of_a_server_takes_linear_time(redactor: Redactor, part: str) -> None:
    assert redactor.text(part * 200_000) == part * 200_000
    many = r"\\".join("judge-access-4712") * 1000
    assert redactor.known(many) == rf"{REDACTED}\\-\\4\\7\\1\\2" * 1000


@pytest.mark.parametrize(
    "settings",
    [
        {"token": "q7Rz/0p+X2<"},
        {"command": ["server", "--auth-token", "q7Rz/0p+X2<"]},
        {"command": ["server", "--api-key=q7Rz/0p+X2<"]},
        {"env": {"GITHUB_PAT": "q7Rz/0p+X2<"}},
        {"headers": {"Authorization": f"Basic {b64encode(b'me:q7Rz/0p+X2<').decode()}"}},
    ],
)
def test_secrets_are_found_by_their_place_and_in_every_escape(settings: Any) -> None:
    found = Redactor(settings, {})
    others = (r"q7Rz/0p\u002BX2\u003C", r"q7Rz\/0p+X2<", "q7rz/0p+x2<", "q7Rz%252F0p%252BX2%253C")
    for text in ("q7Rz/0p+X2<", *others, *escaped("q7Rz/0p+X2<")):
        assert found.known(text) == REDACTED
        nested = found.known(json.dumps([json.dumps(text)]))
        assert json.loads(json.loads(nested)[0]) == REDACTED
    settings = {"stop_token": "<|im_end|>", "args": ["--max-tokens", "12345"]}
    assert Redactor(settings, {}).values == set()


# Real commands, with a secret in each place and a server that repeats all of them in every reply.

OF_TOOL = ("TOOL_ACCESS", "TOOL_COOKIE", "TOOL_HEADER")
NAMES = ("ENGINE_KEY", "JUDGE_ACCESS", "SHOP_TOKEN", "PASSWORD", "QUERY", "BODY", *OF_TOOL)
MARKED = {name: f'Zq{name.title()}/{number}+"\\' for number, name in enumerate(NAMES)}
MARKED |= {name: f"Zq{name.title()}-x1" for name in ("PASSWORD", "QUERY", "BODY", *OF_TOOL)}


class Shop:
    """A tool of an API that needs a login."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        self.api = HttpClient(url, headers=headers)

    async def load(self) -> list[Any]:
        @tool
        async def shop(item: str) -> str:
            """Ask the shop."""
            return str(await self.api.post("/shop", {}))

        return [shop]


def forms(names: Iterable[str]) -> str:
    """Secrets as servers repeat them."""
    told = []
    for one in [*map(MARKED.__getitem__, names), f"me:{MARKED['PASSWORD']}"]:
        told += [one, f"{one[:9]}\n{one[9:]}", quote_plus(one), json.dumps(one), repr(one)]
        told += [b64encode(f"{before}{one}".encode()).decode() for before in ("", "a", "bc")]
        told += escaped(one)
    return "\n".join(told)


def leaks(data: bytes) -> set[str]:
    """The marked secrets in these data, and in the compressed parts of a page."""
    for part in re.findall(rb'data-path="[^"]*">([^<]*)<', data):
        data += gzip.decompress(b64decode(part))
    bare = b"".join(data.replace(rb"\n", b"").split())
    begun = [(name, bytes(n) + one[:12].encode()) for name, one in MARKED.items() for n in range(3)]
    coded = [(name, b64encode(one)[4:-4]) for name, one in begun]
    plain = [(name, text.encode()) for name, one in MARKED.items() for text in escaped(one[:9])]
    plain += [(name, one[:9].encode()) for name, one in MARKED.items()]
    return {name for name, core in plain + coded if core in bare}


def shopping(prompt: str, rng: Random) -> str:
    """A policy that calls both tools, and then says a secret."""
    calls = ("<search>bolts</search>", "<shop>nuts</shop>")
    if (num_results := prompt.count("<result>\n")) < 2:
        return f"<think>look</think>{calls[num_results]}"
    return f"<think>{MARKED['ENGINE_KEY']}</think><answer>{MARKED['PASSWORD']}</answer>"


def test_no_file_page_or_line_contains_a_secret_that_servers_repeat(
    here: None, warehouse: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ENGINE_KEY", "JUDGE_ACCESS", "TOOL_ACCESS", "SHOP_TOKEN"):
        monkeypatch.setenv(name, MARKED[name])
    known, status = NAMES[: -len(OF_TOOL)], 0

    def script(body: dict[str, Any], number: int) -> Answer:
        path = server.headers[-1]["path"]
        said = f"{forms(known)}\n{server.headers[-1]}"
        if status or path == "/shop":
            return (status or 400, said)
        if path == "/retrieve":
            return {"result": [[{"document": {"contents": f"t\n{said}"}}]]}
        tool = "shop" if known == NAMES else "search"
        is_first = "judge" not in path and len(body["messages"]) < 3
        return reply(f"<think>?</think><{tool}>bolts</{tool}>" if is_first else said)

    with ScriptedEndpoint(script) as server:
        judge = f"{server.url}/judge/v1?api_key={MARKED['QUERY']}"
        search = server.url.replace("//", f"//me:{MARKED['PASSWORD']}@")
        headers = f'Authorization="Bearer {MARKED["TOOL_HEADER"]}", X-Login="${{TOOL_ACCESS}}"'
        headers += f', Cookie="sid={MARKED["TOOL_COOKIE"]}; b=1"'
        kwargs = f"{{url='{server.url}', headers={{{headers}}}}}"
        shop = [f"env.tools=[{{name='{__name__}:Shop', kwargs={kwargs}}}]"]
        keys = [
            "env={id='agentenv/WebSearch-v0'}", "prompt.template=search",
            "search.backend.name=remote", f"search.backend.url={search}",
            f"search.cache={tmp_path}/results.sqlite",
            "grader.kind=judge", f"grader.judge.url={judge}", "grader.judge.model=m",
            "grader.judge.api_key_env=JUDGE_ACCESS",
            f"grader.judge.cache={tmp_path}/verdicts.sqlite",
            f"grader.judge.extra_body={{api_key='{MARKED['BODY']}'}}",
            "limits.max_prompt_tokens=740", "limits.max_response_tokens=280",
            "limits.max_tool_result_tokens=100", "limits.max_failed_share=1.0",
        ]  # fmt: skip
        own = [f"run.dir={tmp_path}/runs", "run.name=r", "train.num_steps=1", *keys]
        own += [f"engine.script={__name__}:shopping"]
        assert train.main([str(warehouse), *own]) == 0
        asked = [server.url, "--model", "m", "engine.api_key_env=ENGINE_KEY", *keys]
        asked += [f"data={warehouse.parent}/a.jsonl", "--n", "2", "--env", "agentenv/WebSearch-v0"]
        assert evaluate.main([*asked, "--out", str(tmp_path / "a")]) == 0
        known = NAMES
        assert evaluate.main([*asked, *shop, "--out", str(tmp_path / "b")]) == 0
        assert doctor.main(["--config", str(warehouse), *own, *shop, "--offline"]) == 0
        status = 401
        assert evaluate.main([*asked, *shop, "--out", str(tmp_path / "c")]) == 1
    for folder in (tmp_path / "runs" / "r", tmp_path / "a", tmp_path / "b", tmp_path / "c"):
        view.main([str(folder), "--export", str(tmp_path / f"{folder.name}.html")])
    printed = capfd.readouterr()
    assert leaks((printed.out + printed.err).encode()) == set()
    found = {path: leaks(path.read_bytes()) for path in tmp_path.rglob("*") if path.is_file()}
    assert {path: names for path, names in found.items() if names} == {}
    rows = [*tmp_path.rglob("step-*.jsonl"), *tmp_path.rglob("rows.jsonl")]
    assert sum(REDACTED.encode() in path.read_bytes() for path in rows) == 3
