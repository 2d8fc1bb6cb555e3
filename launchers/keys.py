"""The table of configuration keys that --help shows."""

from __future__ import annotations

import shutil
import textwrap

import msgspec

from agentenv.config import REQUIRED, describe


def key_table(config_type: type[msgspec.Struct]) -> str:
    """Every key with type, default and meaning. name[kind].key belongs to one kind only."""
    width = max(60, min(100, shutil.get_terminal_size().columns))
    lines = ["configuration keys (in the file, or on the command line as key.sub=value):", ""]
    for key, kind, default, meaning in describe(config_type):
        default = default if default == REQUIRED else f"default {default!r}"
        lines.append(f"  {key}  ({kind}, {default})")
        lines += textwrap.wrap(meaning, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)
