"""Exact offline acceptance of static trees of greedy drafts, all of them from one pass over the recorded paths.

Children of a node are the head's likeliest tokens there, so all that a tree asks of the head is the rank of the recorded
token: with rank 0, 1, .. it is the first, second, .. child, and it is kept exactly if the node has as many children. Like
every deterministic draft it is kept whatever the temperature, given that the token is emitted. Trees of sampled drafts
(siblings depend on each other's draws) and dynamic ones (shapes follow tokens that were never emitted) are measured live.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headstart.eval.acceptance import PROJECTION_CHUNK, ReplyAcceptance, count_replies
from headstart.eval.subject import Subject, read_batches
from headstart.eval.target_law import TargetLaw
from headstart.eval.tree_drafts import check_width
from headstart.heads.batch import Batch
from headstart.heads.contract import Head
from headstart.heads.errors import WrongInput
from headstart.heads.tree import Tree


@dataclass
class ReplyRanks:
    """How likely the head found the tokens of one recorded reply; starts and depths as in `ReplyAcceptance`."""

    prompt_id: str
    route: str
    rank_TK: np.ndarray  # int64: draft tokens before the recorded one, largest logit first, of equals the smaller id
    valid_TK: np.ndarray  # bool: x_{t+2+j} lies in the reply
    num_out_of_vocab: int


@torch.no_grad()
def reply_ranks(head: Head, batches: Iterable[Batch], depth: int, law: TargetLaw | None = None) -> list[ReplyRanks]:
    """Ranks of every recorded token that a tree of this depth can meet, reply by reply.

    A token outside the draft vocabulary has the size of that vocabulary for its rank: no tree that can be drafted holds it.

    Args:
        law: what the paths were drawn by, where that is to be checked.

    Raises:
        WrongInput: paths recorded at another sampling setting.
    """
    replies = []
    ids_V = head.draft_ids_V
    for batch in batches:
        if law is not None:
            law.check(batch.samplings)
        rollout = head.rollout(batch, depth)
        pair_P2 = rollout.valid_SD.nonzero()
        label_P = batch.next_token_T[rollout.start_S[pair_P2[:, 0]] + 1 + pair_P2[:, 1]]
        index_P = torch.searchsorted(ids_V, label_P).clamp_max(len(ids_V) - 1)
        rank_SD = torch.full(rollout.valid_SD.shape, len(ids_V), device=ids_V.device)
        for begin in range(0, len(pair_P2), PROJECTION_CHUNK):
            chunk = slice(begin, begin + PROJECTION_CHUNK)
            s_C, j_C = pair_P2[chunk].unbind(1)
            index_C1 = index_P[chunk, None]
            logits_CV = head.logits(rollout.state_SDH[s_C, j_C], j_C).float()
            logit_C1 = logits_CV.gather(1, index_C1)
            earlier_CV = torch.arange(len(ids_V), device=ids_V.device) < index_C1
            rank_C = ((logits_CV > logit_C1) | ((logits_CV == logit_C1) & earlier_CV)).sum(-1)
            known_C = ids_V[index_P[chunk]] == label_P[chunk]
            rank_SD[s_C, j_C] = torch.where(known_C, rank_C, len(ids_V))
        start_S = rollout.start_S.cpu().numpy()
        unknown_S = ~torch.isin(batch.next_token_T[rollout.start_S + 1], ids_V).cpu().numpy()
        ranks, valid = rank_SD.cpu().numpy(), rollout.valid_SD.cpu().numpy()
        row_S = np.searchsorted(np.asarray(batch.offsets[1:]), start_S, side="right")
        for row, (prompt_id, route) in enumerate(zip(batch.prompt_ids, batch.routes, strict=True)):
            here = row_S == row
            replies.append(ReplyRanks(prompt_id, route, ranks[here], valid[here], int(unknown_S[here].sum())))
    return replies


def tree_acceptance(replies: Sequence[ReplyRanks], tree: Tree, draft: str = "greedy") -> list[ReplyAcceptance]:
    """Acceptance of a static tree along recorded replies, from ranks at least as deep.

    Entry (t, j) says whether a step from start t that kept j drafts keeps the next one too. It is judged where the node
    it reached has children.

    Raises:
        WrongInput: a shape or a kind of draft whose acceptance is not exact offline.
    """
    if not isinstance(tree, Tree) or draft != "greedy":
        raise WrongInput(
            f"found {draft} drafts in {tree}, expected greedy drafts in a static tree: others depend on draws, or on tokens "
            "that no reply holds.\nMeasure them live (decode with the tree, then live_counts)."
        )
    num_children_N = np.array([len(tree.children(node)) for node in range(len(tree.parents))])
    child_NC = np.zeros((len(tree.parents), num_children_N.max() + 1), dtype=np.int64)
    for node in range(len(tree.parents)):
        child_NC[node, : num_children_N[node]] = tree.children(node)
    found = []
    for reply in replies:
        accept_TK = np.zeros((len(reply.rank_TK), tree.depth))
        judged_TK = np.zeros(accept_TK.shape, dtype=bool)
        node_T, alive_T = np.zeros(len(accept_TK), dtype=np.int64), np.ones(len(accept_TK), dtype=bool)
        for j in range(tree.depth):
            rank_T = reply.rank_TK[:, j]
            judged_TK[:, j] = alive_T & reply.valid_TK[:, j] & (num_children_N[node_T] > 0)
            alive_T = judged_TK[:, j] & (rank_T < num_children_N[node_T])
            accept_TK[:, j] = alive_T
            node_T = child_NC[node_T, np.where(alive_T, rank_T, 0)]
        found.append(ReplyAcceptance(reply.prompt_id, reply.route, accept_TK, judged_TK, reply.num_out_of_vocab))
    return found


def tree_rows(subject: Subject) -> list[dict[str, Any]]:
    """Rows of eval/acceptance.json for the trees of `eval.trees`, over all prompts, from one pass of the head.

    Raises:
        WrongInput: a node with more children than there are draft tokens.
    """
    trees = [Tree.branching(*num_children) for num_children in subject.settings.trees]
    if not trees:
        return []
    head = subject.head
    check_width(max(max(num_children) for num_children in subject.settings.trees), len(head.draft_ids_V))
    ranks = reply_ranks(head, read_batches(subject.target, head, subject.paths), max(tree.depth for tree in trees))
    return [
        subject.row(
            count_replies(tree_acceptance(ranks, tree), tree.depth),
            source="offline",
            drafter=head.kind,
            draft_length=tree.depth,
            tree=tree,
        )
        for tree in trees
    ]
