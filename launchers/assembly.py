"""Builds the parts that a configuration names, and refuses what cannot work before anything
starts."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentenv.errors import ConfigError, DataError
from agentenv.model_files import read_eos_ids
from agentenv.native import NativeConfig, NativeRenderer
from agentenv.prompt import PromptConfig
from agentenv.renderer import Renderer, TagRenderer, TagsConfig


def import_from_working_directory() -> None:
    """Let the user's modules be found where the command is run, as with `python -m`; the folder
    of the launchers itself, which Python puts there instead, would shadow names of theirs."""
    if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
        del sys.path[0]
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def load_tokenizer(model: Path, with_weights: bool = True) -> Any:
    """The tokenizer of a Hugging Face directory, which has the weights too unless somebody else
    serves them; DataError says what is missing in it."""
    for name in ("config.json", "tokenizer.json"):
        if not (model / name).is_file():
            raise DataError(
                f"{model} is not a model directory: {name} is missing; expected a Hugging Face "
                "directory with config.json, safetensors and tokenizer files"
            )
    if with_weights and not any(model.glob("*.safetensors")):
        raise DataError(f"{model} is not a model directory: it holds no *.safetensors file")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{model}: its tokenizer cannot be loaded: {error}") from error
    return tokenizer


def make_renderer(
    config: TagsConfig | NativeConfig, prompt: PromptConfig, tokenizer: Any, model: Path
) -> Renderer:
    """The renderer that the configuration names. Raises ConfigError for a chat template that it
    cannot use."""
    eos_ids = read_eos_ids(model, tokenizer)
    if isinstance(config, NativeConfig):
        return NativeRenderer(tokenizer, config, prompt, eos_ids)
    return TagRenderer(tokenizer, prompt, eos_ids)


def load_function(path: str, key: str) -> Callable[..., Any]:
    """The function that 'module:function' names; a ConfigError names the key otherwise."""
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}: {path!r} cannot be loaded: {error}") from error
    if not inspect.isroutine(function):
        raise ConfigError(f"{key}: {path!r} is not a function")
    return function
