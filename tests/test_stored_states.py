"""Held-out acceptance reads the target's states where traffic kept them; what it reads changes no figure."""

import dataclasses

import numpy as np
import pytest
import torch

from headstart.eval.heldout import Heldout, head_acceptance, measure_setting
from headstart.eval.measure import evaluate
from headstart.eval.settings import EvalSettings
from headstart.eval.subject import Subject, read_batches
from headstart.heads.checkpoint import save_head
from headstart.heads.errors import WrongInput
from headstart.heads.features import FeatureReader
from headstart.heads.paths import read_paths
from headstart.heads.target import TargetLoader
from headstart.launch.run import RunFolder
from headstart.launch.stages import stored_features
from headstart.trainer.heldout_traffic import at_temperature, make_heldout_traffic
from headstart.trainer.traffic import make_traffic
from tests.small_decoding import untrained_head
from tests.test_traffic import SETTINGS as TRAFFIC
from tests.test_traffic import TINY, prompts_stage, some_prompts

SETTINGS = EvalSettings(draft_lengths=[1, 3], draft_length=3, trees=[[2, 2]], replicates=20)


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """Root, prompts, traffic and features of a recipe at temperature 1."""
    root = tmp_path_factory.mktemp("runs")
    prompts = prompts_stage(root, some_prompts(24, ("train", "heldout")))
    traffic, features = make_traffic(TargetLoader(TINY), prompts, dataclasses.replace(TRAFFIC, temperature=1.0), root)
    return root, prompts, traffic, features


@pytest.fixture(scope="module")
def subject(stages):
    """A head on the held-out replies, with the states that traffic kept of them."""
    _, _, traffic, features = stages
    target = TargetLoader(TINY)("float32")
    paths = list(read_paths(traffic.folder, "heldout"))
    reader = FeatureReader(features.folder)
    return Subject(target, untrained_head(target), paths, ["chat", "code"], SETTINGS, 0, lambda line: None, reader)


def test_stored_states_are_what_is_read(subject):
    (batch,) = subject.batches(subject.paths)
    stored = [subject.features.get(path.prompt_id) for path in subject.paths]
    assert torch.equal(batch.taps_TF, torch.cat([taps for taps, _ in stored]))
    assert torch.equal(batch.final_TH, torch.cat([final for _, final in stored]))


def test_acceptance_on_stored_states_is_that_of_a_pass_of_the_target(subject):
    stored, read = head_acceptance(subject), head_acceptance(dataclasses.replace(subject, features=None))
    assert stored.keys() == read.keys() == {"greedy", "sampled"}
    for draft in stored:
        for a, b in zip(stored[draft], read[draft], strict=True):
            assert a.prompt_id == b.prompt_id
            assert np.array_equal(a.rank_TK, b.rank_TK)
            np.testing.assert_allclose(a.accept_TK, b.accept_TK, atol=1e-5)
            np.testing.assert_allclose(a.confidence_TK, b.confidence_TK, atol=1e-5)


@pytest.mark.parametrize("taps", [[0, 4], [1, 2, 4]])
def test_states_at_other_taps_are_not_taken(stages, taps):
    """The second has as many taps as the stored ones, so that nothing but their names tells them apart."""
    _, _, traffic, features = stages
    target = TargetLoader(TINY, taps)("float32")
    paths = list(read_paths(traffic.folder, "heldout"))
    (batch,) = read_batches(target, untrained_head(target), paths, FeatureReader(features.folder))
    assert torch.equal(batch.taps_TF, torch.cat([states.taps for states in target.read([p.token_N for p in paths])]))


def test_rounded_states_are_not_taken(stages):
    _, _, traffic, features = stages
    target = TargetLoader(TINY)("float32")
    paths = list(read_paths(traffic.folder, "train"))
    (batch,) = read_batches(target, untrained_head(target), paths, FeatureReader(features.folder))
    assert torch.equal(batch.final_TH, torch.cat([states.final for states in target.read([p.token_N for p in paths])]))


def test_replies_of_another_setting_have_no_stored_states(stages, subject):
    """They belong to the same prompts, whose states of another reply must not be taken for theirs."""
    root, prompts, *_ = stages
    other = at_temperature(dataclasses.replace(TRAFFIC, temperature=1.0), 0.0)
    stage = make_heldout_traffic(TargetLoader(TINY), prompts, other, root)
    paths = list(read_paths(stage.folder, "heldout"))
    own = {path.prompt_id: path.token_N.tolist() for path in subject.paths}
    assert any(path.token_N.tolist() != own[path.prompt_id] for path in paths)
    without = dataclasses.replace(subject, features=None)
    assert measure_setting(subject, paths, False, 12) == measure_setting(without, paths, False, 12)


def test_states_of_other_replies_are_refused(stages):
    """They have the same prompts, taps and precision; only what they were made of tells them apart."""
    root, prompts, traffic, features = stages
    _, others = make_traffic(TargetLoader(TINY), prompts, TRAFFIC, root)
    run = RunFolder(root / "run")
    run.folder.mkdir()
    run.link("traffic", traffic.folder)
    run.link("features", features.folder)
    assert len(stored_features(run, TargetLoader(TINY))) == 24
    run.link("features", others.folder)
    with pytest.raises(WrongInput, match=f"replies {others.manifest['inputs']['parents']['traffic'][:12]}, expected"):
        stored_features(run, TargetLoader(TINY))


def test_replies_in_bfloat16_are_held_against_a_decoder_in_bfloat16(tmp_path):
    """In float32 a sound decoder says other things than they do, and would be called lossy for it.

    No part asks for the target in float32, which a device may not hold.
    """
    targets, asked = TargetLoader(TINY), []
    prompts = prompts_stage(tmp_path, some_prompts(5, ("heldout",)))
    rounded = dataclasses.replace(TRAFFIC, eval_dtype="bfloat16")
    traffic, features = make_traffic(targets, prompts, rounded, tmp_path)
    paths, reader = list(read_paths(traffic.folder, "heldout")), FeatureReader(features.folder)
    target = targets("bfloat16")
    (batch,) = read_batches(target, untrained_head(target), paths, reader)
    assert torch.equal(batch.final_TH, torch.cat([reader.get(path.prompt_id)[1] for path in paths]))
    save_head(tmp_path, untrained_head(targets("float32")), step=1)
    few = dataclasses.replace(
        SETTINGS, speed_prompts=2, speed_new_tokens=4, speed_repeats=1, speed_draft_lengths=[1], ngram=False
    )
    results = evaluate(
        lambda name: asked.append(name) or targets(name),
        tmp_path,
        Heldout(paths, dtype="bfloat16", features=reader),
        few,
        tmp_path / "eval",
        tell=lambda line: None,
    )
    assert {*asked} == {"bfloat16"}
    assert results["acceptance"]["environment"]["dtype"] == "bfloat16"
    assert {check["dtype"] for check in results["lossless"]["checks"]} == {"bfloat16"}
    assert results["lossless"]["verdict"] == "lossless"
    assert results["acceptance"]["live_agreement"]["unexplained"] == []
