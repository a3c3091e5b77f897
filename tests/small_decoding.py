"""What tests of decoding share: prompts, paths, small heads and small models on the tiny target."""

import numpy as np
import torch

from headstart.eval.decode import decode
from headstart.eval.speculation import PLAIN
from headstart.heads.batch import pack
from headstart.heads.checkpoint import build_head
from headstart.heads.draft import DraftModel
from headstart.heads.paths import Path
from headstart.heads.settings import DraftSettings
from tests.kinds import make_settings, rollout_logits

NO_STOP: list[int] = []
MOST_DRAFTS = 8


def make_prompts(target, lengths, seed=0):
    generator = np.random.default_rng(seed)
    return [[1, *generator.integers(5, target.facts.num_tokens, size=n - 1).tolist()] for n in lengths]


def make_path(prompt, reply, name="p", sampling=None):
    return Path(
        prompt_id=name,
        route="chat",
        split="heldout",
        token_N=np.array([*prompt, *reply], dtype=np.int32),
        generated_N=np.array([False] * len(prompt) + [True] * len(reply)),
        logprob_N=np.array([np.nan] * len(prompt) + [-1.0] * len(reply), dtype=np.float32),
        finish_reason="length",
        sampling=sampling.to_dict() if sampling else {"temperature": 0.0},
    )


def untrained_head(target, seed=0, kind="eagle3", every=2):
    """A head that can draft every second token, or `every` so many."""
    torch.manual_seed(seed)
    ids = torch.arange(0, target.facts.num_tokens, every)
    head = build_head(make_settings(kind, MOST_DRAFTS), target.facts, ids)
    head.load_target(target, initialise=True)
    return head.eval()


def fitted_head(target, paths, steps=40, kind="eagle3", every=2, enough=0.0):
    """A head fitted to some recorded paths in a second, so that drafts are accepted, but not always.

    Fitting ends before all steps are done where the loss falls below `enough`.
    """
    head = untrained_head(target, kind=kind, every=every).train()
    states = target.read([path.token_N for path in paths])
    batch = pack([(path, s.taps.clone(), s.final.clone()) for path, s in zip(paths, states, strict=True)])
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    for _ in range(steps):
        rollout = head.rollout(batch, 3)
        s_P, j_P = rollout.valid_SD.nonzero(as_tuple=True)
        label_P = batch.next_token_T[rollout.start_S[s_P] + 1 + j_P]
        index_P = torch.searchsorted(head.draft_ids_V, label_P).clamp(max=len(head.draft_ids_V) - 1)
        known_P = head.draft_ids_V[index_P] == label_P
        loss = torch.nn.functional.cross_entropy(rollout_logits(head, rollout)[s_P, j_P][known_P], index_P[known_P])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < enough:
            break
    return head.eval()


def continuations(target, prompts, num_tokens):
    replies = decode(target, prompts, PLAIN, num_tokens, NO_STOP)
    return {tuple(p): r.token_ids for p, r in zip(prompts, replies, strict=True)}


def random_draft(target, seed=0):
    """A draft model of one random layer, which knows nothing of the target but has opinions."""
    torch.manual_seed(seed)
    head = DraftModel(DraftSettings(layers=[0]), target.facts, torch.arange(target.facts.num_tokens))
    head.load_target(target, initialise=False)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 2:
                parameter.copy_(0.5 * torch.randn_like(parameter))
    return head.eval()
