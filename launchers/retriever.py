"""Serve a corpus over HTTP, so that many workers and machines share one index.

    agentenv retriever CONFIG [key.sub=value ...]
    agentenv retriever port=8001 backend.corpus=wiki.jsonl

POST /retrieve accepts {"queries": [text, ...], "topk": 5, "return_scores": true} and
{"query": text, ...}. The response is {"result": [[{"document": {"id", "title", "contents"},
"score"}, ...], ...]}, a list for each query. The routes of Tool-Star's server: POST /search
accepts {"query": text, "top_n": 10, "return_score": false} and returns [{"id", "contents"}, ...];
POST /batch_search accepts {"query": [text, ...], ...} and returns a list of these; with scores,
both return [documents, scores]. GET /health returns {"status": "ok"}. With a key, the others need
`Authorization: Bearer KEY`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

from aiohttp import web
from msgspec import Meta, Struct

from agentenv.assembly.keys.help import KeysParser, add_key_help
from agentenv.assembly.run.exits import exit_code_of, run_until_done
from agentenv.assembly.run.terminal import View
from agentenv.base.config import about, load_config, resolve_config
from agentenv.base.errors import ForeignError
from agentenv.base.result_cache import ResultCache
from agentenv.base.untrusted import decode
from agentenv.contract.server_config import ClientKeyEnv, ListenHost, ListenPort, read_key
from agentenv.endpoint.listener import Listener, body_of, json_response
from agentenv.endpoint.messages import ApiError
from agentenv.envs.search.bm25 import BM25Config
from agentenv.envs.search.corpus import Backend, Hit, Query, document_of
from agentenv.envs.search.keys import AnyBackend, SearchConfig
from agentenv.envs.search.service import build_backend
from agentenv.launchers.command import until_stopped

MAX_QUERIES, MAX_QUERY_CHARS = 512, 10_000  # of a request; of a query


class RetrieverConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of `agentenv retriever`."""

    backend: Annotated[AnyBackend, about("corpus and index")] = BM25Config()
    host: ListenHost = "127.0.0.1"
    port: ListenPort = 8000
    api_key_env: ClientKeyEnv = ""
    topk: Annotated[int, about("default number of results", ge=1, le=100)] = 5


class _Request(Struct):
    query: str | None = None
    queries: list[str] | None = None
    topk: Annotated[int, Meta(ge=1, le=100)] | None = None
    return_scores: bool = False


class _SearchRequest(Struct):
    """A request to /search or /batch_search: FlashRAG's format, with its default of ten."""

    query: str | list[str]
    top_n: Annotated[int, Meta(ge=1, le=100)] = 10
    return_score: bool = False


class Retriever(Listener):
    """The HTTP service: /retrieve, /search and /batch_search over one backend."""

    max_bytes = 4_000_000

    def __init__(self, config: RetrieverConfig, backend: Backend) -> None:
        super().__init__(read_key(config.api_key_env, "api_key_env"))
        self.config = config
        self.backend = backend

    async def start(self) -> None:
        """Listen, as in `listen`."""
        posts = {"/retrieve": self.retrieve, "/search": self.search, "/batch_search": self.search}
        await self.listen({}, posts, self.config.host, self.config.port)

    async def retrieve(self, http: web.Request) -> web.Response:
        """/retrieve in both formats; status 400 for a bad request, with the expected format."""
        with _expecting('{"queries": [text, ...]} or {"query": text}, with "topk" up to 100'):
            body = decode(await body_of(http), _Request)
            if (body.query is None) == (body.queries is None):
                raise ValueError("exactly one of query and queries is required")
            queries = [body.query] if body.query is not None else body.queries or []
            found = await self._search(queries, body.topk or self.config.topk)
        rows = [[_row(hit, body.return_scores) for hit in hits] for hits in found]
        return json_response({"result": rows})

    async def search(self, http: web.Request) -> web.Response:
        """Tool-Star's routes: /search takes one query, /batch_search a list."""
        many = http.path == "/batch_search"
        query = "[text, ...]" if many else "text"
        with _expecting(f'{{"query": {query}}}, with "top_n" up to 100'):
            body = decode(await body_of(http), _SearchRequest)
            if many != isinstance(body.query, list):
                raise ValueError(f"query is {'not a list' if many else 'a list'}")
            queries = [body.query] if isinstance(body.query, str) else body.query
            if not many and not queries[0].strip():
                raise ValueError("query is empty")
            found = await self._search(queries, body.top_n)
        documents: list[Any] = [[document_of(hit) for hit in hits] for hits in found]
        scores: list[Any] = [[hit.score for hit in hits] for hits in found]
        if not many:
            documents, scores = documents[0], scores[0]
        return json_response([documents, scores] if body.return_score else documents)

    async def _search(self, queries: list[str], num_results: int) -> list[list[Hit]]:
        if len(queries) > MAX_QUERIES:
            raise ValueError(f"{len(queries)} queries, at most {MAX_QUERIES}")
        texts = [Query(query[:MAX_QUERY_CHARS], num_results) for query in queries]
        return await asyncio.gather(*map(self.backend.search, texts))


@contextmanager
def _expecting(form: str) -> Iterator[None]:
    """Within the block, the form is named in the error of a bad request."""
    try:
        yield
    except (ForeignError, ValueError) as error:
        raise ApiError("invalid", f"{error}; expected {form}") from error


def _row(hit: Hit, with_score: bool) -> dict[str, object]:
    document = document_of(hit) if hit.document else {**document_of(hit), "title": hit.title}
    return {"document": document, "score": hit.score} if with_score else {"document": document}


async def serve(config: RetrieverConfig, view: View) -> None:
    """Load the index, listen, print the address, and serve until a signal. Raises ConfigError and
    DataError."""
    cache = ResultCache()
    backend = build_backend(SearchConfig(backend=config.backend), cache)
    retriever = Retriever(config, backend)
    async with AsyncExitStack() as stack:
        for one in (cache, backend, retriever):
            stack.push_async_callback(one.close)
        view.wait_for("loading the index", "the address")
        await backend.start()
        await retriever.start()
        url = f"http://{config.host}:{retriever.port}"
        lines = [
            f"serving on {url} (POST /retrieve, /search, /batch_search)",
            "Ctrl-C stops the server; in another terminal:",
            f"""  curl {url}/retrieve -d '{{"query": "a question", "topk": 3}}'""",
            "or in the configuration of a run:",
            f"""  search.backend = {{ name = "remote", url = "{url}" }}""",
        ]
        await until_stopped(view, lines)


def read_config(arguments: list[str]) -> RetrieverConfig:
    """The configuration: of a TOML file and overrides, or of overrides alone."""
    if arguments and "=" not in arguments[0]:
        return load_config(RetrieverConfig, Path(arguments[0]), arguments[1:])
    return resolve_config(RetrieverConfig, {}, "the command line", arguments)


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 stopped, 1 failed with a reason, 2 bad input, 130 interrupted during
    the start-up."""
    usage = "agentenv retriever [CONFIG] [key.sub=value ...]"
    parser = KeysParser(prog="agentenv retriever", usage=usage, description=__doc__)
    parser.add_argument("keys", nargs="*", metavar="key.sub=value")
    add_key_help(parser, RetrieverConfig)
    given = parser.parse_args(arguments).keys
    return exit_code_of(
        lambda view: run_until_done(serve(read_config(given), view), view), "the index"
    )
