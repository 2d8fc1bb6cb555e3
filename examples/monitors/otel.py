"""Any OpenTelemetry receiver as a monitor, for metrics and spans over OTLP.

    invoke_agent    a trajectory: kind of question, reward, outcome
    +-- turn        a turn of the trajectory
        +-- chat          the tokens that the policy sampled
        +-- execute_tool  a tool call of the turn

Spans follow OpenTelemetry's conventions for generative AI; other names begin with `agentenv.`. Each
number in a row of metrics.jsonl becomes a gauge, such as agentenv.reward.mean. Texts are sent only
with `content`. Rows do not contain the start times of turns: the spans of a trajectory end when the
monitor receives it, tool spans have their true length, and turns share the rest in proportion to
their characters (`agentenv.times`).
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from msgspec import Meta

from agentenv.assembly.reports.monitors import Axis, MonitorPart
from agentenv.assembly.reports.records import FAILED
from agentenv.base.errors import SHOWN, ConfigError, MissingError
from agentenv.data.data_files import Row

from .turns import TranscriptTurn, turns_of

logger = logging.getLogger(__name__)

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
EXPORT_S = 10.0  # of one request, its retries included
MAX_KEPT = 1000  # rows and samples queued for the receiver
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0  # between attempts, doubled each time
NANO = 1_000_000_000


def service_name() -> str:
    """`service.name` of a run."""
    return os.environ.get("OTEL_SERVICE_NAME", "") or "agentenv"


class OtelConfig(MonitorPart, frozen=True, kw_only=True, tag="otel"):
    """OpenTelemetry, by OTLP over HTTP. The receiver's credentials come from the environment
    (OTEL_EXPORTER_OTLP_HEADERS), never from a file."""

    endpoint: Annotated[
        str,
        Meta(
            description="address of the receiver, such as http://localhost:4318; empty: that of "
            f"the variable {ENDPOINT}"
        ),
    ] = ""
    content: Annotated[
        bool,
        Meta(
            description="also send prompts, answers, tool arguments and tool results in the spans"
        ),
    ] = False

    def __post_init__(self) -> None:
        address = self.address
        if not address:
            raise ConfigError(
                f"otel.endpoint: is empty and {ENDPOINT} is not set; set the address of a "
                "receiver, such as http://localhost:4318"
            )
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"otel.endpoint: expected http://HOST:PORT or https://..., got {address!r}"
            )
        if parts.username or parts.password:
            raise ConfigError(
                "otel.endpoint: contains a user or a password; put the receiver's "
                "credentials into OTEL_EXPORTER_OTLP_HEADERS"
            )
        try:
            import opentelemetry.exporter.otlp.proto.http
            import opentelemetry.sdk  # noqa: F401
        except ImportError as error:
            raise MissingError(
                f"the monitor otel: {error}; `pip install opentelemetry-sdk "
                "opentelemetry-exporter-otlp-proto-http` installs it"
            ) from error

    def build(self, run: Path, settings: dict[str, Any]) -> OtelMonitor:
        return OtelMonitor(self, run, settings)

    @property
    def address(self) -> str:
        """The receiver's address, from the key or the environment, without a trailing slash."""
        return (self.endpoint or os.environ.get(ENDPOINT, "")).rstrip("/")


class OtelMonitor:
    """Sends each row and each sample of trajectories at once; during an outage of the receiver, it
    keeps the latest."""

    def __init__(self, config: OtelConfig, run: Path, settings: dict[str, Any]) -> None:
        algorithm = settings.get("algorithm", {})
        self._config, self._run = config, run.name
        self._resource = {
            "service.name": service_name(),
            "service.instance.id": run.name,
            "agentenv.run": run.name,
            "agentenv.algorithm": str(algorithm.get("name", "")),
        }
        self._exporter: _Exporter | None = None

    def log(self, metrics: dict[str, float], axis: Axis) -> None:
        exporter = self._begun()
        for key, value in {axis.key: axis.step, **metrics}.items():
            exporter.gauge(f"agentenv.{_metric_name(key)}").set(value)
        exporter.send_metrics()

    def trajectories(self, name: str, rows: Sequence[Row], axis: Axis) -> None:
        exporter = self._begun()
        common = {"agentenv.set": name, f"agentenv.{_metric_name(axis.key)}": axis.step}
        for row in rows:
            _Rollout(exporter.tracer, self._config, self._run, row).send(common)
        exporter.send_spans()

    def finish(self, exit_code: int) -> None:
        if self._exporter is not None:
            self._exporter.close()

    def _begun(self) -> _Exporter:
        if self._exporter is None:
            self._exporter = _Exporter(self._config.address, self._resource)
        return self._exporter


class _Exporter:
    """The parts of the SDK, exporting synchronously, so that failures are visible here: failed
    exports are queued, and retried with later rows, the oldest first."""

    def __init__(self, address: str, resource: dict[str, str]) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self.address = address
        self._waiting: deque[Callable[[], Any]] = deque(maxlen=MAX_KEPT)
        self._is_out, self._num_lost = False, 0
        self._pause_s, self._not_before = FIRST_PAUSE_S, 0.0
        self._reasons = _Reasons()
        self._reasons.listen("opentelemetry.exporter.otlp")
        self._metrics = OTLPMetricExporter(endpoint=f"{address}/v1/metrics", timeout=EXPORT_S)
        self._spans = OTLPSpanExporter(endpoint=f"{address}/v1/traces", timeout=EXPORT_S)
        self._reader, self._ended = InMemoryMetricReader(), InMemorySpanExporter()
        described = Resource.create(resource)
        self._meters = MeterProvider([self._reader], resource=described, shutdown_on_exit=False)
        self._meter = self._meters.get_meter("agentenv")
        self._tracers = TracerProvider(resource=described, shutdown_on_exit=False)
        self._tracers.add_span_processor(SimpleSpanProcessor(self._ended))
        self.tracer = self._tracers.get_tracer("agentenv")
        self.gauge: Callable[[str], Any] = cache(self._meter.create_gauge)

    def send_metrics(self) -> None:
        data = self._reader.get_metrics_data()
        if data is not None:
            self._send(partial(self._metrics.export, data, timeout_millis=EXPORT_S * 1e3))

    def send_spans(self) -> None:
        spans = self._ended.get_finished_spans()
        self._ended.clear()
        self._send(partial(self._spans.export, spans))

    def _send(self, export: Callable[[], Any]) -> None:
        self._num_lost += len(self._waiting) == MAX_KEPT
        self._waiting.append(export)
        if time.monotonic() >= self._not_before:
            self._flush()

    def _flush(self) -> None:
        """Send the queue; after a failure, warn once, and pause before the next attempt."""
        while self._waiting:
            if self._waiting[0]().name != "SUCCESS":
                if not self._is_out:
                    text = (
                        "OpenTelemetry: %s does not accept metrics and spans (%s); retrying, at "
                        "most every %g s, with the last %d rows; metrics.jsonl has all"
                    )
                    values = (self.address, self._reasons.last, MAX_PAUSE_S, MAX_KEPT)
                    logger.warning(text, *values, extra=SHOWN)
                self._is_out = True
                self._not_before = time.monotonic() + self._pause_s
                self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
                return
            self._waiting.popleft()
        if self._is_out:
            text = "OpenTelemetry: %s accepts metrics and spans again; %d rows were lost"
            logger.warning(text, self.address, self._num_lost, extra=SHOWN)
            self._is_out, self._num_lost, self._pause_s = False, 0, FIRST_PAUSE_S

    def close(self) -> None:
        self._flush()
        self._reasons.stop()
        for one in (self._tracers, self._meters, self._metrics, self._spans):
            one.shutdown()


class _Reasons(logging.Handler):
    """Keeps the last message of a package's loggers, and hides them from other handlers."""

    last = "no reason given"

    def listen(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        self._logger.addHandler(self)
        self._logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()

    def stop(self) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = True


class _Rollout:
    """The spans of a trajectory, from its row."""

    def __init__(self, tracer: Any, config: OtelConfig, run: str, row: Row) -> None:
        self._tracer, self._config, self._run, self._row = tracer, config, run, row
        self._prompt, self._turns = turns_of(row["segments"], row["tool_calls"])
        self._in_tools_s = sum(_seconds(call) for turn in self._turns for call in turn.calls)
        self._whole_s = max(row.get("seconds") or 0.0, self._in_tools_s)

    def send(self, common: dict[str, Any]) -> None:
        """Start and end the spans of the trajectory, its turns and their calls."""
        now = time.time_ns()
        at = now - int(self._whole_s * NANO)
        attributes = {**self._attributes(), **common}
        root = self._begin(f"invoke_agent {service_name()}", attributes, None, at)
        num_chars = sum(len(turn.text) for turn in self._turns) or 1
        texts = [self._prompt]
        for turn in self._turns:
            share = len(turn.text) / num_chars
            at = self._turn(root, turn, texts, at, (self._whole_s - self._in_tools_s) * share)
            texts += [turn.text, turn.answer]
        if self._row["end"] == FAILED:
            from opentelemetry.trace import Status, StatusCode

            root.set_status(Status(StatusCode.ERROR, self._row.get("error") or ""))
        root.end(end_time=max(at, now))

    def _attributes(self) -> dict[str, Any]:
        row = self._row
        name = f"{row['task']}-{row.get('sample', 0)}"
        if "tree" in row:
            name = f"tree-{row['tree']:06d}-{row['branch']}"
        error = row.get("error")
        found = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": service_name(),
            "gen_ai.conversation.id": f"{self._run}/{name}",
            "gen_ai.request.model": self._run,
            "gen_ai.usage.input_tokens": row.get("prompt_tokens"),
            "gen_ai.usage.output_tokens": row.get("action_tokens"),
            "agentenv.task": row["task"],
            "agentenv.kind": row["kind"],
            "agentenv.end": row["end"],
            "agentenv.success": row["success"],
            "agentenv.times": "shared" if row.get("seconds") else "tools only",
            "agentenv.reward": None if row["end"] == FAILED else row["reward"],
            "agentenv.limit": row["limit"],
            "agentenv.rollout.branch": row.get("branch"),
            "error.type": error and str(error).partition(":")[0],
        }
        return {key: value for key, value in found.items() if value is not None}

    def _turn(
        self, root: Any, turn: TranscriptTurn, texts: Sequence[str], at: int, sampling_s: float
    ) -> int:
        """Emit the spans of a turn that starts at `at` (ns); returns its end (ns)."""
        span = self._begin(turn.key, {"agentenv.calls": len(turn.calls)}, root, at)
        chat = {"gen_ai.operation.name": "chat", "gen_ai.request.model": self._run}
        chat["gen_ai.provider.name"] = "agentenv"
        if self._config.content:
            chat["gen_ai.input.messages"] = _messages("user", *texts)
            chat["gen_ai.output.messages"] = _messages("assistant", turn.text)
        inner = self._begin(f"chat {self._run}", chat, span, at, client=True)
        at += int(sampling_s * NANO)
        inner.end(end_time=at)
        for place, call in enumerate(turn.calls, 1):
            tool = self._begin(f"execute_tool {call['name']}", self._tool(turn, place), span, at)
            at += int(_seconds(call) * NANO)
            tool.end(end_time=at)
        span.end(end_time=at)
        return at

    def _tool(self, turn: TranscriptTurn, place: int) -> dict[str, Any]:
        call = turn.calls[place - 1]
        tool = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": str(call["name"]),
            "gen_ai.tool.type": "function",
            "gen_ai.tool.call.id": f"{turn.key}-call-{place}",
        }
        if not call.get("ok", True):
            tool["error.type"] = "ToolError"
        if self._config.content:
            arguments = call.get("arguments", {})
            tool["gen_ai.tool.call.arguments"] = json.dumps(arguments, ensure_ascii=False)
            if place == len(turn.calls):
                tool["gen_ai.tool.call.result"] = turn.answer
        return tool

    def _begin(
        self, name: str, attributes: dict[str, Any], parent: Any, at: int, *, client: bool = False
    ) -> Any:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, set_span_in_context

        context = Context() if parent is None else set_span_in_context(parent, Context())
        kind = SpanKind.CLIENT if client else SpanKind.INTERNAL
        return self._tracer.start_span(
            name, context=context, kind=kind, attributes=attributes, start_time=at
        )


def _messages(role: str, *texts: str) -> str:
    found = [{"role": role, "parts": [{"type": "text", "content": one}]} for one in texts if one]
    return json.dumps(found, ensure_ascii=False)


def _seconds(call: dict[str, Any]) -> float:
    return max(0.0, float(call.get("duration_s") or 0.0))


def _metric_name(key: str) -> str:
    """The name of an instrument: "reward/mean" becomes "reward.mean"; invalid characters become
    underscores."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", key.replace("/", "."))
