"""The chat templates that TRL ships, each with a tokenizer that has its markers."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.support.chat_models import byte_tokenizer

# The tokens that end a turn, by the beginning of the template's name: what eos_token_id of the
# checkpoints' generation_config.json stands for.
CHATML = ("<|im_end|>", "<|endoftext|>")
GEMMA = ("<turn|>", "<|tool_response>", "<eos>")
ENDS = {
    "diffusion_gemma": GEMMA,
    "gemma4": GEMMA,
    "glm4moe": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|endoftext|>", "<|call|>"),
    "llama3": ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
    "muse": ("<|eot|>",),
}


def shipped() -> dict[str, str]:
    """The templates by name; TRL itself is not imported."""
    spec = find_spec("trl")
    assert spec is not None, (
        "trl is missing; pip install --no-deps 'trl<1.18' (.ci/environment does it)"
    )
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0], "chat_templates")
    return {path.stem: path.read_text("utf-8") for path in sorted(folder.glob("*.jinja"))}


TEMPLATES = shipped()


def longest(name: str, table: dict[str, Any], default: Any = None) -> Any:
    """The entry of the longest key that the name begins with."""
    return table[max(keys, key=len)] if (keys := [*filter(name.startswith, table)]) else default


def ends_of(name: str) -> tuple[str, ...]:
    ends: tuple[str, ...] = longest(name, ENDS, CHATML)
    return ends


def markers_of(name: str) -> list[str]:
    return re.findall(r'<\|[\w"]+\|>|<\|\w+>|<\w+\|>', TEMPLATES[name])


def tokenizer_of(name: str) -> Any:
    """A byte tokenizer with this template, its markers and its end tokens."""
    template, ends = TEMPLATES[name], ends_of(name)
    special = sorted({*markers_of(name), *ends, "<bos>"})
    return byte_tokenizer(template, special, eos=ends[0], bos="<bos>")
