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

import msgspec

from agentenv.engines.embedded import EmbeddedConfig
from agentenv.engines.scripted import ScriptedConfig
from agentenv.engines.server_config import SGLANG_RESERVED, SGLangConfig, VLLMConfig
from agentenv.errors import ConfigError, DataError
from agentenv.native import NativeConfig, NativeRenderer
from agentenv.prompt import PromptConfig
from agentenv.renderer import Renderer, TagRenderer, TagsConfig, read_eos_ids
from agentenv.types import Limits

EngineConfig = EmbeddedConfig | ScriptedConfig | VLLMConfig | SGLangConfig


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


def read_model_config(model: Path) -> dict[str, Any]:
    """config.json of a Hugging Face directory."""
    path = model / "config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(f"{path}: not a readable model configuration: {error}") from error


def vocab_size(model: Path) -> int:
    """The vocabulary that entropies range over."""
    size = read_model_config(model).get("vocab_size")
    if not isinstance(size, int):
        raise DataError(f"{model / 'config.json'}: key vocab_size is missing")
    return size


def make_renderer(
    config: TagsConfig | NativeConfig, prompt: PromptConfig, tokenizer: Any, model: Path
) -> Renderer:
    """The renderer that the configuration names. Raises ConfigError for a chat template that it
    cannot use."""
    eos_ids = read_eos_ids(model, tokenizer)
    if isinstance(config, NativeConfig):
        return NativeRenderer(tokenizer, config, prompt, eos_ids)
    return TagRenderer(tokenizer, prompt, eos_ids)


def context_length(config: EngineConfig, model: Path, key: str = "engine") -> int:
    """Tokens of prompt and response that the engine, configured in the table `key`, can hold.
    Raises ConfigError for a max_model_len beyond what the model was made for."""
    raw = read_model_config(model)
    is_server = isinstance(config, VLLMConfig | SGLangConfig)
    of_model = stretched(raw) if is_server else int(raw.get("max_position_embeddings") or 0)
    if of_model and config.max_model_len > of_model and not isinstance(config, ScriptedConfig):
        raise ConfigError(
            f"{key}.max_model_len = {config.max_model_len}: {model} holds {of_model} tokens of "
            "prompt and response together; give at most that, or 0 for the model's own limit"
        )
    if of_model and isinstance(config, SGLangConfig):
        of_model -= SGLANG_RESERVED
    if config.max_model_len:
        return min(config.max_model_len, of_model or config.max_model_len)
    if not of_model:
        raise ConfigError(f"engine.max_model_len: must be given, since {model} does not say")
    return of_model


def stretched(raw: dict[str, Any]) -> int:
    """The positions of a model as vLLM and SGLang count them: times the factor that its
    config.json has for longer contexts; 0: it does not say."""
    positions = int(raw.get("max_position_embeddings") or 0)
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if rope.get("rope_type", rope.get("type")) not in ("yarn", "linear", "dynamic"):
        return positions
    trained = rope.get("original_max_position_embeddings") or positions
    return max(positions, int(trained * float(rope.get("factor") or 1.0)))


def check_context(limits: Limits, max_model_len: int) -> None:
    """Refuse limits that the engine's context cannot hold."""
    needed = limits.max_prompt_tokens + limits.max_response_tokens
    if needed > max_model_len:
        raise ConfigError(
            f"limits: max_prompt_tokens {limits.max_prompt_tokens} + max_response_tokens "
            f"{limits.max_response_tokens} = {needed} exceed the engine's context of "
            f"{max_model_len} tokens; lower them, or take an engine and a model that hold more"
        )


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
