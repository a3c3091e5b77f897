"""Both statistical tests on samples of a toy decoder.

A sample of independent replies needs no decoding once the decoder's law has been enumerated: counts of their first
tokens are multinomial, and long replies are chains of blocks drawn from the laws of blocks. A thousand samples take
seconds, which is what it takes to know how often the tests raise a false alarm.
"""

import numpy as np
import torch

from headstart.eval.enumeration import Law, ToyDecoder, plain_law, target_law
from headstart.eval.law_tests import chi_square, chi_square_p, martingale, surprise

NUM_SAMPLES = 20_000  # replies whose first tokens are counted
NUM_TOKENS = 20_000  # tokens whose surprise is summed
REPLY_TOKENS = 400  # tokens of one of the replies that these are


def draw_counts(found: Law, expected: Law, num_samples: int, num_runs: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts [num_runs, C] of independent replies with an enumerated law, and what the target's law expects [C].

    Replies of one request are independent, so their counts are multinomial: nothing is lost by not running them.
    """
    cells = sorted(found.keys() | expected.keys())
    share_C = np.array([found.get(cell, 0.0) for cell in cells])
    counts_RC = np.random.default_rng(seed).multinomial(num_samples, share_C / share_C.sum(), size=num_runs)
    return counts_RC, num_samples * np.array([expected.get(cell, 0.0) for cell in cells])


def long_replies(decoder: ToyDecoder, num_tokens: int, num_runs: int, seed: int) -> np.ndarray:
    """[num_runs, num_tokens + 1] tokens of replies that never stop, the first given: blocks drawn from their laws."""
    laws = [decoder.step_law(last, decoder.draft_length) for last in range(decoder.toy.vocab_size)]
    widest, most = decoder.draft_length + 1, max(len(law) for law in laws)
    block_VCK = np.zeros((len(laws), most, widest), dtype=np.int64)
    length_VC = np.zeros((len(laws), most), dtype=np.int64)
    sums_VC = np.full((len(laws), most), 2.0)
    for last, law in enumerate(laws):
        for c, block in enumerate(law):
            block_VCK[last, c, : len(block)] = block
            length_VC[last, c] = len(block)
        sums = np.cumsum(list(law.values()))
        sums_VC[last, : len(law)] = sums / sums[-1]
    random = np.random.default_rng(seed)
    rows = np.arange(num_runs)
    token_RN = np.zeros((num_runs, num_tokens + 1 + widest), dtype=np.int64)
    end_R = np.ones(num_runs, dtype=np.int64)
    while (end_R <= num_tokens).any():
        last_R = token_RN[rows, end_R - 1]
        choice_R = (random.random((num_runs, 1)) >= sums_VC[last_R]).sum(1)
        at_RK = np.minimum(end_R[:, None] + np.arange(widest), num_tokens + widest)
        token_RN[rows[:, None], at_RK] = block_VCK[last_R, choice_R]
        end_R = np.minimum(end_R + length_VC[last_R, choice_R], num_tokens + 1)
    return token_RN[:, : num_tokens + 1]


def first_tokens_p(decoder: ToyDecoder, num_runs: int = 1, num_samples: int = NUM_SAMPLES, seed: int = 0) -> np.ndarray:
    """p-values [num_runs] of the chi-square test on the first tokens of sampled replies."""
    length = decoder.draft_length + 2
    expected = target_law(decoder.toy, decoder.sampling, 0, length, decoder.stop_ids)
    counts_RC, expected_C = draw_counts(decoder.emitted_law(0, length), expected, num_samples, num_runs, seed)
    return chi_square_p(*chi_square(counts_RC, expected_C))


def martingale_p(decoder: ToyDecoder, num_runs: int = 1, num_tokens: int = NUM_TOKENS, seed: int = 0) -> np.ndarray:
    """p-values [num_runs] of the martingale test on sampled replies; 0 where an impossible token was emitted."""
    each = num_tokens // REPLY_TOKENS  # replies of one run
    token_RN = torch.from_numpy(long_replies(decoder, REPLY_TOKENS, num_runs * each, seed))
    p_VV = plain_law(decoder.toy.target_VV, decoder.sampling)
    vocab_size = len(p_VV)
    last_P, next_P = (pairs.flatten() for pairs in torch.meshgrid(*[torch.arange(vocab_size)] * 2, indexing="ij"))
    excess_P, variance_P = surprise(p_VV[last_P], next_P)  # of every pair of tokens
    pair_RN = token_RN[:, :-1] * vocab_size + token_RN[:, 1:]
    excess_R, variance_R = (value_P[pair_RN].view(num_runs, -1).sum(1) for value_P in (excess_P, variance_P))
    _, p_R = martingale(excess_R.nan_to_num(posinf=0.0).numpy(), variance_R.numpy())
    return np.where(excess_R.isinf().numpy(), 0.0, p_R)
