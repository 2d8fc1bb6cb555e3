"""Experiment trackers as monitors: Weights & Biases; Trackio, which has the same API; and any
OpenTelemetry receiver, for metrics and spans over OTLP.

    invoke_agent    one trajectory: question's kind, reward, how it ended
    +-- turn        one turn of it
        +-- chat          the tokens that the policy sampled
        +-- execute_tool  each tool that it called then

A file in the run's folder names the tracker's run, so that a resumed run goes on under it. A step
that a resumed run repeats has two points.

Spans follow OpenTelemetry's conventions for generative AI; other names begin with `agentenv.`. A
row of metrics.jsonl becomes a gauge of each figure, such as agentenv.reward.mean. Texts are sent
only where `content` asks for them. Rows do not say when each turn began: the spans of a trajectory
end when it was handed over, tools have their true length, and turns share the rest by the
characters that they wrote (`agentenv.times`).
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Sequence
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from contextlib import suppress
from functools import cache
from importlib import import_module
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from msgspec import Meta, Struct, field

from agentenv.config import ESSENTIAL
from agentenv.data_files import Row
from agentenv.disk import write_whole
from agentenv.errors import ConfigError, ForeignError
from agentenv.pipelines.run.records import FAILED, readable
from agentenv.pipelines.run.transcript import Turn, turns_of
from agentenv.untrusted import decode

API_KEY, MODE = "WANDB_API_KEY", "WANDB_MODE"
KEY_FILES = ("WANDB_API_KEY_FILE", "WANDB_IDENTITY_TOKEN_FILE")  # variables that name a file
MODES = {"run": "online", "dryrun": "offline"}  # earlier names
INIT_TIMEOUT_S = 90.0
COLUMNS = ("step", "kind", "question", "answers", "trajectory", "reward", "success", "tool calls")


class Axis(NamedTuple):
    """The position of a row: the key that counts, and its value."""

    key: str
    step: int


def wandb_mode(chosen: str) -> Literal["online", "offline", "disabled"]:
    """The mode of WANDB_MODE where that is set, else the one that the configuration chose."""
    named = os.environ.get(MODE, "").strip().lower() or chosen
    match MODES.get(named, named):
        case "online" | "offline" | "disabled" as mode:
            return mode
    raise ConfigError(f"{MODE} = {named!r}: expected online, offline or disabled")


def is_logged_in() -> bool:
    """Whether Weights & Biases finds a key: in the environment, or where `wandb login` puts it."""
    if any(os.environ.get(name) for name in (API_KEY, *KEY_FILES)):
        return True
    own = os.environ.get("NETRC")
    paths = [Path(one).expanduser() for one in (own, "~/.netrc", "~/_netrc") if one]
    path = next((one for one in paths if one.is_file()), None)
    if path is None:
        return False
    try:
        found = netrc(path).authenticators(urlsplit(_wandb_url()).netloc)
    except (NetrcParseError, OSError) as error:
        raise ConfigError(
            f"monitor.wandb: {path} cannot be read: {error}; set {API_KEY}"
        ) from error
    return found is not None and bool(found[2])


def _wandb_url() -> str:
    """The server: of the environment, or of the last `wandb login --host`."""
    if url := os.environ.get("WANDB_BASE_URL"):
        return url
    folder = os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb"
    parser = ConfigParser(interpolation=None)
    with suppress(ConfigParserError, OSError, UnicodeDecodeError):
        parser.read(Path(folder).expanduser() / "settings")
    return parser.get("default", "base_url", fallback="https://api.wandb.ai")


class TrackioConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Trackio, in this machine's database: TRACKIO_DIR, by default in the cache of the hub."""

    project: Annotated[str, Meta(description="project of the run")] = "agentenv"
    name: Annotated[str, Meta(description="display name; empty: that of the run")] = ""
    group: Annotated[str, Meta(description="group of runs, such as the seeds of one setting")] = ""


class WandbConfig(TrackioConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights & Biases. Its key comes from the environment (WANDB_API_KEY) or from `wandb login`,
    never from the configuration; WANDB_MODE comes before `mode`."""

    project: Annotated[str, Meta(description="project of the run", extra=ESSENTIAL)] = "agentenv"
    entity: Annotated[str, Meta(description="user or team; empty: the default")] = ""
    tags: Annotated[list[str], Meta(description="tags of the run")] = field(default_factory=list)
    mode: Annotated[
        Literal["online", "offline"],
        Meta(
            description="offline: write to the run's folder, for `wandb sync` later; the "
            "environment variable WANDB_MODE takes precedence"
        ),
    ] = "online"

    def __post_init__(self) -> None:
        if wandb_mode(self.mode) == "online" and not is_logged_in():
            raise ConfigError(
                f"monitor.wandb: the environment variable {API_KEY} is not set, and no netrc file "
                f"has a key for {urlsplit(_wandb_url()).netloc}; set it or run `wandb login`, or "
                'write to the run\'s folder with monitor.wandb.mode = "offline"'
            )


class TrackioMonitor:
    """Trackio: nothing is sent anywhere, unless its own variables of the environment name a Space
    or a server. The figures of a cold start (sft/...) stand at its own steps. Tried with 0.43.0."""

    package = "trackio"

    def __init__(self, config: TrackioConfig, run: Path, settings: dict[str, Any]) -> None:
        """`settings` is the whole configuration of the run, shown beside it."""
        self.config, self.run, self.settings = config, run, settings
        self._path = run / f"{self.package}.json"
        self._tracker: Any = None
        try:
            self.saved = decode(self._path.read_bytes(), dict[str, Any])
        except (OSError, ForeignError):
            self.saved = {}

    def log(self, metrics: dict[str, float], axis: Axis) -> None:
        self.write(self._begun(), metrics, axis)

    def trajectories(self, name: str, rows: Sequence[Row], axis: Axis) -> None:
        tracker, module = self._begun(), import_module(self.package)
        cells = [
            [
                *(axis.step, row["kind"], row["question"], " | ".join(row["answers"])),
                *(readable(row), row["reward"], row["success"], len(row["tool_calls"])),
            ]
            for row in rows
        ]
        table = module.Table(columns=list(COLUMNS), data=cells)
        self.write(tracker, {f"trajectories/{name}": table}, axis)

    def finish(self, exit_code: int) -> None:
        if self._tracker is not None:
            self._tracker.finish()

    def _begun(self) -> Any:
        if self._tracker is None:
            self._tracker = self.begin(import_module(self.package))
            self._save()
        return self._tracker

    def _save(self) -> None:
        write_whole(self._path, json.dumps(self.saved) + "\n")

    def begin(self, trackio: Any) -> Any:
        """The tracker's own object of the run, with `log` and `finish`."""
        config, known = self.config, self.saved.get("name")
        tracker = trackio.init(
            project=config.project,
            name=known or config.name or self.run.resolve().name,
            group=config.group or None,
            config=self.settings,
            resume="allow" if known else "never",
            **{"embed": False, "auto_log_gpu": False, "auto_log_cpu": False},
        )
        self.saved = {"name": str(tracker.name)}  # another one where that name was taken
        return tracker

    def write(self, tracker: Any, row: Row, axis: Axis) -> None:
        """Log figures or a table at a step."""
        tracker.log(row, step=axis.step)


class WandbMonitor(TrackioMonitor):
    """Weights & Biases. The run's id and its number of rows there are kept. Curves are over the
    step of the run, whatever the number of the row."""

    package = "wandb"
    config: WandbConfig

    def __init__(self, config: WandbConfig, run: Path, settings: dict[str, Any]) -> None:
        super().__init__(config, run, settings)
        self._axes: set[str] = set()
        self.saved = self.saved or {"id": os.urandom(6).hex(), "num_rows": 0}

    def finish(self, exit_code: int) -> None:
        if self._tracker is not None:
            self._tracker.finish(exit_code=exit_code)

    def begin(self, wandb: Any) -> Any:
        config, mode = self.config, wandb_mode(self.config.mode)
        return wandb.init(
            project=config.project,
            name=config.name or self.run.name,
            entity=config.entity or None,
            group=config.group or None,
            tags=config.tags,
            mode=mode,
            dir=str(self.run),
            id=self.saved["id"],
            resume="allow" if mode == "online" else None,
            config=self.settings,
            settings=wandb.Settings(
                silent=True, console="off", init_timeout=INIT_TIMEOUT_S, x_disable_stats=True
            ),
        )

    def write(self, tracker: Any, row: Row, axis: Axis) -> None:
        if axis.key not in self._axes:
            self._axes.add(axis.key)
            shown = "*" if axis.key == "step" else f"{axis.key.partition('/')[0]}/*"
            tracker.define_metric(shown, step_metric=axis.key)
        tracker.log({**row, axis.key: axis.step}, step=self.saved["num_rows"])
        self.saved["num_rows"] += 1
        self._save()


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
        Meta(
            description="also send prompts, answers, tool arguments and tool results in the spans"
        ),
    ] = False

    def __post_init__(self) -> None:
        address = self.address
        if not address:
            raise ConfigError(
                f"monitor.otel.endpoint: is empty and {ENDPOINT} is not set; set the address of a "
                "receiver, such as http://localhost:4318"
            )
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"monitor.otel.endpoint: expected http://HOST:PORT or https://..., got {address!r}"
            )
        if parts.username or parts.password:
            raise ConfigError(
                "monitor.otel.endpoint: contains a user or a password; put the receiver's "
                "credentials into OTEL_EXPORTER_OTLP_HEADERS"
            )

    @property
    def address(self) -> str:
        """That of the key or of the environment, without a slash at its end."""
        return (self.endpoint or os.environ.get(ENDPOINT, "")).rstrip("/")


class OtelMonitor:
    """Sends each row and each sample of trajectories at once, and raises when it is not taken."""

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
    """The pieces of the SDK. They send when asked to, so that a failure is seen here."""

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
        self.gauge: Callable[[str], Any] = cache(self._meter.create_gauge)

    def send_metrics(self) -> None:
        data = self._reader.get_metrics_data()
        if data is not None:
            self._check(self._metrics.export(data, timeout_millis=EXPORT_S * 1e3), "metrics")

    def send_spans(self) -> None:
        spans = self._ended.get_finished_spans()
        self._ended.clear()
        self._check(self._spans.export(spans), "spans")

    def _check(self, result: Any, sent: str) -> None:
        if result.name != "SUCCESS":
            raise ConnectionError(f"{self.address} did not accept {sent}")

    def close(self) -> None:
        for one in (self._tracers, self._meters, self._metrics, self._spans):
            one.shutdown()


class _Rollout:
    """The spans of one trajectory, from its row."""

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
            "agentenv.branch": row.get("branch"),
            "error.type": error and str(error).partition(":")[0],
        }
        return {key: value for key, value in found.items() if value is not None}

    def _turn(self, root: Any, turn: Turn, texts: Sequence[str], at: int, sampling_s: float) -> int:
        """The spans of a turn from `at` (ns); its end."""
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

    def _tool(self, turn: Turn, place: int) -> dict[str, Any]:
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
        self, name: str, attributes: dict[str, Any], above: Any, at: int, *, client: bool = False
    ) -> Any:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, set_span_in_context

        context = Context() if above is None else set_span_in_context(above, Context())
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
    """reward/mean as reward.mean, without characters that instruments may not have."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", key.replace("/", "."))
