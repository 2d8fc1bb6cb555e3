"""The keys that choose environments: by row if need be, and their interpreter, search, grader."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct, field

from agentenv.tool_limits import ToolConfig
from envs.code_interpreter import PythonConfig
from envs.grading.config import GraderConfig
from envs.search.config import SearchConfig

# tables of a run and of a variant, passed to environments that take such a keyword
PythonTable = Annotated[PythonConfig | None, Meta(description="the Python interpreter")]
SearchTable = Annotated[SearchConfig | None, Meta(description="search and pages")]
GraderTable = Annotated[GraderConfig | None, Meta(description="how answers are graded")]
TABLES = ("python", "search", "grader")

_Id = Annotated[str, Meta(description="registered environment id")]
_Kwargs = Annotated[
    dict[str, Any], Meta(description="keyword arguments of the environment's class")
]
_Tools = Annotated[
    list[ToolConfig],
    Meta(description="all tools of an episode, [[env.tools]]; empty: those of the environment"),
]


class EnvVariant(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An environment under a name that rows can choose. Its tables take the place of the run's."""

    id: _Id
    kwargs: _Kwargs = field(default_factory=dict)
    tools: _Tools = field(default_factory=list)
    python: PythonTable = None
    search: SearchTable = None
    grader: GraderTable = None


class EnvConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The environment of rows that name none themselves. `kwargs` and `tools` are only its own;
    a row that names another id meets that environment as it is registered."""

    id: _Id
    module: Annotated[
        str, Meta(description="module to import first, which registers environments of your own")
    ] = "envs"
    kwargs: _Kwargs = field(default_factory=dict)
    tools: _Tools = field(default_factory=list)
    variants: Annotated[
        dict[str, EnvVariant],
        Meta(description="[env.variants.NAME]: a NAME for rows' env_id, data.env_by, data.mix"),
    ] = field(default_factory=dict)
