"""A run for whatever understands OpenTelemetry: metrics of steps, and rollouts as spans, by OTLP.

    invoke_agent    one trajectory: question's kind, reward, how it ended
    +-- turn        one turn of it
        +-- chat          what the policy sampled
        +-- execute_tool  each tool that it called then

Names and attributes are those of OpenTelemetry's conventions for generative AI; what they have no
name for begins with `agentenv.`. A row of metrics.jsonl becomes a gauge of each figure, such as
agentenv.reward.mean. Texts are sent only where `content` asks for them.

A trajectory's row says how long its tools worked, and in an evaluation how long all of it took, but
not when each turn began. The spans of a trajectory end when it was handed over; tools have their
true length, and turns share the rest by the characters that they wrote (`agentenv.times`).
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from agentenv.data_files import Row
from agentenv.errors import ConfigError

if TYPE_CHECKING:
    from agentenv.pipelines.monitors.monitors import Axis

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
EXPORT_S = 10.0  # of one request, its retries included
NANO = 1_000_000_000


def service_name() -> str:
    """`service.name` of a run."""
    return os.environ.get("OTEL_SERVICE_NAME", "") or "agentenv"


class OtelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenTelemetry, by OTLP over HTTP. Keys of the receiver come from the environment
    (OTEL_EXPORTER_OTLP_HEADERS), never from a file."""

    endpoint: Annotated[
        str,
        Meta(
            description="address of the receiver, such as http://localhost:4318; empty: that of "
            f"the variable {ENDPOINT}",
        ),
    ] = ""
    content: Annotated[
        bool,
        Meta(description="send prompts, answers, arguments and results of tools in the spans too"),
    ] = False

    def __post_init__(self) -> None:
        address = self.address
        if not address:
            raise ConfigError(
                f"monitor.otel.endpoint: is empty and {ENDPOINT} is not set; give the address of a "
                "receiver, such as http://localhost:4318"
            )
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"monitor.otel.endpoint: expected http://HOST:PORT or https://..., got {address!r}"
            )
        if parts.username or parts.password:
            raise ConfigError(
                "monitor.otel.endpoint: has a user or a password in it; put what the receiver "
                "asks for into OTEL_EXPORTER_OTLP_HEADERS"
            )

    @property
    def address(self) -> str:
        """That of the key or of the environment, without a slash at its end."""
        return (self.endpoint or os.environ.get(ENDPOINT, "")).rstrip("/")


class OtelMonitor:
    """Sends each row and each sample of trajectories at once, and raises when it is not taken."""

    def __init__(self, config: OtelConfig, run: Path, settings: dict[str, Any]) -> None:
        self._config = config
        self._run = run.name
        self._settings = settings
        self._parts: _Parts | None = None

    def log(self, metrics: dict[str, float], axis: Axis) -> None:
        parts = self._begun()
        parts.gauge(f"agentenv.{_metric_name(axis.key)}").set(axis.step)
        for key, value in metrics.items():
            parts.gauge(f"agentenv.{_metric_name(key)}").set(value)
        parts.send_metrics()

    def trajectories(self, name: str, rows: Sequence[Row], axis: Axis) -> None:
        from agentenv.pipelines.records.conversations import of_rows

        parts = self._begun()
        common = {"agentenv.set": name, f"agentenv.{_metric_name(axis.key)}": axis.step}
        for row, question in zip(rows, of_rows(rows), strict=True):
            _Rollout(parts, self._config, self._run).tell(row, question, common)
        parts.send_spans()

    def finish(self, exit_code: int) -> None:
        if self._parts is not None:
            self._parts.close()

    def _begun(self) -> _Parts:
        if self._parts is None:
            algorithm = self._settings.get("algorithm", {})
            self._parts = _Parts(
                self._config.address,
                {
                    "service.name": service_name(),
                    "service.instance.id": self._run,
                    "agentenv.run": self._run,
                    "agentenv.algorithm": str(algorithm.get("name", "")),
                },
            )
        return self._parts


class _Parts:
    """The pieces of the SDK: here they send when told to, so that a failure is seen."""

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
        self._metrics = OTLPMetricExporter(endpoint=f"{address}/v1/metrics", timeout=EXPORT_S)
        self._spans = OTLPSpanExporter(endpoint=f"{address}/v1/traces", timeout=EXPORT_S)
        self._reader, self._ended = InMemoryMetricReader(), InMemorySpanExporter()
        made = Resource.create(resource)
        self._meters = MeterProvider([self._reader], resource=made, shutdown_on_exit=False)
        self._meter = self._meters.get_meter("agentenv")
        self._tracers = TracerProvider(resource=made, shutdown_on_exit=False)
        self._tracers.add_span_processor(SimpleSpanProcessor(self._ended))
        self.tracer = self._tracers.get_tracer("agentenv")
        self._gauges: dict[str, Any] = {}

    def gauge(self, name: str) -> Any:
        if name not in self._gauges:
            self._gauges[name] = self._meter.create_gauge(name)
        return self._gauges[name]

    def send_metrics(self) -> None:
        data = self._reader.get_metrics_data()
        if data is not None:
            self._check(self._metrics.export(data, timeout_millis=EXPORT_S * 1e3), "metrics")

    def send_spans(self) -> None:
        spans = self._ended.get_finished_spans()
        self._ended.clear()
        self._check(self._spans.export(spans), "spans")

    def _check(self, result: Any, what: str) -> None:
        if result.name != "SUCCESS":
            raise ConnectionError(f"{self.address} took no {what}")

    def close(self) -> None:
        for one in (self._tracers, self._meters, self._metrics, self._spans):
            one.shutdown()


class _Rollout:
    """The spans of one trajectory."""

    def __init__(self, parts: _Parts, config: OtelConfig, run: str) -> None:
        self._tracer, self._config, self._run = parts.tracer, config, run

    def tell(self, row: Row, question: Any, common: dict[str, Any]) -> None:
        """The spans of a question and of its turns and calls, with what they took."""
        (branch,) = question.branches
        calls_s = [[_seconds(call) for call in turn.calls] for turn in branch.turns]
        in_tools_s = sum(map(sum, calls_s))
        whole_s = max(question.seconds or 0.0, in_tools_s)
        num_chars = sum(len(turn.text) for turn in branch.turns) or 1
        now = time.time_ns()
        at = start = now - int(whole_s * NANO)
        attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": service_name(),
            "gen_ai.conversation.id": f"{self._run}/{question.id}",
            "gen_ai.request.model": self._run,
            "agentenv.task": question.task,
            "agentenv.kind": question.kind,
            "agentenv.end": branch.end,
            "agentenv.success": branch.success,
            "agentenv.times": "shared" if question.seconds else "tools only",
            **common,
        }
        optional = {
            "agentenv.reward": branch.reward,
            "agentenv.limit": branch.limit,
            "agentenv.branch": branch.name if "tree" in row else None,
            "gen_ai.usage.input_tokens": row.get("prompt_tokens"),
            "gen_ai.usage.output_tokens": row.get("action_tokens"),
            "error.type": branch.error and str(branch.error).partition(":")[0],
        }
        attributes |= {key: value for key, value in optional.items() if value is not None}
        root = self._begin(f"invoke_agent {service_name()}", attributes, None, start)
        texts = [question.prompt]
        for turn, each_s in zip(branch.turns, calls_s, strict=True):
            sampling_s = (whole_s - in_tools_s) * len(turn.text) / num_chars
            at = self._turn(root, turn, texts, at, sampling_s, each_s)
            texts += [turn.text, turn.answer]
        if branch.end == "failed":
            from opentelemetry.trace import Status, StatusCode

            root.set_status(Status(StatusCode.ERROR, branch.error or ""))
        root.end(end_time=max(at, now))

    def _turn(
        self,
        root: Any,
        turn: Any,
        texts: Sequence[str],
        at: int,
        sampling_s: float,
        calls_s: Sequence[float],
    ) -> int:
        """Returns when it ended."""
        span = self._begin(turn.key, {"agentenv.calls": len(turn.calls)}, root, at)
        chat = {"gen_ai.operation.name": "chat", "gen_ai.request.model": self._run}
        chat["gen_ai.provider.name"] = "agentenv"
        if self._config.content:
            chat["gen_ai.input.messages"] = json.dumps(
                [_message("user", text) for text in texts if text], ensure_ascii=False
            )
            chat["gen_ai.output.messages"] = json.dumps(
                [_message("assistant", turn.text)], ensure_ascii=False
            )
        inner = self._begin(f"chat {self._run}", chat, span, at, client=True)
        at += int(sampling_s * NANO)
        inner.end(end_time=at)
        for place, (call, call_s) in enumerate(zip(turn.calls, calls_s, strict=True), 1):
            at = self._call(span, turn, place, call, at, call_s)
        span.end(end_time=at)
        return at

    def _call(
        self, span: Any, turn: Any, place: int, call: dict[str, Any], at: int, call_s: float
    ) -> int:
        name = str(call["name"])
        tool = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": name,
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
        made = self._begin(f"execute_tool {name}", tool, span, at)
        end = at + int(call_s * NANO)
        made.end(end_time=end)
        return end

    def _begin(
        self, name: str, attributes: dict[str, Any], above: Any, at: int, *, client: bool = False
    ) -> Any:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, set_span_in_context

        context = Context() if above is None else set_span_in_context(above, Context())
        kind = SpanKind.CLIENT if client else SpanKind.INTERNAL
        return self._tracer.start_span(
            name, context=context, kind=kind, attributes=attributes, start_time=at
        )


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def _seconds(call: dict[str, Any]) -> float:
    return max(0.0, float(call.get("duration_s") or 0.0))


def _metric_name(key: str) -> str:
    """reward/mean as reward.mean, without characters that instruments may not have."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", key.replace("/", "."))
