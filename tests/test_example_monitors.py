"""examples/monitors: OpenTelemetry against a receiver of OTLP (its requests, the redaction of
secrets, the independence of the run), and Trackio as its package is called."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import web

from agentenv.assembly.reports.monitors import Axis, Monitors, RolloutMonitorConfig
from agentenv.base.config import build_config
from agentenv.base.errors import ConfigError
from agentenv.endpoint.listener import Listener
from examples.monitors import otel
from examples.monitors.otel import OtelConfig
from examples.monitors.trackio_runs import TrackioConfig, TrackioMonitor
from tests.commands.test_exports import ROW
from tests.commands.test_monitor import SAMPLE

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

NAME = "examples.monitors.otel:OtelConfig"
SECRET = "sk-proj-0123456789abcdefghij"


class Receiver:
    """OTLP over HTTP in a separate thread. `refuse`: the status of each reply, if not 200."""

    def __init__(self) -> None:
        self.metrics: list[ExportMetricsServiceRequest] = []
        self.traces: list[ExportTraceServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.refuse = 0
        self._listener = Listener()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.url = self._run(self._start())

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    async def _start(self) -> str:
        posts = dict.fromkeys(("/v1/metrics", "/v1/traces"), self._take)
        await self._listener.listen({}, posts, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._listener.port}"

    async def _take(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.headers.append(dict(request.headers))
        if self.refuse:
            return web.Response(status=self.refuse)
        if request.path == "/v1/metrics":
            self.metrics.append(ExportMetricsServiceRequest.FromString(body))
        else:
            self.traces.append(ExportTraceServiceRequest.FromString(body))
        return web.Response(body=b"", content_type="application/x-protobuf")

    def close(self) -> None:
        self._run(self._listener.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    one = Receiver()
    yield one
    one.close()


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (otel.ENDPOINT, "OTEL_EXPORTER_OTLP_HEADERS"):
        monkeypatch.delenv(name, raising=False)


def followed(receiver: Receiver, tmp_path: Any, *, content: bool = False, **row: Any) -> None:
    config = RolloutMonitorConfig(own=[OtelConfig(endpoint=receiver.url, content=content)])
    monitors = Monitors(config, tmp_path / "arpo-7", {"algorithm": {"name": "arpo"}})
    monitors.log({"step": 3, "reward/mean": 0.5, "tool/<malformed>/calls": 2})
    monitors.log({"step": 4, "reward/mean": 0.75})
    monitors.trajectories("eval-held-x", [msgspec.structs.asdict(ROW) | row])
    monitors.finish(0)


def attributes(of: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in of.attributes}


def spans(receiver: Receiver) -> list[Any]:
    (request,) = receiver.traces
    (resource,) = request.resource_spans
    (scope,) = resource.scope_spans
    return sorted(scope.spans, key=lambda span: (span.start_time_unix_nano, span.name))


def test_each_figure_of_a_step_is_a_gauge_of_the_run(receiver: Receiver, tmp_path: Any) -> None:
    followed(receiver, tmp_path)
    assert len(receiver.metrics) == 2
    resource = receiver.metrics[0].resource_metrics[0].resource
    assert (
        attributes(resource).items()
        >= {
            "service.name": "agentenv",
            "agentenv.run": "arpo-7",
            "agentenv.algorithm": "arpo",
        }.items()
    )
    values = [
        {
            metric.name: point.as_double or point.as_int
            for metric in request.resource_metrics[0].scope_metrics[0].metrics
            for point in metric.gauge.data_points
        }
        for request in receiver.metrics
    ]
    assert values[0] == {
        "agentenv.step": 3,
        "agentenv.reward.mean": 0.5,
        "agentenv.tool._malformed_.calls": 2,
    }
    assert values[1].items() >= {"agentenv.step": 4, "agentenv.reward.mean": 0.75}.items()


def test_a_rollout_is_a_span_with_its_turns_and_their_tool_calls(
    receiver: Receiver, tmp_path: Any
) -> None:
    followed(receiver, tmp_path)
    found = spans(receiver)
    by_id = {span.span_id: span for span in found}
    above = [
        (span.name, by_id[span.parent_span_id].name if span.parent_span_id else "")
        for span in found
    ]
    assert sorted(above) == [
        ("chat arpo-7", "turn-1"),
        ("chat arpo-7", "turn-2"),
        ("execute_tool python", "turn-1"),
        ("invoke_agent agentenv", ""),
        ("turn-1", "invoke_agent agentenv"),
        ("turn-2", "invoke_agent agentenv"),
    ]
    assert len({span.trace_id for span in found}) == 1
    of = {span.name: attributes(span) for span in found}
    expected = {
        "gen_ai.operation.name": "invoke_agent", "gen_ai.conversation.id": "arpo-7/q1-1",
        "gen_ai.usage.input_tokens": 5, "gen_ai.usage.output_tokens": 9, "agentenv.reward": 1.0,
        "agentenv.set": "held", "agentenv.step": 4,
    }  # fmt: skip
    assert of["invoke_agent agentenv"].items() >= expected.items()
    assert (
        of["execute_tool python"].items()
        >= {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "python"}.items()
    )
    lengths = {
        span.name: (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 for span in found
    }
    assert lengths["invoke_agent agentenv"] == pytest.approx(1.5)
    assert lengths["execute_tool python"] == pytest.approx(0.1)
    for span in found:
        if span.parent_span_id:
            parent = by_id[span.parent_span_id]
            assert parent.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= parent.end_time_unix_nano


def test_texts_are_sent_only_on_request_and_without_secrets(
    receiver: Receiver, tmp_path: Any
) -> None:
    followed(receiver, tmp_path)
    (quiet,) = receiver.traces
    assert b"6 * 7" not in quiet.SerializeToString()
    receiver.traces.clear()
    (call,) = ROW.tool_calls
    followed(
        receiver,
        tmp_path,
        content=True,
        segments=[*ROW.segments[:2], {"env": f" {SECRET}\n"}, *ROW.segments[3:]],
        tool_calls=[{**call, "arguments": {"code": f"key = {SECRET!r}"}}],
    )
    (told,) = receiver.traces
    assert SECRET.encode() not in told.SerializeToString()
    of = {span.name: attributes(span) for span in spans(receiver)}
    assert json.loads(of["execute_tool python"]["gen_ai.tool.call.arguments"]) == {
        "code": "key = '[redacted]'"
    }
    last = json.loads(of["chat arpo-7"]["gen_ai.output.messages"])
    assert last == [
        {"role": "assistant", "parts": [{"type": "text", "content": "<answer>42</answer><end>"}]}
    ]


def test_a_failed_rollout_is_an_error(receiver: Receiver, tmp_path: Any) -> None:
    followed(receiver, tmp_path, end="failed", error="EngineError: it is gone", reward=0.0)
    (root,) = [span for span in spans(receiver) if span.name.startswith("invoke_agent")]
    assert (root.status.code, root.status.message) == (2, "EngineError: it is gone")
    assert attributes(root)["error.type"] == "EngineError"
    assert "agentenv.reward" not in attributes(root)


def test_metrics_resume_when_the_receiver_is_reachable_again(
    receiver: Receiver,
    tmp_path: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a rolling update of a collector: one warning, one line when it is back, and the rows
    of the outage in their order."""
    monkeypatch.setattr(otel, "FIRST_PAUSE_S", 0.0)
    monitors = Monitors(
        RolloutMonitorConfig(own=[OtelConfig(endpoint=receiver.url)]), tmp_path / "arpo-7", {}
    )

    def row(step: int) -> None:
        """Handed over, and tried."""
        monitors.log({"step": step, "reward/mean": 0.5})
        done = threading.Event()
        monitors._enqueue("otel", done.set)
        assert done.wait(60)

    row(1)
    receiver.refuse = 404  # for which the SDK has no retries
    row(2)
    row(3)
    assert len(receiver.headers) == 3
    receiver.refuse = 0
    row(4)
    monitors.finish(0)
    steps = [
        point.as_int
        for request in receiver.metrics
        for metric in request.resource_metrics[0].scope_metrics[0].metrics
        for point in metric.gauge.data_points
        if metric.name == "agentenv.step"
    ]
    assert steps == [1, 2, 3, 4]
    out, back = [text for text in caplog.messages if "OpenTelemetry" in text]
    assert f"{receiver.url} does not accept metrics and spans" in out
    assert "404" in out
    assert f"{receiver.url} accepts metrics and spans again; 0 rows were lost" in back


def test_address_and_keys_may_come_from_the_environment(
    receiver: Receiver, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(otel.ENDPOINT, receiver.url + "/")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-api-key=abc123")
    monitors = Monitors(RolloutMonitorConfig(own=[OtelConfig()]), tmp_path, {})
    monitors.log({"step": 1, "reward/mean": 1})
    monitors.finish(0)
    assert receiver.headers[0]["x-api-key"] == "abc123"


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("", "OTEL_EXPORTER_OTLP_ENDPOINT is not set"),
        ("localhost:4318", "expected http://HOST:PORT"),
        ("http://me:secret@host:4318", "contains a user or a password"),
    ],
)
def test_a_bad_address_is_refused_before_anything_starts(endpoint: str, expected: str) -> None:
    own = [{"name": NAME, "endpoint": endpoint}]
    with pytest.raises(ConfigError, match=rf"otel\.endpoint: .*{expected}") as failure:
        build_config(RolloutMonitorConfig, {"own": own}, "run.toml")
    assert "me:secret" not in str(failure.value)


# Trackio, as its package is called; that it takes this was tried with 0.43.0


class _Trackio(ModuleType):
    """Keeps its records; a duplicate run name gets another one."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.__spec__ = ModuleSpec("trackio", None)
        self.begun: list[tuple[str, str]] = []
        self.logged: list[tuple[dict[str, Any], int]] = []

    def init(self, *, project: str, name: str, resume: str, **_: Any) -> Any:
        self.begun.append((name, resume))
        shown = name if resume == "allow" else f"{name}-1"
        return SimpleNamespace(name=shown, log=self._log, finish=lambda: None)

    def _log(self, row: dict[str, Any], step: int) -> None:
        self.logged.append((row, step))

    @staticmethod
    def Table(columns: list[str], data: list[list[Any]]) -> list[list[Any]]:
        assert {len(row) for row in data} == {len(columns)}
        return data


def test_a_resumed_run_continues_in_trackio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackio = _Trackio()
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    run = tmp_path / "shop"
    run.mkdir()
    for step in (1, 2):
        monitor = TrackioMonitor(TrackioConfig(), run, {})
        monitor.log({"reward/mean": 0.5}, Axis("step", step))
        monitor.trajectories("train", [SAMPLE], Axis("step", step))
        monitor.finish(0)
    assert trackio.begun == [("shop", "never"), ("shop-1", "allow")]
    assert [step for _, step in trackio.logged] == [1, 1, 2, 2]
    assert trackio.logged[2][0] == {"reward/mean": 0.5}
    (row,) = trackio.logged[3][0]["trajectories/train"]
    assert row[:4] == [2, "calc", "6 * 7?", "42"]
