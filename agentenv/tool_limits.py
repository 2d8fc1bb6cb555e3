"""What the tools of an episode may be asked: the limits of each, and the calls that are left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from agentenv.errors import ToolError

OnLimit = Literal["end", "result"]

# shared keywords of the two structs below
_MaxCalls = Annotated[
    Annotated[int, Meta(ge=0)] | None,
    Meta(description="calls of the tool in one episode; none: only the total counts"),
]
_Timeout = Annotated[
    Annotated[float, Meta(gt=0)] | None,
    Meta(description="deadline of one call; none: that of the environment"),
]
_Concurrency = Annotated[
    Annotated[int, Meta(ge=1)] | None,
    Meta(description="calls of the tool in flight in this process; none: no bound"),
]
_Retries = Annotated[
    Annotated[int, Meta(ge=0)] | None,
    Meta(description="retries after a failure of machinery; none: as the environment does"),
]
_Required = Annotated[
    bool,
    Meta(
        description="false: a tool that cannot be loaded is left out with a warning, and one that "
        "fails for good is reported to the policy as not available"
    ),
]


class ToolLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of one tool; what is None is left to the environment."""

    max_calls: _MaxCalls = None
    timeout_s: _Timeout = None
    max_concurrency: _Concurrency = None
    num_retries: _Retries = None
    required: _Required = True

    def filled(self, timeout_s: float, num_retries: int) -> ToolLimits:
        """With what the environment says where this says nothing."""
        return replace(
            self,
            timeout_s=timeout_s if self.timeout_s is None else self.timeout_s,
            num_retries=num_retries if self.num_retries is None else self.num_retries,
        )


class ToolConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tool of an episode. A list of them replaces the environment's own list."""

    name: Annotated[
        str, Meta(description="a tool that the environment has, by its name, or 'module:name'")
    ]
    kwargs: Annotated[
        dict[str, Any], Meta(description="keyword arguments of the class or function named")
    ] = field(default_factory=dict)
    max_calls: _MaxCalls = None
    timeout_s: _Timeout = None
    max_concurrency: _Concurrency = None
    num_retries: _Retries = None
    required: _Required = True

    @property
    def limits(self) -> ToolLimits:
        return ToolLimits(
            max_calls=self.max_calls,
            timeout_s=self.timeout_s,
            max_concurrency=self.max_concurrency,
            num_retries=self.num_retries,
            required=self.required,
        )


class CallBudget:
    """How many calls of an episode are used, and what is left of its limits."""

    def __init__(self, max_tool_calls: int | None) -> None:
        self.max_tool_calls = max_tool_calls
        self.num_calls = 0
        self._num_of: Counter[str] = Counter()

    def copy(self) -> CallBudget:
        """An independent copy, for a fork."""
        other = CallBudget(self.max_tool_calls)
        other.num_calls, other._num_of = self.num_calls, self._num_of.copy()
        return other

    def use(self, name: str, limits: ToolLimits) -> None:
        """Count a call of a tool, which `num_calls` holds already; ToolError when none is left."""
        if self.max_tool_calls is not None and self.num_calls > self.max_tool_calls:
            raise ToolError(
                f"No tool can be called any more: all {self.max_tool_calls} calls are used. "
                "Answer with what you know.",
                {"limit": "max_tool_calls"},
            )
        most = limits.max_calls
        if most is not None and self._num_of[name] >= most:
            raise ToolError(
                f"{name} cannot be called any more: all {most} calls of it are used.",
                {"limit": f"max_calls of {name}"},
            )
        self._num_of[name] += 1

    def beyond(self, names: Sequence[str], limits: Mapping[str, ToolLimits]) -> str:
        """The limit that calls of these tools would break, in words; "" for none."""
        total = self.max_tool_calls
        if total is not None and self.num_calls + len(names) > total:
            return "max_tool_calls"
        for name, count in Counter(names).items():
            most = limits[name].max_calls if name in limits else None
            if most is not None and self._num_of[name] + count > most:
                return f"max_calls of {name}"
        return ""
