"""Laws of the intervals: what they cover, what a paired comparison detects, and how several are corrected."""

import numpy as np
import pytest

from headstart.eval.statistics import (
    LEVEL,
    endpoints,
    holm,
    interval,
    looks,
    p_value,
    paired_ratio,
    ratio,
    relative_width,
    resampling_weights,
    student_p_value,
    student_quantile,
    tail_share,
)

REPLICATES, REPLICATIONS = 2000, 1000


def make_world(seed=0, num=240):
    """Tokens and steps of prompts as a run has them: most replies are cut at a limit, some are short, some loop."""
    generator = np.random.default_rng(seed)
    tokens_R = np.where(generator.random(num) < 0.7, 127, generator.integers(5, 127, num)).astype(float)
    accept_R = 1 + generator.gamma(4, 0.2, num)
    accept_R = np.where(generator.random(num) < 0.05, 4.0, accept_R).clip(1, 5)
    return tokens_R, np.ceil(tokens_R / accept_R)


@pytest.mark.parametrize("num_prompts", [60, 200])
def test_95_percent_intervals_hold_93_to_97_percent_of_the_time(num_prompts):
    tokens_R, steps_R = make_world()
    true = tokens_R.sum() / steps_R.sum()
    generator = np.random.default_rng(num_prompts)
    weights_BR = resampling_weights(num_prompts, REPLICATES, 0)
    covered, widths, plain_widths = 0, 0.0, 0.0
    for _ in range(REPLICATIONS):
        drawn = generator.integers(0, len(tokens_R), num_prompts)
        samples_B = ratio(weights_BR @ tokens_R[drawn], weights_BR @ steps_R[drawn])
        low, high = endpoints(samples_B, num_prompts)
        covered += low <= true <= high
        widths += high - low
        plain_widths += np.subtract(*np.quantile(samples_B, [0.975, 0.025]))
    assert 0.93 <= covered / REPLICATIONS <= 0.97
    assert 1 < widths / plain_widths < 1.06  # what few prompts cost, and no more


def test_three_percent_are_detected_on_200_prompts_and_nothing_is_seldom():
    tokens_R, steps_R = make_world()
    generator = np.random.default_rng(1)
    other_R = steps_R * np.exp(generator.normal(0, 0.08, len(steps_R)))  # heads differ by 8 % from prompt to prompt
    other_R *= steps_R.sum() / other_R.sum()  # and are equal on the whole
    weights_BR = resampling_weights(200, REPLICATES, 0)
    alarms, detected = 0, 0
    for _ in range(REPLICATIONS):
        drawn = generator.integers(0, len(tokens_R), 200)
        _, samples_B = paired_ratio(tokens_R[drawn], other_R[drawn], tokens_R[drawn], steps_R[drawn], weights_BR)
        low, high = endpoints(samples_B, 200)
        alarms += not low <= 1 <= high
        detected += low * 1.03 > 1  # the interval of a head whose steps are 3 % fewer throughout
    assert detected / REPLICATIONS >= 0.9
    assert 0.03 <= alarms / REPLICATIONS <= 0.07


@pytest.mark.parametrize(("freedom", "expected"), [(4, 2.7764), (9, 2.2622), (59, 2.0010), (10**6, 1.9600)])
def test_students_quantile_is_that_of_the_tables(freedom, expected):
    assert student_quantile(0.975, freedom) == pytest.approx(expected, rel=4e-3)
    assert student_quantile(0.025, freedom) == pytest.approx(-expected, rel=4e-3)


@pytest.mark.parametrize(
    ("t", "freedom", "expected"), [(2.5706, 5, 0.05), (2.001, 59, 0.05), (-4.2073, 59, 8.92e-5), (3.2905, 10**6, 1e-3)]
)
def test_students_p_value_is_that_of_the_tables(t, freedom, expected):
    assert student_p_value(t, freedom) == pytest.approx(expected, rel=0.02)


def test_percentiles_go_further_out_the_fewer_prompts_there_are():
    shares = [tail_share(num) for num in (2, 5, 20, 60, 200, 10**7)]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(0.025, rel=1e-4)
    assert tail_share(60) == pytest.approx(0.0218, abs=2e-4)


def test_few_prompts_have_a_value_and_no_interval():
    for num_prompts in (1, 5):
        found = interval(1.5, np.full(100, 1.5), num_prompts)
        assert found == {"value": 1.5, "low": None, "high": None}
        assert relative_width(found) == float("inf")
    assert interval(1.5, np.full(100, 1.5), 6) == {"value": 1.5, "low": 1.5, "high": 1.5}
    assert interval(float("nan"), np.full(100, 1.5), 60) == {"value": None, "low": None, "high": None}


def test_p_below_5_percent_is_the_interval_leaving_one():
    generator = np.random.default_rng(0)
    seen = set()
    for shift in np.linspace(0.9, 1.1, 41):
        samples_B = generator.normal(shift, 0.03, 999)
        low, high = endpoints(samples_B, 30, LEVEL)
        holds = low <= 1 <= high
        assert (p_value(samples_B, 30) >= 0.05) == holds
        seen.add(holds)
    assert seen == {True, False}
    assert p_value(np.ones(99), 30) == 1
    assert p_value(np.full(99, 2.0), 30) == 2 / 100  # replicates cannot tell more


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


def test_a_pair_is_compared_within_prompts():
    tokens_R, steps_R = make_world()
    weights_BR = resampling_weights(len(tokens_R), 200, 0)
    value, samples_B = paired_ratio(tokens_R, steps_R / 1.03, tokens_R, steps_R, weights_BR)
    assert value == pytest.approx(1.03)
    assert samples_B == pytest.approx(np.full(200, 1.03))  # a constant gain has no uncertainty, however prompts differ


@pytest.mark.parametrize("num_prompts", [1, 59, 60, 61, 240, 1000])
def test_looks_are_fixed_and_end_with_all_prompts(num_prompts):
    numbers = looks(num_prompts)
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == num_prompts
    assert all(number in looks(10**6) for number in numbers[:-1])
