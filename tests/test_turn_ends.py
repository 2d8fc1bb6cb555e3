"""The end tokens of a turn are read in one place: three files of a model, and the chat template."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from agentenv.base.errors import DataError
from agentenv.base.model_files import check_turn_end, load_tokenizer, read_eos_ids, template_end
from agentenv.base.types import Limits, Message, SamplingParams
from agentenv.contract.engine import EngineStart
from agentenv.engines.embedded.embedded_config import EmbeddedConfig
from agentenv.engines.embedded.weights import read_architecture
from agentenv.engines.openai import OpenAIConfig, TokensEngine, _sglang_body
from agentenv.engines.pool.turn import PooledTurn
from agentenv.engines.scripted import ScriptedConfig, ScriptedEngine
from agentenv.text.prompt import PromptConfig
from agentenv.text.renderer import TagRenderer
from agentenv.training.supervised.dialogues import Dialogue
from agentenv.training.supervised.encoding import ChatEncoder
from tests.support.trl_templates import TEMPLATES, ends_of, longest, tokenizer_of

TURN_END, TEXT_END, OTHER = "<|turn_end|>", "<|text_end|>", "<|other|>"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }}"
    "{% if m.role == 'assistant' %}END{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


class Model:
    """A directory whose files differ."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def set(
        self,
        *,
        generation: Any = None,
        config: Any = None,
        tokenizer: str | None = None,
        template: str = TURN_END,
    ) -> Any:
        """The tokenizer, after the files were written; `template` is the end of an answer."""
        self.write("config.json", eos_token_id=config)
        path = self.folder / "generation_config.json"
        path.unlink(missing_ok=True)
        if generation is not None:
            path.write_text(json.dumps({"eos_token_id": generation}))
        found = load_tokenizer(self.folder)
        found.add_special_tokens({"additional_special_tokens": [TURN_END, TEXT_END, OTHER]})
        found.eos_token = tokenizer
        found.chat_template = TEMPLATE.replace("END", template)
        return found

    def write(self, name: str, **keys: Any) -> None:
        path = self.folder / name
        values = json.loads(path.read_text()) | keys
        path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


@pytest.fixture
def model(quickstart_model: Path, tmp_path: Path) -> Model:
    return Model(Path(shutil.copytree(quickstart_model, tmp_path / "model")))


def ids_of(model: Model) -> tuple[int, int, int]:
    tokenizer = model.set(tokenizer=None)
    one, two, three = tokenizer.convert_tokens_to_ids([TURN_END, TEXT_END, OTHER])
    return one, two, three


def test_three_files_are_read_together(model: Model) -> None:
    one, two, three = ids_of(model)
    tokenizer = model.set(generation=[one], config=two, tokenizer=OTHER)
    assert read_eos_ids(model.folder, tokenizer) == {one, two, three}
    assert read_eos_ids(model.folder, model.set(config=[one, two])) == {one, two}
    assert read_eos_ids(model.folder, model.set(generation=one)) == {one}
    tokenizer = model.set(generation=one)
    model.write("config.json", text_config={"eos_token_id": two})
    assert read_eos_ids(model.folder, tokenizer) == {one, two}


def test_a_default_end_token_written_by_a_library_is_ignored(model: Model) -> None:
    one, *_ = ids_of(model)
    word = model.set(tokenizer=None).encode("What", add_special_tokens=False)[0]
    assert read_eos_ids(model.folder, model.set(generation=one, config=word)) == {one}


def test_an_invalid_end_token_is_refused_with_file_and_key(model: Model) -> None:
    tokenizer = model.set(generation="<eos>")
    with pytest.raises(DataError, match=r"generation_config\.json.*eos_token_id"):
        read_eos_ids(model.folder, tokenizer)


async def test_every_engine_stops_at_the_end_tokens_of_the_renderer(model: Model) -> None:
    one, two, three = ids_of(model)
    tokenizer = model.set(generation=[one], config=two, tokenizer=OTHER)
    ends = read_eos_ids(model.folder, tokenizer)
    assert TagRenderer(tokenizer, eos_ids=ends).eos_ids == {one, two, three}
    assert read_architecture(model.folder, tokenizer).eos_ids == ends
    turn = PooledTurn([1], SamplingParams(max_tokens=4), None, 1, ends, None)
    assert set(turn.request("id", "", 1).stop_token_ids) == ends
    there = TokensEngine(OpenAIConfig(url="http://127.0.0.1:9"), ends)
    sampling = SamplingParams(max_tokens=4)
    assert set(there._body([1], sampling)["stop_token_ids"]) == ends
    sent = _sglang_body([1], sampling, there._ends)["sampling_params"]
    assert set(sent["stop_token_ids"]) == ends
    await there.close()
    tokenizer = model.set(generation=[one])
    async with AsyncExitStack() as stack:
        keys: Any = {"policy_version": 0, "limits": Limits(), "stack": stack, "servers": None}
        given = EngineStart(model=model.folder, tokenizer=tokenizer, **keys)
        scripted = await ScriptedConfig().start(given)
        assert isinstance(scripted, ScriptedEngine)
        scripted.script = lambda text, rng: "What"
        done = await scripted.generate([1], SamplingParams(max_tokens=9), session="s")
        assert done.token_ids[-1] == one
        embedded: Any = await EmbeddedConfig(device="cpu").start(given)
        assert embedded._arch.eos_ids == {one}


def test_the_end_of_the_template_must_be_an_end_token(model: Model) -> None:
    one, two, _ = ids_of(model)
    tokenizer = model.set(generation=[two], tokenizer=TEXT_END)
    with pytest.raises(DataError) as caught:
        check_turn_end(model.folder, tokenizer, {})
    for part in (f"'{TURN_END}' (token {one})", f"is [{two}]", f"to [{one}, {two}]"):
        assert part in str(caught.value)
    check_turn_end(model.folder, tokenizer, None)  # the template is not applied
    check_turn_end(model.folder, model.set(generation=[one, two]), {})
    check_turn_end(model.folder, model.set(config=one), {})
    check_turn_end(model.folder, model.set(tokenizer=TURN_END), {})
    plain = model.set(tokenizer=TEXT_END, template="")
    assert template_end(plain, {two}, {}) is None
    check_turn_end(model.folder, plain, {})


def test_a_model_without_any_end_token_is_refused(model: Model) -> None:
    with pytest.raises(DataError, match="no end-of-turn token"):
        check_turn_end(model.folder, model.set(tokenizer=None), {})


def encoder(model: Model, tokenizer: Any) -> ChatEncoder:
    ends = read_eos_ids(model.folder, tokenizer)
    return ChatEncoder(TagRenderer(tokenizer, PromptConfig(), ends))


def dialogue(answer: str) -> Dialogue:
    return Dialogue((Message("user", "What is 2 + 3?"), Message("assistant", answer)))


def test_demonstrations_end_with_a_token_at_which_engines_stop(model: Model) -> None:
    one, two, three = ids_of(model)
    tokenizer = model.set(generation=[one, two], tokenizer=TEXT_END)
    learned = encoder(model, tokenizer)
    assert learned.renderer.end_id == one
    plain = learned.encode(dialogue("<answer>5</answer>"))
    assert plain.token_ids[-1] == one
    assert plain.token_ids.tolist().count(one) == 1
    for end in (TURN_END, TEXT_END):
        written = learned.encode(dialogue(f"<answer>5</answer>{end}\n"))
        assert written.equals(plain), "an end that the data has is not learned twice"
    with pytest.raises(DataError, match=rf"'<\|other\|>'.*token {three}"):
        learned.encode(dialogue(f"<answer>5</answer>{OTHER}"))


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_the_end_token_of_published_templates(name: str) -> None:
    tokenizer, ends = tokenizer_of(name), ends_of(name)
    found = template_end(tokenizer, tokenizer.convert_tokens_to_ids([*ends]), {})
    text = found and tokenizer.decode([found])
    own = {"phi": "<|end|>", "cohere2": "<|END_RESPONSE|>", "cohere": "<|END_OF_TURN_TOKEN|>"}
    if end := longest(name, own):  # which is not in the table of ends
        assert text == end
        last = tokenizer.convert_tokens_to_ids("<|END_OF_TURN_TOKEN|>")
        assert name[:6] != "cohere" or template_end(tokenizer, {last}, {}) == last
    elif re.match("gemma(_|3|$)|deepseek|idefics|llava|smolvlm", name):
        assert text is None, "its end is no token of this tokenizer, or contents are lists"
    else:
        assert text in ends
