"""A head learns from a real target: the loss falls, measured acceptance rises, and both can be read back."""

import struct
from dataclasses import replace

import numpy as np
import pytest
import torch

from headstart.heads.eagle3 import Eagle3
from headstart.heads.paths import Path, Prompt
from headstart.heads.settings import Eagle3Settings
from headstart.heads.vocabulary import choose_draft_vocabulary
from headstart.trainer.data import EvaluationRows, TrainingRows
from headstart.trainer.loop import Job, train
from headstart.trainer.metrics import METRICS, read_metrics
from headstart.trainer.settings import TrackingSettings, TrainSettings
from tests.small_training import SETTINGS, RandomFeatures, make_lengths, make_paths, run
from tests.test_resume import StopsAt

WORDS = ["rivers", "boats", "a list", "winter", "numbers", "bread", "music", "a letter"]


@pytest.fixture(scope="module")
def answered(tiny_target):
    """Greedy replies of the tiny target with their features, as traffic records them."""
    features, paths = RandomFeatures(), []
    target = tiny_target
    for word in WORDS:
        prompt = Prompt("chat", ({"role": "user", "content": f"Tell me about {word}."},))
        token_ids, logprobs = target.render(prompt), []
        num_prompt = len(token_ids)
        while len(token_ids) < num_prompt + 24 and token_ids[-1] not in target.facts.stop_ids:
            with torch.inference_mode():
                final = target.model.base_model(torch.tensor([token_ids])).last_hidden_state[0, -1]
            logprob_V = torch.log_softmax(target.logits(final), -1)
            token_ids.append(int(logprob_V.argmax()))
            logprobs.append(float(logprob_V.max()))
        token_N = np.array(token_ids, np.int32)
        logprob_N = np.concatenate((np.full(num_prompt, np.nan), logprobs)).astype(np.float32)
        path = Path(prompt.prompt_id, "chat", "train", token_N, ~np.isnan(logprob_N), logprob_N, "length", {})
        states = target.read([token_N])[0]
        features.states[path.prompt_id] = states.taps.bfloat16(), states.final.bfloat16()
        paths.append(path)
    return paths, features


def make_head(target, paths, size):
    counts = np.bincount(np.concatenate([p.token_N[p.generated_N] for p in paths]), minlength=target.facts.vocab_size)
    torch.manual_seed(0)
    head = Eagle3(Eagle3Settings(), target.facts, torch.from_numpy(choose_draft_vocabulary(counts, size, target.facts)))
    head.load_target(target, initialise=True)
    return head


# Losses whose gradient is proportional to q start slowly: it is tiny where a fresh head is wrong. tv is the slowest.
@pytest.mark.parametrize(("kind", "loss_falls_to", "reached"), [
    ("kl", 0.5, 2.5), ("reverse_kl", 0.6, 1.3), ("jsd", 0.7, 1.7), ("ce", 0.5, 2.5), ("tv", 0.8, 1.3),
    ("lk_hybrid", 0.5, 2.5),
])  # fmt: skip
def test_a_memorisable_set_is_memorised(tiny_target, answered, tmp_path, kind, loss_falls_to, reached):
    """The law of the whole stage: what is trained is what live acceptance measures, so seen replies are drafted well."""
    paths, features = answered
    settings = TrainSettings(
        num_steps=80, batch_tokens=256, learning_rate=5e-3, warmup_steps=5, dtype="float32", eval_every=40, log_every=20,
        loss=replace(SETTINGS.loss, kind=kind),
    )  # fmt: skip
    rows = TrainingRows(paths, features, settings.batch_tokens, 0)
    validation = EvaluationRows(paths, features, 256)
    head = make_head(tiny_target, paths, 400)
    train(Job.open(head, tiny_target.output_weight(), rows, settings, draft_length=3), validation, tmp_path)
    lines = read_metrics(tmp_path / METRICS)
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    accept_len = [line["accept_len"] for line in lines if "accept_len" in line]
    assert losses[-1] < loss_falls_to * losses[0]
    assert accept_len[0] < 1.2 < reached < accept_len[-1]
    assert lines[-1]["acceptance/position_0"] > lines[0]["acceptance/position_0"] + 0.2
    assert lines[-1]["train/in_vocab_mass"] > 0.8


def test_recorded_log_probabilities_give_the_targets_own_mass(tiny_target, answered):
    """log Z from one logit and its record equals the sum over the whole vocabulary."""
    from headstart.heads.batch import pack, supervised_pairs
    from headstart.heads.contract import Rollout
    from headstart.trainer.losses import Teacher, pair_loss

    paths, features = answered
    states = {path.prompt_id: tiny_target.read([path.token_N])[0] for path in paths}
    batch = pack([(path, states[path.prompt_id].taps, states[path.prompt_id].final) for path in paths])
    draft_ids = torch.arange(0, 500, 3)
    start_S, valid_SD = supervised_pairs(batch, 1)
    rollout = Rollout(torch.zeros(len(start_S), 1, 64), start_S, valid_SD)
    teacher = Teacher(tiny_target.output_weight(), draft_ids, torch.float32)
    _, sums = pair_loss(rollout, [torch.zeros(len(draft_ids), 64)], batch, teacher, SETTINGS.loss, 1.0)
    p_UV = torch.softmax(tiny_target.logits(batch.final_TH[start_S + 1]), -1)
    assert sums.mass_D.item() == pytest.approx(float(p_UV[:, draft_ids].double().sum()), rel=1e-4)


def offline_history(folder):
    """History rows of the last offline W&B run in `folder`, decoded from its record file (LevelDB log format)."""
    import json

    from wandb.proto import wandb_internal_pb2

    file = max(folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda file: file.stat().st_mtime_ns)
    data, position, rows, parts = file.read_bytes(), 7, [], b""
    while position + 7 <= len(data):
        _, size, kind = struct.unpack_from("<IHB", data, position)
        left = 32768 - position % 32768
        if left < 7 or kind == 0:  # the rest of a block is padding
            position += left
            continue
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record.FromString(parts)
            parts = b""
            if record.HasField("history"):
                items = record.history.item
                rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def test_the_offline_run_holds_the_curves_of_metrics_jsonl_however_often_training_was_stopped(tmp_path, capsys):
    options = {"tracking": TrackingSettings(), "name": "small", "config": {"train": {"num_steps": SETTINGS.num_steps}}}
    rows = StopsAt(*make_paths(make_lengths(14)), SETTINGS.batch_tokens, 0)
    rows.stop_step = 9
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, rows=rows, **options)
    printed = capsys.readouterr().out
    assert f"{SETTINGS.num_steps} steps of {SETTINGS.batch_tokens} tokens" in printed
    assert "a checkpoint takes 0." in printed
    run(tmp_path, **options)
    shown = {row["_step"]: row for row in offline_history(tmp_path)}
    lines = read_metrics(tmp_path / METRICS)
    assert shown.keys() == {line["step"] for line in lines}
    for line in lines:
        for key in ("train/loss", "accept_len", "acceptance/position_0", "survival/position_1", "tokens"):
            assert shown[line["step"]].get(key) == line.get(key)
    assert sum("acceptance/position_0" in row for row in shown.values()) == 4


def test_a_tracker_that_cannot_start_does_not_stop_training(tmp_path, capsys):
    (tmp_path / "wandb").write_text("in the way")
    _, progress = run(tmp_path, tracking=TrackingSettings(), name="small")
    assert progress.step == SETTINGS.num_steps
    assert "tracking" in capsys.readouterr().out
