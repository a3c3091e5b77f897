"""Exact offline acceptance of static trees of greedy drafts, all of them from one pass over the recorded paths.

Children of a node are the head's likeliest tokens there, so all that a tree asks of the head is the rank of the recorded
token: with rank 0, 1, .. it is the first, second, .. child, and it is kept exactly if the node has as many children. Like
every deterministic draft it is kept whatever the temperature, given that the token is emitted. Trees of sampled drafts
(siblings depend on each other's draws) and dynamic ones (shapes follow tokens that were never emitted) are measured live.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from headstart.eval.acceptance import ReplyAcceptance, count_replies
from headstart.eval.subject import Subject
from headstart.eval.tree_drafts import check_width
from headstart.heads.tree import Tree


def tree_acceptance(replies: Sequence[ReplyAcceptance], tree: Tree) -> list[ReplyAcceptance]:
    """Acceptance of a static tree of greedy drafts along recorded replies, from a head's acceptance at least as deep.

    Entry (t, j) says whether a step from start t that kept j drafts keeps the next one too. It is judged where the node
    it reached has children.
    """
    num_children_N = np.array([len(tree.children(node)) for node in range(len(tree.parents))])
    child_NC = np.zeros((len(tree.parents), num_children_N.max() + 1), dtype=np.int64)
    for node in range(len(tree.parents)):
        child_NC[node, : num_children_N[node]] = tree.children(node)
    found = []
    for reply in replies:
        if reply.rank_TK is None:
            raise ValueError("this drafter has no ranks to judge a tree by")
        accept_TK = np.zeros((len(reply.rank_TK), tree.depth))
        judged_TK = np.zeros(accept_TK.shape, dtype=bool)
        node_T, alive_T = np.zeros(len(accept_TK), dtype=np.int64), np.ones(len(accept_TK), dtype=bool)
        for j in range(tree.depth):
            rank_T = reply.rank_TK[:, j]
            judged_TK[:, j] = alive_T & reply.judged_TK[:, j] & (num_children_N[node_T] > 0)
            alive_T = judged_TK[:, j] & (rank_T < num_children_N[node_T])
            accept_TK[:, j] = alive_T
            node_T = child_NC[node_T, np.where(alive_T, rank_T, 0)]
        found.append(ReplyAcceptance(reply.prompt_id, reply.route, accept_TK, judged_TK, reply.num_out_of_vocab))
    return found


def trees_of(subject: Subject) -> list[Tree]:
    """The trees of `eval.trees`.

    Raises:
        WrongInput: a node with more children than there are draft tokens.
    """
    shapes = subject.settings.trees
    if shapes:
        check_width(max(max(num_children) for num_children in shapes), len(subject.head.draft_ids_V))
    return [Tree.branching(*num_children) for num_children in shapes]


def tree_rows(subject: Subject, replies: Sequence[ReplyAcceptance]) -> list[dict[str, Any]]:
    """Rows of eval/acceptance.json for the trees of `eval.trees`, over all prompts.

    Args:
        replies: the head's acceptance, as deep as the deepest tree.
    """
    return [
        subject.row(
            count_replies(tree_acceptance(replies, tree), tree.depth),
            source="offline",
            drafter=subject.head.kind,
            draft_length=tree.depth,
            tree=tree,
        )
        for tree in trees_of(subject)
    ]
