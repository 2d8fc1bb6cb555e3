"""System prompts: presets, files, prompts of rows, and their precedence."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from agentenv.base.errors import ConfigError
from agentenv.base.types import Message, Task
from agentenv.contract.instruction import Instruction
from agentenv.text.prompt import PromptConfig, load_instruction, preset, presets

TASK = Task("t", "x", "Capital of Peru?", ("Lima",))
ROW = Task("t", "x", "Capital of Peru?", ("Lima",), metadata={"system_prompt": "From the row."})
OWN = [Message("system", "From the class."), Message("user", "Capital of Peru?")]
QUESTION = OWN[1]


def system(instruction: Instruction, task: Task) -> str:
    first, *rest = instruction.apply(OWN, task)
    assert rest == [QUESTION]
    return first.content


def test_a_row_overrides_the_template_which_overrides_the_class() -> None:
    text = Instruction("From the template.")
    assert system(Instruction(), TASK) == "From the class."
    assert system(text, TASK) == "From the template."
    assert system(Instruction(), ROW) == "From the row."
    assert system(text, ROW) == "From the row."
    assert system(Instruction("From the template.", override_row=True), ROW) == (
        "From the template."
    )


TOOLS = {
    "search+python": ("search", "python"), "search": ("search",), "python": ("python",),
    "no_tools": (), "chinese": ("search", "python"), "direct": (), "native": (),
}  # fmt: skip


@pytest.mark.parametrize("name", TOOLS)
def test_a_preset_shows_its_required_tags(name: str) -> None:
    text = preset(name)
    for tag in ("search", "python"):
        assert (f"<{tag}>" in text) == (f"</{tag}>" in text) == (tag in TOOLS[name])
    for tag in ("think", "answer"):
        assert f"<{tag}>" in text
        assert f"</{tag}>" in text
    assert r"\boxed{" in text
    assert load_instruction(PromptConfig(template=name)).text == text
    assert name in presets()


def test_a_file_is_the_system_prompt_or_the_whole_message(tmp_path: Path) -> None:
    (tmp_path / "system.txt").write_text("Be brief.\n")
    (tmp_path / "whole.txt").write_text("Q: {question}\nA:")

    def load(name: str) -> Instruction:
        return load_instruction(PromptConfig(template=f"{{run}}/{name}"), resolve)

    def resolve(text: str) -> Path:
        return Path(text.replace("{run}", str(tmp_path)))

    assert load("system.txt").apply(OWN, TASK) == [Message("system", "Be brief."), QUESTION]
    whole = Message("user", "Q: Capital of Peru?\nA:")
    assert load("whole.txt").apply(OWN, TASK) == [whole]
    assert load("whole.txt").apply(OWN, ROW) == [Message("system", "From the row."), whole]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"template": "serch"}, "did you mean search"),
        ({"template": "no/such/file.txt"}, "presets: chinese, direct"),
        ({"override_row": True}, "prompt.override_row: needs"),
        ({"apply_chat_template": False, "chat_template_kwargs": {"x": 1}}, "unused with"),
    ],
)
def test_an_unavailable_prompt_is_refused(config: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_instruction(PromptConfig(**config))  # type: ignore[arg-type]


# the system prompt of rows

SAID = "Answer in \\boxed{answer here}."


def chat(system: str, question: str = "q") -> dict[str, object]:
    """A row in the schema of ARPO's parquet files."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"prompt": messages, "reward_model": {"ground_truth": "", "style": "rule"}}


def template(path: Path, rows: list[dict[str, object]]) -> str:
    """The template from a file of these rows."""
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        importlib.import_module("pyarrow.parquet").write_table(
            pyarrow.Table.from_pylist(rows), path
        )
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_instruction(PromptConfig(template=str(path))).text


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_the_single_system_prompt_of_rows_is_used_with_boxed_repaired(
    tmp_path: Path, suffix: str
) -> None:
    """As published the \\b of \\boxed is a backspace byte; golds do not matter."""
    broken = SAID.replace("\\b", "\b")
    rows = [chat(broken, f"question {number}") for number in range(3)]
    assert "\x08oxed" in broken
    assert template(tmp_path / f"train{suffix}", rows) == SAID


@pytest.mark.parametrize(
    "row",
    [
        {"system": SAID, "conversations": [{"from": "human", "value": "q"}]},
        {"conversations": [{"from": "system", "value": SAID}, {"from": "human", "value": "q"}]},
        {"messages": [{"role": "system", "content": SAID}, {"role": "user", "content": "q"}]},
        {"system_prompt": SAID, "question": "q", "answer": "a"},
    ],
)
def test_the_single_system_prompt_of_dialogues_is_used(
    tmp_path: Path, row: dict[str, object]
) -> None:
    assert template(tmp_path / "sft.jsonl", [row, row]) == SAID


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (
            [chat(SAID), chat("Another.")],
            "row 2: a different system prompt than row 1; expected the same",
        ),
        ([chat(SAID), {"question": "q"}], r"row 2: no system prompt; .*row has \['question'\]"),
        ([], "no rows; expected rows with a system prompt"),
    ],
)
def test_rows_without_one_system_prompt_are_refused(
    tmp_path: Path, rows: list[dict[str, object]], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        template(tmp_path / "rows.jsonl", rows)


def test_a_missing_file_of_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no/rows\.parquet"):
        load_instruction(PromptConfig(template="no/rows.parquet"))
