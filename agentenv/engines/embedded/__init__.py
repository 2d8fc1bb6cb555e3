"""The engine in this process. Reading its settings loads no torch."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec


class EmbeddedConfig(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="embedded",
    tag_field="name",
):
    """Settings of the embedded engine."""

    max_num_seqs: Annotated[
        int, msgspec.Meta(description="Requests that run at a time; more wait in order.", ge=1)
    ] = 128
    max_model_len: Annotated[
        int, msgspec.Meta(description="Most tokens of prompt and output; 0: the model's.", ge=0)
    ] = 0
    num_cached_seqs: Annotated[
        int, msgspec.Meta(description="Ended requests kept as prefix cache.", ge=0)
    ] = 128
    num_threads: Annotated[
        int, msgspec.Meta(description="Threads of torch on the CPU, process-wide.", ge=1)
    ] = 1
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        msgspec.Meta(description="Where the model runs; auto: a GPU if there is one."),
    ] = "auto"
    dtype: Annotated[
        Literal["float32", "bfloat16"], msgspec.Meta(description="Of weights, keys and values.")
    ] = "float32"
