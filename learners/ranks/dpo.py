"""Direct preference optimization (DPO, Rafailov et al. 2023, arXiv 2305.18290, eq. 7).

    L = -E log sigmoid( beta * [ log pi(y+|x) / ref(y+|x)  -  log pi(y-|x) / ref(y-|x) ] )

y+ is the chosen and y- the rejected answer to x; log pi(y|x) sums over the policy's tokens. Tool
results are part of the context, but not of the sum: the paper has no tools, and the policy does not
write the environment's text. The mean is over pairs.

A pair is one tree: the common part of both answers, prompt and first turns, is stored and computed
once. Tokens of the chosen answer have adv_pos = 1, those of the rejected answer adv_neg = -1; a
shared token has both, so that it cancels in every difference. `behavior` has the log-probs of the
reference policy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace
from numpy.typing import ArrayLike, NDArray

from agentenv.base.errors import DataError
from agentenv.learners.algorithms.credit import Floats
from agentenv.learners.keys import Metrics
from agentenv.learners.trees.encoded_tree import ActionTokens, EncodedTree, Longs, from_arrays

if TYPE_CHECKING:  # torch is slow to import, and users of pairs do not need it
    from torch import Tensor

    from agentenv.learners.ranks.trainer import Trainer

Answer = tuple[ArrayLike, ArrayLike]  # token ids from the prompt on, mask of the policy's tokens


def encode_pair(chosen: Answer, rejected: Answer) -> EncodedTree:
    """The tree of a pair. Each answer includes the prompt; `mask` is True on the policy's tokens.

    Raises DataError if an answer has no token of the policy or the two are the same.
    """
    ids, mask = _arrays(chosen)
    other_ids, other_mask = _arrays(rejected)
    shorter = min(len(ids), len(other_ids))
    differs = (ids[:shorter] != other_ids[:shorter]) | (mask[:shorter] != other_mask[:shorter])
    shared = int(np.argmax(differs)) if differs.any() else shorter
    if shared == len(ids) == len(other_ids):
        raise DataError("the chosen and the rejected answer are equal")
    shared = min(shared, len(ids) - 1, len(other_ids) - 1)  # both branches have a token
    if shared < 1:
        raise DataError("the chosen and the rejected answer have different prompts")
    return from_arrays(
        np.concatenate([ids, other_ids[shared:]]),
        np.concatenate([mask, other_mask[shared:]]),
        starts=[0, shared, len(ids)],
        parents=[-1, 0, 0],
        adv_pos=[1.0, 1.0, 0.0],
        adv_neg=[-1.0, 0.0, -1.0],
        weight=[2.0, 1.0, 1.0],
    )


def with_reference(pair: EncodedTree, logprobs: Sequence[float]) -> EncodedTree:
    """The pair with the reference policy's log-probs of its trained tokens, in their order."""
    return replace(pair, behavior=np.asarray(logprobs, np.float64).tobytes())


class PairTokens:
    """The trained tokens of pairs, pair after pair; [tokens].

    pair: number of the pair; reference: log-probs, nats; chosen, rejected: 1 on the tokens of
    that answer, else 0.
    """

    def __init__(self, pairs: Sequence[EncodedTree]) -> None:
        tokens, self.num_pairs = ActionTokens(pairs), len(pairs)
        self.pair = np.repeat(np.arange(len(pairs)), [pair.num_action_tokens for pair in pairs])
        self.reference = tokens.behavior
        self.chosen, self.rejected = tokens.adv_pos, -tokens.adv_neg

    @property
    def sign(self) -> Floats:
        """Factor of a token's log-prob in the margin of its pair: 1, -1, or 0 if shared."""
        return self.chosen - self.rejected

    def sums(self, values: Floats) -> Floats:
        """[tokens] -> [pairs]"""
        return np.bincount(self.pair, values, minlength=self.num_pairs).astype(np.float64)

    def margins(self, logprobs: Floats) -> Floats:
        """[pairs], of log(policy / reference): chosen less rejected, in nats."""
        return self.sums(self.sign * (logprobs - self.reference))


def preference_sums(tokens: PairTokens, logprobs: Floats, beta: float) -> dict[str, float]:
    """Sums over pairs, which `preference_metrics` averages."""
    ratio = logprobs - tokens.reference
    chosen, rejected = tokens.sums(tokens.chosen * ratio), tokens.sums(tokens.rejected * ratio)
    margin = beta * tokens.margins(logprobs)
    return {
        "num_pairs": float(tokens.num_pairs),
        "num_tokens": float(len(logprobs)),
        "loss": float(np.logaddexp(0.0, -margin).sum()),
        "accuracy": float((margin > 0).sum()),
        "margin": float(margin.sum()),
        "reward_chosen": float(beta * chosen.sum()),
        "reward_rejected": float(beta * rejected.sum()),
        "logprob_chosen": float((tokens.chosen * logprobs).sum()),
        "logprob_rejected": float((tokens.rejected * logprobs).sum()),
        "preferred": float((tokens.sums(tokens.sign * logprobs) > 0).sum()),
    }


def preference_metrics(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over all pairs from the sums of parts.

    accuracy: share of pairs with a positive margin; margin, reward_*: beta * log(policy /
    reference) of whole answers; logprob_*: of the policy, nats per answer; preferred: share of
    pairs whose chosen answer is likelier under the policy, regardless of the reference.
    """
    totals = {name: sum(part[name] for part in parts) for name in parts[0]}
    count = max(1.0, totals["num_pairs"])
    return {n: value if n.startswith("num_") else value / count for n, value in totals.items()}


def _arrays(answer: Answer) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    ids, mask = np.asarray(answer[0], np.int32), np.asarray(answer[1], np.bool_)
    if len(ids) != len(mask) or not mask.any() or mask[0]:
        raise DataError("an answer needs a mask of its length, with a True after its first token")
    return ids, mask


def preference_loss(margins: Tensor, beta: float) -> Tensor:
    """[pairs] -> [pairs]: -log sigmoid(beta * margin); `margins` as of PairTokens.margins."""
    from torch.nn.functional import logsigmoid

    return -logsigmoid(beta * margins)


def prefer(trainer: Trainer, pairs: Sequence[EncodedTree], beta: float, lr_scale: float) -> Metrics:
    """One optimizer step on the mean loss over the pairs of all ranks.

    `pairs` are those of this rank's replica, with the reference's log-probs. If a pair is larger
    than a micro-batch and therefore cut, its margin is computed first, and the loss is replaced by
    its tangent at this margin, which has the same gradient.
    """
    from agentenv.learners.ranks.trainer import times

    start = time.perf_counter(), time.process_time()
    backend, tokens = trainer.backend, PairTokens(pairs)
    batches = trainer.layouts.pack(pairs)
    total = float(sum(backend.gather_replicas(len(pairs))))
    slopes = None
    num_parts = sum(len(np.unique(tokens.pair[batch.index])) for batch in batches)
    if any(backend.gather_replicas(num_parts > tokens.num_pairs)):  # some pair is cut
        margins = tokens.margins(trainer.figures(pairs)[0])
        slopes = -beta * np.exp(-np.logaddexp(0.0, beta * margins))  # of the loss by the margin
    found = np.zeros_like(tokens.reference)
    for batch in backend.passes(batches):
        logprobs, _, _ = backend.forward(batch)
        found[batch.index] = logprobs.detach().cpu().numpy()
        backend.backward(_loss(tokens, batch.index, logprobs, slopes, beta) / total)
    sums = preference_sums(tokens, found, beta)
    metrics = preference_metrics(backend.gather_replicas(sums))
    return metrics | trainer.step(lr_scale, metrics["loss"]) | times(*start)


def _loss(
    tokens: PairTokens, index: Longs, logprobs: Tensor, slopes: Floats | None, beta: float
) -> Tensor:
    """Sum over the pairs of a micro-batch, of their loss or of its tangent; in float64."""
    import torch

    wide = logprobs.double()

    def tensor(values: Floats | Longs) -> Tensor:
        return torch.from_numpy(values).to(wide.device)

    sign = tensor(tokens.sign[index])
    if slopes is not None:
        return (tensor(slopes[tokens.pair[index]]) * sign * wide).sum()
    numbers, place = np.unique(tokens.pair[index], return_inverse=True)
    differences = sign * (wide - tensor(tokens.reference[index]))
    margins = wide.new_zeros(len(numbers)).index_add(0, tensor(place), differences)
    return preference_loss(margins, beta).sum()
