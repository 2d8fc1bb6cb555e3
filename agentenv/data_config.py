"""The keys that say how rows of a dataset are read."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

Overlong = Literal["error", "skip", "cut"]


class ColumnsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a row keeps what a task needs; a dot goes into an object (`extra_info.question`).

    An empty name means the known ones, in the order of `agentenv/data_rows.py`. A column that is
    named here must be in every row.
    """

    question: Annotated[str, Meta(description="column of the question, or of a chat prompt")] = ""
    answer: Annotated[str, Meta(description="column of the right answer, or of a list of them")] = (
        ""
    )
    id: Annotated[str, Meta(description="column of the row's name; empty: id, else FILE-ROW")] = ""
    kind: Annotated[
        str,
        Meta(
            description="column that groups the metrics; empty: kind, else data_source, else "
            "ability, the first that the row has"
        ),
    ] = ""
    env_id: Annotated[
        str, Meta(description="column of the environment's id; empty: env_id, if the row has it")
    ] = ""
    system_prompt: Annotated[
        str,
        Meta(description="column of a system prompt; empty: system_prompt, else the chat prompt's"),
    ] = ""


class RowsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rows become tasks, and what happens to those that cannot."""

    columns: ColumnsConfig = ColumnsConfig()
    env_by: Annotated[
        dict[str, str],
        Meta(
            description="environment id by the value of a row's data_source, else of its ability; "
            "a row's own env_id comes first, env.id last"
        ),
    ] = field(default_factory=dict)
    skip_bad_rows: Annotated[
        bool, Meta(description="leave out bad rows and list them, instead of refusing the file")
    ] = False
    overlong_prompt: Annotated[
        Overlong,
        Meta(
            description="a prompt beyond limits.max_prompt_tokens: 'error' refuses it, 'skip' "
            "leaves its row out, 'cut' takes the middle out of its question; found before the start"
        ),
    ] = "error"
    compat: Annotated[
        Literal["", "reference"],
        Meta(description="'reference' keeps the backspace byte in the \\boxed of ARPO's files"),
    ] = ""


class MixPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files of a weighted mix."""

    path: Annotated[
        str | list[str], Meta(description="file, folder or pattern of rows, or a list of them")
    ]
    weight: Annotated[
        float, Meta(gt=0, le=1e6, description="share of the questions, relative to other parts")
    ] = 1.0
    env_id: Annotated[
        str, Meta(description="environment of its rows that choose none; empty: env.id")
    ] = ""
    columns: Annotated[
        ColumnsConfig | None, Meta(description="columns of this part, instead of data.columns")
    ] = None
    max_samples: Annotated[int, Meta(ge=0, description="first n rows; 0: all")] = 0
