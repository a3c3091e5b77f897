"""Laws of the sampling rule: one distribution, written down plainly here and drawn from exactly."""

import numpy as np
import pytest
import torch

from headstart.heads.sampling import (
    NUM_CANDIDATES,
    Sampling,
    filtered_logprobs,
    filtered_probabilities,
    request_generator,
    request_uniforms,
    sample,
)

RULES = [
    Sampling(1.0),
    Sampling(0.7),
    Sampling(1.0, top_k=5),
    Sampling(1.3, top_p=0.8),
    Sampling(0.9, top_k=20, top_p=0.6),
    Sampling(1.0, top_p=0.999),
    Sampling(0.8, min_p=0.1),
    Sampling(1.2, top_k=30, top_p=0.7, min_p=0.02),
]


def plain_distribution(logits_V: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Temperature, min-p, top-k, then the smallest set of at least top_p mass, by sorting in double precision."""
    order = np.argsort(-logits_V, kind="stable")
    scaled = logits_V[order].astype(np.float64) / sampling.temperature
    scaled[np.exp(scaled - scaled[0]) < sampling.min_p] = -np.inf
    if sampling.top_k:
        scaled[sampling.top_k :] = -np.inf
    mass = np.exp(scaled - scaled.max())
    mass /= mass.sum()
    mass[np.cumsum(mass) - mass >= sampling.top_p] = 0
    out = np.zeros_like(mass)
    out[order] = mass / mass.sum()
    return out


@pytest.mark.parametrize("sampling", RULES, ids=str)
@pytest.mark.parametrize("vocab_size", [40, 3000])
def test_filtered_distribution_is_the_plainly_sorted_one(sampling, vocab_size):
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(1)) * 2
    found = filtered_logprobs(logits, sampling).exp().numpy()
    for row in range(3):
        # Single precision may put the last kept token on the other side of top_p: as much mass as that token has.
        np.testing.assert_allclose(found[row], plain_distribution(logits[row].numpy(), sampling), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sampling", [*RULES, Sampling()], ids=str)
def test_the_law_verification_judges_by_is_the_one_tokens_are_drawn_from(sampling):
    logits = torch.randn(2, 3, 700, generator=torch.Generator().manual_seed(4)) * 2
    logits[..., 600:] = -torch.inf
    law, logprobs = filtered_probabilities(logits, sampling), filtered_logprobs(logits, sampling)
    assert law.dtype == torch.float64
    torch.testing.assert_close(law.sum(-1), torch.ones(2, 3, dtype=torch.float64), rtol=1e-14, atol=0)
    assert torch.equal(law > 0, logprobs > -torch.inf)
    torch.testing.assert_close(law, logprobs.double().exp(), rtol=1e-5, atol=0)


def test_a_setting_without_min_p_is_recorded_as_before():
    assert Sampling(0.7, 5, 0.9).to_dict() == {"temperature": 0.7, "top_k": 5, "top_p": 0.9}
    assert Sampling(0.7, min_p=0.1).to_dict() == {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.1}


def test_a_flat_distribution_needs_more_than_the_usual_candidates():
    logits = torch.zeros(1, 4 * NUM_CANDIDATES)
    logits[0, ::2] = 0.01
    kept = filtered_logprobs(logits, Sampling(1.0, top_p=0.9)).isfinite().sum()
    assert kept == pytest.approx(0.9 * 4 * NUM_CANDIDATES, abs=2)


@pytest.mark.parametrize("sampling", RULES, ids=str)
def test_evenly_spaced_numbers_draw_each_token_as_often_as_its_probability(sampling):
    logits = torch.randn(1, 700, generator=torch.Generator().manual_seed(2)) * 2
    number = 20_000
    uniforms = (torch.arange(number, dtype=torch.float64) + 0.5) / number
    drawn = sample(logits.expand(number, -1), sampling, uniforms)
    shares = torch.bincount(drawn, minlength=700) / number
    torch.testing.assert_close(shares, filtered_logprobs(logits, sampling)[0].exp(), atol=2 / number, rtol=1e-3)


def test_ids_without_mass_are_never_drawn():
    logits = torch.randn(4, 600, generator=torch.Generator().manual_seed(3))
    logits[:, 500:] = -torch.inf
    ends = torch.tensor([0.0, 1.0 - 2**-53, 0.5, 0.999999999], dtype=torch.float64)
    for sampling in RULES:
        drawn = sample(logits, sampling, ends)
        assert filtered_logprobs(logits, sampling).gather(1, drawn[:, None]).isfinite().all()


def test_greedy_takes_the_first_of_equal_logits():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    assert sample(logits, Sampling()).tolist() == [1]
    assert filtered_logprobs(logits, Sampling()).exp().tolist() == [[0, 1, 0, 0]]


def test_random_numbers_belong_to_the_request():
    numbers = request_uniforms("a", 0, 8)
    assert numbers.tolist() == request_uniforms("a", 0, 16)[:8].tolist()
    assert numbers.tolist() == request_generator("a", 0).random(8).tolist()
    assert numbers.tolist() != request_uniforms("b", 0, 8).tolist()
    assert numbers.tolist() != request_uniforms("a", 1, 8).tolist()
