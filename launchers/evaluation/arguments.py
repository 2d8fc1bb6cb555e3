"""The arguments that commands which ask a policy have in common, and the configuration in them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import msgspec

from agentenv.config import Tree, override_kinds, read_toml
from launchers.evaluation.run_config import merged
from launchers.evaluation.subject import Subject
from launchers.keys import add_key_help
from launchers.planning.dry_run import add_dry_run
from launchers.verl_keys import refuse_verl_keys


def add_arguments(
    parser: argparse.ArgumentParser, config_type: type[msgspec.Struct], out: str
) -> None:
    """SUBJECT [key.sub=value ...] and the options of both; `out` is the help of --out."""
    parser.add_argument(
        "subject", metavar="SUBJECT", help="run, checkpoint, model directory, or http(s)://HOST"
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="key.sub=value")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of its settings")
    parser.add_argument("--env", default="", help="environment id; of a run: its own")
    parser.add_argument("--n", type=int, default=0, help="first n questions of each set; 0: all")
    parser.add_argument("--model", default="", help="of an endpoint: the model's name there")
    parser.add_argument(
        "--tokenizer", default="", metavar="DIR",
        help="of a vLLM or SGLang server: its tokenizer, so that token ids go in and out"
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="DIR", help=out)
    add_dry_run(parser)
    add_key_help(parser, config_type)


def given_keys(
    arguments: argparse.Namespace,
    subject: Subject,
    config_type: type[msgspec.Struct],
    say: Callable[[str], None],
) -> tuple[Tree, str]:
    """The keys of the subject, over them those of the file, over both the command line; and what
    messages call them. Raises ConfigError."""
    raw, source = subject.raw, str(arguments.subject)
    if arguments.config is not None:
        source = str(arguments.config)
        given = read_toml(arguments.config)
        asks = given.get("sets") or given.get("data")
        raw = merged({k: v for k, v in raw.items() if k != "sets" or not asks}, given)
        if subject.model is None:
            raw["engine"] = merged(_of_endpoint(raw), subject.raw["engine"])
    if any(text.startswith("data=") for text in arguments.overrides):
        raw = {key: value for key, value in raw.items() if key != "sets"}
    if arguments.env:
        raw = merged(raw, {"env": {"id": arguments.env}})
    override_kinds(config_type, raw, arguments.overrides, say)
    refuse_verl_keys(raw, source)
    return raw, source


def _of_endpoint(raw: Tree) -> Tree:
    """The file's keys of an endpoint; those of another engine mean nothing to it."""
    engine = raw.get("engine") or {}
    return engine if engine.get("name") == "openai" else {}
