"""DAPO: clip-higher, dynamic sampling, token-mean, overlong filter and soft length penalty."""

from __future__ import annotations

from msgspec import field

from agentenv.types import Limit
from learners.algorithm_keys import TRUNCATED, NormalizeByStd, TruncatedKey
from learners.clipped import Clipped
from learners.credit import Floats, Truncated, group_advantages

OVERLONG: dict[Limit, Truncated] = {
    **TRUNCATED,
    Limit.RESPONSE_TOKENS: "mask",
    Limit.TURN_TOKENS: "mask",
}


class DAPO(Clipped, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="dapo"):
    """Decoupled clip and dynamic sampling (Yu 2025, arXiv 2503.14476, section 3).

        A_i = (R_i - mean(R)) / (std(R) + 1e-6)                       eq. 9
        J = sum over all tokens of min(r A, clip(r, 1 - 0.2, 1 + 0.28) A) / number of tokens

    Dynamic sampling (eq. 11): groups whose returns are all equal are replaced by later ones.
    Overlong filter (3.4): trajectories cut by a token limit are masked. Soft punishment (eq. 13):
    set overlong_tokens to the response length and overlong_buffer to its cache; the penalty
    counts sampled tokens, not tool results. Differs from the paper: dual clip stays on, inf
    switches it off; replacement takes the next questions in order, not a larger draw.
    """

    truncated: TruncatedKey = field(default_factory=OVERLONG.copy)
    normalize_by_std: NormalizeByStd = True

    @property
    def refills(self) -> bool:
        return True

    @property
    def default_truncated(self) -> dict[Limit, Truncated]:
        return OVERLONG

    def advantages(self, returns: Floats) -> Floats:
        return group_advantages(returns, norm_by_std=self.normalize_by_std)
