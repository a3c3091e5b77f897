"""Laws of traffic: a reply depends on its prompt alone, a killed run ends as an unbroken one, states are kept right."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from headstart.heads.errors import WrongInput
from headstart.heads.features import FeatureReader
from headstart.heads.paths import Prompt, read_paths
from headstart.heads.sampling import Sampling
from headstart.heads.settings import TargetSettings
from headstart.heads.store import Stage, open_stage, read_json
from headstart.heads.target import TargetLoader, load_target
from headstart.trainer.features import recorded_bytes
from headstart.trainer.generation import Generator, Request
from headstart.trainer.settings import TrafficSettings
from headstart.trainer.traffic import make_traffic

TINY = TargetSettings(model="tiny", dtype="float32", device="cpu")
SETTINGS = TrafficSettings(max_new_tokens=12, max_prompt_tokens=200, slots=4, chunk=8)


def some_prompts(number: int, splits: tuple[str, ...] = ("train",)) -> list[Prompt]:
    texts = [f"Question {i}: " + "tea and bread " * (i * 7 % 11) for i in range(number)]
    return [
        Prompt("chat" if i % 2 else "code", ({"role": "user", "content": text},), splits[i % len(splits)])
        for i, text in enumerate(texts)
    ]


def prompts_stage(root: Path, prompts: list[Prompt]) -> Stage:
    stage = open_stage(root, "prompts", {"prompts": [[p.prompt_id, p.reply] for p in prompts]}, seed=0)
    with (stage.folder / "prompts.jsonl").open("w") as handle:
        for p in prompts:
            row = {"id": p.prompt_id, "route": p.route, "split": p.split, "messages": list(p.messages)}
            handle.write(json.dumps({**row, "template_kwargs": p.template_kwargs, "reply": p.reply}) + "\n")
    stage.record("prompts.jsonl", len(prompts))
    stage.finish()
    return stage


def requests_of(target, number: int) -> list[Request]:
    return [Request(p.prompt_id, target.render(p)) for p in some_prompts(number)]


def hashes(stage: Stage) -> dict[str, str]:
    return {
        name: output["sha256"] for name, output in sorted(read_json(stage.folder / "manifest.json")["outputs"].items())
    }


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(0.9, 20, 0.9)], ids=str)
def test_slots_padding_and_order_do_not_change_a_reply(tiny_target, sampling):
    requests = requests_of(tiny_target, 11)
    few = Generator(tiny_target, sampling, 16, num_slots=3, max_length=128).generate(requests)
    many = Generator(tiny_target, sampling, 16, num_slots=8, max_length=200).generate(requests[::-1])
    alone = Generator(tiny_target, sampling, 16, num_slots=1, max_length=128).generate(requests[:4])
    assert [reply.token_ids for reply in few] == [reply.token_ids for reply in many[::-1]]
    assert [reply.token_ids for reply in few[:4]] == [reply.token_ids for reply in alone]


def test_greedy_replies_are_those_of_transformers_generate(tiny_target):
    requests = requests_of(tiny_target, 6)
    replies = Generator(tiny_target, Sampling(), 20, num_slots=4, max_length=128).generate(requests)
    for request, reply in zip(requests, replies, strict=True):
        tokens = torch.tensor([request.token_ids])
        banned = [[i] for i in range(tiny_target.facts.num_tokens, tiny_target.facts.vocab_size)]
        expected = tiny_target.model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=20, do_sample=False, bad_words_ids=banned
        )
        assert reply.token_ids == expected[0, len(request.token_ids) :].tolist()


def test_a_stopped_reply_ends_in_its_stop_token_and_a_cut_one_does_not(tiny_target):
    requests = requests_of(tiny_target, 24)
    replies = Generator(tiny_target, Sampling(1.0), 24, num_slots=8, max_length=128).generate(requests)
    stops = set(tiny_target.facts.stop_ids)
    assert {reply.finish_reason for reply in replies} == {"stop", "length"}
    for reply in replies:
        assert not stops & set(reply.token_ids[:-1])
        assert (reply.token_ids[-1] in stops) == (reply.finish_reason == "stop")
        assert reply.finish_reason == "stop" or len(reply.token_ids) == 24


def test_replies_end_at_the_context(tiny_folder, tiny_target):
    requests = [Request("long", [5] * (tiny_target.facts.max_position - 3))]
    replies = Generator(tiny_target, Sampling(), 50, num_slots=1, max_length=4096).generate(requests)
    assert len(replies[0].token_ids) == 3
    assert replies[0].finish_reason == "length"


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("name", ["tiny", "tiny-tied"])
def test_states_kept_while_generating_equal_a_teacher_forced_pass(name, dtype, tolerance):
    target = load_target(replace(TINY, model=name, dtype=dtype), taps=[0, 2, 4])
    requests = requests_of(target, 9)
    replies = Generator(target, Sampling(1.0), 16, num_slots=4, max_length=160).generate(requests, target.dtype)
    paths = [np.array(q.token_ids + r.token_ids) for q, r in zip(requests, replies, strict=True)]
    for path, reply, states in zip(paths, replies, target.read(paths), strict=True):
        assert reply.states.final.shape == (len(path) - 1, target.facts.hidden_size)
        for kept, read in ((reply.states.taps, states.taps), (reply.states.final, states.final)):
            # Means, because a random model in bfloat16 may amplify one rounding without bound.
            difference = (kept.float() - read.float()).abs().mean()
            assert difference <= tolerance * read.float().std()


def test_logprobs_are_the_raw_targets(tiny_target):
    requests = requests_of(tiny_target, 5)
    replies = Generator(tiny_target, Sampling(0.7, 5, 0.8), 12, num_slots=2, max_length=128).generate(requests)
    for request, reply in zip(requests, replies, strict=True):
        states = tiny_target.read([np.array(request.token_ids + reply.token_ids)])[0]
        logprobs = tiny_target.logits(states.final[len(request.token_ids) - 1 :]).log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(reply.token_ids)[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(reply.logprobs), expected, atol=1e-4, rtol=1e-4)


def test_the_stage_records_every_split_and_is_reused(tmp_path):
    prompts = some_prompts(21, ("train", "train", "validation", "heldout"))
    loader = TargetLoader(replace(TINY, dtype="bfloat16"))
    traffic, features = make_traffic(loader, prompts_stage(tmp_path, prompts), SETTINGS, tmp_path)
    paths = {path.prompt_id: path for path in read_paths(traffic.folder)}
    assert set(paths) == {prompt.prompt_id for prompt in prompts}
    reader = FeatureReader(features.folder)
    for prompt in prompts:
        path = paths[prompt.prompt_id]
        assert (path.route, path.split) == (prompt.route, prompt.split)
        assert path.token_N[: path.num_prompt_tokens].tolist() == loader.render(prompt)
        assert np.isnan(path.logprob_N).tolist() == (~path.generated_N).tolist()
        taps, final = reader.get(prompt.prompt_id)
        assert taps.shape == (len(path.token_N) - 1, 3 * 64)
        expected = torch.float32 if prompt.split == "heldout" else torch.bfloat16
        assert taps.dtype == final.dtype == reader.dtype(prompt.prompt_id) == expected
    assert reader.taps == loader.taps
    assert reader.dtype("nobody's") is None
    with pytest.raises(WrongInput, match="no features"):
        reader.get("nobody's")
    written = sum(output["bytes"] for output in features.outputs.values())
    assert recorded_bytes(traffic, loader, SETTINGS) == written
    # Complete stages are answered from their manifests: no weights are loaded.
    again = TargetLoader(replace(TINY, dtype="bfloat16"))
    again._load = None  # type: ignore[assignment,method-assign]
    assert make_traffic(again, prompts_stage(tmp_path, prompts), SETTINGS, tmp_path)[0].key == traffic.key


def test_features_of_other_taps_are_read_from_recorded_traffic(tmp_path):
    stage = prompts_stage(tmp_path, some_prompts(10, ("train", "validation")))
    traffic, _ = make_traffic(TargetLoader(TINY, [0, 1, 2]), stage, SETTINGS, tmp_path)
    before = hashes(traffic)
    again, features = make_traffic(TargetLoader(TINY, [0, 4]), stage, SETTINGS, tmp_path)
    assert again.key == traffic.key
    assert hashes(again) == before
    target = load_target(TINY, [0, 4])
    reader = FeatureReader(features.folder)
    for path in read_paths(traffic.folder):
        states = target.read([path.token_N])[0]
        torch.testing.assert_close(reader.get(path.prompt_id)[0], states.taps.bfloat16(), atol=1e-2, rtol=1e-2)


def test_features_that_hold_more_taps_serve(tmp_path):
    """Taps of several heads are stored once; each head reads its own, as if nothing else were there."""
    stage = prompts_stage(tmp_path, some_prompts(10, ("train", "validation")))
    _, features = make_traffic(TargetLoader(TINY, [0, 1, 4]), stage, SETTINGS, tmp_path)
    loader = TargetLoader(TINY, [0, 4])
    loader._load = None  # type: ignore[assignment,method-assign]
    traffic, found = make_traffic(loader, stage, SETTINGS, tmp_path)
    assert found.folder == features.folder
    whole, own = FeatureReader(found.folder), FeatureReader(found.folder, [0, 4])
    for path in read_paths(traffic.folder):
        (all_SF, final_SH), (taps_SF, same_SH) = whole.get(path.prompt_id), own.get(path.prompt_id)
        assert torch.equal(taps_SF, torch.cat([all_SF[:, :64], all_SF[:, 128:]], 1))
        assert torch.equal(final_SH, same_SH)
    with pytest.raises(WrongInput, match=r"found the taps \[0, 1, 4\], expected \[2\] among them"):
        FeatureReader(found.folder, [0, 2])


def test_the_number_of_workers_changes_nothing(tmp_path):
    prompts = some_prompts(30, ("train", "validation"))
    stages = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        root = tmp_path / str(threads)
        stages.append(make_traffic(TargetLoader(TINY), prompts_stage(root, prompts), SETTINGS, root))
    torch.set_num_threads(1)
    for one, three in zip(*stages, strict=True):
        assert hashes(one) == hashes(three)


RUN = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from headstart.heads.store import open_stage
from headstart.heads.target import TargetLoader
from headstart.trainer.traffic import make_traffic
from tests.test_traffic import SETTINGS, TINY, prompts_stage, some_prompts
root = Path(sys.argv[1])
make_traffic(TargetLoader(TINY), prompts_stage(root, some_prompts(40, ("train", "train", "validation"))), SETTINGS, root)
"""


def test_a_run_killed_at_any_moment_ends_as_an_unbroken_one(tmp_path):
    prompts = some_prompts(40, ("train", "train", "validation"))
    whole = make_traffic(TargetLoader(TINY), prompts_stage(tmp_path / "whole", prompts), SETTINGS, tmp_path / "whole")
    root = tmp_path / "killed"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", RUN, str(root)], env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(root.glob(".stages/traffic-*/part-00001.parquet")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    for stage in whole:
        killed = read_json(root / ".stages" / stage.folder.name / "manifest.json")
        assert killed["state"] == "running"
    # As if the kill had come between a chunk's features and its traffic, and another process had the same id now.
    (features,) = root.glob(".stages/features-*")
    (features / f".shard-00003.safetensors.{os.getppid()}.tmp").write_bytes(b"half")
    resumed = make_traffic(TargetLoader(TINY), prompts_stage(root, prompts), SETTINGS, root)
    for unbroken, again in zip(whole, resumed, strict=True):
        assert hashes(again) == hashes(unbroken)
        assert {f.name for f in again.folder.iterdir()} == {f.name for f in unbroken.folder.iterdir()}
        for name in hashes(again):
            assert (again.folder / name).read_bytes() == (unbroken.folder / name).read_bytes()


def test_damaged_files_of_a_finished_stage_are_refused_and_made_again(tmp_path):
    prompts = some_prompts(20, ("train", "validation"))
    stage = prompts_stage(tmp_path, prompts)
    traffic, features = make_traffic(TargetLoader(TINY), stage, SETTINGS, tmp_path)
    before = hashes(traffic), hashes(features)
    part, shard = traffic.folder / "part-00001.parquet", features.folder / "shard-00000.safetensors"
    copy = traffic.folder / "part-00001 (copy).parquet"  # not recorded, so nobody reads it
    copy.write_bytes(part.read_bytes())
    assert len(list(read_paths(traffic.folder))) == len(prompts)
    part.unlink()
    content = bytearray(shard.read_bytes())
    content[-40] ^= 1  # of the same size
    shard.write_bytes(content)
    with pytest.raises(WrongInput, match="part-00001.parquet missing or damaged"):
        list(read_paths(traffic.folder))
    with pytest.raises(WrongInput, match="shard-00000.safetensors missing or damaged"):
        FeatureReader(features.folder)
    again = make_traffic(TargetLoader(TINY), stage, SETTINGS, tmp_path)
    assert tuple(map(hashes, again)) == before
    assert (features.folder / "shard-00000.safetensors.damaged").read_bytes() == content
    assert {path.prompt_id for path in read_paths(traffic.folder)} == {prompt.prompt_id for prompt in prompts}
    (traffic.folder / "manifest.json").write_text('{"schema": "head')
    with pytest.raises(WrongInput, match=r"manifest.json: found no JSON(.|\n)*move it away and run again"):
        make_traffic(TargetLoader(TINY), stage, SETTINGS, tmp_path)
    (traffic.folder / "manifest.json").unlink()
    assert tuple(map(hashes, make_traffic(TargetLoader(TINY), stage, SETTINGS, tmp_path))) == before


def test_long_prompts_are_refused_by_id_before_anything_runs(tmp_path):
    prompts = some_prompts(12)
    loader = TargetLoader(TINY)
    loader._load = None  # type: ignore[assignment,method-assign]
    longest = max(prompts, key=lambda prompt: len(loader.render(prompt)))
    settings = replace(SETTINGS, max_prompt_tokens=len(loader.render(longest)) - 1)
    with pytest.raises(WrongInput, match=rf"max_prompt_tokens.*{longest.prompt_id[:12]}"):
        make_traffic(loader, prompts_stage(tmp_path, prompts), settings, tmp_path)
    huge = [Prompt("chat", ({"role": "user", "content": "bread " * 1500},))]
    with pytest.raises(WrongInput, match="context"):
        make_traffic(loader, prompts_stage(tmp_path, huge), replace(SETTINGS, max_prompt_tokens=10**6), tmp_path)


def test_features_larger_than_the_disk_are_refused(tmp_path, monkeypatch):
    import shutil

    usage = shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(WrongInput, match="num_train"):
        make_traffic(TargetLoader(TINY), prompts_stage(tmp_path, some_prompts(8)), SETTINGS, tmp_path)
