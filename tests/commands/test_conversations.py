"""Rows of dialogues: every form yields the same messages, and the errors of bad rows name the
fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentenv.assembly.keys.supervised import ChatColumns, ChatDataConfig
from agentenv.base.types import Message, ToolCall
from agentenv.launchers import sft
from agentenv.training.supervised import dialogues
from tests.commands.supervised import make_supervised
from tests.support.golden import Golden

USER, ANSWER = Message("user", "Who?"), Message("assistant", "<answer>me</answer>")
SHAREGPT = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "<answer>me</answer>"}]
REPLY = {"role": "assistant", "content": "<answer>me</answer>"}
MESSAGES = [{"role": "user", "content": "Who?"}, REPLY]


def read(row: dict[str, Any], **keys: Any) -> tuple[Message, ...]:
    return dialogues.read_conversation(row, dialogues.RowFormat(**keys)).messages


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": SHAREGPT},
        {"messages": MESSAGES},
        {"conversations": MESSAGES},
        {"messages": json.dumps(MESSAGES)},
        {"messages": [MESSAGES[0], {"role": "assistant", "content": [
            {"type": "text", "text": "<answer>me</answer>"}]}]},
        {"instruction": "Who?", "input": "", "output": "<answer>me</answer>"},
        {"question": "Who?", "turns": [{"action": "<answer>me</answer>", "result": None}]},
    ],
)  # fmt: skip
def test_every_form_gives_the_same_messages(row: dict[str, Any]) -> None:
    assert read(row) == (USER, ANSWER)


def test_a_system_prompt_of_the_row_comes_first() -> None:
    system = Message("system", "Be brief.")
    assert read({"conversations": SHAREGPT, "system": "Be brief."}) == (system, USER, ANSWER)
    own = [{"from": "system", "value": "Be long."}, *SHAREGPT]
    assert read({"conversations": own, "system": "Be brief."})[0].content == "Be long."


def test_tools_and_calls() -> None:
    call = {"name": "search", "arguments": {"query": "me"}}
    schema = {"name": "search", "parameters": {}}
    shared = {"from": "function_call", "value": json.dumps(call)}
    talk = [SHAREGPT[0], shared, {"from": "observation", "value": "found"}, SHAREGPT[1]]
    function = {"name": "search", "arguments": '{"query": "me"}'}
    calls = [{"id": "1", "type": "function", "function": function}]
    turn = {"role": "assistant", "content": None, "tool_calls": calls}
    messages = [MESSAGES[0], turn, {"role": "tool", "content": "found"}, MESSAGES[1]]
    rows = (
        {"conversations": talk, "tools": json.dumps([schema])},
        {"messages": messages, "tools": [{"type": "function", "function": schema}]},
    )
    asked = Message("assistant", "", (ToolCall("search", {"query": "me"}),))
    for row in rows:
        found = dialogues.read_conversation(row, dialogues.RowFormat())
        assert found.messages == (USER, asked, Message("tool", "found"), ANSWER)
        assert found.tools == [schema]


def test_names_of_columns_and_roles_are_configurable() -> None:
    row = {"talk": [{"who": "q", "what": "Who?"}, {"who": "a", "what": "<answer>me</answer>"}]}
    tags = dialogues.ChatTags(role_tag="who", content_tag="what", user_tag="q", assistant_tag="a")
    assert read(row, columns=ChatColumns(messages="talk"), tags=tags) == (USER, ANSWER)


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": SHAREGPT[:1], "chosen": SHAREGPT[1],
         "rejected": {"from": "gpt", "value": "no"}},
        {"prompt": MESSAGES[:1], "chosen": [MESSAGES[1]],
         "rejected": [{"role": "assistant", "content": "no"}]},
        {"prompt": "Who?", "chosen": "<answer>me</answer>", "rejected": "no"},
        {"chosen": MESSAGES, "rejected": [MESSAGES[0], {"role": "assistant", "content": "no"}]},
        {"prompt": MESSAGES[:1], "chosen": MESSAGES,
         "rejected": [MESSAGES[0], {"role": "assistant", "content": "no"}]},
        {"instruction": "Who?", "chosen": "<answer>me</answer>", "rejected": "no"},
    ],
)  # fmt: skip
def test_every_form_of_a_preference(row: dict[str, Any]) -> None:
    found = dialogues.read_preference(row, dialogues.RowFormat())
    assert found.prompt.messages == (USER,)
    assert found.chosen == (ANSWER,)
    assert found.rejected == (Message("assistant", "no"),)


def registry(folder: Path, entry: dict[str, Any]) -> ChatDataConfig:
    (folder / "d.json").write_text("[]")
    (folder / "dataset_info.json").write_text(json.dumps({"cold_start": entry}))
    return ChatDataConfig(train="cold_start", dataset_info=str(folder))


def test_a_name_in_dataset_info_refers_to_its_file(tmp_path: Path) -> None:
    entry = {
        "file_name": "d.json",
        "formatting": "sharegpt",
        "columns": {"messages": "talk", "system": "sys"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user",
                 "assistant_tag": "assistant"},
        "num_samples": 7,
    }  # fmt: skip
    config = registry(tmp_path, entry)
    (source,) = dialogues.find_sources(config, ["cold_start"])
    assert source.path == tmp_path / "d.json"
    assert source.max_samples == 7
    row = {"talk": MESSAGES, "sys": "Be brief.", "tools": "not read, as columns do not name it"}
    found = dialogues.read_conversation(row, source.form)
    assert found.messages == (Message("system", "Be brief."), USER, ANSWER)


BAD_ROWS: list[dict[str, Any]] = [
    {"text": "x"}, {"conversations": []},
    {"conversations": [*SHAREGPT, {"from": "bot", "value": "x"}]},
    {"conversations": [SHAREGPT[0], {"from": "gpt", "value": 3}]}, {"conversations": SHAREGPT[:1]},
    {"conversations": SHAREGPT[1:]}, {"conversations": [*SHAREGPT, SHAREGPT[1]]},
    {"conversations": [SHAREGPT[0], {"from": "function_call", "value": "{"}]},
    {"conversations": SHAREGPT, "tools": "[{}]"}, {"conversations": SHAREGPT, "system": 3},
    {"instruction": "a", "output": None}, {"question": "a", "turns": [{"result": "x"}]},
]  # fmt: skip
BAD_ENTRIES: list[dict[str, Any]] = [
    {"hf_hub_url": "a/b"},
    {"file_name": "d.json", "formatting": "xml"},
    {"file_name": "e.json"},
    {"file_name": "d.json", "ranking": True},
    {"file_name": "d.json", "columns": {"images": "i"}},
    {"file_name": "d.json", "colums": {}},
]


@pytest.mark.golden("sft-rows")
def test_the_error_of_a_bad_row_or_entry_names_the_key(tmp_path: Path, golden: Golden) -> None:
    """And one of a dataset that has no entry its nearest name."""
    config = make_supervised(tmp_path, "[data]\n") / "small.toml"
    for number, row in enumerate(BAD_ROWS):
        path = tmp_path / f"bad-{number}.jsonl"
        path.write_text(json.dumps(row) + "\n")
        golden.run(sft, config, f"data.train={path}", status=2)
    for number, entry in enumerate(BAD_ENTRIES):
        folder = tmp_path / f"entry-{number}"
        folder.mkdir()
        registry(folder, entry)
        golden.run(sft, config, "data.train=cold_start", f"data.dataset_info={folder}", status=2)
    golden.run(sft, config, "data.train=cold_strat", f"data.dataset_info={folder}", status=2)
