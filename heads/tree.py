"""The shape of a tree of drafts. Neither torch nor numpy at import: tables name trees, and must print at once.

node      0            the last emitted token, which is no draft
          1 .. N - 1   drafts, in order of depth, so that a tree cut at a depth is its first nodes
slot      of node n in a cache is start + n, its rotary position is start + depth of n
sees      the slots before start, its ancestors and itself; siblings and their branches never
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True)
class Tree:
    """`parents[n]` is the parent of node n, before it in order; a node's children are judged in their order.

    A chain of K drafts is Tree((-1, 0, .., K - 1)).

    Raises:
        ValueError: no root at node 0, a parent that does not come before its child, or nodes out of order of depth.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        before = all(0 <= parent < node for node, parent in enumerate(self.parents[1:], 1))
        if not self.parents or self.parents[0] != -1 or not before:
            raise ValueError(f"found parents {self.parents}, expected -1 and then of every node one before it")
        if any(a > b for a, b in zip(self.depths, self.depths[1:], strict=False)):
            raise ValueError(f"found nodes at depths {self.depths}, expected them in order of depth")

    @classmethod
    def branching(cls, *num_children: int) -> "Tree":
        """Every node of depth d has `num_children[d]` children; (1, 1, 1) is a chain of three drafts."""
        parents, level = [-1], [0]
        for number in num_children:
            first = len(parents)
            parents += [node for node in level for _ in range(number)]
            level = list(range(first, len(parents)))
        return cls(tuple(parents))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Drafts on the way from the root to each node, itself counted."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Most drafts that a step can accept."""
        return self.depths[-1]

    @property
    def num_drafts(self) -> int:
        """Nodes but the root."""
        return len(self.parents) - 1

    @cached_property
    def _children(self) -> tuple[list[int], ...]:
        children: tuple[list[int], ...] = tuple([] for _ in self.parents)
        for node, parent in enumerate(self.parents[1:], 1):
            children[parent].append(node)
        return children

    def children(self, node: int) -> list[int]:
        """Nodes drafted after `node`, in the order they are judged in."""
        return self._children[node]

    @cached_property
    def heights(self) -> tuple[int, ...]:
        """Drafts on the longest way down from each node; 0 for a leaf."""
        heights = [0] * len(self.parents)
        for node in range(self.num_drafts, 0, -1):
            heights[self.parents[node]] = max(heights[self.parents[node]], heights[node] + 1)
        return tuple(heights)

    @cached_property
    def sees_NN(self) -> "np.ndarray":
        """bool: entry (n, m) says that m is n or an ancestor of it."""
        import numpy as np

        sees_NN = np.eye(len(self.parents), dtype=bool)
        for node, parent in enumerate(self.parents[1:], 1):
            sees_NN[node] |= sees_NN[parent]
        return sees_NN

    def cut(self, depth: int) -> "Tree":
        """Its nodes down to a depth."""
        if depth >= self.depth:
            return self
        return Tree(self.parents[: sum(d <= depth for d in self.depths)])

    def path(self, tokens: Sequence[int], drafts: Sequence[int]) -> list[int]:
        """Nodes from the root along `drafts`, which are tokens of children of each other; siblings' tokens differ."""
        nodes = [0]
        for draft in drafts:
            nodes.append(next(child for child in self.children(nodes[-1]) if tokens[child] == draft))
        return nodes

    def __str__(self) -> str:
        """`tree 2-2-1 (10 nodes)` by children of every node at each depth, where they are alike; the root is not counted."""
        counts = [
            sorted({len(self.children(n)) for n, d in enumerate(self.depths) if d == depth})
            for depth in range(self.depth)
        ]
        shape = (
            "-".join(str(found[0]) for found in counts) if all(len(c) == 1 for c in counts) else f"{self.depth} deep"
        )
        return f"tree {shape} ({self.num_drafts} nodes)"


def stacked(trees: Sequence[Tree], num_tokens: int, device: "torch.device") -> tuple["torch.Tensor", "torch.Tensor"]:
    """Depths [B, T] and `sees` [B, T, T] of several trees, padded to T nodes that nothing sees."""
    import numpy as np
    import torch

    depth_BT = np.zeros((len(trees), num_tokens), dtype=np.int64)
    sees_BTT = np.zeros((len(trees), num_tokens, num_tokens), dtype=bool)
    for row, tree in enumerate(trees):
        size = len(tree.parents)
        depth_BT[row, :size] = tree.depths
        sees_BTT[row, :size, :size] = tree.sees_NN
    return torch.from_numpy(depth_BT).to(device), torch.from_numpy(sees_BTT).to(device)
