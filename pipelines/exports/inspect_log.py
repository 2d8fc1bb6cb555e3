"""Trees and evaluations as logs of Inspect (`.eval`), which `inspect view` and Inspect Scout read.

One sample a question: what began from scratch first is the sample's own conversation; every other
trajectory is a branch, a span below the one that it was forked from, behind the anchor of the turn
that both have. The sample's timeline holds the same tree for the viewer. With one sample a
trajectory instead, each is an epoch of its question and names its parent in its metadata.

Nothing says at what time of day a turn was taken: all events have the time at which the step or the
evaluation was written, and tools how long they worked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from inspect_ai.event import (
    AnchorEvent,
    BranchEvent,
    InfoEvent,
    ModelEvent,
    ScoreEvent,
    SpanBeginEvent,
    SpanEndEvent,
    Timeline,
    TimelineEvent,
    TimelineSpan,
    ToolEvent,
)
from inspect_ai.log import (
    EvalConfig,
    EvalDataset,
    EvalError,
    EvalLog,
    EvalMetric,
    EvalResults,
    EvalSample,
    EvalScore,
    EvalSpec,
    EvalStats,
    write_eval_log,
)
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageTool,
    ChatMessageUser,
    GenerateConfig,
    Logprob,
    Logprobs,
    ModelOutput,
    ModelUsage,
)
from inspect_ai.scorer import Score
from inspect_ai.tool import ToolCall, ToolCallError
from msgspec.structs import replace

from agentenv.pipelines.records.conversations import Branch, Question, Turn

PROMPT = "prompt"  # the anchor from which other trajectories begin from scratch


def write_log(
    path: Path,
    questions: Sequence[Question],
    *,
    task: str,
    model: str,
    at: datetime,
    metadata: dict[str, Any],
) -> None:
    """Write one log. `at` is the time that it shows."""
    samples = [sample(one, model, at) for one in questions]
    stamp = at.isoformat()
    spec = EvalSpec(
        created=stamp,
        task=task,
        task_id=task,
        eval_id=f"{task}-{int(at.timestamp())}",
        run_id=str(metadata.get("run", task)),
        model=model,
        dataset=EvalDataset(
            name=task, samples=len(samples), sample_ids=sorted({one.id for one in samples})
        ),
        config=EvalConfig(epochs=max((one.epoch for one in samples), default=1)),
        metadata=metadata,
    )
    log = EvalLog(
        status="success",
        eval=spec,
        results=_results(samples),
        stats=EvalStats(started_at=stamp, completed_at=stamp),
        samples=samples,
    )
    write_eval_log(log, path, format="eval")


def by_trajectory(questions: Iterable[Question]) -> list[Question]:
    """Each trajectory as a question of its own, an epoch of its task, with all of its turns."""
    found: list[Question] = []
    epochs: dict[str, int] = {}
    for question in questions:
        for branch in question.branches:
            sample_number = epochs[question.id] = epochs.get(question.id, 0) + 1
            turns = [turn for _, turn in question.path(branch)]
            scores = {}
            if branch.reward is not None:
                scores = {"reward": branch.reward, "success": float(branch.success)}
            parent = {"branch": branch.name, "forked_from": branch.parent}
            found.append(
                replace(
                    question,
                    sample=sample_number,
                    scores=scores,
                    facts=question.facts | parent | {"forked_at": branch.forked_at},
                    branches=[replace(branch, parent=None, forked_at=None, turns=turns)],
                )
            )
    return found


def sample(question: Question, model: str, at: datetime) -> EvalSample:
    """A question with its branches."""
    teller = _Teller(question, model, at)
    events, root = teller.told()
    first = question.branches[0] if question.branches else None
    messages, output = teller.conversation(first)
    error = None
    if question.branches and all(one.end == "failed" for one in question.branches):
        text = question.branches[0].error or "failed"
        error = EvalError(message=text, traceback=text, traceback_ansi=text)
    return EvalSample(
        id=question.id,
        epoch=question.sample,
        input=question.question,
        target=question.answers,
        messages=messages,
        output=output,
        scores={
            name: Score(value=value, answer=question.prediction or None)
            for name, value in question.scores.items()
        },
        metadata={"task": question.task, "kind": question.kind, **question.facts},
        events=events,
        timelines=[Timeline(name="tree", description="forks of one question", root=root)],
        model_usage={model: teller.usage},
        started_at=at.isoformat(),
        completed_at=at.isoformat(),
        total_time=question.seconds,
        error=error,
        uuid=teller.name(""),
    )


class _Teller:
    """Tells the branches of a question as events, depth first: the span of a fork begins behind
    the turn from which it goes on."""

    def __init__(self, question: Question, model: str, at: datetime) -> None:
        self._question, self._model, self._at = question, model, at
        self._num_events = 0
        self.usage = ModelUsage()

    def name(self, what: str) -> str:
        """A name that no other sample has."""
        return f"{self._question.id}-{self._question.sample}{what and f'-{what}'}"

    def told(self) -> tuple[list[Any], TimelineSpan]:
        """All events in order, and the tree of them."""
        root = TimelineSpan(id=self.name("root"), name="main", span_type="agent")
        if not self._question.branches:
            return [], root
        first, *others = self._question.branches
        fresh = [one for one in others if one.parent is None]
        span = self.name(f"branch-{first.name}")
        events = [self._begin(first, span, None, "agent")]
        root = TimelineSpan(id=span, name=_title(first), span_type="agent")
        anchor = self._made(AnchorEvent, span, anchor_id=self._anchor(PROMPT))
        self._tell(events, root, anchor)
        for one in fresh:
            self._branch(events, root, one, PROMPT)
        self._turns(events, root, first)
        return events, root

    def _branch(self, events: list[Any], above: TimelineSpan, branch: Branch, key: str) -> None:
        span = self.name(f"branch-{branch.name}")
        below = TimelineSpan(
            id=span, name=_title(branch), span_type="branch", branched_from=self._anchor(key)
        )
        above.branches.append(below)
        events.append(self._begin(branch, span, above.id, "branch"))
        self._tell(events, below, self._made(BranchEvent, span, from_anchor=self._anchor(key)))
        self._turns(events, below, branch)

    def _turns(self, events: list[Any], span: TimelineSpan, branch: Branch) -> None:
        messages = self._messages(branch, shared_only=True)
        forks = [one for one in self._question.branches if one.parent == branch.name]
        for turn in branch.turns:
            said = self._said(turn)
            self._tell(events, span, self._model_event(turn, messages, said, span.id))
            answers = self._answers(turn)
            for event in self._tool_events(turn, answers, span.id):
                self._tell(events, span, event)
            messages = [*messages, said, *answers]
            here = [one for one in forks if one.forked_at == turn.key]
            if here:
                name = self._anchor(turn.key)
                self._tell(events, span, self._made(AnchorEvent, span.id, anchor_id=name))
            for one in here:
                self._branch(events, span, one, turn.key)
        self._end(events, span, branch)
        events.append(self._made(SpanEndEvent, span.id, id=span.id))

    def _end(self, events: list[Any], span: TimelineSpan, branch: Branch) -> None:
        facts = {
            "end": branch.end,
            "limit": branch.limit,
            "error": branch.error,
            "forked_from": branch.parent,
            **branch.facts,
        }
        data = {key: value for key, value in facts.items() if value is not None}
        self._tell(events, span, self._made(InfoEvent, span.id, source="agentenv", data=data))
        if branch.reward is not None:
            score = Score(value=branch.reward, explanation=branch.reason or None)
            event = self._made(
                ScoreEvent,
                span.id,
                score=score,
                target=self._question.answers,
                scorer="reward",
                intermediate=True,
            )
            self._tell(events, span, event)

    def _tell(self, events: list[Any], span: TimelineSpan, event: Any) -> None:
        events.append(event)
        span.content.append(TimelineEvent(event=event))

    def _made(self, kind: Any, span: str | None, **fields: Any) -> Any:
        self._num_events += 1
        return kind(
            uuid=self.name(f"event-{self._num_events}"),
            span_id=span,
            timestamp=self._at,
            working_start=0.0,
            **fields,
        )

    def _begin(self, branch: Branch, span: str, above: str | None, kind: str) -> Any:
        title = _title(branch)
        return self._made(SpanBeginEvent, span, id=span, parent_id=above, type=kind, name=title)

    def _anchor(self, key: str) -> str:
        return self.name(key)

    def conversation(self, branch: Branch | None) -> tuple[list[ChatMessage], ModelOutput]:
        """A trajectory as messages, and its last turn."""
        if branch is None:
            return [], ModelOutput()
        messages = self._messages(branch, shared_only=False)
        said = [one for one in messages if isinstance(one, ChatMessageAssistant)]
        if not said:
            return messages, ModelOutput(model=self._model)
        choice = ChatCompletionChoice(message=said[-1])
        return messages, ModelOutput(model=self._model, choices=[choice])

    def _messages(self, branch: Branch, *, shared_only: bool) -> list[ChatMessage]:
        found: list[ChatMessage] = [
            ChatMessageUser(content=self._question.prompt, id=self.name("prompt"))
        ]
        for owner, turn in self._question.path(branch):
            if not shared_only or owner is not branch:
                found += [self._said(turn), *self._answers(turn)]
        return found

    def _said(self, turn: Turn) -> ChatMessageAssistant:
        calls = [
            ToolCall(
                id=self.name(f"{turn.key}-call-{place}"),
                function=str(call["name"]),
                arguments=dict(call.get("arguments", {})),
            )
            for place, call in enumerate(turn.calls, 1)
        ]
        return ChatMessageAssistant(
            content=turn.text, tool_calls=calls or None, id=self.name(turn.key), model=self._model
        )

    def _answers(self, turn: Turn) -> list[ChatMessage]:
        """What was read after a turn: one text, which stands with the last of its calls."""
        if not turn.answer:
            return []
        if not turn.calls:
            return [ChatMessageUser(content=turn.answer, id=self.name(f"{turn.key}-answer"))]
        place, call = len(turn.calls), turn.calls[-1]
        return [
            ChatMessageTool(
                content=turn.answer,
                tool_call_id=self.name(f"{turn.key}-call-{place}"),
                function=str(call["name"]),
                id=self.name(f"{turn.key}-answer"),
            )
        ]

    def _model_event(
        self, turn: Turn, messages: list[ChatMessage], said: ChatMessageAssistant, span: str
    ) -> Any:
        usage = ModelUsage(
            input_tokens=turn.num_context or 0,
            output_tokens=turn.num_tokens or 0,
            total_tokens=(turn.num_context or 0) + (turn.num_tokens or 0),
        )
        self.usage = self.usage + usage
        logprobs = None
        if turn.logprobs:
            pairs = zip(turn.token_ids, turn.logprobs, strict=True)
            logprobs = Logprobs(content=[Logprob(token=str(i), logprob=p) for i, p in pairs])
        choice = ChatCompletionChoice(
            message=said, stop_reason="tool_calls" if turn.calls else "stop", logprobs=logprobs
        )
        return self._made(
            ModelEvent,
            span,
            model=self._model,
            input=messages,
            tools=[],
            tool_choice="auto",
            config=GenerateConfig(),
            output=ModelOutput(model=self._model, choices=[choice], usage=usage),
            metadata=turn.facts or None,
        )

    def _tool_events(self, turn: Turn, answers: list[ChatMessage], span: str) -> Iterable[Any]:
        for place, call in enumerate(turn.calls, 1):
            is_last = place == len(turn.calls)
            error = call.get("error")
            yield self._made(
                ToolEvent,
                span,
                id=self.name(f"{turn.key}-call-{place}"),
                function=str(call["name"]),
                arguments=dict(call.get("arguments", {})),
                result=turn.answer if is_last else "",
                error=None if error is None else ToolCallError(type="unknown", message=str(error)),
                working_time=call.get("duration_s"),
                message_id=answers[-1].id if is_last and answers else None,
            )


def _title(branch: Branch) -> str:
    """Name of a branch and what became of it."""
    reward = "failed" if branch.reward is None else f"{branch.reward:g}"
    return " ".join(filter(None, [branch.name, reward, branch.limit or ""]))


def _results(samples: Sequence[EvalSample]) -> EvalResults:
    names = dict.fromkeys(name for one in samples for name in one.scores or {})
    scores = []
    for name in names:
        values = [float(one.scores[name].value) for one in samples if name in (one.scores or {})]
        scores.append(
            EvalScore(
                name=name,
                scorer=name,
                scored_samples=len(values),
                unscored_samples=len(samples) - len(values),
                metrics={"mean": EvalMetric(name="mean", value=fmean(values))},
            )
        )
    done = sum(one.error is None for one in samples)
    return EvalResults(total_samples=len(samples), completed_samples=done, scores=scores)
