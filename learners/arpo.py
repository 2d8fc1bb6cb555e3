"""ARPO: forks after tool results whose entropy rose, credit shared below a fork."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from agentenv.errors import ConfigError
from agentenv.plan import ARPOPlan, Criterion, RolloutPlan
from agentenv.reference_plan import ReferencePlan
from learners.algorithm import Grouped
from learners.credit import Sharing


class Forking(Grouped, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ARPO and AEPO share: the fork criterion and the credit of shared tokens."""

    initial_rollouts: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="trajectories from scratch; default half of the group"),
    ] = None
    beam_size: Annotated[
        int, Meta(ge=1, description="a fork point starts at most beam_size - 1 siblings")
    ] = 2
    base_probability: Annotated[
        float, Meta(ge=0, le=1, description="fork probability without entropy rise (alpha)")
    ] = 0.5
    entropy_weight: Annotated[
        float, Meta(ge=0, description="weight of the entropy rise in it (beta)")
    ] = 0.2
    fork_mode: Annotated[
        Literal["sample", "threshold"],
        Meta(description="fork with that probability, or when it exceeds fork_threshold"),
    ] = "sample"
    fork_threshold: Annotated[
        float, Meta(ge=0, le=1, description="threshold of fork_mode threshold (tau)")
    ] = 0.5
    fork_criterion: Annotated[
        Criterion,
        Meta(
            description="what the weight multiplies: paper, the entropy rise / ln V, which moves "
            "the probability by less than 0.01 and leaves a coin toss; zscore, the rise against "
            "the spread of the rises before on the same tree; relative, the rise over the sum of "
            "both entropies"
        ),
    ] = "paper"
    rise_scale: Annotated[
        float,
        Meta(gt=0, description="spread of rises to expect before any was seen (zscore), in ln V"),
    ] = 0.02
    entropy_window: Annotated[
        int, Meta(ge=1, description="tokens after a tool result whose entropy decides")
    ] = 20
    sharing: Annotated[
        Sharing,
        Meta(description="shared tokens get each leaf's advantage (soft) or their mean (hard)"),
    ] = "soft"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_compat and (self.fork_mode, self.fork_criterion) != ("sample", "paper"):
            raise ConfigError(
                'algorithm.compat = "reference" has one fork criterion: leave fork_mode and '
                "fork_criterion out"
            )

    @property
    def num_initial(self) -> int:
        """Trajectories from scratch, at most the group."""
        return min(self.initial_rollouts or max(1, self.group_size // 2), self.group_size)

    @property
    def credit_sharing(self) -> Sharing:
        return self.sharing


class ARPO(Forking, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="arpo"):
    """Agentic reinforced policy optimisation (Dong 2025, arXiv 2507.19849).

    Rollout, eq. 3 and section 3.1: after a tool result P = alpha + beta * dH, where dH is the
    rise over the root's entropy; forks and refills share a budget of group_size trajectories.
    Update, section 3.2: GRPO over all leaves; a token shared by d leaves counts d times, with
    their own advantages (soft) or d times with the mean (hard). Loss: see GRPO.

    Differs from the paper: sampling a fork is the default, its text forks iff P > tau
    (fork_mode = "threshold"); entropies are means over the window, see `agentenv.plan.ARPOPlan`;
    the loss is a token-mean without KL.

    The paper's signal is inert: with entropy_weight = 0.2 a standard deviation of dH moves the
    fork probability by 0.001 to 0.003 (quick start; docs/experiments.md), so what is gained comes
    from forking as such. fork_criterion = "relative" or "zscore" lets the signal decide; it
    carries information only with an entropy_window that reaches past a turn's opening phrase.

    compat = "reference" is the released code: see `agentenv.reference_plan` for its rollout and
    `Grouped` for its update; entropy_window is then 20 tokens whatever is set.
    """

    def plan(self, vocab_size: int) -> RolloutPlan:
        if self.is_compat:
            return ReferencePlan(
                group_size=self.group_size,
                initial_rollouts=self.num_initial,
                vocab_size=vocab_size,
                beam_size=self.beam_size,
                base_probability=self.base_probability,
                entropy_weight=self.entropy_weight,
            )
        return ARPOPlan(
            group_size=self.group_size,
            initial_rollouts=self.num_initial,
            beam_size=self.beam_size,
            base_probability=self.base_probability,
            entropy_weight=self.entropy_weight,
            mode=self.fork_mode,
            threshold=self.fork_threshold,
            fork_window=self.entropy_window,
            vocab_size=vocab_size,
            criterion=self.fork_criterion,
            rise_scale=self.rise_scale,
        )
