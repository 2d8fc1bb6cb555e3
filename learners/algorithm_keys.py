"""Keys that algorithms share but give other defaults, with their descriptions."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from agentenv.types import Limit
from learners.aggregation import Aggregation
from learners.credit import Truncated

TRUNCATED: dict[Limit, Truncated] = {
    limit: "mask" if limit is Limit.SECONDS else "score" for limit in Limit
}

AggregationKey = Annotated[
    Aggregation, Meta(description="how token losses become the mini-batch's mean")
]
ClipLow = Annotated[
    float, Meta(gt=0, le=1, description="ratios below 1 - clip_low are clipped; 1: none")
]
ClipHigh = Annotated[
    float, Meta(gt=0, description="ratios above 1 + clip_high are clipped (DAPO: clip-higher)")
]
TruncatedKey = Annotated[
    dict[Limit, Truncated],
    Meta(
        description="by limit: score a truncated trajectory, count its return as zero, or mask it "
        "(in no group, not trained); limits left out keep the default"
    ),
]
DualClip = Annotated[
    float,
    Meta(gt=1, description="bound on the loss of negative advantages, in units of |A|; or inf"),
]
NormalizeByStd = Annotated[
    bool, Meta(description="divide advantages by the group's deviation; false is Dr. GRPO's")
]
Compat = Annotated[
    Literal["none", "reference"],
    Meta(description="reference: do what the released code does where it differs from the paper"),
]
