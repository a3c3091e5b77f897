"""A smaller draft vocabulary measured from the same pass is what the head accepts once it is really cut."""

import numpy as np
import pytest
import torch

from headstart.eval.acceptance import count_replies, drafts_acceptance, reply_acceptance
from headstart.eval.cut_vocabulary import cut_rows
from headstart.eval.decode import decode
from headstart.eval.settings import EvalSettings
from headstart.eval.speculation import Speculation
from headstart.eval.subject import Subject, read_batches
from headstart.eval.target_law import TargetLaw
from headstart.heads.checkpoint import build_head
from headstart.heads.sampling import Sampling
from tests.small_decoding import fitted_head, make_path, make_prompts

SAMPLING = Sampling(0.8)


@pytest.fixture(scope="module")
def paths(tiny_target):
    prompts = make_prompts(tiny_target, [7, 12, 20, 9, 11, 8])
    names = [f"p{i}" for i in range(len(prompts))]
    replies = decode(tiny_target, prompts, Speculation(sampling=SAMPLING), 16, batch=6, request_ids=names)
    return [make_path(p, r.token_ids, n, SAMPLING) for p, r, n in zip(prompts, replies, names, strict=True)]


@pytest.fixture(scope="module")
def head(tiny_target, paths):
    return fitted_head(tiny_target, paths)


def really_cut(head, target, ids_W):
    """The head with only those rows in its output layer."""
    small = build_head(head.settings, head.facts, ids_W)
    small.load_target(target, initialise=False)
    columns_W = torch.searchsorted(head.draft_ids_V, ids_W)
    state = head.trained_tensors()
    for name, tensor in small.trained_tensors().items():
        tensor.data.copy_(state[name] if state[name].shape == tensor.shape else state[name][columns_W])
    return small.eval()


@pytest.mark.parametrize("every", [2, 5])
def test_one_pass_gives_what_a_head_with_fewer_rows_accepts(tiny_target, head, paths, every):
    ids_W = head.draft_ids_V[::every].clone()
    law, batches = TargetLaw(tiny_target, SAMPLING), list(read_batches(tiny_target, head, paths))
    found = drafts_acceptance(head, batches, 3, (0.0, 0.8), law, vocabularies=[ids_W])
    assert len(found) == 4
    small = really_cut(head, tiny_target, ids_W)
    for replies, temperature in zip(found[2:], (0.0, 0.8), strict=True):
        for a, b in zip(replies, reply_acceptance(small, batches, 3, temperature, law), strict=True):
            np.testing.assert_allclose(a.accept_TK, b.accept_TK, atol=1e-6)
            np.testing.assert_allclose(a.confidence_TK, b.confidence_TK, atol=1e-6)
            assert np.array_equal(a.rank_TK, b.rank_TK)
            assert a.num_out_of_vocab == b.num_out_of_vocab
    for replies, temperature in zip(found[:2], (0.0, 0.8), strict=True):
        for a, b in zip(replies, reply_acceptance(head, batches, 3, temperature, law), strict=True):
            assert np.array_equal(a.accept_TK, b.accept_TK)


def test_rows_name_the_size_and_compare_with_the_whole(tiny_target, head, paths):
    settings = EvalSettings(draft_lengths=[1, 3], draft_length=3, replicates=50)
    subject = Subject(tiny_target, head, paths, ["chat"], settings, 0, lambda line: None)
    fewer, all_of_them = head.draft_ids_V[:40].numpy(), np.arange(tiny_target.facts.num_tokens)
    rows = cut_rows(subject, [fewer, all_of_them])
    assert [(row["draft_vocab_size"], row["draft"]) for row in rows] == [
        (40, "greedy"), (40, "sampled"), (len(head.draft_ids_V), "greedy"), (len(head.draft_ids_V), "sampled")
    ]  # fmt: skip
    for row in rows[2:]:
        assert row["ratio"]["value"] == 1
    law = TargetLaw(tiny_target, SAMPLING)
    counts = count_replies(reply_acceptance(head, read_batches(tiny_target, head, paths), 3, 0.8, law), 3)
    whole = sum(c.num_tokens for c in counts) / sum(c.num_steps for c in counts)
    assert rows[3]["accept_len"]["value"] == pytest.approx(whole)
    assert rows[1]["ratio"]["value"] == pytest.approx(rows[1]["accept_len"]["value"] / whole)
    assert rows[1]["out_of_vocab_share"] > rows[3]["out_of_vocab_share"]
