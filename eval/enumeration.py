"""The exact law of what a verification rule emits, on a target small enough to follow every random decision.

Every random decision of a rule, drafting included, is one call of a `Chance`. `every_run` gives the rule a `Branch`,
which takes one way at each decision and notes the ways it left open, and runs the rule again until none is left: the
very code that serves is enumerated, not a copy of it. The laws of single steps are chained over as many steps as the
wanted number of tokens takes, with the decoder's own bookkeeping of limits and stop tokens, and compared with the law
of the target itself. Losslessness is equality up to rounding.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from headstart.eval.drafters import Proposal
from headstart.eval.early_stop import EarlyStop
from headstart.eval.parts import SOUND, Parts
from headstart.eval.replies import Reply
from headstart.eval.tree_drafts import DynamicTree, Shape, new_growth
from headstart.eval.verify import Chance, Rule, verify_tokens
from headstart.heads.sampling import Sampling
from headstart.heads.tree import Tree

EXACT = 1e-12  # laws closer than this are equal: what is left of float64 after some hundred sums and products
DUST = 1e-15  # shares below this come from rounding and are no ways of their own
SAMPLERS = (
    Sampling(0.0),
    Sampling(1.0),
    Sampling(0.7),
    Sampling(1.0, top_k=2),
    Sampling(1.3, top_p=0.8),
    Sampling(1.0, min_p=0.3),
    Sampling(0.8, top_k=3, top_p=0.9, min_p=0.05),
)

Outcome = TypeVar("Outcome")
Law = dict[tuple[int, ...], float]  # probability of every token sequence that can be emitted


class Branch:
    """A `Chance` that repeats decided ways, then takes the first open one, and notes the others."""

    def __init__(self, decided: Sequence[int] = ()) -> None:
        self.decided = decided
        self.taken: list[int] = []
        self.probability = 1.0
        self.open: list[list[int]] = []

    def accept(self, probability: float) -> bool:
        kept = min(max(float(probability), 0.0), 1.0)
        if kept != kept:
            raise ValueError("a rule tossed a coin of probability nan")
        return self._choose([1.0 - kept, kept]) == 1

    def draw(self, weights_V: Tensor) -> int:
        weights = weights_V.tolist()
        total = sum(weights)
        if min(weights) < 0 or not total > 0:
            raise ValueError(f"a rule drew from the weights {weights}")
        return self._choose([weight / total for weight in weights])

    def _choose(self, shares: list[float]) -> int:
        if len(self.taken) < len(self.decided):
            choice = self.decided[len(self.taken)]
        else:
            choice, *others = [i for i, share in enumerate(shares) if share > DUST]
            self.open += [[*self.taken, other] for other in others]
        self.taken.append(choice)
        self.probability *= shares[choice]
        return choice


def every_run(run: Callable[[Chance], Outcome]) -> Iterator[tuple[Outcome, float]]:
    """Outcomes of a random procedure, one for each way through its decisions, with the probability of that way."""
    undecided: list[list[int]] = [[]]
    while undecided:
        branch = Branch(undecided.pop())
        outcome = run(branch)
        undecided += branch.open
        yield outcome, branch.probability


@dataclass(frozen=True)
class Toy:
    """A target and a draft that look at the last token only. Logits, float64."""

    target_VV: Tensor  # row: the last token
    draft_VD: Tensor  # columns: the draft vocabulary
    draft_ids_D: Tensor  # its target ids

    @classmethod
    def random(cls, vocab_size: int = 4, draft_size: int | None = None, seed: int = 0) -> "Toy":
        """A draft that resembles its target; a smaller draft vocabulary has holes between its ids."""
        generator = torch.Generator().manual_seed(seed)
        target_VV = 1.5 * torch.randn(vocab_size, vocab_size, generator=generator, dtype=torch.float64)
        ids_D = torch.randperm(vocab_size, generator=generator)[: draft_size or vocab_size].sort().values
        noise_VD = torch.randn(vocab_size, len(ids_D), generator=generator, dtype=torch.float64)
        return cls(target_VV, target_VV[:, ids_D] + noise_VD, ids_D)

    @property
    def vocab_size(self) -> int:
        return len(self.target_VV)

    def draft_law(self, temperature: float) -> Tensor:
        """[V, V]: what drafts are drawn from, by target ids; tokens outside the draft vocabulary have nothing."""
        law_VV = torch.zeros_like(self.target_VV)
        law_VV[:, self.draft_ids_D] = plain_law(self.draft_VD, Sampling(temperature))
        return law_VV


def plain_law(logits_VV: Tensor, sampling: Sampling) -> Tensor:
    """What a sampler makes of each row of logits, written down plainly in float64: the reference for every filter."""
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(logits_VV.argmax(-1), logits_VV.shape[-1]).double()
    order_VV = logits_VV.argsort(dim=-1, descending=True, stable=True)
    mass_VV = (logits_VV / sampling.temperature).softmax(-1).gather(-1, order_VV)
    mass_VV[mass_VV < sampling.min_p * mass_VV[:, :1]] = 0
    if sampling.top_k:
        mass_VV[:, sampling.top_k :] = 0
    mass_VV /= mass_VV.sum(-1, keepdim=True)
    if sampling.top_p < 1:
        mass_VV[mass_VV.cumsum(-1) - mass_VV >= sampling.top_p] = 0
    law_VV = torch.zeros_like(mass_VV).scatter(-1, order_VV, mass_VV)
    return law_VV / law_VV.sum(-1, keepdim=True)


class ToyDecoder:
    """The reference decoder on a toy: the same rules and the same bookkeeping of blocks, one request, chain drafts.

    Laws are tables over target ids, [V, V], by the token that stands before. A fault is another rule, or another of the
    `parts` (eval/faults.py).
    """

    shape = "chain"

    def __init__(
        self,
        toy: Toy,
        rule: Rule = verify_tokens,
        sampling: Sampling | None = None,
        draft: str = "sampled",
        draft_length: int = 2,
        stop_ids: frozenset[int] = frozenset(),
        parts: Parts = SOUND,
        stop_below: float = 0.0,
    ) -> None:
        """`stop_below` ends drafts by confidence (eval/early_stop.py), as a head does."""
        self.toy, self.rule, self.draft, self.draft_length, self.stop_ids = toy, rule, draft, draft_length, stop_ids
        self.sampling = sampling or Sampling(1.0)
        self.parts, self.stop_below = parts, stop_below
        self.target_VV = parts.target_law(toy.target_VV, self.sampling)
        self.drawn_VV = self.drawn_law()
        self._step_laws: dict[tuple[int, int], Law] = {}

    def drawn_law(self) -> Tensor:
        """What drafts are drawn from; greedy ones from certainty."""
        return self.toy.draft_law(0.0 if self.draft == "greedy" else self.draft_temperature)

    @property
    def draft_temperature(self) -> float:
        """Of the law that drafts are drawn from, or whose likeliest token they are."""
        return 1.0 if self.draft == "greedy" else self.sampling.temperature or 1.0

    def propose(self, last: int, length: int, chance: Chance) -> Proposal:
        """A chain of at most `length` drafts after a token."""
        context = [last]

        def choose(logits_1D: Tensor) -> Tensor:
            drawn = torch.tensor([chance.draw(self.drawn_VV[context[-1]])])
            return torch.searchsorted(self.toy.draft_ids_D, drawn)

        stop = EarlyStop(choose, [length], self.stop_below, self.draft_temperature)
        for _ in range(length):
            index_1 = stop(self.toy.draft_VD[context[-1:]])
            if index_1 is None:
                break
            context.append(int(self.toy.draft_ids_D[index_1]))
        law_1KV = self.drawn_VV[None, context[:-1]] if self.draft == "sampled" and len(context) > 1 else None
        return Proposal(torch.tensor([context[1:]], dtype=torch.int64), [len(context) - 1], law_1KV)

    def step(self, last: int, length: int, chance: Chance) -> list[int]:
        """One block: what the reference decoder does for one request in one step."""
        proposal = self.parts.told(self.propose(last, length, chance), self.sampling)
        drafts = proposal.tokens_BK[0, : proposal.length_B[0]].tolist()
        draft_KV = None if proposal.law_BKV is None else proposal.law_BKV[0, : len(drafts)]
        return self.rule(self.target_VV[[last, *drafts]], draft_KV, drafts, chance)

    def append(self, reply: Reply, block: list[int], drafted: int, limit: int) -> None:
        self.parts.append(reply, block, drafted, limit, set(self.stop_ids))

    def step_law(self, last: int, length: int) -> Law:
        """Probability of every block after a token."""
        if (last, length) not in self._step_laws:
            law: Law = defaultdict(float)
            for block, probability in every_run(lambda chance: tuple(self.step(last, length, chance))):
                law[block] += probability
            self._step_laws[last, length] = dict(law)
        return self._step_laws[last, length]

    def emitted_law(self, last: int, num_tokens: int) -> Law:
        """Law of the first `num_tokens` tokens after a token, fewer where a stop token ends the reply."""
        finished: Law = defaultdict(float)
        going: list[Law] = [defaultdict(float) for _ in range(num_tokens)]  # by number of tokens so far
        going[0][()] = 1.0
        for emitted in range(num_tokens):
            length = min(self.draft_length, num_tokens - emitted)
            for tokens, mass in going[emitted].items():
                for block, share in self.step_law(tokens[-1] if tokens else last, length).items():
                    reply = Reply(token_ids=list(tokens))
                    self.append(reply, list(block), length, num_tokens)
                    into = finished if reply.finish_reason else going[len(reply.token_ids)]
                    into[tuple(reply.token_ids)] += mass * share
        return dict(finished)

    def accepted_share(self, last: int) -> float:
        """Probability that a step of draft length 1 after a token accepts a draft."""
        return sum(share for block, share in self.step_law(last, 1).items() if len(block) > 1)

    def exact_share(self, last: int) -> float:
        """What it should be: sum_x min(p(x), q(x)) for a draft sampled from q, so p(x) for one that is always x.

        Nothing, where confidence ends the draft before its first token.
        """
        if float(plain_law(self.toy.draft_VD, Sampling(self.draft_temperature))[last].max()) < self.stop_below:
            return 0.0
        p_V = plain_law(self.toy.target_VV, self.sampling)[last]
        return float(torch.minimum(p_V, self.drawn_VV[last]).sum())


class TreeDecoder(ToyDecoder):
    """The same with two drafts after the last token, and one more after the first of them; grown as a head's trees are."""

    shape = "tree"
    tree: Shape = Tree((-1, 0, 0, 1))

    def step(self, last: int, length: int, chance: Chance) -> list[int]:
        proposal = self.grow(last, length, chance)
        (tree,) = proposal.trees or []
        tokens = [last, *proposal.tokens_BK[0].tolist()]
        draft_NV = None if proposal.law_BKV is None else proposal.law_BKV[0]
        return self.parts.verify_tree(self.target_VV[tokens], tree, tokens, draft_NV, chance)

    def grow(self, last: int, length: int, chance: Chance) -> Proposal:
        """One tree: greedy children, or children drawn without replacement."""
        chances = [chance] if self.draft == "sampled" else None
        growth = new_growth(self.tree, [length], chances, self.sampling.temperature or 1.0)
        logits_BWD = self.toy.draft_VD[last].view(1, 1, -1)
        while (level := growth(logits_BWD)) is not None:
            logits_BWD = self.toy.draft_VD[self.toy.draft_ids_D[level.index_BW]]
        return growth.proposal(self.toy.draft_ids_D, self.toy.vocab_size)

    def exact_share(self, last: int) -> float:
        """p of both drafts where they are certain; of a first draft sampled from q, then of one from q without it."""
        p_V = plain_law(self.toy.target_VV, self.sampling)[last]
        if self.draft == "greedy":
            return float(p_V[self.toy.draft_law(1.0)[last].topk(2).indices].sum())
        q_V = self.drawn_VV[last]
        residual_V = (p_V - q_V).clamp_min(0)
        left_V = residual_V / residual_V.sum()
        share = float(torch.minimum(p_V, q_V).sum())
        for token in q_V.nonzero().flatten().tolist():
            others_V = q_V.index_fill(0, torch.tensor(token), 0.0)
            refused = float((q_V - p_V)[token].clamp_min(0))
            share += refused * float(torch.minimum(left_V, others_V / others_V.sum()).sum())
        return share


class DynamicTreeDecoder(TreeDecoder):
    """The same with a dynamic tree, which is always of greedy drafts."""

    tree = DynamicTree(depth=2, width=2, num_drafts=3)


def target_law(toy: Toy, sampling: Sampling, last: int, num_tokens: int, stop_ids: frozenset[int]) -> Law:
    """Law of the first tokens under the target alone."""
    law_VV = plain_law(toy.target_VV, sampling).tolist()
    finished: Law = {}
    going: Law = {(): 1.0}
    for emitted in range(1, num_tokens + 1):
        longer: Law = {}
        for tokens, mass in going.items():
            for token, share in enumerate(law_VV[tokens[-1] if tokens else last]):
                into = finished if token in stop_ids or emitted == num_tokens else longer
                if share > 0:
                    into[(*tokens, token)] = mass * share
        going = longer
    return finished


def largest_difference(found: Law, expected: Law) -> float:
    """Largest difference of the probability of any sequence."""
    sequences = found.keys() | expected.keys()
    # numpy's maximum, because a nan must not get lost in it
    return float(np.max([abs(found.get(tokens, 0.0) - expected.get(tokens, 0.0)) for tokens in sequences]))


@dataclass(frozen=True)
class Difference:
    """How far an enumerated decoder is from what it should be."""

    law: float  # largest difference of the probability of a sequence of first tokens
    acceptance: float  # largest difference of a single draft's acceptance from the exact one
    num_sequences: int

    @property
    def exact(self) -> bool:
        return self.law <= EXACT and self.acceptance <= EXACT


def compare(decoder: ToyDecoder, num_tokens: int | None = None) -> Difference:
    """Enumerate a decoder after every token and compare it with its target.

    By default the sequences are one token longer than the longest block, so that every one of them takes two steps or
    more. Acceptance is compared too: a rule may emit the right law and still refuse what it should keep.
    """
    toy, length = decoder.toy, num_tokens or decoder.draft_length + 2
    laws, shares, num_sequences = [], [], 0
    for last in range(toy.vocab_size):
        expected = target_law(toy, decoder.sampling, last, length, decoder.stop_ids)
        laws.append(largest_difference(decoder.emitted_law(last, length), expected))
        shares.append(abs(decoder.accepted_share(last) - decoder.exact_share(last)))
        num_sequences += len(expected)
    return Difference(float(np.max(laws)), float(np.max(shares)), num_sequences)
