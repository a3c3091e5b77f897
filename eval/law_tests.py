"""Statistical tests of whether tokens were drawn from the laws they should come from.

Two tests that see different things. Chi-square compares counts of whole sequences: it notices any difference of their joint
law, but has to have met every sequence some times, so it reaches a few tokens far. The martingale test sums one number
a token, over replies of any length: it notices only what makes tokens more or less surprising than they should be, as
every rule does that is generous to likely drafts.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

LEVEL = 1e-4  # of every statistical check
MIN_EXPECTED = 5.0  # a cell of the chi-square test is expected to be met at least so often


def pool_cells(expected_C: np.ndarray) -> np.ndarray:
    """[C, G]: 1 where cell c belongs to pool g. Rare cells are pooled, rarest first, until a pool expects MIN_EXPECTED.

    It looks at expectations only: pools that depended on what was observed would not follow the chi-square law.
    """
    pools: list[list[int]] = [[]]
    filled = 0.0
    for cell in np.argsort(expected_C, kind="stable"):
        if filled >= MIN_EXPECTED:
            pools.append([])
            filled = 0.0
        pools[-1].append(int(cell))
        filled += expected_C[cell]
    if filled < MIN_EXPECTED and len(pools) > 1:
        pools[-2] += pools.pop()
    pool_CG = np.zeros((len(expected_C), len(pools)))
    for pool, cells in enumerate(pools):
        pool_CG[cells, pool] = 1.0
    return pool_CG


def chi_square(observed_RC: np.ndarray, expected_C: np.ndarray) -> tuple[np.ndarray, int]:
    """Pearson's statistic of every row of counts, and its degrees of freedom; counts and expectations have equal sums."""
    pool_CG = pool_cells(expected_C)
    observed_RG, expected_G = observed_RC @ pool_CG, expected_C @ pool_CG
    return ((observed_RG - expected_G) ** 2 / expected_G).sum(-1), pool_CG.shape[1] - 1


def chi_square_p(statistic: Any, dof: int) -> np.ndarray:
    """Probability that a chi-square variable is larger."""
    statistic_R = torch.as_tensor(statistic, dtype=torch.float64)
    if dof == 0:
        return torch.ones_like(statistic_R).numpy()
    return torch.special.gammaincc(torch.full_like(statistic_R, dof / 2), statistic_R / 2).numpy()


def surprise(law_NV: Tensor, token_N: Tensor) -> tuple[Tensor, Tensor]:
    """Excess surprise of drawn tokens under the laws they should come from, and its variance, each [N], in float64.

    Token t has the surprise -log p(x_t), whose mean under p is the entropy H_t. If every x_t is drawn from p, given all
    before it, the sums of -log p(x_t) - H_t are a martingale, and divided by the root of their summed variances they are
    nearly normal, however long and differently entropic the replies are. Rules that favour likely tokens have a drift.
    A token of probability 0 is an infinite surprise.
    """
    log_NV = law_NV.log()
    mean_of = torch.where(law_NV > 0, law_NV * log_NV, 0.0)
    entropy_N = -mean_of.sum(-1)
    variance_N = torch.where(law_NV > 0, mean_of * log_NV, 0.0).sum(-1) - entropy_N**2
    return -log_NV.gather(-1, token_N[:, None]).squeeze(-1) - entropy_N, variance_N.clamp_min(0)


def martingale(excess: Any, variance: Any) -> tuple[np.ndarray, np.ndarray]:
    """z and its two-sided p-value from summed excess surprise and summed variance; no variance, nothing to doubt."""
    excess_R, variance_R = np.asarray(excess, float), np.asarray(variance, float)
    z_R = np.divide(excess_R, np.sqrt(variance_R), out=np.zeros_like(excess_R), where=variance_R > 0)
    return z_R, torch.special.erfc(torch.as_tensor(np.abs(z_R)) / math.sqrt(2)).numpy()
