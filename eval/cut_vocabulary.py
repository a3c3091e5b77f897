"""What a head accepts with a smaller draft vocabulary: its output layer cut to some of its rows, nothing trained anew.

The output layer is most of what many heads read to draft a token, so fewer rows make drafts cheaper; tokens that are left
out can never be kept. What that costs is exact on the same recorded replies, as everything that is computed offline.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from headstart.eval.acceptance import count_replies, drafts_acceptance
from headstart.eval.compare import REPLICATES, compare_route
from headstart.eval.previous import prompt_sums
from headstart.eval.subject import Subject
from headstart.eval.target_law import TargetLaw


def cut_rows(subject: Subject, vocabularies: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    """The entry `vocabularies` of acceptance.json: rows over all prompts at the reported draft length, a smaller draft
    vocabulary each, with its size and the paired ratio of accept_len to that of the head's own.

    Args:
        vocabularies: target token ids; those that the head does not draft are passed over.
    """
    if not vocabularies:
        return []
    head, length, kinds = subject.head, subject.settings.draft_length, subject.draft_temperatures
    cut = [head.draft_ids_V[torch.isin(head.draft_ids_V, torch.as_tensor(ids).to(head.device))] for ids in vocabularies]
    law = TargetLaw(subject.target, subject.sampling) if subject.sampling.temperature else None
    batches = subject.batches(subject.paths)
    found = drafts_acceptance(head, batches, length, list(kinds.values()), law, vocabularies=cut)
    counts = [count_replies(replies, length) for replies in found]
    rows = []
    for i, ids_W in enumerate(cut, start=1):
        for j, draft in enumerate(kinds):
            smaller, whole = counts[i * len(kinds) + j], counts[j]
            both = prompt_sums(subject, smaller), prompt_sums(subject, whole)
            compared = compare_route(*both, "all", subject.seed, REPLICATES)
            row = subject.row(smaller, source="offline", drafter=head.kind, draft=draft, draft_length=length)
            rows.append({**row, "draft_vocab_size": len(ids_W), "ratio": compared.ratio})
    return rows
