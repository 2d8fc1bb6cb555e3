"""Samples what a synthesis lacks, through the actor, environments and engines of evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from random import Random

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from agentenv.actor import Actor
from agentenv.engine import Engine
from agentenv.env import Env
from agentenv.evaluate import Answer
from agentenv.types import Task
from launchers.evaluation.parts import Builder, Questions
from launchers.evaluation.progress import Progress
from launchers.evaluation.rows import EvalRow, Wanted
from launchers.evaluation.run import ask_into
from launchers.evaluation.store import FAILED, Store
from launchers.evaluation.trajectory import row_of
from launchers.synthesis.chains import chain_text, parts_of
from launchers.synthesis.config import WITH_TOOLS, Plan, Way, set_name
from launchers.synthesis.filters import Judged, judge
from launchers.synthesis.hinted import HintedActor, LanguageOnly, hinted_row
from launchers.synthesis.hints import MARK, Hint, make_hint
from launchers.synthesis.sorting import Question
from launchers.view import View

MAX_HINTED_SHARE = 0.75  # of limits.max_response_tokens; what is left is the policy's


class Pair(Struct, frozen=True):
    """A question of the user's set `name`, as it is asked without and with tools."""

    name: str
    direct: Task
    tools: Task


class Sampling:
    """Asks in two stages, since hints need the language-only chains; what `store` holds is not
    asked again. `tools` are the names of the tools by environment id."""

    def __init__(
        self,
        plan: Plan,
        builder: Builder,
        sets: Mapping[str, Questions],
        store: Store,
        tools: Mapping[str, Sequence[str]],
        view: View,
    ) -> None:
        self.plan, self.store, self.num_failed = plan, store, 0
        self._builder, self._sets, self._tools, self._view = builder, sets, tools, view
        self._engine: Engine | None = None
        self._actors: dict[str, Actor] = {}

    async def run(self, pairs: Sequence[Pair]) -> list[Question]:
        """Every question with all of its trajectories."""
        direct = [wanted for pair in pairs for wanted in self._samples(pair, "direct")]
        await self._ask("language-only", direct)
        await self._ask("with tools", [one for pair in pairs for one in self._with_tools(pair)])
        return [self._gather(pair) for pair in pairs]

    # what is asked

    def _samples(self, pair: Pair, way: Way) -> Iterator[Wanted]:
        name = set_name(pair.name, way)
        task = pair.direct if way == "direct" else pair.tools
        for sample in range(self._sets[name].config.num_samples or 1):
            yield Wanted(name, task, sample)

    def _with_tools(self, pair: Pair) -> Iterator[Wanted]:
        is_easy = self._is_easy(pair)
        if not (is_easy and self.plan.config.skip_easy):
            yield from self._samples(pair, "tools")
        if self.plan.config.hints is not None and not is_easy:
            yield from self._hinted(pair)

    def _is_easy(self, pair: Pair) -> bool:
        clean = [one for one in self._judged(self._samples(pair, "direct")) if not one.reason]
        return len(clean) >= self.plan.config.filter.min_right

    def _hinted(self, pair: Pair) -> Iterator[Wanted]:
        """The chains of the question that have a place for a hint, the first ones."""
        config, name = self.plan.config.hints, set_name(pair.name, "hints")
        assert config is not None
        count = 0
        for wanted in self._samples(pair, "direct"):
            row = self.store.rows.get(wanted.key)
            if row is None or row.end == FAILED or count == config.max_per_question:
                continue
            text = chain_text(parts_of(row, self._tools[pair.tools.env_id]))
            rng = Random(f"{self.plan.config.seed}/{pair.name}/{pair.tools.id}/{row.sample}/hint")
            hint = make_hint(text, row.sample, config, rng)
            if hint is not None and self._has_room(name, hint):
                count += 1
                told = {**pair.tools.metadata, MARK: msgspec.to_builtins(hint)}
                yield Wanted(name, replace(pair.tools, metadata=told), row.sample)

    def _has_room(self, name: str, hint: Hint) -> bool:
        one = self._sets[name]
        assert one.config.limits is not None
        room = MAX_HINTED_SHARE * one.config.limits.max_response_tokens
        return len(one.renderer.encode(hint.prefix)) <= room

    # asking

    async def _ask(self, what: str, wanted: Sequence[Wanted]) -> None:
        missing = self.store.missing(wanted)
        if len(missing) < len(wanted):
            held = f"{len(wanted) - len(missing)} of {len(wanted)} trajectories"
            self._view.say(f"{what}: {held} are there already")
        if not missing:
            return
        if self._engine is None:
            self._engine = await self._builder.engine()
        actors = {one.dataset: self._actor(one.dataset, self._engine) for one in missing}
        progress = Progress(self._view, self._engine, len(missing), [])

        def make_row(name: str, answer: Answer) -> EvalRow:
            row = row_of(name, answer, self._builder.seed(self._sets[name].config))
            return hinted_row(row, answer) if MARK in row.metadata else row

        many = self.plan.evaluation.concurrency
        try:
            await ask_into(self.store, missing, actors, make_row, progress.add, concurrency=many)
        finally:
            self.num_failed += progress.num_failed
            await progress.close()

    def _actor(self, name: str, engine: Engine) -> Actor:
        if name not in self._actors:
            actor = self._builder.actor(name, self._sets[name], engine)
            make_env = actor.make_env
            if name.endswith(".direct"):
                actor.make_env = lambda task: _language_only(make_env(task))
            elif name.endswith(".hints"):
                parts = (actor.limits, actor.sampling, actor.seed)
                actor = HintedActor(engine, actor.renderer, make_env, *parts)
            self._actors[name] = actor
        return self._actors[name]

    # what is there

    def _gather(self, pair: Pair) -> Question:
        direct = list(self._samples(pair, "direct"))
        expected = [*direct, *self._with_tools(pair)]
        kept = {one.key: one for one in (*expected, *self._samples(pair, "tools"))}
        judged = self._judged(kept.values())
        is_whole = all(one.key in self.store.rows for one in expected)
        return Question(pair.name, pair.tools, judged, is_whole)

    def _judged(self, wanted: Iterable[Wanted]) -> list[Judged]:
        config = self.plan.config.filter
        judged = []
        for one in wanted:
            row = self.store.rows.get(one.key)
            if row is not None:
                ways = (way for way in WITH_TOOLS if one.dataset.endswith(f".{way}"))
                way: Way = next(ways, "direct")
                judged.append(judge(row, way, self._tools[one.task.env_id], config))
        return judged


def _language_only(env: Env) -> Env:
    return LanguageOnly(env)
