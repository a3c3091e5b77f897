"""A small causal language model as the drafter: it reads the same tokens as the target, through a cache of its own.

Draft and target must number tokens alike: one tokenizer, which is for the caller to see to. Their tables may be padded to
different sizes: ids at or above either tokenizer's size are never proposed.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headstart.eval.acceptance import ReplyAcceptance
from headstart.eval.drafters import DraftSampler, Growth, Proposal, padded
from headstart.eval.early_stop import EarlyStop
from headstart.eval.target_law import TargetLaw
from headstart.heads.contract import Sampler, greedy
from headstart.heads.errors import WrongInput
from headstart.heads.facts import TargetFacts
from headstart.heads.paths import Path
from headstart.heads.target import States, Target
from headstart.heads.tree import Tree

READ_PATHS = 16  # paths whose states are in memory at once
PROJECTION_CHUNK = 128  # positions projected to the vocabulary at a time


class LanguageModelDrafter:
    """Drafts with a causal language model, greedily or from its law."""

    name = "draft"

    def __init__(self, model: Target, target: TargetFacts, stop_below: float = 0.0) -> None:
        """`model` is the small one, `target` the facts of the model it drafts for; `stop_below` as in `HeadDrafter`.

        Raises:
            WrongInput: a model that has no row for some of the target's tokens.
        """
        if model.facts.vocab_size < target.num_tokens:
            raise WrongInput(
                f"draft model {model.facts.name}: found {model.facts.vocab_size} rows in its embedding, expected at least "
                f"{target.num_tokens}, the tokens of {target.name}.\nChoose a draft model with the target's tokenizer."
            )
        self.model, self.stop_below = model, stop_below
        self.vocab_size = target.vocab_size
        self.num_tokens = min(target.num_tokens, model.facts.num_tokens)
        # A draft is made from the last emitted token's own position, one later than a head's first slot.
        self.max_position: int | None = model.facts.max_position - 1

    def start(
        self, prompts: list[list[int]], first_tokens: list[int], states: States, max_length: int
    ) -> "LanguageModelSession":
        texts = [[*prompt, first] for prompt, first in zip(prompts, first_tokens, strict=True)]
        return LanguageModelSession(self, texts, max_length)

    def logits(self, final: Tensor) -> Tensor:
        """Float32 logits [.., num_tokens] over the ids that both tokenizers know."""
        return self.model.logits(final)[..., : self.num_tokens]

    def logprobs(self, final_SH: Tensor, token_S: Tensor, temperature: float) -> Tensor:
        """log q(x) [S] in float64 of drafting tokens after final states: 0 or -inf for greedy drafts (temperature 0).

        A few positions at a time are projected to the vocabulary.
        """
        parts = [torch.zeros(0, dtype=torch.float64, device=token_S.device)]
        for begin in range(0, len(token_S), PROJECTION_CHUNK):
            chunk = slice(begin, begin + PROJECTION_CHUNK)
            logits_CV, token_C = self.logits(final_SH[chunk]), token_S[chunk]
            if temperature == 0:
                logq_C = (logits_CV.argmax(-1) == token_C).double().log()
            else:
                logq_CV = (logits_CV.double() / temperature).log_softmax(-1)
                logq_C = logq_CV.gather(1, token_C.clamp_max(self.num_tokens - 1)[:, None]).squeeze(1)
                logq_C = logq_C.masked_fill(token_C >= self.num_tokens, -torch.inf)
            parts.append(logq_C)
        return torch.cat(parts)


class LanguageModelSession:
    """Texts of B requests, and how much of each the model's cache holds; the rest is read when next drafting."""

    def __init__(self, drafter: LanguageModelDrafter, texts: list[list[int]], max_length: int) -> None:
        self.drafter, self.texts = drafter, texts
        self.cache = drafter.model.new_cache(len(texts), max_length)
        self.num_read = [0] * len(texts)  # leading tokens of the text whose keys and values are in the cache
        self.num_drafts_read = [0] * len(texts)  # drafts of the last proposal that lie behind them

    def propose(self, length_B: list[int]) -> Proposal:
        stop = EarlyStop(greedy, length_B, self.drafter.stop_below)
        return Proposal(self._draft(length_B, stop), stop.length_B)

    def sample(self, length_B: list[int], sampler: DraftSampler) -> Proposal:
        stop = EarlyStop(sampler, length_B, self.drafter.stop_below, sampler.temperature)
        tokens_BK = self._draft(length_B, stop)
        ids_W = torch.arange(self.drafter.num_tokens, device=tokens_BK.device)
        law_BKV = sampler.law_BKV(ids_W, self.drafter.vocab_size) if tokens_BK.shape[1] else None
        return Proposal(tokens_BK, stop.length_B, law_BKV)

    def accept(self, states: States, blocks: list[list[int]]) -> None:
        for row, block in enumerate(blocks):
            self.texts[row] += block
            self.num_read[row] += min(len(block) - 1, self.num_drafts_read[row])
            self.num_drafts_read[row] = 0

    def select(self, rows: list[int]) -> None:
        for row, source in enumerate(rows):
            if row != source:
                self.cache.move_row(source, row, self.num_read[source])
        self.texts = [self.texts[row] for row in rows]
        self.num_read = [self.num_read[row] for row in rows]
        self.num_drafts_read = [self.num_drafts_read[row] for row in rows]

    def propose_tree(self, growth: Growth) -> Proposal:
        """Trees grown level by level; each level is read together with the nodes above it and the last token, their root."""
        model, device = self.drafter.model, self.drafter.model.device
        logits_BWV = self._read_texts(list(range(len(self.texts))))[:, None]
        self.num_read = [len(text) for text in self.texts]
        root_B = torch.tensor(self.num_read, device=device) - 1
        tokens = [text[-1:] for text in self.texts]
        parents = [[-1] for _ in self.texts]
        first, width = 0, 1  # nodes of the last level
        while (level := growth(logits_BWV)) is not None:
            for row, (parent_W, index_W) in enumerate(zip(level.parent_BW, level.index_BW, strict=True)):
                parents[row] += (first + parent_W).tolist()
                tokens[row] += index_W.tolist()
            first, width = first + width, level.index_BW.shape[1]
            trees = [Tree(tuple(nodes)) for nodes in parents]
            states = model.forward(torch.tensor(tokens, device=device), root_B, self.cache, trees=trees)
            logits_BWV = self.drafter.logits(states.final[:, first:])
        return growth.proposal(torch.arange(self.drafter.num_tokens, device=device), self.drafter.vocab_size)

    def _read_texts(self, rows: list[int]) -> Tensor:
        """Read what these rows have not read yet; logits [len(rows), num_tokens] behind their last tokens."""
        fed = [self.texts[row][self.num_read[row] :] for row in rows]
        return self._read(rows, fed, [self.num_read[row] for row in rows])

    def _read(self, rows: list[int], fed: list[list[int]], start: list[int]) -> Tensor:
        """Logits behind the last of the tokens that each row is fed, from position `start` on."""
        model, device = self.drafter.model, self.drafter.model.device
        number_B = torch.tensor([len(part) for part in fed], device=device)
        index_B = None if len(rows) == len(self.texts) else torch.tensor(rows, device=device)
        start_B = torch.tensor(start, device=device)
        states = model.forward(padded(fed, device), start_B, self.cache, number_B, index_B)
        return self.drafter.logits(states.final[torch.arange(len(rows), device=device), number_B - 1])

    def _draft(self, length_B: list[int], sampler: Sampler) -> Tensor:
        """Tokens [B, max(length_B)]; a row is fed no further than its own length, for its context may end there."""
        device = self.drafter.model.device
        logits_BV = torch.zeros(len(self.texts), self.drafter.num_tokens, device=device)
        tokens = [torch.zeros(len(self.texts), 0, dtype=torch.int64, device=device)]
        for j in range(max(length_B)):
            rows = [row for row, length in enumerate(length_B) if length > j]
            if j == 0:
                logits_BV[rows] = self._read_texts(rows)
            else:
                drafted = [[int(tokens[-1][row])] for row in rows]
                logits_BV[rows] = self._read(rows, drafted, [len(self.texts[row]) + j - 1 for row in rows])
            chosen_B = sampler(logits_BV)
            if chosen_B is None:
                break
            tokens.append(chosen_B[:, None])
        for row, length in enumerate(length_B):
            if length > 0:
                self.num_read[row] = len(self.texts[row])
                self.num_drafts_read[row] = min(length - 1, j)
        return torch.cat(tokens, dim=1)


@torch.no_grad()
def language_model_acceptance(
    drafter: LanguageModelDrafter,
    paths: Sequence[Path],
    draft_length: int,
    temperature: float = 0.0,
    law: TargetLaw | None = None,
) -> list[ReplyAcceptance]:
    """Exact offline acceptance of a model drafter, from one teacher-forced pass of it (and of the target).

    What it drafts for a position depends on the text before it and not on where the block began, so r_{t,j} is a number
    of the drafted position t+2+j alone (`acceptance_probabilities` has the rule).

    Args:
        temperature: of the draft; 0 drafts greedily.
        law: what the paths were drawn by; needed for a temperature above 0.

    Raises:
        WrongInput: paths recorded at another sampling setting than the law's.
    """
    if law is None and temperature > 0:
        raise ValueError("acceptance of sampled drafts needs the law that the paths were drawn by")
    if law is not None:
        law.check(path.sampling for path in paths)
    model = drafter.model
    replies = []
    for begin in range(0, len(paths), READ_PATHS):
        chunk = paths[begin : begin + READ_PATHS]
        readable = [path.token_N[: model.facts.max_position + 1] for path in chunk]
        target_states = law.target.read([path.token_N for path in chunk]) if law and temperature > 0 else None
        for i, (path, states) in enumerate(zip(chunk, model.read(readable), strict=True)):
            first = path.num_prompt_tokens  # slot that drafts the second reply token
            label_S = torch.from_numpy(path.token_N[first + 1 : len(states.final) + 1].astype(np.int64))
            label_S = label_S.to(model.device)
            logq_S = drafter.logprobs(states.final[first:], label_S, temperature)
            logp_S = torch.zeros_like(logq_S)
            if law is not None and target_states is not None:
                final_SH = target_states[i].final[first : first + len(label_S)]
                logp_S = law.logprobs(final_SH, label_S.to(final_SH.device)).to(logq_S.device)
            accept_S = (logq_S - logp_S).clamp_max(0).exp().cpu().numpy()
            num_unknown = int((label_S >= drafter.num_tokens).sum())
            replies.append(spread(path, accept_S, num_unknown, draft_length))
    return replies


def spread(path: Path, accept_S: np.ndarray, num_unknown: int, draft_length: int) -> ReplyAcceptance:
    """r_{t,j} of all starts from one number a drafted position; positions beyond the last number are not drafted."""
    num_starts = max(path.num_reply_tokens - 1, 0)
    position_TK = np.add.outer(np.arange(num_starts), np.arange(draft_length))
    judged_TK = position_TK < len(accept_S)
    padded_S = np.append(accept_S, 0.0)
    accept_TK = padded_S[np.minimum(position_TK, len(accept_S))]
    return ReplyAcceptance(path.prompt_id, path.route, accept_TK, judged_TK, num_unknown)
