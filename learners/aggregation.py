"""How token losses become one number, on trees, and what else needs no tensors to be named.

A mode is a coefficient c_i per trajectory and a denominator over the whole mini-batch of N
trajectories with lengths |y_i| (policy tokens):

    loss = sum_i c_i sum_t l_it / denominator

    token-mean               c_i = 1         denominator sum |y_i|     DAPO, the default
    seq-mean-token-sum       c_i = 1         denominator N
    seq-mean-token-mean      c_i = 1/|y_i|   denominator N             GRPO and GSPO as printed
    seq-mean-token-sum-norm  c_i = 1         denominator N * L         Dr. GRPO, L a constant

A token shared by several trajectories takes the sum of their coefficients. The released code of
ARPO differs: it aggregates each micro-batch on its own and weights by rows, so that the result
depends on the packing; and its last mode divides by L without N (`learners.losses.aggregate`).
Trajectories without policy tokens count in none of the modes.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Aggregation = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
KLKind = Literal["k1", "abs", "k2", "k3", "low_var_kl"]


def coefficients(mode: Aggregation, lengths: Floats) -> Floats:
    """c_i, float64 [trajectories]."""
    if mode == "seq-mean-token-mean":
        return 1.0 / np.maximum(lengths, 1.0)
    return np.ones_like(lengths)


def denominator(mode: Aggregation, lengths: Floats, norm_length: int) -> float:
    """What this rank's trajectories add to the denominator; `norm_length` is L."""
    if mode == "token-mean":
        return float(lengths.sum())
    num_sequences = float((lengths > 0).sum())
    return num_sequences * norm_length if mode == "seq-mean-token-sum-norm" else num_sequences
