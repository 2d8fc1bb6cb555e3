"""How busy an evaluation keeps the embedded engine: `python benchmarks/parts/bench_evaluate.py
RUN`.

Evaluates 500 questions of a trained quick-start run, records every request, and then lets the
same engine sample the same requests flat out: all first turns at once, each next turn of a
trajectory as soon as the one before is sampled, no tokenizer, tools, grader or rows in between.
The two take turns; the figure is the ratio of their tokens a second, both in wall time and in CPU
time of the engine's thread. On a busy machine only the ratios mean anything. `--extra-layers N`
makes the model deeper without changing an answer: the one of the quick start, half a million
parameters, costs less than the tools that it calls.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil

from agentenv.engine import Engine
from agentenv.evaluate import Answer, Question, ask
from agentenv.pipelines.config.evaluation import resolve_sets
from agentenv.pipelines.evaluation.run import row_of
from agentenv.pipelines.evaluation.store import Saved, Store
from agentenv.pipelines.evaluation.subject import EvaluationAssembly, find_subject
from agentenv.types import Completion, SamplingParams
from benchmarks.parts.deeper_model import deepened

NUM_QUESTIONS = 500
Call = tuple[Sequence[int], SamplingParams]


class Recorded:
    """An engine that keeps what it was asked, by trajectory: a prompt that continues another."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.calls: list[tuple[Sequence[int], SamplingParams, Completion]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(self, prompt_ids: Any, sampling: Any, **keys: Any) -> Completion:
        done = await self.engine.generate(prompt_ids, sampling, **keys)
        self.calls.append((list(prompt_ids), sampling, done))
        return done

    def chains(self) -> list[list[Call]]:
        """The requests of each trajectory in order."""
        chains: list[list[Call]] = []
        open_: dict[tuple[int, ...], list[list[Call]]] = defaultdict(list)
        lengths: set[int] = set()
        for prompt, sampling, done in sorted(self.calls, key=lambda call: len(call[0])):
            for length in sorted(lengths, reverse=True):
                found = open_.get(tuple(prompt[:length]))
                if found:
                    chain = found.pop()
                    break
            else:
                chains.append(chain := [])
            chain.append((prompt, sampling))
            reached = (*prompt, *done.token_ids)
            open_[reached].append(chain)
            lengths.add(len(reached))
        return chains


async def flat_out(engine: Engine, chains: list[list[Call]]) -> None:
    async def one(number: int, chain: list[Call]) -> None:
        for prompt, sampling in chain:
            await engine.generate(prompt, sampling, session=str(number))

    async with asyncio.TaskGroup() as group:
        for number, chain in enumerate(chains):
            group.create_task(one(number, chain))


class Cost(NamedTuple):
    """Tokens, wall seconds, CPU seconds of the engine's thread, of all else in this process (the
    event loop), and of the processes below it (sandboxes)."""

    tokens: float
    wall_s: float
    engine_s: float
    loop_s: float
    below_s: float


def below_s() -> float:
    """CPU seconds of the processes below this one."""
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


async def timed(engine: Engine, work: Any) -> Cost:
    before, own, below, start = engine.stats(), time.process_time(), below_s(), time.monotonic()
    await work
    wall, after = time.monotonic() - start, engine.stats()
    engine_s = after["busy_s"] - before["busy_s"]
    own_s = time.process_time() - own
    tokens = after["sampled_tokens"] - before["sampled_tokens"]
    return Cost(tokens, wall, engine_s, own_s - engine_s, below_s() - below)


async def bench(
    run: str, num_questions: int, rounds: int, concurrency: int, num_extra: int
) -> None:
    subject = find_subject(run)
    limits = {**subject.raw["limits"], "max_seconds": 1e4}  # a busy machine is no limit here
    raw = {**subject.raw, "concurrency": concurrency, "limits": limits}
    config = resolve_sets(raw, run)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if num_extra:
            assert subject.model is not None
            model = deepened(subject.model, Path(folder) / "model", num_extra)
            subject = subject._replace(model=model)
        assembly = EvaluationAssembly(config, subject, stack, print)
        ((name, questions),) = (await assembly.questions()).items()
        engine = Recorded(await assembly.engine())
        actor = await assembly.actor(name, engine)
        wall, cpu = [], []
        for number in range(rounds):
            saved = Saved(subject={}, run="", config={"engine": {}, "limits": {}, "sets": {}})
            store = Store(Path(folder) / str(number), saved)

            def keep(answer: Answer, store: Store = store) -> None:
                store.add(row_of(name, answer, 0))

            asked = [Question(actor, task, 0) for task in questions.tasks[:num_questions]]
            engine.calls = []
            whole = await timed(engine, ask(asked, keep, concurrency=config.concurrency))
            store.close()
            chains = engine.chains()
            assert sum(map(len, chains)) == len(engine.calls)
            flat = await timed(engine, flat_out(engine.engine, chains))
            assert abs(flat.tokens / whole.tokens - 1) < 0.02, "equal seeds, up to rounding"
            rates = [cost.tokens / cost.wall_s for cost in (whole, flat)]
            wall.append(rates[0] / rates[1])
            rates = [cost.tokens / cost.engine_s for cost in (whole, flat)]
            cpu.append(rates[0] / rates[1])
            print(
                f"{len(asked)} questions, {len(engine.calls)} requests, {whole.tokens:.0f} tokens: "
                f"{wall[-1]:.3f} of flat out"
            )
            for title, cost in (("evaluation", whole), ("flat out", flat)):
                print(
                    f"  {title}: {cost.wall_s:.2f} s; CPU of engine {cost.engine_s:.2f}, "
                    f"loop {cost.loop_s:.2f}, sandboxes {cost.below_s:.2f}"
                )
        print(
            f"median of {rounds}: {statistics.median(wall):.3f} of the flat-out tokens/s by wall, "
            f"{statistics.median(cpu):.3f} by CPU of the engine's thread"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="a run of configs/quickstart.toml")
    parser.add_argument("--n", type=int, default=NUM_QUESTIONS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--extra-layers", type=int, default=0, help="which change no answer")
    arguments = parser.parse_args()
    asyncio.run(
        bench(
            arguments.run,
            arguments.n,
            arguments.rounds,
            arguments.concurrency,
            arguments.extra_layers,
        )
    )


if __name__ == "__main__":
    main()
