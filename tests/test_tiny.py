"""A small model with words of one's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agentenv import tiny_model
from agentenv.cold_start import tiny_tokenizer
from agentenv.errors import ConfigError
from agentenv.model_files import check_model_directory, load_tokenizer, read_model_config

TEXTS = ["How many Bolts are there?", "<think>look</think><stock>Bolts</stock>", 'So {"a": 3}']


def test_words_are_tokens_and_the_rest_is_bytes() -> None:
    tokenizer = tiny_tokenizer(TEXTS, tools=["stock"])

    def pieces(text: str) -> list[str]:
        return [tokenizer.decode([token]) for token in tokenizer.encode(text)]

    assert pieces("<think>look</think><stock>Bolts</stock>") == [
        "<think>", "look", "</think>", "<stock>", "Bolts", "</stock>",
    ]  # fmt: skip
    assert pieces("How many Bolts")[-2:] == [" many ", "Bolts"]
    assert pieces('{"a": 1240}') == ['{"', "a", '": ', "12", "40", "}"]
    for text in ("größer \u2713\n\t", "Nuts and screws, <b>", "\\boxed{7}"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(pieces("Nuts")) == 4


def test_equal_arguments_give_equal_files(tmp_path: Path) -> None:
    first, again, other = (
        tiny_model(tmp_path / name, TEXTS, seed, tools=["stock"], max_tokens=256)
        for name, seed in (("first", 1), ("again", 1), ("other", 2))
    )
    check_model_directory(first)
    assert read_model_config(first)["max_position_embeddings"] == 256
    assert load_tokenizer(first).encode("Bolts") == load_tokenizer(other).encode("Bolts")
    for file in first.iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes(), file.name
    weights = "model.safetensors"
    assert (first / weights).read_bytes() != (other / weights).read_bytes()


def test_one_text_in_place_of_a_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a list of them"):
        tiny_model(tmp_path, "How many?")


def test_without_the_extra_it_says_so(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['tokenizers'] = None\n"
        "import agentenv\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "try:\n    agentenv.tiny_model('m', ['a'])\n"
        "except agentenv.ConfigError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "needs tokenizers, missing here" in done.stdout, done.stderr
    assert "pip install" in done.stdout
    assert "[train]" in done.stdout
