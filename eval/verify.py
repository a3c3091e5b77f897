"""The rules of lossless verification: given what the target would say and what was drafted, which tokens are emitted.

p is the law the target samples by (temperature and filters applied), q the law a draft was drawn from, both over the
target's vocabulary in float64. A deterministic draft (greedy, looked up, scripted) is a draw from a one-hot law; to judge
it by the softmax it maximises would bias the output.

Every random decision is one of the two calls of `Chance`, so that a test can walk through all outcomes of the very code
that serves.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from headstart.heads.tree import Tree


class Chance(Protocol):
    """What decides at random."""

    def accept(self, probability: float) -> bool:
        """True with this probability."""

    def draw(self, weights_V: Tensor) -> int:
        """An index, in proportion to non-negative weights; they need not sum to 1."""


class Uniforms:
    """Chance from the random numbers of one request, one number a decision."""

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator

    def accept(self, probability: float) -> bool:
        return bool(self._generator.random() < probability)

    def draw(self, weights_V: Tensor) -> int:
        return invert(weights_V, self._generator.random())

    def numbers(self, count: int) -> np.ndarray:
        """Uniform numbers in [0, 1), for draws that are made elsewhere."""
        return self._generator.random(count)


# Judges one row: (target_TV [K + 1, V], draft_KV [K, V] or None, drafts, chance) -> the emitted block.
Rule = Callable[[Tensor, Tensor | None, Sequence[int], Chance], list[int]]
# The same of a tree: (target_NV [N, V], tree, tokens [N], draft_NV [N, V] or None, chance).
TreeRule = Callable[[Tensor, Tree, Sequence[int], Tensor | None, Chance], list[int]]


def verify_tokens(target_TV: Tensor, draft_KV: Tensor | None, drafts: Sequence[int], chance: Chance) -> list[int]:
    """Token-wise verification (Leviathan et al., arXiv 2211.17192, appendix A.1; Chen et al., arXiv 2302.01318).

    Draft x ~ q is kept with probability min(1, p(x) / q(x)); the first one refused is replaced by a draw from
    max(p - q, 0), normalised. The token at that place is then y with probability

        q(y) min(1, p(y) / q(y))  +  P(refused) max(p(y) - q(y), 0) / R,      R = sum_x max(p(x) - q(x), 0),

    whose first part is min(p(y), q(y)). P(refused) = 1 - sum_x min(p(x), q(x)) = sum_x (p(x) - min(p(x), q(x))) = R, so
    the sum is min(p(y), q(y)) + max(p(y) - q(y), 0) = p(y). Behind the last kept draft the target's own law gives one
    token more (the bonus). A one-hot q keeps x with probability p(x), and a refusal draws from p without x.

    Args:
        target_TV: p at every place, row k given the first k drafts; [K + 1, V].
        draft_KV: q at every place, [K, V]; None: the drafts are deterministic.
        drafts: K token ids.

    Returns:
        The drafts that were kept and one token more.
    """
    for k, token in enumerate(drafts):
        target_V, draft_V = target_TV[k], draft_law(draft_KV, k, token, target_TV)
        p, q = float(target_V[token]), float(draft_V[token])
        if not chance.accept(kept(p, q)):
            return [*drafts[:k], corrected(target_V - draft_V, target_V, chance)]
    return [*drafts, chance.draw(target_TV[len(drafts)])]


def verify_blocks(target_TV: Tensor, draft_KV: Tensor | None, drafts: Sequence[int], chance: Chance) -> list[int]:
    """Block verification (Sun et al., arXiv 2403.10444, algorithm 2): never fewer kept drafts than token by token.

    Let x_1 .. x_K be the drafts, p_k and q_k the laws given the first k of them, and

        w_0 = 1,   w_k = min(1, w_{k-1} p_{k-1}(x_k) / q_{k-1}(x_k)),   R_k = sum_x max(w_k p_k(x) - q_k(x), 0).

    Going back from k = K, the first k that is kept is the number of kept drafts: K with probability w_K, each k below
    with h_k = R_k / (R_k + 1 - w_k). What follows is a draw from max(w_k p_k - q_k, 0), normalised (from p_K behind K).

    At least k drafts are kept with probability w_k, given x_1 .. x_k. It holds for K. If it holds for k + 1, the mean of
    w_{k+1} over x_{k+1} ~ q_k is S = sum_x min(w_k p_k(x), q_k(x)), and R_k = w_k - S, so h_k = (w_k - S) / (1 - S):
    exactly k are kept with probability (1 - S) h_k = w_k - S, and at least k with w_k - S + S = w_k. Note h_0 = 1.

    So the text x_1 .. x_k, y begins the output, by a block that keeps k drafts or more, with probability q(x_1 .. x_k)
    times w_{k+1} q_k(y) = min(w_k p_k(y), q_k(y)) if y is a kept draft, and max(w_k p_k(y) - q_k(y), 0) if y was drawn:
    together w_k p_k(y). Given that at least k drafts are kept, the next token has the target's law; tokens of later blocks
    have it by the same argument.

    Args and returns as `verify_tokens`.
    """
    num_drafts = len(drafts)
    laws = [draft_law(draft_KV, k, token, target_TV) for k, token in enumerate(drafts)]
    weights = [1.0]
    for k, token in enumerate(drafts):
        p, q = weights[k] * float(target_TV[k, token]), float(laws[k][token])
        weights.append(kept(p, q))
    if chance.accept(weights[num_drafts]):
        return [*drafts, chance.draw(target_TV[num_drafts])]
    for k in range(num_drafts - 1, 0, -1):
        residual_V = (weights[k] * target_TV[k] - laws[k]).clamp(min=0)
        mass = float(residual_V.sum())
        if mass > 0 and chance.accept(mass / (mass + 1.0 - weights[k])):
            return [*drafts[:k], chance.draw(residual_V)]
    return [corrected(target_TV[0] - laws[0], target_TV[0], chance)]


def verify_tree(
    target_NV: Tensor, tree: Tree, tokens: Sequence[int], draft_NV: Tensor | None, chance: Chance
) -> list[int]:
    """Verification of a tree, child by child (Miao et al., arXiv 2305.09781; Jeon et al., arXiv 2402.14160).

    At a node with target law p and draft law q the children are judged in order. Each one that is refused changes both
    laws: what is left to produce is r = max(p - q, 0), normalised, and, since siblings are drawn without replacement, the
    next one came from q without the refused token, normalised. By the argument of `verify_tokens`, keeping the next
    child with min(1, r / q) and drawing from what is left after the last one gives p at every stage, from the last
    refusal back to the first. Deterministic children are one-hot laws, each its own, so a refusal only takes the refused
    token out of r. Judging siblings independently, each by the first p, would favour what was drafted.

    Args:
        target_NV: p after every node, [N, V]; row n follows the path from the root to n.
        tokens: token of every node (`tokens[0]` is the last emitted one); siblings differ.
        draft_NV: law that the first child of node n was drawn from, [N, V]; None: deterministic children.

    Returns:
        The kept path below the root and one token more.
    """
    block: list[int] = []
    node = 0
    while True:
        left_V, taken_V = target_NV[node], None if draft_NV is None else draft_NV[node]
        for child in tree.children(node):
            token = tokens[child]
            law_V = one_hot(token, left_V) if taken_V is None else taken_V
            p, q = float(left_V[token]), float(law_V[token])
            if chance.accept(kept(p, q)):
                block.append(token)
                node = child
                break
            residual_V = (left_V - law_V).clamp(min=0)
            left_V = residual_V / residual_V.sum() if bool(residual_V.any()) else left_V
            if taken_V is not None:
                others_V = taken_V * (1 - one_hot(token, taken_V))
                taken_V = others_V / others_V.sum() if bool(others_V.any()) else taken_V
        else:
            return [*block, chance.draw(left_V)]


def kept(p: float, q: float) -> float:
    """min(1, p / q); a draft that its own law cannot give is never kept."""
    return min(1.0, p / q) if q > 0 else 0.0


def draft_law(draft_KV: Tensor | None, place: int, token: int, like: Tensor) -> Tensor:
    """The law [V] that the draft at `place` came from: certainty of `token` where drafts are deterministic."""
    return one_hot(token, like) if draft_KV is None else draft_KV[place]


def one_hot(token: int, like: Tensor) -> Tensor:
    """All mass on one token, over the vocabulary and in the dtype of `like` [.., V]."""
    law_V = like.new_zeros(like.shape[-1])
    law_V[token] = 1.0
    return law_V


def corrected(difference_V: Tensor, target_V: Tensor, chance: Chance) -> int:
    """The token in place of a refused draft: a draw from the positive part of p - q.

    Nothing is positive only where p = q but for rounding, and then p itself is the law.
    """
    residual_V = difference_V.clamp(min=0)
    return chance.draw(residual_V if bool(residual_V.any()) else target_V)


def invert(weights_V: Tensor, uniform: float) -> int:
    """The index under whose share of the cumulative weight a number in [0, 1) falls; one without weight never does."""
    mass_V = np.cumsum(weights_V.detach().cpu().numpy(), dtype=np.float64)
    # Rounding may push the threshold to the very end, where every later index would lie behind it.
    threshold = min(uniform * mass_V[-1], np.nextafter(mass_V[-1], 0.0))
    return int(np.searchsorted(mass_V, threshold, side="right"))


RULES: dict[str, Rule] = {"tokens": verify_tokens, "blocks": verify_blocks}
