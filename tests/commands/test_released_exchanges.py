"""Our evaluations and the released evaluation loop, against the same servers: each value that the
loop shows to the policy, its tools and the browser agent is equal here, or listed with
its reason among the differences of the recording."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from agentenv.assembly.reports.records import EvalRow
from agentenv.base.types import SamplingParams
from agentenv.engines.scripted import ScriptedEngine
from agentenv.envs.quickstart.setup import build_model
from agentenv.evaluation.store import read_rows
from agentenv.launchers import evaluate
from agentenv.text.renderer import RESULT_CLOSE, RESULT_OPEN
from tests.support.openai_endpoint import Answer, Json, ScriptedEndpoint, reply
from tests.support.pdfs import pages
from tests.support.warehouse import ROOT

RECORDED = json.loads((ROOT / "tests/fixtures/released_exchanges.json").read_text("utf-8"))
END = "<|im_end|>"  # the policy ended its turn
SHOWN, HALF = 200, 30  # characters; of a longer text, its length and both ends
DOCUMENT = re.compile(r"\*\*Web Page \d+:\*\*\n(\{.*?\n\})", re.DOTALL)
SETS = {"eval_reasoning": "hotpotqa", "eval_deep_search": "SimpleQA"}
CASES: dict[str, Json] = RECORDED["cases"]
turns: dict[str, list[str]] = {}  # that are left, by question


def policy(prompt: str, rng: Random) -> str:
    """The policy of the evaluations, named in `engine.script`."""
    (question,) = (question for question in turns if question in prompt)
    return turns[question].pop(0)


class Exchange:
    """Evaluations with one server as the web, the browser agent and the judge."""

    def __init__(self, site: ScriptedEndpoint, folder: Path) -> None:
        self.site, self.folder = site, folder
        self.searches, self.summaries = dict[str, Json](), dict[str, Json]()  # by query
        self.sampled: list[SamplingParams] = []
        site.script = self.answer
        site.pages = {path: page(path, parts) for path, parts in RECORDED["pages"].items()}

    def answer(self, body: Json, _: int) -> Answer:
        if "zone" in body:
            params = dict(parse_qsl(urlsplit(body["url"]).query))
            self.searches[params["q"]] = params
            found = json.dumps(RECORDED["found"][params["q"]]).replace("SITE", self.site.url)
            return {"general": {}, "organic": json.loads(found)}
        if body["model"] == "judge":
            return reply("CORRECT")
        query = part(body["messages"][0]["content"], "query")
        self.summaries[query] = body
        return reply(RECORDED["summaries"][query])

    def run(self, config: str, asked: list[Json]) -> list[EvalRow]:
        """Evaluate questions in a set of a shipped configuration; the rows in their order."""
        chosen, file, out = SETS[config], self.folder / "rows.jsonl", self.folder / config
        file.write_text("".join(json.dumps(one) + "\n" for one in asked))
        keys = f"""num_samples=1 concurrency=1 engine.name=scripted engine.script={__name__}:policy
            sets.{chosen}.path={file} prompt.template=search+python grader.judge.cache=
            search.backend.url={self.site.url} search.cache=
            search.pages.fetch.allow_networks=['127.0.0.0/8']""".split()
        roles = ("judge", "summarizer")[: 1 + (config == "eval_deep_search")]
        keys += [f"roles.{role}={{url='{self.site.url}'}}" for role in roles]
        path, model = ROOT / "configs" / f"{config}.toml", self.folder / "model"
        given = [str(model), "--config", str(path), "--set", chosen, "--out", str(out)]
        assert evaluate.main([*given, *keys]) == 0
        rows = {row.question: row for row in read_rows(out)}
        return [rows[one["question"]] for one in asked]

    def play(self, config: str) -> Json:
        """The facts of the recorded cases of a configuration, from our evaluation."""
        cases = {name: case for name, case in CASES.items() if case["config"] == config}
        for case in cases.values():
            whole = ["".join(pieces).partition(END)[0] for pieces in case["turns"]]
            turns[case["question"]] = whole
        rows = self.run(config, [{**case, "answer": case["gold"]} for case in cases.values()])
        return dict(zip(cases, map(self.facts, rows), strict=True))

    def facts(self, row: EvalRow) -> Json:
        results = [one["env"] for one in row.segments[1:] if "env" in one]
        assert all(one.startswith(RESULT_OPEN) and one.endswith(RESULT_CLOSE) for one in results)
        calls = [one["arguments"] for one in row.tool_calls if one["name"] == "search"]
        wanted = [*dict.fromkeys(arguments["query"] for arguments in calls)]
        read = [query for query in wanted if query in self.summaries]
        return {
            "turns": [one["policy"] for one in row.segments if "policy" in one],
            "results": [shown(one[len(RESULT_OPEN) : -len(RESULT_CLOSE)]) for one in results],
            "prediction": row.prediction,
            "requests": row.num_turns,
            "queries": [query for query in wanted if query in self.searches],
            "summaries": [*map(self.summary, read if len(read) < 3 else (read[0], read[-1]))],
        }

    def summary(self, query: str) -> Json:
        """The parts of a message to the browser agent."""
        text = self.summaries[query]["messages"][0]["content"].replace(self.site.url, "SITE")
        documents = [json.loads(one) for one in DOCUMENT.findall(text)]
        shortened = [one | {"context": shown(one["context"])} for one in documents]
        return {"steps": part(text, "reasoning"), "query": query, "documents": shortened}


def part(text: str, name: str) -> str:
    return text.partition(f"<{name}>\n")[2].partition(f"\n</{name}>")[0]


def shown(text: str) -> str:
    return text if len(text) < SHOWN else f"{len(text)}: {text[:HALF]} ... {text[-HALF:]}"


def page(path: str, parts: list[tuple[str, int]]) -> tuple[str, bytes]:
    text = " ".join(sentence for sentence, times in parts for _ in range(times))
    if path.endswith("pdf"):
        lines = b" ".join(b"(%b) Tj T*" % line.encode() for line in textwrap.wrap(text, 90))
        return "application/pdf", pages(b"BT /F1 10 Tf 12 TL 40 780 Td %b ET" % lines)
    return "text/html", f"<html><body><p>{text}</p></body></html>".encode()


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Values by path."""
    if not isinstance(value, dict | list) or not value:
        yield path, value
        return
    for key, one in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(one, f"{path} / {key}" if path else key)


@pytest.fixture
def exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Exchange]:
    build_model(tmp_path / "model", seed=0)
    path = tmp_path / "model" / "config.json"
    path.write_text(path.read_text().replace('_embeddings": 1024', '_embeddings": 65536'))
    monkeypatch.setenv("BRIGHTDATA_API_KEY", "synthetic-key")
    with ScriptedEndpoint(lambda body, number: 500) as site:
        one = Exchange(site, tmp_path)
        generate = ScriptedEngine.generate

        def generated(self: Any, ids: Any, sampling: SamplingParams, **keys: Any) -> Any:
            one.sampled.append(sampling)
            return generate(self, ids, sampling, **keys)

        monkeypatch.setattr(ScriptedEngine, "generate", generated)
        yield one


def test_each_value_is_the_released_one_or_a_difference_with_its_reason(exchange: Exchange) -> None:
    here = exchange.play("eval_reasoning") | exchange.play("eval_deep_search")
    policy, browser = exchange.sampled[0], next(iter(exchange.summaries.values()))
    sampled = {key: getattr(policy, key) for key in RECORDED["released"]["every case"]["policy"]}
    search = {"eval_reasoning": "snippets", "eval_deep_search": "lima"}
    here["every case"] = {
        "policy": sampled | {"stop": " ".join(policy.stop)},
        "summarizer": {key: value for key, value in browser.items() if key in sampled},
        "frame": f"{RESULT_OPEN}..{RESULT_CLOSE}",
        "search": {config: exchange.searches[query] for config, query in search.items()},
    }
    released, found = dict(leaves(RECORDED["released"])), dict(leaves(here))
    pairs = {path: [released.get(path), found.get(path)] for path in released | found}
    listed = [one.get("values", {}) for one in RECORDED["differences"]]
    values = {path: pair for one in listed for path, pair in one.items()}
    assert {path: pair for path, pair in pairs.items() if pair[0] != pair[1]} == values
    assert all(one["why"] for one in RECORDED["differences"])
