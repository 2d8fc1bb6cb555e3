"""Rows of dialogues: every form yields the same messages, and the errors of bad rows name the
fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentenv.assembly.keys.supervised import ChatColumns, ChatDataConfig
from agentenv.base.errors import DataError
from agentenv.base.types import Message, ToolCall
from agentenv.training.supervised.dialogues import (
    ChatTags,
    RowFormat,
    find_sources,
    read_conversation,
    read_preference,
)

USER, ANSWER = Message("user", "Who?"), Message("assistant", "<answer>me</answer>")
SHAREGPT = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "<answer>me</answer>"}]
MESSAGES = [
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "<answer>me</answer>"},
]


def read(row: dict[str, Any], **keys: Any) -> tuple[Message, ...]:
    return read_conversation(row, RowFormat(**keys)).messages


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
    rows = (
        {
            "conversations": [
                SHAREGPT[0],
                {"from": "function_call", "value": json.dumps(call)},
                {"from": "observation", "value": "found"},
                SHAREGPT[1],
            ],
            "tools": json.dumps([schema]),
        },
        {
            "messages": [
                MESSAGES[0],
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "1", "type": "function", "function": {
                        "name": "search", "arguments": '{"query": "me"}'}}],
                },
                {"role": "tool", "content": "found"},
                MESSAGES[1],
            ],
            "tools": [{"type": "function", "function": schema}],
        },
    )  # fmt: skip
    asked = Message("assistant", "", (ToolCall("search", {"query": "me"}),))
    for row in rows:
        found = read_conversation(row, RowFormat())
        assert found.messages == (USER, asked, Message("tool", "found"), ANSWER)
        assert found.tools == [schema]


def test_names_of_columns_and_roles_are_configurable() -> None:
    row = {"talk": [{"who": "q", "what": "Who?"}, {"who": "a", "what": "<answer>me</answer>"}]}
    tags = ChatTags(role_tag="who", content_tag="what", user_tag="q", assistant_tag="a")
    assert read(row, columns=ChatColumns(messages="talk"), tags=tags) == (USER, ANSWER)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, "no dialogue found: expected conversations or messages"),
        ({"conversations": []}, "key 'conversations': expected a list of messages"),
        ({"conversations": [*SHAREGPT, {"from": "bot", "value": "x"}]},
         "key 'conversations[2].from': expected one of ['function_call', 'gpt', 'human'"),
        ({"conversations": [SHAREGPT[0], {"from": "gpt", "value": 3}]},
         "key 'conversations[1].value': expected a text, got 3"),
        ({"conversations": SHAREGPT[:1]}, "no message is the policy's"),
        ({"conversations": SHAREGPT[1:]}, "cannot follow 'the beginning'; expected system or user"),
        ({"conversations": [*SHAREGPT, SHAREGPT[1]]}, "cannot follow 'assistant'"),
        ({"conversations": [SHAREGPT[0], {"from": "function_call", "value": "{"}]},
         "key 'conversations[1].value': expected a call"),
        ({"conversations": SHAREGPT, "tools": "[{}]"}, "key 'tools': expected a list of tools"),
        ({"conversations": SHAREGPT, "system": 3}, "key 'system': expected a text, got 3"),
        ({"instruction": "a", "output": None}, "key 'output': expected a text"),
        ({"question": "a", "turns": [{"result": "x"}]}, "field `action` - at `$.turns[0]`"),
    ],
)  # fmt: skip
def test_the_error_of_a_bad_row_names_the_key_and_the_expected_value(
    row: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError) as caught:
        read_conversation(row, RowFormat())
    assert message in str(caught.value)


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
    found = read_preference(row, RowFormat())
    assert found.prompt.messages == (USER,)
    assert found.chosen == (ANSWER,)
    assert found.rejected == (Message("assistant", "no"),)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "Who?", "chosen": "me"}, "key 'rejected' is missing"),
        ({"chosen": "me", "rejected": "no"}, "no prompt"),
        ({"prompt": "Who?", "chosen": MESSAGES[:1], "rejected": "no"},
         "key 'chosen': expected an answer that starts with the policy's turn"),
    ],
)  # fmt: skip
def test_a_bad_preference(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_preference(row, RowFormat())


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
    (source,) = find_sources(config, ["cold_start"])
    assert source.path == tmp_path / "d.json"
    assert source.max_samples == 7
    row = {"talk": MESSAGES, "sys": "Be brief.", "tools": "not read, as columns do not name it"}
    assert read_conversation(row, source.form).messages == (
        Message("system", "Be brief."),
        USER,
        ANSWER,
    )


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"hf_hub_url": "a/b"}, "downloads are not supported; get the file and set file_name"),
        ({"file_name": "d.json", "formatting": "xml"}, "cold_start: Invalid enum value 'xml'"),
        ({"file_name": "e.json"}, "cold_start.file_name: no such file"),
        ({"file_name": "d.json", "ranking": True}, "ranking: expected false or absent"),
        ({"file_name": "d.json", "columns": {"images": "i"}}, "`images`"),
        ({"file_name": "d.json", "colums": {}}, "cold_start: Object contains unknown field"),
    ],
)
def test_a_bad_entry_of_dataset_info(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        find_sources(registry(tmp_path, entry), ["cold_start"])
    assert message in str(caught.value)


def test_an_unknown_dataset_has_a_hint(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'cold_strat'"):
        find_sources(registry(tmp_path, {"file_name": "d.json"}), ["cold_strat"])
