"""Laws of the hours that a plan tells: a stage takes as long as the slowest of what it needs."""

from dataclasses import replace

import pytest

from headstart.launch.planning.estimate import Machine, Work, break_even, passing, training

WORK = Work(
    tokens=10**6, reply_tokens=10**5, trained_tokens=10**6, pass_tokens=1000, slots=10, layer_ops=2 * 10**9,
    layer_bytes=4 * 10**9, sharded=True, head_ops=10**9, token_bytes=10**4, streams=False,
    step_tokens=1000, stored_bytes=10**10,
)  # fmt: skip
FAST = Machine(processes=4, tflops=1e9, memory=1e9, link=1e9, disk=1e9)


@pytest.mark.parametrize(
    ("slow", "bound", "rate"),
    [
        ("tflops", "products", 4 * 1e12 / 2e9),  # each process multiplies
        ("memory", "memory", 4 * 1000 / 4.0),  # and reads all layers for its 1,000 tokens,
        ("link", "links", 4 * 1000 / 3.0),  # three quarters of them from the others
        ("disk", "disk", 1e9 / 1e4),  # the disk is one for all
    ],
)
def test_a_pass_is_bound_by_the_slowest_of_its_four_needs(slow, bound, rate):
    stage, faster = (
        passing(WORK, replace(FAST, **{slow: value}), WORK.pass_tokens, WORK.token_bytes) for value in (1.0, 2.0)
    )
    assert stage.bound == bound
    assert stage.rate == pytest.approx(rate)
    assert faster.rate == pytest.approx(2 * rate)


def test_a_target_that_is_whole_gathers_nothing_and_training_reads_its_states():
    assert passing(replace(WORK, sharded=False), replace(FAST, link=1e-9), 1000, 0).bound != "links"
    assert training(WORK, replace(FAST, tflops=1.0)).rate == pytest.approx(4 * 1e12 / 1e9)
    assert training(WORK, replace(FAST, disk=1.0)).rate == pytest.approx(1e9 / 1e4)


def test_training_that_streams_waits_for_a_pass_of_its_micro_batch_and_for_no_disk():
    slow = replace(FAST, tflops=1.0, link=1.0, disk=1e-9)
    stored, streams = replace(WORK, head_ops=10**10), replace(WORK, streams=True, head_ops=10**10, step_tokens=100)
    assert training(stored, slow).bound == "disk"
    # 4 x 100 tokens gather in 3 s, and the head's products of as many take 1 s.
    assert training(streams, slow).rate == pytest.approx(400 / (3.0 + 1.0))
    assert training(streams, slow).bound == "links"
    assert training(replace(streams, step_tokens=1000), slow).rate == pytest.approx(4000 / (3.0 + 10.0))
    assert training(replace(streams, step_tokens=1000), slow).bound == "products"


def test_states_are_worth_storing_where_they_are_read_faster_than_computed():
    # A pass of 4,000 tokens takes 2 s, and the disk moves one in 0.2 s: 2 E = 2 + 0.2 + 0.2 E at E = 2.2 / 1.8.
    machine = replace(FAST, tflops=1.0, disk=4000 * 1e4 / 0.2 / 1e9)
    assert break_even(WORK, machine) == "2"
    assert break_even(WORK, replace(machine, disk=4000 * 1e4 / 3.0 / 1e9)) == "never"
    # Micro-batches of half a pass take 4 s of links where long ones take 2: 4 E = 2 + 0.2 + 0.2 E at E = 2.2 / 3.8.
    short = replace(WORK, step_tokens=500, layer_bytes=2 * 10**9 * 4 // 3)
    assert break_even(short, replace(machine, tflops=1e9, link=1.0)) == "1"
