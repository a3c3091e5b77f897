"""Laws of a target whose layers are spread over processes: two real ones over gloo, against one that holds it whole."""

import json
import shutil
import subprocess
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file

from headstart.heads.errors import WrongInput
from headstart.heads.features import FeatureReader
from headstart.heads.paths import read_paths
from headstart.heads.store import STAGES, finished_stage
from headstart.heads.target_ends import load_ends
from headstart.heads.weight_files import check_parts
from headstart.launch.launcher import launch_command
from headstart.trainer.traffic import make_traffic
from tests.shipped_targets import write_target
from tests.small_sharded import STREAMED, STREAMED_BY, TRAFFIC, loader_of, read_served, some_paths, streamed
from tests.test_ranks import WAIT_S, assert_alike, finish, start_ranks
from tests.test_served_traffic import record, rows, serving
from tests.test_traffic import prompts_stage, some_prompts

# Llama with and without an output head of its own, in one file and in several; experts, in files one by one.
TARGETS = ("tiny", "tiny-tied", "tiny-shards", "glm4_moe", "deepseek_v3")
ROOTS = ("sharded", "whole", "one")
SERVED = ("served", "one-served")


@pytest.fixture(scope="module")
def spread(tmp_path_factory, tiny_target):
    """Where two processes have read paths by every target, and answered prompts under every root but those named `one`.

    A server of the whole tiny target answers while the tests run, at the address in `url`.
    """
    folder = tmp_path_factory.mktemp("spread")
    for name in TARGETS:
        make_model(folder / "targets" / name, name)
    for root in ROOTS:
        # Rounds of training prompts of which the last has one chunk, and a single chunk of either other split.
        prompts_stage(folder / root, [*some_prompts(18), *some_prompts(22, ("validation", "heldout"))[18:]])
    for root in SERVED:
        prompts_stage(folder / root, some_prompts(14, ("train",) * 5 + ("validation", "heldout")))
    with serving(tiny_target) as server:
        (folder / "url").write_text(server.url)
        ranks = start_ranks("laws", folder, program="tests.small_sharded")
        errors = finish(ranks)
        assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors)
        yield folder


def make_model(folder, name):
    if name in ("glm4_moe", "deepseek_v3"):
        write_target(folder, name, shards=name == "glm4_moe")
        return
    source = loader_of(name.removesuffix("-shards"))
    shutil.copytree(source.folder, folder)
    if name == "tiny-shards":
        (folder / "model.safetensors").unlink()
        source().model.save_pretrained(folder, max_shard_size="150KB")
        assert len(list(folder.glob("*.safetensors"))) > 3


def facts_of(folder, name):
    """What each process found out about a target."""
    return [json.loads((folder / f"facts-{rank}.json").read_text())[name] for rank in range(2)]


@pytest.mark.parametrize("name", TARGETS)
def test_states_are_those_of_one_process_however_passes_are_dealt(name, spread):
    target = loader_of(spread / "targets" / name)()
    expected = [torch.cat([x.taps, x.final], dim=1) for x in target.read(some_paths())]
    found = [load_file(spread / f"{name}-{rank}.safetensors") for rank in range(2)]
    assert sorted(found[0]) == [f"alone-{i}" for i in range(5)] + ["dealt-0", "dealt-3", "dealt-6"]
    assert sorted(found[1]) == ["dealt-1", "dealt-4", "dealt-7"]
    for key, states in (item for part in found for item in part.items()):
        whole = expected[int(key.partition("-")[2])]
        assert (states - whole).abs().max() <= 1e-5 * whole.abs().max(), key


@pytest.mark.parametrize("name", TARGETS)
def test_each_process_holds_its_part_of_the_layers_and_all_of_the_ends(name, spread):
    target = loader_of(spread / "targets" / name)()
    layers = sum(p.nbytes for layer in target._layers for p in layer.parameters())
    ends = sum(p.nbytes for p in target.model.parameters()) - layers
    held = [found["held"] for found in facts_of(spread, name)]
    assert sum(part["layers"] for part in held) == layers
    assert max(part["layers"] for part in held) <= 0.52 * layers  # rows of an odd weight do not halve
    assert [part["ends"] for part in held] == [ends, ends]


@pytest.mark.parametrize("name", TARGETS)
def test_what_a_head_begins_with_is_whole_on_every_process_and_in_the_ends_alone(name, spread):
    loader = loader_of(spread / "targets" / name)
    whole = loader()
    loader.load_by(load_ends)
    ends = loader()
    for given in ("embedding_weight", "output_weight", "final_norm_weight"):
        assert torch.equal(getattr(ends, given)(), getattr(whole, given)())
    layer, expected = ends.last_layer(), whole.last_layer()
    assert layer.keys() == expected.keys()
    assert all(torch.equal(layer[key], tensor) for key, tensor in expected.items())
    held = sum(p.nbytes for p in ends.model.parameters() if not p.is_meta)
    assert [found["held"]["ends"] for found in facts_of(spread, name)] == [held, held]
    sums = {key: float(tensor.double().sum()) for key, tensor in expected.items()}
    assert [found["last_layer"] for found in facts_of(spread, name)] == [sums, sums]
    with pytest.raises(WrongInput, match="target.sharded=false"):
        ends.read(some_paths()[:1])


def test_replies_and_states_of_two_processes_are_those_of_one(spread):
    prompts = finished_stage(next((spread / "one" / STAGES).glob("prompts-*")))
    for taps in (None, [0, 4]):
        make_traffic(loader_of("tiny", taps), prompts, TRAFFIC, spread / "one")
    spread_out, whole, one = ({f.name: f for f in (spread / root / STAGES).iterdir()} for root in ROOTS)
    assert len(one) == 4  # prompts, traffic, and features of either taps
    assert {name: files_of(whole[name]) for name in one} == {name: files_of(one[name]) for name in one}
    for name in one:
        if name.startswith("traffic"):
            paths = [{path.prompt_id: path.token_N.tolist() for path in read_paths(f[name])} for f in (spread_out, one)]
            assert paths[0] == paths[1]
        if name.startswith("features"):
            assert_close(FeatureReader(spread_out[name]), FeatureReader(one[name]), paths_of(one))


def test_replies_of_a_server_are_read_by_two_processes_as_by_one(spread):
    expected = read_served(loader_of("tiny"), spread / "one-served", (spread / "url").read_text())
    found = [load_file(spread / f"served-{rank}.safetensors") for rank in range(2)]
    assert all(found)
    assert sorted([*found[0], *found[1]]) == sorted(expected)
    for prompt_id, states in (item for part in found for item in part.items()):
        assert (states - expected[prompt_id]).abs().max() <= 1e-5 * expected[prompt_id].abs().max()
    apart, one = ({f.name.partition("-")[0]: f for f in (spread / root / STAGES).iterdir()} for root in SERVED)
    assert record(finished_stage(apart["traffic"])) == record(finished_stage(one["traffic"]))
    backends = [row["backend"] for row in rows(finished_stage(one["traffic"]))]
    assert backends.count("openai-vllm-tiny-model") == len(expected)
    assert_close(FeatureReader(apart["features"]), FeatureReader(one["features"]), paths_of(one))


@pytest.mark.parametrize("kind", ["eagle3", "draft"])
def test_a_head_learns_beside_a_target_that_is_spread_what_it_learns_beside_a_whole_one(kind, spread, tmp_path):
    """Streamed states and own words, in micro-batches of which a process has more rows than the other, or none."""
    rows = streamed(spread / "whole", kind, loader_of("tiny")(), tmp_path)
    met, pieces = set(), 2 if kind == "draft" else 1
    for step, micro in product(range(1, STREAMED.num_steps + 1), range(pieces)):
        least, most = sorted(len(rows.batch(step, micro, pieces, rank, 2).prompt_ids) for rank in range(2))
        met |= {(rows.reads_head(step), least == 0)} if least < most else set()
    assert met == {(own, empty) for own in {False, kind == "draft"} for empty in (False, True)}
    for strategy in (by for of, by in STREAMED_BY if of == kind):
        assert_alike(spread / f"streamed-{kind}-{strategy}", tmp_path)


def assert_close(reader, other, prompt_ids):
    """Gathered weights lie elsewhere in memory, which may change the last bit of a product."""
    for prompt_id in prompt_ids:
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[other.dtype(prompt_id)]
        for states, expected in zip(reader.get(prompt_id), other.get(prompt_id), strict=True):
            assert (states.float() - expected.float()).abs().max() <= tolerance * expected.abs().max()


def paths_of(stages):
    traffic = next(folder for name, folder in stages.items() if name.startswith("traffic"))
    return [path.prompt_id for path in read_paths(traffic)]


def files_of(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["state"] == "complete"
    return {name: output["sha256"] for name, output in sorted(manifest["outputs"].items())}


def test_a_target_that_cannot_be_read_in_parts_is_refused_before_it_is(tiny_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.2.mlp.other.weight"] = weights.pop("model.layers.2.mlp.up_proj.weight")
    weights["lm_head.weight"] = weights["lm_head.weight"][1:].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WrongInput, match=r"lacks 2 weights.*up_proj.weight, lm_head.weight"):
        check_parts("tiny", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(WrongInput, match="quantised weights"):
        check_parts("tiny", folder)


def test_a_recipe_with_a_sharded_target_runs_to_its_report(tmp_path):
    """By the literal command: replies, training and acceptance, with the layers on no process whole."""
    prompts = ["prompts.routes=[chat]", "prompts.num_train=8", "prompts.num_validation=2", "prompts.num_heldout=2"]
    rest = ["train.num_steps=4", "train.eval_every=4", "target.sharded=true", "export.engines=[]"]
    command = launch_command("fsdp2", "smoke", [*prompts, *rest])
    done = subprocess.run(
        command, cwd=tmp_path, timeout=WAIT_S, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout
    assert "nothing is decoded here; acceptance is measured on the stored states" in done.stdout
    rows = json.loads((tmp_path / "runs" / "smoke" / "eval" / "acceptance.json").read_text())["rows"]
    assert {row["source"] for row in rows} == {"offline"}
