"""The place and the text of hints."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from agentenv.assembly.keys.evaluation import HintsConfig
from agentenv.base.errors import ConfigError
from agentenv.lab.recipes.sampling import cut_at_doubt, make_hint, reopened

CHAIN = (
    "<think>Peru is a country. Perhaps its capital is Cusco, since it is old. It is.</think>"
    r"<answer>It is \boxed{Cusco}.</answer>"
)


def test_a_hint_replaces_the_first_uncertain_sentence() -> None:
    assert cut_at_doubt(CHAIN, ["maybe", "perhaps"]) == "<think>Peru is a country. "
    assert cut_at_doubt("<think>Perhaps Cusco.", ["perhaps"]) == "<think>"
    assert cut_at_doubt("<think>It weighs 3.5 kg, I think.", ["i think"]) == "<think>"
    assert cut_at_doubt("<think>The mayberry is red.</think>", ["may", "maybe"]) is None
    chinese = "<think>\u79d8\u9c81\u3002\u4e5f\u8bb8\u662f\u5e93\u65af\u79d1"
    assert cut_at_doubt(chinese, ["\u4e5f\u8bb8"]) == "<think>\u79d8\u9c81\u3002 "
    assert cut_at_doubt("<think>a</think>Perhaps.<answer>b</answer>", ["perhaps"]) is None
    assert cut_at_doubt("<think>a</think><answer>perhaps</answer>", ["perhaps"]) is None


def test_the_thought_is_reopened_after_the_answer() -> None:
    assert reopened(CHAIN) == (
        "<think>Peru is a country. Perhaps its capital is Cusco, since it is old. It is. "
        "So it would be Cusco. "
    )
    assert reopened("<think>a</think>") is None
    assert reopened("<answer>a</answer>") is None
    assert reopened("<think>a</think><answer>a") is None
    assert reopened("<think>a</think>Well: <answer>b</answer>") is None


def test_the_place_of_a_hint() -> None:
    config = HintsConfig(verification=["Check it."], reflection=["Check that."])
    either = make_hint(CHAIN, 2, config, Random(0))
    assert either is not None
    assert either.prefix == "<think>Peru is a country. Check it."
    assert (either.place, either.text, either.sample) == ("uncertain", "Check it.", 2)
    behind = make_hint(CHAIN, 0, replace(config, place="answer"), Random(0))
    assert behind is not None
    assert behind.prefix.endswith("So it would be Cusco. Check that.")
    sure = CHAIN.replace("Perhaps its", "Its")
    fallback = make_hint(sure, 0, config, Random(0))
    assert fallback is not None
    assert fallback.place == "answer"
    assert make_hint(sure, 0, replace(config, place="uncertain"), Random(0)) is None
    assert make_hint("no thought", 0, config, Random(0)) is None


def test_sentences_are_drawn_by_the_seed() -> None:
    found = [make_hint(CHAIN, 0, HintsConfig(), Random(seed)) for seed in range(20)]
    assert {one.text for one in found if one} == {*HintsConfig().verification}
    assert found[0] == make_hint(CHAIN, 0, HintsConfig(), Random(0))


@pytest.mark.parametrize("keys", [{"phrases": []}, {"verification": [" "]}, {"reflection": []}])
def test_a_hint_without_words_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"hints.{next(iter(keys))}: expected"):
        HintsConfig(**keys)
