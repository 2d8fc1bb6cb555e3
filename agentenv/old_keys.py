"""Keys and values of earlier configurations that are no more: why, and what takes their place.

A key that stands here at the value that was its default is passed over, so that what an earlier
version wrote can be resumed and asked again; with any other value it is refused by its reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple


class Dropped(NamedTuple):
    """A key that is no more. `default` is the plain value that it had when nobody set it, of a
    table all that it ever held; `why` says why it went and what to write in its place."""

    default: Any
    why: str

    def was_unset(self, value: Any) -> bool:
        """Whether a stored value is the default, or a part of it."""
        if isinstance(self.default, dict) and isinstance(value, dict):
            return value.items() <= self.default.items()
        return bool(value == self.default)


_ZSCORE = (
    "the criterion zscore kept the least information of all (docs/algorithms.md); "
    'fork_criterion = "relative" with entropy_weight = 0.5 lets entropy decide'
)

_ALWAYS = "the key is gone, the value is always"

_CASSETTE = (
    "search.snapshot holds results and pages in place of raw replies; record it with "
    'search.snapshot = FILE and search.snapshot_mode = "record"'
)

_CHAT_TAGS = ("role", "content", "user", "assistant", "observation", "function", "system")

# By the name of the struct that had the key, in the order of the structs' names.
DROPPED: dict[str, dict[str, Dropped]] = {
    "Algorithm": {
        "min_group_fraction": Dropped(
            0.75, f"{_ALWAYS} 0.75; algorithm.truncated says which leaves count"
        ),
    },
    "ARPO": {
        "fork_mode": Dropped("sample", "its name is algorithm.fork_rule; an environment has modes"),
        "rise_scale": Dropped(0.02, _ZSCORE),
    },
    "ChatDataConfig": {
        "tags": Dropped(
            {f"{one}_tag": "" for one in _CHAT_TAGS},
            "roles under other names are told by the tags of a dataset_info.json; name that file "
            "with data.dataset_info",
        ),
    },
    "DirectConfig": {
        "sampling": Dropped(None, "answers of both kinds are sampled alike, by [sampling]"),
    },
    "DPOLoopConfig": {
        "reference": Dropped(
            "scored",
            "the reference is the policy that the run began with, which is the model without its "
            "adapters, too; remove the key",
        ),
    },
    "EvalConfig": {
        "report": Dropped("", "the summary reports the first set; write that one first"),
    },
    "EvaluateConfig": {
        "rows": Dropped(
            None,
            "how rows are read stands with their set: [sets.NAME] with path = FILE in place of "
            "data = FILE, and the keys beside it",
        ),
    },
    "FaissConfig": {"max_tokens": Dropped(256, f"{_ALWAYS} 256; longer queries are cut")},
    "FetchConfig": {
        "max_bytes": Dropped(2_000_000, f"{_ALWAYS} 2000000; the rest of a page is not read"),
        "max_concurrency": Dropped(64, f"{_ALWAYS} 64"),
        "num_retries": Dropped(2, f"{_ALWAYS} 2"),
    },
    "FilterConfig": {
        "drop_repeated_calls": Dropped(True, f"{_ALWAYS} true"),
        "min_right": Dropped(1, f"{_ALWAYS} 1; filter.max_per_question says how many are kept"),
    },
    "LearnerConfig": {
        "temperature": Dropped(
            1.0,
            "training samples from the policy itself, at temperature 1, and any other value made "
            "the learner's log-probs those of another distribution; remove the key",
        ),
    },
    "Limits": {
        "engine_timeout_s": Dropped(
            300.0,
            "waiting for a place counted; a server that gives no token is lost after "
            "engine.pool.first_token_s and engine.pool.silence_s",
        ),
        "max_crashed_share": Dropped(
            0.05,
            "failures of every kind have one bound: use limits.max_failed_share; limits.strict "
            "ends the run at the first bug",
        ),
    },
    "PagesConfig": {
        "max_page_chars": Dropped(100_000, f"{_ALWAYS} 100000; search.max_page_chars is smaller"),
        "num_workers": Dropped(2, f"{_ALWAYS} 2"),
    },
    "PoolConfig": {
        "check_weights": Dropped(
            True,
            "checksums of all weights stopped a server for as long as it took to compute them; "
            "a label that the server gives back and the log-prob of one token are always checked "
            "in their place, remove the key",
        ),
        "first_backoff_s": Dropped(0.5, f"{_ALWAYS} 0.5; engine.pool.max_retries bounds retries"),
        "max_backoff_s": Dropped(30.0, f"{_ALWAYS} 30; engine.pool.max_retries bounds retries"),
        "poll_interval_s": Dropped(1.0, f"{_ALWAYS} 1"),
        "poll_timeout_s": Dropped(60.0, f"{_ALWAYS} 60"),
        "initial_concurrency": Dropped(
            64,
            f"{_ALWAYS} 64 until a server's load is known; engine.pool.max_concurrency bounds it",
        ),
    },
    "PooledEngineConfig": {
        "timeouts": Dropped(
            {"connect_s": 10.0, "call_s": 30.0, "idle_s": 600.0, "load_s": 600.0},
            "several keys for one deadline; use engine.pool.load_timeout_s",
        ),
    },
    "ResourcesConfig": {
        "engine_gpus": Dropped([], "two keys for the same GPUs; use engine.servers.gpus"),
    },
    "SFTConfig": {
        "kind_boost": Dropped(2.0, f"{_ALWAYS} 2; sft.stages choose rows"),
    },
    "SandboxLimits": {"max_open_files": Dropped(64, f"{_ALWAYS} 64")},
    "SearchConfig": {
        "cassette": Dropped("", _CASSETTE),
        "cassette_mode": Dropped("replay", _CASSETTE),
        "language": Dropped("auto", 'search.market says it too, with the country: "zh-CN"'),
    },
    "SelfCriticConfig": {
        "pairs_per_question": Dropped(
            4, f"{_ALWAYS} 4; self_critic.num_questions and num_samples make more pairs"
        ),
    },
    "SummarizerConfig": {
        "key_variable": Dropped("", "it is api_key_env now, as of the judge"),
        "traffic": Dropped(
            {
                "rate_per_s": 0.0,
                "burst": 20,
                "max_concurrency": 64,
                "timeout_s": 120.0,
                "num_retries": 5,
                "first_delay_s": 0.5,
                "max_delay_s": 30.0,
                "max_failures": 20,
                "cool_down_s": 30.0,
            },
            "the summarizer is asked as the judge is: timeout_s, num_retries and max_concurrency "
            "stand in search.summarizer itself",
        ),
    },
    "TrafficConfig": {
        "burst": Dropped(20, f"{_ALWAYS} 20; rate_per_s and max_concurrency of the same table"),
        "cool_down_s": Dropped(30.0, f"{_ALWAYS} 30; then one call is a probe"),
        "first_delay_s": Dropped(0.5, f"{_ALWAYS} 0.5; num_retries bounds retries"),
        "max_delay_s": Dropped(30.0, f"{_ALWAYS} 30; num_retries bounds retries"),
        "max_failures": Dropped(20, f"{_ALWAYS} 20"),
    },
}

# Values that a key takes no more, by key and value, and why.
REFUSED: dict[str, dict[tuple[str, str], str]] = {
    "ARPO": {("fork_criterion", "zscore"): _ZSCORE},
}

# Texts that name something of ours under its earlier place: read as the new one.
MOVED: dict[str, dict[str, str]] = {
    "ScriptedConfig": {
        "envs.quickstart_script:scripted_turn": "agentenv.envs.quickstart:scripted_turn"
    },
}


def dropped_keys(struct: type) -> dict[str, Dropped]:
    """The dropped keys of a struct, those of the structs that it extends among them."""
    return {key: one for name in _names(struct) for key, one in DROPPED.get(name, {}).items()}


def refused_values(struct: type) -> dict[tuple[str, str], str]:
    """Why a struct's key takes a value no more, by key and value."""
    return {pair: why for name in _names(struct) for pair, why in REFUSED.get(name, {}).items()}


def moved_values(struct: type) -> dict[str, str]:
    """What texts in a struct's keys have become, by their earlier form."""
    return {old: new for name in _names(struct) for old, new in MOVED.get(name, {}).items()}


def _names(struct: type) -> Iterator[str]:
    return (kind.__name__ for kind in struct.__mro__)
