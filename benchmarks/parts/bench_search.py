"""Embedded search, the traffic layer under load, and the cache.

    python benchmarks/parts/bench_search.py [--passages 100000] [--queries 2000] [--calls 20000]
    python benchmarks/parts/bench_search.py --corpus 1000000

embedded  synthetic passages of 100 words drawn by Zipf's law from 50,000; a query is 7 words of a
          passage, stop words included; the 10 best are wanted. Latency: one query at a time, on
          the backend as an environment calls it (thread hop included). Rate: 64 callers at once.
          Of the first words' passage: how often it is among the 10.
traffic   20,000 concurrent calls with 800 distinct queries on a provider (a server in this
          process) that answers 429 to one request in ten, with Retry-After 0. Wanted: at most
          1,000 requests and no failure.
cache     reads of 20,000 entries of 1.6 kB in a file, of which the memory holds one in ten.
corpus    alone, with --corpus: passages of 100 words in FlashRAG's form, read by offset as the
          dense retriever does. Wanted: at most 100 bytes of memory a passage, the growth of the
          process's resident memory from before to after, and at its highest.
Times are wall times beside the CPU seconds of the process: on a shared machine read the latter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from aiohttp import web

from agentenv.envs.search.bm25 import BM25Backend
from agentenv.envs.search.cache import CachedBackend, ResultCache
from agentenv.envs.search.corpus import Query
from agentenv.envs.search.corpus_file import CorpusFile
from agentenv.envs.search.keys import TrafficConfig
from agentenv.envs.search.providers import WebBackend, WebConfig
from agentenv.envs.search.tantivy_index import TantivyBackend
from agentenv.errors import AgentEnvError

NUM_WORDS, PASSAGE_WORDS, QUERY_WORDS = 50_000, 100, 7
NUM_CALLERS = 64


def write_corpus(path: Path, num_passages: int, num_queries: int) -> list[tuple[str, str]]:
    """Writes the corpus; (id, query) pairs."""
    rng = np.random.default_rng(0)
    weights = 1 / np.arange(1, NUM_WORDS + 1)
    drawn = rng.choice(NUM_WORDS, (num_passages, PASSAGE_WORDS), p=weights / weights.sum())
    with path.open("w") as file:
        for number, row in enumerate(drawn):
            text = " ".join(f"w{word}" for word in row)
            file.write(json.dumps({"id": str(number), "title": "", "text": text}) + "\n")
    pairs = []
    for number in rng.choice(num_passages, num_queries).tolist():
        words = rng.choice(drawn[number], QUERY_WORDS, replace=False)
        pairs.append((str(number), " ".join(f"w{word}" for word in words)))
    return pairs


async def embedded(name: str, backend: Any, pairs: list[tuple[str, str]]) -> None:
    start, start_cpu = time.perf_counter(), time.process_time()
    await backend.start()
    print(
        f"{name}: built in {time.perf_counter() - start:.1f} s, "
        f"{time.process_time() - start_cpu:.1f} CPU s"
    )
    taken: list[float] = []
    num_found = 0
    for number, text in pairs:
        before = time.perf_counter()
        hits = await backend.search(Query(text))
        taken.append(1000 * (time.perf_counter() - before))
        num_found += number in {hit.id for hit in hits}
    taken.sort()
    print(
        f"  one at a time: median {statistics.median(taken):.3f} ms, "
        f"p99 {taken[int(0.99 * len(taken))]:.3f} ms; found {num_found / len(pairs):.3f}"
    )
    queue = list(pairs)

    async def caller() -> None:
        while queue:
            await backend.search(Query(queue.pop()[1]))

    start, start_cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(caller() for _ in range(NUM_CALLERS)))
    wall, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    rate, cpu_ms = len(pairs) / wall, 1000 * cpu / len(pairs)
    print(f"  {NUM_CALLERS} callers: {rate:.0f} queries/s, {cpu_ms:.3f} CPU ms a query")
    await backend.close()


async def traffic(num_calls: int, num_distinct: int) -> None:
    chance = random.Random(0)
    num_requests = num_refused = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal num_requests, num_refused
        num_requests += 1
        if chance.random() < 0.1:
            num_refused += 1
            return web.Response(status=429, headers={"Retry-After": "0"})
        await asyncio.sleep(0.02)
        results = [{"title": "t", "url": "u", "content": request.query["q"]}]
        return web.json_response({"results": results})

    app = web.Application()
    app.router.add_get("/search", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    limits = TrafficConfig(rate_per_s=0)
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    with tempfile.TemporaryDirectory() as directory:
        cache = ResultCache(Path(directory) / "cache.db")
        provider = WebBackend(WebConfig("searxng", url=url, traffic=limits))
        backend = CachedBackend("bench", provider, cache)
        queries = [f"query {number % num_distinct}" for number in range(num_calls)]
        chance.shuffle(queries)
        num_wrong = 0

        async def call(text: str) -> None:
            nonlocal num_wrong
            try:
                num_wrong += (await backend.search(Query(text)))[0].text != text
            except AgentEnvError:
                num_wrong += 1

        start, start_cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*map(call, queries))
        wall, cpu = time.perf_counter() - start, time.process_time() - start_cpu
        await backend.close()
        await cache.close()
    await runner.cleanup()
    print(
        f"traffic: {num_calls} calls, {num_distinct} distinct: {num_requests} requests, "
        f"{num_refused} of them refused, {num_wrong} calls failed; {wall:.1f} s, {cpu:.1f} CPU s"
    )


async def cache_reads(num_entries: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        cache = ResultCache(Path(directory) / "cache.db", max_memory_entries=num_entries // 10)
        for number in range(num_entries):
            cache.put(f"key {number}", b"x" * 1600)
        await cache.close()
        cache = ResultCache(Path(directory) / "cache.db", max_memory_entries=num_entries // 10)
        keys = [f"key {number}" for number in range(num_entries)]
        random.Random(0).shuffle(keys)
        rate(f"cache: reads from the file, {num_entries} entries", cache.get, keys)
        hot = keys[-num_entries // 20 :]
        rate("cache: reads from memory", cache.get, hot * 20)
        await cache.close()


def corpus_file(num_passages: int) -> None:
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "corpus.jsonl"
        text = " ".join(f"w{rng.randrange(NUM_WORDS)}" for _ in range(2 * PASSAGE_WORDS))
        with path.open("w") as file:
            for number in range(num_passages):
                begin = rng.randrange(len(text) // 2)
                row = {"id": str(number), "contents": f'"T{number}"\n{text[begin : begin + 600]}'}
                file.write(json.dumps(row) + "\n")
        before, start = memory("VmRSS"), time.perf_counter()
        corpus = CorpusFile(path)
        wall = time.perf_counter() - start
        held, peak = memory("VmRSS") - before, memory("VmHWM") - before
        print(
            f"corpus: {num_passages} passages, {path.stat().st_size / 1e6:.0f} MB: opened in "
            f"{wall:.1f} s; {held / num_passages:.0f} bytes of memory a passage, "
            f"{peak / num_passages:.0f} at the highest"
        )
        places = [rng.randrange(num_passages) for _ in range(20_000)]
        start = time.perf_counter()
        if any(corpus[place].title != f"T{place}" for place in places):
            raise SystemExit("another passage than the one asked for")
        by_place = time.perf_counter() - start
        start = time.perf_counter()
        if any(corpus.find(str(place)) is None for place in places):
            raise SystemExit("a passage is missing")
        by_id = time.perf_counter() - start
    print(
        f"  {1e6 * by_place / len(places):.1f} us a passage by place, "
        f"{1e6 * by_id / len(places):.1f} us by id"
    )


def memory(name: str) -> int:
    """Bytes of the process: VmRSS what it has, VmHWM the most it had."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise SystemExit(f"/proc/self/status has no {name}")


def rate(what: str, read: Callable[[str], bytes | None], keys: list[str]) -> None:
    start, start_cpu = time.perf_counter(), time.process_time()
    for key in keys:
        if read(key) is None:
            raise SystemExit(f"{key} is missing")
    wall, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    print(f"{what}: {len(keys) / wall:.0f} a second, {len(keys) / cpu:.0f} a CPU second")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=2_000)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--distinct", type=int, default=800)
    parser.add_argument("--tantivy", action="store_true", help="measure tantivy too")
    parser.add_argument("--corpus", type=int, help="measure a corpus of so many, and nothing else")
    arguments = parser.parse_args()
    if arguments.corpus:
        corpus_file(arguments.corpus)
        return
    await traffic(arguments.calls, arguments.distinct)
    await cache_reads(20_000)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "corpus.jsonl"
        pairs = write_corpus(path, arguments.passages, arguments.queries)
        await embedded("bm25", BM25Backend(path), pairs)
        if arguments.tantivy:
            index = Path(directory) / "index"
            await embedded("tantivy", TantivyBackend(path, index), pairs[:500])


if __name__ == "__main__":
    asyncio.run(main())
