"""Judging drafts at temperature 0: they stand while they are what the target would have said."""

from collections.abc import Callable

import torch
from torch import Tensor

from headstart.eval.drafters import Proposal
from headstart.heads.tree import Tree

# Turns target logits [B, T, V] and a proposal into each row's emitted block: accepted drafts and one token more.
VerifyRule = Callable[[Tensor, Proposal], list[list[int]]]


def verify_greedy(logits_BTV: Tensor, proposal: Proposal) -> list[list[int]]:
    """Keep drafts while they are what the target would have said; then the target's own token, from the same pass.

    Row b's logits at i follow its i-th fed token, so they judge draft i and, behind the last accepted draft, give the
    corrected token (a draft was refused) or the bonus token (none was). The emitted block is a prefix of what plain
    greedy decoding says, whatever was drafted. Of a tree, the child that is the target's token is kept.
    """
    if proposal.trees is not None:
        return [
            greedy_walk(*row)
            for row in zip(proposal.trees, proposal.tokens_BK.tolist(), logits_BTV.argmax(-1).tolist(), strict=True)
        ]
    width = logits_BTV.shape[1]
    both = torch.cat((logits_BTV.argmax(-1), proposal.tokens_BK[:, : width - 1]), dim=1).tolist()
    blocks = []
    for row, length in zip(both, proposal.length_B, strict=True):
        choice, drafts = row[:width], row[width : width + length]
        accepted = 0
        while accepted < length and drafts[accepted] == choice[accepted]:
            accepted += 1
        blocks.append(choice[: accepted + 1])
    return blocks


def greedy_walk(tree: Tree, drafts: list[int], choice: list[int]) -> list[int]:
    """The emitted block of one tree: down from the root as long as a child is what the target says there."""
    node: int | None = 0
    block: list[int] = []
    while node is not None:
        block.append(choice[node])
        node = next((child for child in tree.children(node) if drafts[child - 1] == block[-1]), None)
    return block
