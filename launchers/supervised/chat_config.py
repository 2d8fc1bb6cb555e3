"""The keys that say how files of dialogues are read: names of columns, roles and datasets."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

Format = Literal["auto", "sharegpt", "messages", "alpaca", "turns"]


class ChatColumns(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a row keeps its dialogue. The names are those of LLaMA-Factory's dataset_info.json."""

    messages: Annotated[
        str, Meta(description="list of messages; empty: conversations, messages or prompt")
    ] = ""
    system: Annotated[str, Meta(description="system prompt, if the row has it")] = "system"
    tools: Annotated[
        str, Meta(description="schemas of the tools, as JSON or as a list, if the row has it")
    ] = "tools"
    chosen: Annotated[str, Meta(description="the better answer of a preference")] = "chosen"
    rejected: Annotated[str, Meta(description="the worse answer of a preference")] = "rejected"
    prompt: Annotated[str, Meta(description="alpaca: the instruction")] = "instruction"
    query: Annotated[str, Meta(description="alpaca: what is added to the instruction")] = "input"
    response: Annotated[str, Meta(description="alpaca: the answer")] = "output"
    history: Annotated[str, Meta(description="alpaca: pairs of earlier turns")] = "history"


class ChatTags(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a message names its parts and roles; empty: as its format has it."""

    role_tag: Annotated[str, Meta(description="key of the role: from, or role")] = ""
    content_tag: Annotated[str, Meta(description="key of the text: value, or content")] = ""
    user_tag: Annotated[str, Meta(description="role of the user: human, or user")] = ""
    assistant_tag: Annotated[str, Meta(description="role of the policy: gpt, or assistant")] = ""
    observation_tag: Annotated[
        str, Meta(description="role of a tool result: observation, or tool")
    ] = ""
    function_tag: Annotated[
        str, Meta(description="role of a call, a JSON text: function_call, or function")
    ] = ""
    system_tag: Annotated[str, Meta(description="role of the system prompt")] = ""


SHAREGPT_TAGS = ChatTags(
    role_tag="from",
    content_tag="value",
    user_tag="human",
    assistant_tag="gpt",
    observation_tag="observation",
    function_tag="function_call",
    system_tag="system",
)
MESSAGE_TAGS = ChatTags(
    role_tag="role",
    content_tag="content",
    user_tag="user",
    assistant_tag="assistant",
    observation_tag="tool",
    function_tag="function",
    system_tag="system",
)


class ChatDataConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The files that are learned from, and those that only measure."""

    train: Annotated[
        str | list[str],
        Meta(
            description="rows to learn from: a JSONL, JSON, CSV, parquet or Arrow file, a folder, "
            "a pattern, or a list of them; with data.dataset_info names of datasets in it"
        ),
    ]
    eval: Annotated[
        str | list[str], Meta(description="rows that measure, given as data.train is")
    ] = ""
    eval_split: Annotated[
        float,
        Meta(
            ge=0,
            description="hold out this part of data.train, drawn by run.seed; from 1 on: so many "
            "rows",
        ),
    ] = 0.0
    dataset_info: Annotated[
        str, Meta(description="LLaMA-Factory's dataset_info.json; files are sought beside it")
    ] = ""
    format: Annotated[
        Format,
        Meta(
            description="sharegpt: from and value; messages: role and content; alpaca: "
            "instruction, input, output; turns: question and turns; auto: by the keys of each row"
        ),
    ] = "auto"
    columns: ChatColumns = ChatColumns()
    tags: ChatTags = ChatTags()
    max_samples: Annotated[int, Meta(ge=0, description="first n rows of data.train; 0: all")] = 0
    skip_bad_rows: Annotated[
        bool, Meta(description="leave out bad rows and list them, instead of refusing the file")
    ] = False
    max_length: Annotated[
        int, Meta(ge=2, description="cut-off length of a sequence, in tokens")
    ] = 15_000
    overlong: Annotated[
        Literal["cut", "skip", "error"],
        Meta(description="a longer sequence loses its end, is left out, or is refused"),
    ] = "cut"
    compat: Annotated[
        Literal["", "reference"],
        Meta(
            description="'reference' trains tool results that stand within an answer, as the "
            "released recipes do, and keeps the backspace byte in \\boxed; empty: masks them"
        ),
    ] = ""


class RowFormat(Struct, frozen=True):
    """How the rows of one file are read."""

    format: Format = "auto"
    columns: ChatColumns = field(default_factory=ChatColumns)
    tags: ChatTags = field(default_factory=ChatTags)
