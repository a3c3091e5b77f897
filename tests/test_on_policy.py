"""Laws of learning from the draft's own continuations: they are its words, the target's judgement, and they repeat."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from headstart.eval.decode import decode
from headstart.eval.speculation import PLAIN
from headstart.heads.draft import DraftModel
from headstart.heads.settings import DraftSettings, MedusaSettings
from headstart.launch.settings import Recipe
from headstart.trainer.data import EvaluationRows, TrainingRows
from headstart.trainer.loop import Job, optimizer_step, train
from headstart.trainer.on_policy import OnPolicyRows
from headstart.trainer.settings import LossSettings, TrainSettings
from tests.small_decoding import NO_STOP, make_path, make_prompts
from tests.small_training import RandomFeatures

SEED = 3
SETTINGS = TrainSettings(
    num_steps=6, batch_tokens=150, learning_rate=2e-3, warmup_steps=2, dtype="float32", depth=1, on_policy=0.5,
    eval_every=6, save_every=3, log_every=1, loss=LossSettings(kind="kl"),
)  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tiny_target):
    """Ten replies of the target with their features."""
    prompts = make_prompts(tiny_target, [1, 7, 5, 12, 9, 3, 20, 8, 6, 11])
    replies = decode(tiny_target, prompts, PLAIN, 24, NO_STOP, batch=10)
    paths = [
        make_path(p, r.token_ids[: 15 + i], f"p{i}") for i, (p, r) in enumerate(zip(prompts, replies, strict=True))
    ]
    features = RandomFeatures()
    for path, states in zip(paths, tiny_target.read([path.token_N for path in paths]), strict=True):
        features.states[path.prompt_id] = states.taps.bfloat16().clone(), states.final.bfloat16().clone()
    return paths, features


def new_head(target, seed=0):
    torch.manual_seed(seed)
    head = DraftModel(DraftSettings(), target.facts, torch.arange(target.facts.num_tokens))
    head.load_target(target, initialise=True)
    return head


def own_rows(target, recorded, head, share=1.0):
    return OnPolicyRows(*recorded, SETTINGS.batch_tokens, SEED, head=head, target=target, share=share)


def texts_of(batch):
    """Token ids of each path of a batch, by prompt id."""
    bounds = zip(batch.offsets, batch.offsets[1:], batch.prompt_ids, strict=False)
    return {name: [int(batch.token_T[a]), *batch.next_token_T[a:b].tolist()] for a, b, name in bounds}


def test_continuations_are_the_heads_words_and_the_targets_judgement(tiny_target, recorded):
    head = new_head(tiny_target)
    rows = own_rows(tiny_target, recorded, head)
    batch, plain = rows.batch(1), TrainingRows(*recorded, SETTINGS.batch_tokens, SEED).batch(1)
    assert batch.offsets == plain.offsets
    assert torch.equal(batch.next_generated_T, plain.next_generated_T)  # the same pairs as recorded
    names = [path.prompt_id for path in rows.paths]
    for name, text in texts_of(batch).items():
        row = names.index(name)
        path = rows.paths[row]
        first = path.num_prompt_tokens
        assert text[:first] == path.token_N[:first].tolist()
        assert text[first:] != path.token_N[first:].tolist()
        assert not set(text[first:]) & set(tiny_target.facts.stop_ids)
        token_T = torch.tensor(text)
        with torch.no_grad():
            logits_TV = head.logits(head.model.paths(head.embed(token_T), torch.arange(len(text)), [0, len(text)]))
            law_TV = logits_TV.double().softmax(-1)
            law_TV[:, tiny_target.facts.stop_ids] = 0
            law_TV /= law_TV.sum(-1, keepdim=True)
            mass_TV = law_TV.cumsum(-1)
            logp_TV = tiny_target.model(token_T[None]).logits[0, :, :500].log_softmax(-1)
        uniform_K = np.random.default_rng([SEED, 1, 1 + row]).random(len(text) - first)
        begin = batch.offsets[batch.prompt_ids.index(name)]
        for position, uniform in zip(range(first, len(text)), uniform_K, strict=True):
            token, mass_V = text[position], mass_TV[position - 1]
            assert mass_V[token] - law_TV[position - 1, token] - 1e-5 <= uniform <= mass_V[token] + 1e-5
            found = float(batch.next_logprob_T[begin + position - 1])
            assert found == pytest.approx(float(logp_TV[position - 1, token]), abs=1e-3)


def test_continuations_repeat_and_do_not_depend_on_the_split(tiny_target, recorded):
    rows = own_rows(tiny_target, recorded, new_head(tiny_target))
    whole = texts_of(rows.batch(2))
    assert texts_of(own_rows(tiny_target, recorded, new_head(tiny_target)).batch(2)) == whole
    parts = [texts_of(rows.batch(2, micro, accumulate=2)) for micro in range(2)]
    assert parts[0] | parts[1] == whole
    later = texts_of(rows.batch(4))
    assert all(later[name] != whole[name] for name in later.keys() & whole.keys())


def test_a_share_of_the_steps_is_the_heads_own(tiny_target, recorded):
    head = new_head(tiny_target)
    assert 70 < sum(own_rows(tiny_target, recorded, head, 0.5).reads_head(step) for step in range(1, 201)) < 130
    rows = own_rows(tiny_target, recorded, head, 0.0)
    assert texts_of(rows.batch(1)) == texts_of(TrainingRows(*recorded, SETTINGS.batch_tokens, SEED).batch(1))


def test_the_head_learns_to_say_what_the_target_would(tiny_target, recorded):
    head = new_head(tiny_target)
    rows = own_rows(tiny_target, recorded, head)
    job = Job.open(head, tiny_target.output_weight(), rows, replace(SETTINGS, num_steps=45))
    losses = []
    for step in range(1, 46):
        sums = optimizer_step(job, step).sums
        losses.append(float(sums.loss_D / sums.pairs_D))
    assert np.mean(losses[-5:]) < 0.85 * np.mean(losses[:3])


def test_training_with_own_steps_resumes_as_if_never_stopped(tiny_target, recorded, tmp_path):
    def run(folder, seed=0):
        head = new_head(tiny_target, seed)
        rows = own_rows(tiny_target, recorded, head, SETTINGS.on_policy)
        assert {rows.reads_head(step) for step in (4, 5, 6)} == {True, False}
        validation = EvaluationRows(recorded[0][:2], recorded[1], 256)
        train(Job.open(head, tiny_target.output_weight(), rows, SETTINGS, draft_length=2), validation, folder)
        return head

    unbroken = run(tmp_path / "unbroken")
    run(tmp_path / "broken")
    (tmp_path / "broken" / "checkpoints" / "last").write_text("step-000003\n")
    resumed = run(tmp_path / "broken", seed=5)
    for name, tensor in unbroken.trained_tensors().items():
        assert torch.equal(tensor, resumed.trained_tensors()[name]), name


def test_kinds_that_cannot_go_on_and_losses_of_the_token_are_refused():
    found = dict(Recipe(head=MedusaSettings(), train=TrainSettings(on_policy=0.5, depth=4)).conflicts())
    assert "expected 0: medusa cannot go on without the target's states (draft can)" in found["train.on_policy"]
    found = dict(
        Recipe(head=DraftSettings(), train=TrainSettings(on_policy=0.5, loss=LossSettings(kind="ce"))).conflicts()
    )
    assert "found ce with train.on_policy = 0.5" in found["train.loss.kind"]
    assert not dict(Recipe(head=DraftSettings(), train=TrainSettings(on_policy=0.5)).conflicts())
