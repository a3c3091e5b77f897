"""Losslessness as a verdict: is the output of speculative decoding the target's own law, or another?

Four kinds of checks, each an entry of eval/lossless.json:

    enumeration      the rules themselves, exactly, on a toy target (eval/enumeration.py)
    first_tokens     sampled replies of the real target: the joint law of their first tokens, by chi-square
    martingale       sampled replies of the real target: how surprising their tokens are, over all of their length
    greedy_identity  greedy replies, token for token (eval/identity.py)

A statistical check fails where its p-value is below 1e-4, so that a sound head meets a false alarm in one of some
thousand evaluations.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from headstart.eval.checks import check_entry
from headstart.eval.decode import decode
from headstart.eval.drafters import HeadDrafter
from headstart.eval.enumeration import SAMPLERS, DynamicTreeDecoder, Toy, ToyDecoder, TreeDecoder, compare
from headstart.eval.identity import tree_identity
from headstart.eval.law_tests import LEVEL, MIN_EXPECTED, chi_square, chi_square_p, martingale, surprise
from headstart.eval.speculation import Speculation
from headstart.eval.subject import Subject
from headstart.eval.verify import RULES, Rule, verify_tokens
from headstart.heads.sampling import Sampling, filtered_probabilities
from headstart.heads.target import Target
from headstart.heads.tree import Tree

OPEN_EXPECTED = 40.0  # sequences expected so often are told apart by their next token
NUM_FIRST_TOKENS = 3  # the first comes from prefill, the others from verified blocks
FIRST_PROMPTS = 2  # prompts whose first tokens are sampled
FIRST_BATCH = 32  # short replies of one prompt run in larger batches than whole ones
REST = -1  # stands for every next token that has no cell of its own
EDGE = 1e-3  # logits this close to the last one that a filter keeps may fall on either side of it
TREE_PROMPTS, TREE_TOKENS = 4, 64  # greedy replies with a tree of drafts, compared with plain ones
DEFAULT_TREE = (3, 2, 1)  # children of every node by depth, where eval.trees names none
SCORE_TOKENS = 32  # tokens whose law over the whole vocabulary is in memory at once; more leave the processor's cache
Cell = tuple[int, ...]


@dataclass(frozen=True)
class Decoder:
    """The reference decoder on a real target, speculating one way, whose sampled replies are to be judged."""

    target: Target
    way: Speculation
    batch: int = 8
    seed: int = 0

    def replies(self, names: Sequence[str], prompts: Sequence[list[int]], max_new_tokens: int) -> list[list[int]]:
        """One reply a prompt; the random numbers of each belong to its name."""
        replies = decode(
            self.target, prompts, self.way, max_new_tokens, batch=self.batch, seed=self.seed, request_ids=names
        )
        return [reply.token_ids for reply in replies]

    def entry(self, name: str, **values: Any) -> dict[str, Any]:
        way, rule = self.way, self.way.rule
        return check_entry(
            name,
            target=self.target.facts.name,
            dtype=str(self.target.dtype).removeprefix("torch."),
            sampling=way.sampling,
            draft=way.draft,
            shape="tree" if way.tree else "chain",
            draft_length=way.draft_length,
            batch=self.batch,
            drafter=way.drafter.name if way.drafter else "plain",
            rule=rule if isinstance(rule, str) else getattr(rule, "__name__", type(rule).__name__),
            **values,
        )


def expected_cells(
    next_laws: Callable[[list[Cell]], Tensor], num_samples: int, num_tokens: int, stop_ids: Sequence[int]
) -> dict[Cell, float]:
    """Cells of the joint law of the first tokens, with their exact probabilities.

    A vocabulary of thousands has more sequences than samples, so only sequences that are expected OPEN_EXPECTED times
    are told apart by their next token; next tokens expected less than MIN_EXPECTED times share the cell REST. Cells
    and probabilities follow from the target alone, before anything is sampled.

    Args:
        next_laws: [len(sequences), V] laws of the token that follows each sequence; every call is one pass of the target.
    """
    cells: dict[Cell, float] = {}
    level: dict[Cell, float] = {(): 1.0}
    for _ in range(num_tokens):
        opened = [cell for cell, mass in level.items() if mass * num_samples >= OPEN_EXPECTED]
        cells |= {cell: mass for cell, mass in level.items() if mass * num_samples < OPEN_EXPECTED}
        longer: dict[Cell, float] = {}
        for cell, law_V in zip(opened, next_laws(opened) if opened else [], strict=True):
            mass_V = law_V * level[cell]
            frequent = (mass_V * num_samples >= MIN_EXPECTED).nonzero().flatten().tolist()
            for token in frequent:
                (cells if token in stop_ids else longer)[*cell, token] = float(mass_V[token])
            cells[*cell, REST] = max(level[cell] - float(mass_V[frequent].sum()), 0.0)
        level = longer
    return cells | level


def count_cells(replies: Sequence[Sequence[int]], cells: dict[Cell, float]) -> np.ndarray:
    """How many replies fall into each cell, in the cells' order."""
    opened = {cell[:-1] for cell in cells if cell and cell[-1] == REST}
    counts: Counter[Cell] = Counter()
    for reply in replies:
        cell: Cell = ()
        for token in reply:
            if cell not in opened:
                break
            longer = (*cell, token)
            known = longer in cells or longer in opened
            cell = longer if known else (*cell, REST)
            if not known:
                break
        counts[cell] += 1
    return np.array([counts[cell] for cell in cells], dtype=float)


def num_wrong_ends(
    decoder: Decoder, prompts: Sequence[list[int]], replies: Sequence[list[int]], max_new_tokens: int
) -> int:
    """Replies that end elsewhere than at their first stop token, the token limit or the end of the context."""
    stops, context = set(decoder.target.facts.stop_ids), decoder.target.facts.max_position
    wrong = 0
    for prompt, reply in zip(prompts, replies, strict=True):
        most = min(max_new_tokens, context - len(prompt))
        wrong += any(token in stops for token in reply[:-1]) or (len(reply) < most and reply[-1] not in stops)
    return wrong


def first_tokens_check(
    decoder: Decoder, prompts: Sequence[list[int]], num_samples: int, num_tokens: int = NUM_FIRST_TOKENS
) -> dict[str, Any]:
    """Joint law of the first reply tokens of a few prompts against the target's own, by chi-square.

    The expected law is computed, not sampled: the target scores the frequent sequences, teacher-forced. Against a sample of
    plain decoding the same replies would show a difference only sqrt(2) times as large, and that sample costs as much as
    the speculative one. Each prompt has `num_samples` / len(prompts) samples and its own degrees of freedom; they add.
    """
    each = max(num_samples // len(prompts), 1)
    target, way = decoder.target, decoder.way
    statistic, dof, largest, total, num_impossible = 0.0, 0, 0.0, 0, 0
    for i, prompt in enumerate(prompts):

        @torch.inference_mode()
        def next_laws(sequences: list[Cell], prompt: list[int] = prompt) -> Tensor:
            states = target.read([np.array([*prompt, *sequence, 0]) for sequence in sequences])
            logits_NV = target.logits(torch.stack([s.final[-1] for s in states]))
            return filtered_probabilities(logits_NV, way.sampling).cpu()

        cells = expected_cells(next_laws, each, num_tokens, target.facts.stop_ids)
        names = [f"first/{way.draft}/{i}/{sample}" for sample in range(each)]  # checks share no random number
        replies = decoder.replies(names, [prompt] * each, num_tokens)
        observed_C, expected_C = count_cells(replies, cells), each * np.array(list(cells.values()))
        expected_C *= each / expected_C.sum()  # rounding of the remainders
        value, more = chi_square(observed_C, expected_C)
        statistic, dof = statistic + float(value), dof + more
        largest = max(largest, float(np.abs(observed_C - expected_C).max()) / each)
        total += sum(len(reply) for reply in replies)
        num_impossible += num_wrong_ends(decoder, [prompt] * each, replies, num_tokens)
    p_value = 0.0 if num_impossible else float(chi_square_p(statistic, dof))
    return decoder.entry(
        "first_tokens",
        num_samples=each * len(prompts),
        num_tokens=total,
        statistic=statistic,
        p_value=p_value,
        max_difference=largest,
        passed=p_value >= LEVEL,
        dof=dof,
        num_impossible=num_impossible,
    )


def martingale_check(
    decoder: Decoder, names: Sequence[str], prompts: Sequence[list[int]], max_new_tokens: int
) -> dict[str, Any]:
    """Excess surprise of whole sampled replies, scored again by the plain target, against its normal law.

    `num_impossible` counts tokens that the target cannot say, and replies that end where it does not.
    """
    replies = decoder.replies(names, prompts, max_new_tokens)
    excess, variance, num_impossible = 0.0, 0.0, num_wrong_ends(decoder, prompts, replies, max_new_tokens)
    for law_NV, token_N, edge_N in scored_tokens(decoder.target, prompts, replies, decoder.way.sampling):
        excess_N, variance_N = surprise(law_NV, token_N)
        impossible_N = excess_N.isinf()
        num_impossible += int((impossible_N & ~edge_N).sum())
        excess += float(excess_N[~impossible_N].sum())
        variance += float(variance_N[~impossible_N].sum())
    z, p_value = (float(value) for value in martingale(excess, variance))
    return decoder.entry(
        "martingale",
        num_samples=len(replies),
        num_tokens=sum(len(reply) for reply in replies),
        statistic=z,
        p_value=0.0 if num_impossible else p_value,
        passed=num_impossible == 0 and p_value >= LEVEL,
        num_impossible=num_impossible,
    )


@torch.inference_mode()
def scored_tokens(
    target: Target, prompts: Sequence[list[int]], replies: Sequence[list[int]], sampling: Sampling
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Reply tokens with the laws they should come from, a few at a time: law [N, V], token [N], and which are edges.

    An edge is a token that the filter removes here and whose logit all but equals the last one it keeps: rounding, which
    differs between a block and a whole reply, may have kept it when it was drawn.
    """
    paths = [np.array([*prompt, *reply]) for prompt, reply in zip(prompts, replies, strict=True)]
    for prompt, reply, states in zip(prompts, replies, target.read(paths), strict=True):
        for begin in range(0, len(reply), SCORE_TOKENS):
            token_N = torch.tensor(reply[begin : begin + SCORE_TOKENS])
            first = len(prompt) - 1 + begin
            logits_NV = target.logits(states.final[first : first + len(token_N)]).cpu()
            law_NV = filtered_probabilities(logits_NV, sampling)
            last_kept_N = logits_NV.masked_fill(law_NV == 0, torch.inf).amin(-1)
            edge_N = last_kept_N - logits_NV.gather(1, token_N[:, None]).squeeze(1) <= EDGE
            yield law_NV, token_N, edge_N


def enumeration_checks() -> list[dict[str, Any]]:
    """Every rule, shape, sampler and kind of draft on a toy target: its draft vocabulary lacks a token, one token stops."""
    toy = Toy.random(vocab_size=4, draft_size=3)
    kinds: list[tuple[str, type[ToyDecoder], Rule]] = [(name, ToyDecoder, rule) for name, rule in RULES.items()]
    kinds += [("tree", TreeDecoder, verify_tokens), ("dynamic_tree", DynamicTreeDecoder, verify_tokens)]
    checks = []
    for (rule_name, kind, rule), draft, sampling in product(kinds, ("greedy", "sampled"), SAMPLERS):
        if kind is DynamicTreeDecoder and draft == "sampled":
            continue  # dynamic trees are of greedy drafts
        found = compare(kind(toy, rule, sampling, draft, draft_length=2, stop_ids=frozenset([1])))
        checks.append(
            check_entry(
                "enumeration",
                target="toy",
                dtype="float64",
                sampling=sampling,
                draft=draft,
                shape=kind.shape,
                draft_length=2,
                num_samples=found.num_sequences,
                max_difference=found.law,
                passed=found.exact,
                rule=rule_name,
                acceptance_difference=found.acceptance,
            )
        )
    return checks


def certificate(subject: Subject) -> list[dict[str, Any]]:
    """Rules by enumeration, this head's sampled replies by both statistics, and greedy identity with a tree.

    Replies are sampled anew, after the prompts of held-out paths and with the paths' sampling settings; where those are
    greedy, at temperature 1, where nothing is filtered and a wrong law has the most room to show.
    """
    target, head, paths, settings = subject.target, subject.head, subject.paths, subject.settings
    checks = enumeration_checks()
    exact = sum(check["verdict"] == "pass" for check in checks)
    subject.tell(f"lossless: {exact} of {len(checks)} enumerated laws are exact")
    sampling = subject.sampling if subject.sampling.temperature else Sampling(1.0)
    prompts = [path.prompt_token_ids for path in paths]
    limit = max(path.num_reply_tokens for path in paths)
    few = sorted(prompts, key=len)[:FIRST_PROMPTS]
    long = [prompts[i % len(prompts)] for i in range(-(-settings.lossless_tokens // limit))]
    drafts: tuple[Literal["greedy", "sampled"], ...] = ("greedy", "sampled")
    for draft in drafts:
        way = Speculation(HeadDrafter(head), settings.draft_length, sampling, draft)
        names = [f"long/{draft}/{i}" for i in range(len(long))]
        for check in (
            first_tokens_check(Decoder(target, way, FIRST_BATCH, subject.seed), few, settings.lossless_samples),
            martingale_check(Decoder(target, way, settings.live_batch, subject.seed), names, long, limit),
        ):
            subject.tell(f"lossless: {check['name']}, {draft} drafts: p = {check['p_value']:.3g}, {check['verdict']}")
            checks.append(check)
    short = sorted(prompts, key=len)[:TREE_PROMPTS]
    tree = Tree.branching(*(settings.trees[0] if settings.trees else DEFAULT_TREE))
    tree = tree.cut(head.settings.max_depth or tree.depth)
    checks.append(tree_identity(target, head, short, min(limit, TREE_TOKENS), tree, settings.live_batch))
    subject.tell(f"lossless: greedy identity with a {tree}: {checks[-1]['num_tokens']} tokens, {checks[-1]['verdict']}")
    return checks
