"""Ends of sampled text: stop strings over token borders, end-of-sequence tokens."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from agentenv.base.types import Completion, SamplingParams
from agentenv.contract.stop_strings import StopStrings
from agentenv.engines.embedded.embedded_config import EmbeddedConfig
from agentenv.engines.embedded.engine import EmbeddedEngine
from tests.engines.small_models import SIZES

WORDS = ["</", "pyth", "on>x", "\u00e9t\u00e9"]


def byte_level() -> Tokenizer:
    """All bytes as tokens and a few words, decoded the way of GPT-2."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = symbols + ["".join(encode(word)) for word in WORDS]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def encode(text: str) -> list[str]:
    """Byte-level symbols of a text without spaces."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return [symbol for piece, _ in splitter.pre_tokenize_str(text) for symbol in piece]


def byte_fallback() -> Tokenizer:
    """Words with a mark for the space, and bytes for the rest, decoded the way of Llama 2."""
    pieces = [f"<0x{i:02X}>" for i in range(256)]
    pieces += ["\u2581", "a", "\u2581b", "ab", "\u2581\u00e9", ">", "\u2581>"]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True))
    replaced, strip = decoders.Replace("\u2581", " "), decoders.Strip(" ", 1, 0)
    steps = [replaced, decoders.ByteFallback(), decoders.Fuse(), strip]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


async def test_tables_of_a_large_vocabulary_are_built_outside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, for any number of concurrent requests."""
    tokenizer = byte_level()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    finder = StopStrings(tmp_path, tokenizer.get_vocab_size())
    monkeypatch.setattr("agentenv.contract.stop_strings.MAX_AT_ONCE", 10)
    threads = []
    matcher = finder.matcher

    def make(stops: tuple[str, ...]) -> Any:
        threads.append(threading.current_thread())
        return matcher(stops)

    monkeypatch.setattr(finder, "matcher", make)
    found = await asyncio.gather(*(finder.ready((">",)) for _ in range(3)))
    assert found[0] is not None
    assert found[0] is found[1] is found[2] is await finder.ready((">",))
    assert threads[0] is not threading.main_thread()
    assert threads[-1] is threading.main_thread()


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_matcher_agrees_with_decoding_everything(make: type[Tokenizer], tmp_path: Path) -> None:
    tokenizer = make()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocab = tokenizer.get_vocab()
    some = [vocab.get(s, 0) for s in ("</", "pyth", "on>x", "\u2581", "a", "\u2581b", "ab", ">")]
    some += [vocab.get(s, 0) for s in ("\u2581\u00e9", "\u2581>", "<0xC3>", "<0xA9>", "<0x20>")]
    some += [vocab.get(s, 0) for s in [*encode("\u00e9\u20ac<>"), "\u0120"]]
    finder = StopStrings(tmp_path, tokenizer.get_vocab_size())
    rng = random.Random(0)
    found = 0
    for stops in ((">",), ("</python>", "b "), ("\u00e9",), ("a b", "\u20ac<"), (" ", "\u00e9>")):
        matcher = finder.matcher(stops)
        assert matcher is not None
        for _ in range(60):
            ids: list[int] = []
            for _ in range(40):
                ids.append(rng.choice(some))
                text = tokenizer.decode(ids, skip_special_tokens=False)
                expected = min(((text.find(s), s) for s in stops if s in text), default=(0, None))
                stop = matcher.match(ids) if ids[-1] in matcher.candidates else None
                assert stop == expected[1], (ids, text)
                if stop:
                    found += 1
                    break
    assert found > 50


def test_a_stop_string_is_found_after_a_long_run_of_bytes(tmp_path: Path) -> None:
    """Cut at the wrong byte, the whole run would decode to unreadable text."""
    tokenizer = byte_fallback()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocab = tokenizer.get_vocab()
    matcher = StopStrings(tmp_path, len(vocab)).matcher(("\u00e9>",))
    assert matcher is not None
    run = [vocab["<0xC3>"], vocab["<0xA9>"]] * 20
    for end in ([vocab[">"]], [vocab["<0x3E>"]], [vocab["<0x3E>"], vocab["<0x61>"]]):
        assert matcher.match(run + end) == "\u00e9>"


def automaton(folder: Path, chain: list[int], vocab: int, eos: int | list[int] | None) -> None:
    """A model that writes `chain`: each token surely follows the one before."""
    sizes = {"vocab_size": vocab, "hidden_size": vocab, "eos_token_id": eos}
    one_layer = {"num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**(SIZES | sizes | one_layer)))
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(vocab))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for before, after in pairwise(chain):
            model.lm_head.weight[after, before] = 10.0
    model.save_pretrained(folder)


async def write(folder: Path, chain: list[int], size: int, stop: tuple[str, ...]) -> Completion:
    engine = EmbeddedEngine(EmbeddedConfig(device="cpu"), folder)
    params = SamplingParams(max_tokens=size, stop=stop)
    done = await engine.generate(chain[:1], params, session="s")
    await engine.close()
    return done


async def test_stop_strings_in_the_engine(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocab = tokenizer.get_vocab()
    text = ["Q", "</", "pyth", "on>x", "a", *encode("\u00e9"), "b", *encode("\u20ac"), "c", "d"]
    chain = [vocab[piece] for piece in text]
    automaton(tmp_path, chain, 260, None)
    for stops, end, stop in (
        (("</python>",), 4, "</python>"),  # over three tokens, all of which remain
        (("zzz", "thon"), 4, "thon"),
        (("\u00e9",), 7, "\u00e9"),  # two tokens of one byte each
        (("b\u20ac",), 11, "b\u20ac"),
        (("Q</",), 13, None),  # the prompt takes no part
        (("d", "\u20acc"), 12, "\u20acc"),
    ):
        done = await write(tmp_path, chain, 12, stops)
        assert done.token_ids == chain[1:end], stops
        assert (done.finish_reason, done.stop) == ("stop" if stop else "length", stop)
    last = await write(tmp_path, chain, 3, ("</python>",))
    assert (last.finish_reason, last.stop) == ("stop", "</python>")  # not "length"


@pytest.mark.parametrize("eos", [6, [50, 6]])
async def test_end_of_sequence(tmp_path: Path, eos: int | list[int]) -> None:
    chain = [3, 4, 5, 6, 7, 8]
    automaton(tmp_path, chain, 60, 5)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    done = await write(tmp_path, chain, 5, ())
    assert (done.token_ids, done.finish_reason, done.stop) == ([4, 5, 6], "stop", None)
    (tmp_path / "generation_config.json").unlink()
    done = await write(tmp_path, chain, 5, ())
    assert (done.token_ids, done.finish_reason, done.stop) == ([4, 5], "stop", None)
