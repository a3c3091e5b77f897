"""Which tokens a tree of drafts holds: static trees, greedy or sampled, and EAGLE-2's dynamic tree.

A head computes logits level by level (`Head.draft_tree`); what is here chooses the nodes. Children that are the likeliest
tokens are certain, whatever the temperature: `verify_tree` judges them as one-hot laws (to judge them by the softmax they
maximise would favour them). Children drawn from the head's law are judged by it, siblings without replacement.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.eval.drafters import Growth, Proposal
from headstart.eval.verify import Chance
from headstart.heads.contract import Level
from headstart.heads.errors import WrongInput
from headstart.heads.tree import Tree


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree, whose shape follows the head's confidence (Li et al., arXiv 2406.16858, section 4).

    The confidence of a node is the product of the head's probabilities along its path. At every depth the `width` most
    confident nodes get `width` children each, their likeliest tokens; of all nodes the `num_drafts` most confident stay.
    A child is never more confident than its parent, and of equals the earlier one stays, so parents always stay too.
    """

    depth: int
    width: int
    num_drafts: int

    def __post_init__(self) -> None:
        if min(self.depth, self.width, self.num_drafts) < 1:
            raise ValueError(f"found {self}, expected depth, width and num_drafts of at least 1")

    @property
    def num_slots(self) -> int:
        """Slots that the largest tree takes in a cache, of the target or of the head."""
        return max(self.num_drafts, (self.depth - 1) * self.width)


Shape = Tree | DynamicTree


def num_slots(shape: Shape) -> int:
    """Slots behind the last emitted token that drafts of this shape may take in a cache."""
    return shape.num_slots if isinstance(shape, DynamicTree) else shape.num_drafts


def likeliest(logits: Tensor, number: int) -> Tensor:
    """Indices [.., number] of the largest logits [.., V], the largest first, of equals the smaller index first."""
    top = logits.topk(number, dim=-1)
    if bool(((logits >= top.values[..., -1:]).sum(-1) > number).any()):  # equals on either side of the edge
        return logits.sort(dim=-1, descending=True, stable=True).indices[..., :number]
    index, order = top.indices.sort(dim=-1)
    by_value = top.values.gather(-1, order).sort(dim=-1, descending=True, stable=True).indices
    return index.gather(-1, by_value)


def check_width(widest: int, vocab_size: int) -> None:
    """Raises WrongInput: more children than there are draft tokens."""
    if widest > vocab_size:
        raise WrongInput(
            f"found a tree with {widest} children of one node, expected at most {vocab_size}, all that the head drafts."
        )


class StaticDrafts:
    """A static tree: the children of every node are its likeliest tokens, or drawn one after the other.

    Row b's tree is cut at `length_B[b]`, and the batch's at the longest of them.

    Args:
        chances: of each row, to draw its children by; None: the likeliest.
        temperature: of the draft, where it is sampled.
    """

    def __init__(
        self, tree: Tree, length_B: Sequence[int], chances: Sequence[Chance] | None = None, temperature: float = 1.0
    ) -> None:
        self.tree = tree.cut(max(length_B))
        self.trees = [tree.cut(length) for length in length_B]
        self.chances, self.temperature = chances, temperature
        self.level = [0]  # nodes whose logits come next
        self.index: dict[int, Tensor] = {}  # [B] of every node
        self.law: dict[int, Tensor] = {}  # float64 [B, Vd] of every node that sampled children follow

    def __call__(self, logits_BWV: Tensor) -> Level | None:
        children = [self.tree.children(node) for node in self.level]
        widest = max(len(nodes) for nodes in children)
        check_width(widest, logits_BWV.shape[-1])
        if self.chances is None:
            best_BWC = likeliest(logits_BWV, widest)
            for w, nodes in enumerate(children):
                self.index |= {node: best_BWC[:, w, c] for c, node in enumerate(nodes)}
        else:
            for w, (node, nodes) in enumerate(zip(self.level, children, strict=True)):
                self._draw(node, nodes, logits_BWV[:, w], self.chances)
        parent = {node: w for w, nodes in enumerate(children) for node in nodes}
        self.level = [node for node in sorted(parent) if self.tree.children(node)]
        if not self.level:
            return None
        index_BW = torch.stack([self.index[node] for node in self.level], dim=1)
        parent_W = torch.tensor([parent[node] for node in self.level], device=index_BW.device)
        return Level(parent_W.expand_as(index_BW), index_BW)

    def _draw(self, node: int, children: list[int], logits_BV: Tensor, chances: Sequence[Chance]) -> None:
        """Draw a node's children without replacement. A row draws for nodes of its own tree only, in their order.

        So its random numbers do not depend on its neighbours; what stands elsewhere is padding.
        """
        law_BV = (logits_BV.double() / self.temperature).softmax(-1)
        self.law[node] = law_BV
        index_BC = torch.zeros(len(law_BV), len(children), dtype=torch.int64)
        for row, (chance, law_V) in enumerate(zip(chances, law_BV.cpu(), strict=True)):
            if children[0] >= len(self.trees[row].parents):
                continue
            left_V = law_V.clone()
            for c in range(len(children)):
                taken = index_BC[row, :c]
                # Where rounding leaves the others no probability, they are drafts that verification never keeps.
                weights_V = left_V if bool(left_V.any()) else torch.ones_like(left_V).index_fill(0, taken, 0.0)
                index_BC[row, c] = chance.draw(weights_V)
                left_V[index_BC[row, c]] = 0.0
        self.index |= {child: index_BC[:, c].to(law_BV.device) for c, child in enumerate(children)}

    def proposal(self, ids_W: Tensor, vocab_size: int) -> Proposal:
        index_BK = torch.stack([self.index[node] for node in range(1, len(self.tree.parents))], dim=1)
        law_BNV = None
        if self.chances is not None:
            law_BNV = torch.zeros(
                len(index_BK), len(self.tree.parents), vocab_size, dtype=torch.float64, device=index_BK.device
            )
            for node, law_BV in self.law.items():
                law_BNV[:, node, ids_W] = law_BV
        return Proposal(ids_W[index_BK], [tree.num_drafts for tree in self.trees], law_BNV, self.trees)


class DynamicDrafts:
    """A dynamic tree of every row; row b's is no deeper than `length_B[b]`."""

    def __init__(self, shape: DynamicTree, length_B: Sequence[int]) -> None:
        self.shape, self.length_B = shape, length_B
        self.depth = min(shape.depth, max(length_B))
        # Candidates in order of depth: confidence, token, and parent as a candidate (-1: the root), each [B, ..].
        self.confidence: list[Tensor] = []
        self.index: list[Tensor] = []
        self.parent: list[Tensor] = []
        self.level_BW: Tensor | None = None  # candidates whose logits come next; None: the root
        self.num_candidates = [0]  # down to each depth

    def __call__(self, logits_BWV: Tensor) -> Level | None:
        width = self.shape.width
        check_width(width, logits_BWV.shape[-1])
        best_BWC = likeliest(logits_BWV, width)
        logq_BWC = logits_BWV.double().log_softmax(-1).gather(-1, best_BWC)
        parent_BW = best_BWC.new_full(best_BWC.shape[:2], -1) if self.level_BW is None else self.level_BW
        if self.level_BW is not None:
            logq_BWC = logq_BWC + torch.cat(self.confidence, dim=1).gather(1, parent_BW)[:, :, None]
        first = self.num_candidates[-1]
        self.confidence.append(logq_BWC.flatten(1))
        self.index.append(best_BWC.flatten(1))
        self.parent.append(parent_BW[:, :, None].expand_as(best_BWC).flatten(1))
        self.num_candidates.append(first + self.index[-1].shape[1])
        if len(self.index) == self.depth:
            return None
        chosen_BW = likeliest(self.confidence[-1], width)
        self.level_BW = first + chosen_BW
        return Level(chosen_BW // width, self.index[-1].gather(1, chosen_BW))

    def proposal(self, ids_W: Tensor, vocab_size: int) -> Proposal:
        confidence_BC, index_BC, parent_BC = (
            torch.cat(parts, dim=1).cpu() for parts in (self.confidence, self.index, self.parent)
        )
        trees, tokens = [], []
        for row, length in enumerate(self.length_B):
            reachable = self.num_candidates[min(length, self.depth)]
            number = min(self.shape.num_drafts, reachable)
            kept = confidence_BC[row, :reachable].sort(descending=True, stable=True).indices[:number].sort().values
            node = {-1: 0, **{candidate: n for n, candidate in enumerate(kept.tolist(), 1)}}
            trees.append(Tree((-1, *(node[parent] for parent in parent_BC[row, kept].tolist()))))
            tokens.append(index_BC[row, kept])
        index_BK = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True).to(ids_W.device)
        return Proposal(ids_W[index_BK], [tree.num_drafts for tree in trees], None, trees)


def new_growth(
    shape: Shape, length_B: Sequence[int], chances: Sequence[Chance] | None = None, temperature: float = 1.0
) -> Growth:
    """One step's growth; `chances` and `temperature` as of `StaticDrafts`.

    Raises:
        ValueError: a dynamic tree of sampled drafts, whose shape would depend on what was drawn.
    """
    if isinstance(shape, Tree):
        return StaticDrafts(shape, length_B, chances, temperature)
    if chances is not None:
        raise ValueError(
            "found a dynamic tree and sampled drafts; its children are the likeliest tokens: draft greedily"
        )
    return DynamicDrafts(shape, length_B)
