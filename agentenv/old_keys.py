"""Deleted keys of stored configurations, keys with a former default, and new paths of moved
functions.

A deleted key at its former default is ignored, so that runs and evaluations of earlier versions can
be resumed; any other value is rejected with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

V = TypeVar("V")


class Deleted(NamedTuple):
    """A deleted key: its former default as a plain value (for a table, all of its keys), and the
    reason for its deletion, with the remedy."""

    default: Any
    why: str

    def was_unset(self, value: Any) -> bool:
        """Whether a stored value equals the default, or a part of it."""
        if isinstance(self.default, dict) and isinstance(value, dict):
            return value.items() <= self.default.items()
        return bool(value == self.default)


def _always(value: Any, remedy: str = "") -> Deleted:
    return Deleted(value, f"the key was removed; its value is always {value!r}{remedy}")


_OF_PRESET = Deleted(None, "search.preset sets it to its published sizes")
_LAUNCH = {
    "kv_cache_gb": _always(1, "; of vLLM set env.VLLM_CPU_KVCACHE_SPACE of the same table"),
    "max_restarts": _always(10),
}

# By the name of the key's struct.
DELETED: dict[str, dict[str, Deleted]] = {
    "EnvConfig": {
        "held_s": Deleted(300.0, "it is 300 s, and limits.env_timeout_s where that is more"),
    },
    "FetchConfig": {
        "ports": Deleted(
            [80, 443],
            "pages come from the ports 80 and 443; search.pages.fetch.allow_networks names "
            "networks whose ports are all allowed",
        ),
        "user_agent": _always("Mozilla/5.0 (compatible; agentenv)"),
    },
    "GraderKeys": {"num_workers": _always(2)},
    "JournalConfig": {"sync_s": _always(1.0)},
    "JudgeConfig": {"max_answer_chars": _always(2000)},
    "KubernetesCluster": {
        "namespace": Deleted("default", "choose it with `kubectl apply --namespace=NAME`"),
        "cpus": _always(4, "; edit the manifest for another number"),
    },
    "LaunchConfig": _LAUNCH,
    "LearnerConfig": {
        "allow_idle": Deleted(
            False, "idle ranks are measured (learner/idle_share), not predicted; remove the key"
        ),
        "start_timeout_s": _always(300.0),
    },
    "LogConfig": {
        "max_trajectory_mb": _always(500.0, "; log.trajectories = false writes none"),
        "timings": Deleted(
            False, "`python -m benchmarks.parts.timings CONFIG` of a clone trains and writes them"
        ),
    },
    "OtelConfig": {
        "service": Deleted("agentenv", "set the environment variable OTEL_SERVICE_NAME"),
    },
    "PagesConfig": {
        "jina_url": _always("https://r.jina.ai"),
        "jina_traffic": Deleted(
            {"rate_per_s": 20.0, "max_concurrency": 64, "timeout_s": 40.0, "num_retries": 5},
            "the limits of Jina's reader are constants; remove the table",
        ),
    },
    "RayCluster": {
        "cpus_per_engine": _always(1),
        "cpus_per_rank": _always(1),
        "object_store_mb": _always(80),
    },
    "PooledEngineConfig": {
        "control_urls": Deleted([], "name the servers behind the router in engine.urls"),
    },
    "PoolConfig": {"broadcast_timeout_s": _always(60.0), "load_timeout_s": _always(600.0)},
    "PythonConfig": {
        "remote_url": Deleted(None, "model-written code runs in the sandbox of this machine only"),
    },
    "SandboxLimits": {
        "max_total_bytes": Deleted(None, "the bound of all sessions is half of the memory"),
        "tmp_bytes": _always(16 << 20),
        "max_output_chars": _always(8000, "; limits.max_tool_result_tokens cuts further"),
    },
    "SearchConfig": {
        "max_page_chars": _OF_PRESET,
        "window_chars": _OF_PRESET,
        "repeated": _OF_PRESET,
        "show_links": Deleted(None, "results have links where pages can be opened"),
        "snapshot": Deleted("", "the frozen web was removed; search.cache keeps results and pages"),
        "snapshot_mode": _always("replay"),
        "snapshot_sha256": _always(""),
        "on_miss": _always("fail"),
    },
    "SpreadCluster": {
        "silence_s": _always(60.0),
        "start_timeout_s": _always(300.0),
        "max_restarts": _always(5),
    },
}

# Former defaults of keys that are now empty by default: such a value counts as unset.
EMPTIED: dict[str, dict[str, Any]] = {
    "TrainingConfig": {"max_logprob_gap": 0.01, "stop_logprob_gap": 0.1},  # by dtype
}

# Former paths of functions of this project, and the present ones.
MOVED: dict[str, dict[str, str]] = {
    "EnvConfig": {"envs": "agentenv.envs"},
    "RunConfig": {
        "launchers.quickstart:prepare": "agentenv.envs.quickstart_setup:prepare",
        "launchers.quickstart_chat:prepare": "agentenv.envs.quickstart_setup:prepare_chat",
        "agentenv.envs.quickstart_chat:prepare": "agentenv.envs.quickstart_setup:prepare_chat",
    },
    "ScriptedConfig": {"envs.quickstart:scripted_turn": "agentenv.envs.quickstart:scripted_turn"},
}


def of_struct(table: Mapping[str, Mapping[str, V]], struct: type) -> dict[str, V]:
    """The entries of one of these tables for a struct and its bases."""
    return {
        key: one for kind in struct.__mro__ for key, one in table.get(kind.__name__, {}).items()
    }
