"""Trees and evaluations as logs of Inspect (`.eval`), for `inspect view` and Inspect Scout.

There is one sample per question: the first from-scratch trajectory is the sample's conversation;
every other one is a branch, a span under the trajectory from which it was forked, after the anchor
of the last shared turn. The sample's timeline has the same tree for the viewer.

The times of turns are not recorded: all events have the time at which the step or the evaluation
was written, and tools have their durations.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    ModelOutput,
    ModelUsage,
)
from inspect_ai.scorer import Score
from inspect_ai.tool import ToolCall, ToolCallError

from examples.inspect_logs.transcript import TranscriptBranch, TranscriptQuestion
from examples.monitors.turns import TranscriptTurn

PROMPT = "prompt"  # the anchor of the other from-scratch trajectories


def write_log(
    path: Path,
    questions: Sequence[TranscriptQuestion],
    task: str,
    model: str,
    at: datetime,
    metadata: dict[str, Any],
) -> None:
    """Write a log; `at`: the time of its events."""
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


def sample(question: TranscriptQuestion, model: str, at: datetime) -> EvalSample:
    """The sample of a question with its branches."""
    events = _Events(question, model, at)
    root, branches = events.tree(), question.branches
    messages = events.conversation(branches[0], shared_only=False) if branches else []
    answers = [one for one in messages if isinstance(one, ChatMessageAssistant)]
    choices = [ChatCompletionChoice(message=answers[-1])] if answers else []
    error = None
    if branches and all(one.end == "failed" for one in branches):
        text = branches[0].error or "failed"
        error = EvalError(message=text, traceback=text, traceback_ansi=text)
    answer = question.prediction or None
    return EvalSample(
        id=question.id,
        epoch=question.sample,
        input=question.question,
        target=question.answers,
        messages=messages,
        output=ModelOutput(model=model, choices=choices),
        scores={name: Score(value=one, answer=answer) for name, one in question.scores.items()},
        metadata={"task": question.task, "kind": question.kind, **question.facts},
        events=events.all,
        timelines=[Timeline(name="tree", description="forks of one question", root=root)],
        model_usage={model: events.usage},
        started_at=at.isoformat(),
        completed_at=at.isoformat(),
        total_time=question.seconds,
        error=error,
        uuid=events.name(""),
    )


class _Events:
    """The branches of a question as events, depth first: the span of a fork begins after its last
    shared turn."""

    def __init__(self, question: TranscriptQuestion, model: str, at: datetime) -> None:
        self._question, self._model, self._at = question, model, at
        self.all: list[Any] = []
        self.usage = ModelUsage()

    def name(self, part: str) -> str:
        """A name that is unique among samples."""
        return f"{self._question.id}-{self._question.sample}{part and f'-{part}'}"

    def tree(self) -> TimelineSpan:
        """Create all events in order; returns their tree."""
        if not self._question.branches:
            return TimelineSpan(id=self.name("root"), name="main", span_type="agent")
        first, *others = self._question.branches
        root = self._begin(first, "agent", None)
        self._add(root, AnchorEvent, anchor_id=self.name(PROMPT))
        for one in others:
            if one.parent is None:
                self._fork(root, one, PROMPT)
        self._turns(root, first)
        return root

    def _begin(
        self, branch: TranscriptBranch, kind: str, above: str | None, **fields: Any
    ) -> TimelineSpan:
        span, title = self.name(f"branch-{branch.name}"), _title(branch)
        below = TimelineSpan(id=span, name=title, span_type=kind, **fields)
        self._event(SpanBeginEvent, span, id=span, parent_id=above, type=kind, name=title)
        return below

    def _fork(self, above: TimelineSpan, branch: TranscriptBranch, key: str) -> None:
        """Add a branch that forks at the anchor of a turn, or of the prompt."""
        anchor = self.name(key)
        below = self._begin(branch, "branch", above.id, branched_from=anchor)
        above.branches.append(below)
        self._add(below, BranchEvent, from_anchor=anchor)
        self._turns(below, branch)

    def _turns(self, span: TimelineSpan, branch: TranscriptBranch) -> None:
        messages = self.conversation(branch, shared_only=True)
        forks = [one for one in self._question.branches if one.parent == branch.name]
        for turn in branch.turns:
            action, *answers = self._messages(turn)
            self._model_turn(span, turn, messages, action)
            self._tools(span, turn, answers)
            messages = [*messages, action, *answers]
            here = [one for one in forks if one.forked_at == turn.key]
            if here:
                self._add(span, AnchorEvent, anchor_id=self.name(turn.key))
            for one in here:
                self._fork(span, one, turn.key)
        self._end(span, branch)
        self._event(SpanEndEvent, span.id, id=span.id)

    def _end(self, span: TimelineSpan, branch: TranscriptBranch) -> None:
        facts = {"end": branch.end, "limit": branch.limit, "error": branch.error}
        facts |= {"forked_from": branch.parent, **branch.facts}
        data = {key: value for key, value in facts.items() if value is not None}
        self._add(span, InfoEvent, source="agentenv", data=data)
        if branch.reward is not None:
            score = Score(value=branch.reward, explanation=branch.reason or None)
            more = {"target": self._question.answers, "scorer": "reward", "intermediate": True}
            self._add(span, ScoreEvent, score=score, **more)

    def _add(self, span: TimelineSpan, kind: Any, **fields: Any) -> None:
        """Add an event, also to its span in the timeline."""
        span.content.append(TimelineEvent(event=self._event(kind, span.id, **fields)))

    def _event(self, kind: Any, span: str, **fields: Any) -> Any:
        uuid = self.name(f"event-{len(self.all) + 1}")
        event = kind(uuid=uuid, span_id=span, timestamp=self._at, working_start=0.0, **fields)
        self.all.append(event)
        return event

    def conversation(self, branch: TranscriptBranch, *, shared_only: bool) -> list[ChatMessage]:
        """A trajectory as messages; `shared_only`: only the part shared with other branches."""
        prompt = ChatMessageUser(content=self._question.prompt, id=self.name("prompt"))
        found: list[ChatMessage] = [prompt]
        for owner, turn in self._question.path(branch):
            if not shared_only or owner is not branch:
                found += self._messages(turn)
        return found

    def _call(self, turn: TranscriptTurn, place: int) -> str:
        return self.name(f"{turn.key}-call-{place}")

    def _messages(self, turn: TranscriptTurn) -> list[ChatMessage]:
        """A turn and its observation, a single text that answers the last of its calls."""
        calls = [
            ToolCall(
                id=self._call(turn, place),
                function=str(call["name"]),
                arguments=dict(call.get("arguments", {})),
            )
            for place, call in enumerate(turn.calls, 1)
        ]
        action = ChatMessageAssistant(
            content=turn.text, tool_calls=calls or None, id=self.name(turn.key), model=self._model
        )
        if not turn.answer:
            return [action]
        name = self.name(f"{turn.key}-answer")
        if not calls:
            return [action, ChatMessageUser(content=turn.answer, id=name)]
        last = {"tool_call_id": calls[-1].id, "function": calls[-1].function}
        return [action, ChatMessageTool(content=turn.answer, id=name, **last)]

    def _model_turn(
        self, span: TimelineSpan, turn: TranscriptTurn, messages: list[ChatMessage], action: Any
    ) -> None:
        before, sampled = turn.num_context or 0, turn.num_tokens or 0
        usage = ModelUsage(
            input_tokens=before, output_tokens=sampled, total_tokens=before + sampled
        )
        self.usage = self.usage + usage
        reason: Any = "tool_calls" if turn.calls else "stop"
        choice = ChatCompletionChoice(message=action, stop_reason=reason)
        output = ModelOutput(model=self._model, choices=[choice], usage=usage)
        given = {"input": messages, "tools": [], "tool_choice": "auto", "config": GenerateConfig()}
        more = {**given, "output": output, "metadata": turn.facts or None}
        self._add(span, ModelEvent, model=self._model, **more)

    def _tools(self, span: TimelineSpan, turn: TranscriptTurn, answers: list[ChatMessage]) -> None:
        for place, call in enumerate(turn.calls, 1):
            is_last, error = place == len(turn.calls), call.get("error")
            self._add(
                span,
                ToolEvent,
                id=self._call(turn, place),
                function=str(call["name"]),
                arguments=dict(call.get("arguments", {})),
                result=turn.answer if is_last else "",
                error=None if error is None else ToolCallError(type="unknown", message=str(error)),
                working_time=call.get("duration_s"),
                message_id=answers[-1].id if is_last and answers else None,
            )


def _title(branch: TranscriptBranch) -> str:
    """The name of a branch with its reward and limit."""
    reward = "failed" if branch.reward is None else f"{branch.reward:g}"
    return " ".join(filter(None, [branch.name, reward, branch.limit or ""]))


def _results(samples: Sequence[EvalSample]) -> EvalResults:
    scores = []
    for name in dict.fromkeys(name for one in samples for name in one.scores or {}):
        values = [float(one.scores[name].value) for one in samples if name in (one.scores or {})]
        mean = {"mean": EvalMetric(name="mean", value=fmean(values))}
        sizes = {"scored_samples": len(values), "unscored_samples": len(samples) - len(values)}
        scores.append(EvalScore(name=name, scorer=name, metrics=mean, **sizes))
    done = sum(one.error is None for one in samples)
    return EvalResults(total_samples=len(samples), completed_samples=done, scores=scores)
