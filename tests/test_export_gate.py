"""The law of the gate: what was not measured, or failed, is exported only with a card that says so first."""

import json
import shutil
import subprocess

import numpy as np
import pytest

from headstart.eval import engines
from headstart.eval.engine_runs import EngineReply, EngineRun
from headstart.eval.identity import Rescorer
from headstart.eval.settings import EvalSettings, ExportSettings
from headstart.heads.checkpoint import checkpoint_identity, head_hash, load_head, save_head
from headstart.heads.errors import GateFailed, WrongInput
from headstart.heads.export.serving import serving_text
from headstart.heads.paths import Path
from headstart.heads.settings import TargetSettings
from headstart.heads.start import saved_start
from headstart.heads.store import read_json
from headstart.heads.target import load_target
from headstart.launch.export_gate import export_head
from tests.test_export import make_head

SETTINGS = EvalSettings(draft_length=3)


def spread(value):
    return {"value": value, "low": value - 0.1, "high": value + 0.1}


def acceptance(sha256, accept_len=2.0, draft_length=3, source="offline", counting="reply"):
    row = {
        "source": source, "drafter": "eagle3", "route": "all", "context": "all", "temperature": 0.0, "top_k": 0,
        "top_p": 1.0, "draft": "greedy", "draft_length": draft_length, "tree": None, "counting": counting,
        "num_prompts": 8, "num_tokens": 320, "num_steps": 160.0, "num_short_steps": 2.0,
        "accept_len": spread(accept_len), "accept_len_macro": spread(accept_len), "conditional": [spread(0.5)] * 3,
        "survival": [spread(0.5), spread(0.3), spread(0.2)], "accepted_histogram": [80, 32, 16, 32],
        "uniform_start_estimate": 2.1, "product_of_marginals": 2.0, "out_of_vocab_share": 0.0,
    }  # fmt: skip
    checkpoint = {"kind": "eagle3", "step": 7, "sha256": sha256}
    names = {"checkpoint": checkpoint, "target": {"name": "tiny"}, "prompts": {"name": "heldout"}}
    return {"schema": "headstart.acceptance/1", **names, "rows": [row]}


def lossless(sha256, verdict="lossless"):
    check = {
        "name": "greedy_identity", "dtype": "float32", "sampler": None, "draft": "greedy", "draft_length": 3, "batch": 4,
        "num_samples": 8, "num_tokens": 320, "p_value": None, "level": None, "divergences": [],
        "verdict": "pass" if verdict == "lossless" else "fail",
    }  # fmt: skip
    checkpoint = {"kind": "eagle3", "step": 7, "sha256": sha256}
    body = {"verdict": verdict, "checks": [check], "faults": []}
    return {"schema": "headstart.lossless/1", "checkpoint": checkpoint, **body}


def speed(sha256, speedup=1.3):
    row = {
        "engine": "reference", "drafter": "eagle3", "route": "all", "dtype": "float32", "concurrency": 1,
        "draft_length": 2, "plain_tokens_per_s": 10.0, "tokens_per_s": 10.0 * speedup, "speedup": spread(speedup),
        "temperature": 0.0, "threads": 2, "predicted_speedup": speedup, "accept_len": 2.0, "target_step_ms": 1.0,
        "verify_step_ms": 1.5, "cost_ratio": 0.1, "num_divergences": 0, "num_near_ties": 0,
    }  # fmt: skip
    checkpoint = {"kind": "eagle3", "step": 7, "sha256": sha256}
    hardware = {"cpu": "two cores", "cores": 2, "gpu": None, "versions": {}}
    recommended = [{"engine": "vllm", "concurrency": [1, 4], "draft_length": 2, "routes_off": ["json"], "flags": ""}]
    absolute = {"generate_tokens_per_s": 9.0, "plain_tokens_per_s": 10.0}
    return {
        "schema": "headstart.speed/1", "checkpoint": checkpoint, "hardware": hardware, "absolute": absolute,
        "rows": [row], "recommended": recommended, "crossover_concurrency": None,
    }  # fmt: skip


@pytest.fixture
def run(tiny_target, tmp_path):
    folder = tmp_path / "run" / "checkpoints" / "step-000007"
    folder.mkdir(parents=True)
    save_head(folder, make_head(tiny_target), step=7)
    (folder.parent / "best").write_text("step-000007\n")
    return tmp_path / "run"


def measure(run, **evals):
    (run / "eval").mkdir(exist_ok=True)
    for name, value in evals.items():
        (run / "eval" / f"{name}.json").write_text(json.dumps(value))


def export(run, target, engine="vllm", settings=SETTINGS, **options):
    return export_head(run, engine, target, settings, ExportSettings(), **options)


def own_hash(run):
    return head_hash(run / "checkpoints" / "step-000007")


def test_an_unmeasured_head_is_refused_with_what_to_run(run, tiny_target):
    with pytest.raises(WrongInput, match=r"(?s)acceptance.json is missing.*lossless.json is missing.*headstart eval"):
        export(run, tiny_target)
    assert not (run / "export").exists()


def test_figures_of_another_checkpoint_do_not_count(run, tiny_target):
    measure(run, acceptance=acceptance("0" * 64), lossless=lossless(own_hash(run)))
    with pytest.raises(WrongInput, match="(?s)measured another checkpoint.*headstart eval .*checkpoints/step-000007"):
        export(run, tiny_target)


def test_figures_of_the_same_weights_under_other_settings_do_not_count(run, tiny_target):
    folder = run / "checkpoints" / "step-000007"
    checkpoint = checkpoint_identity(folder)
    measured = {"acceptance": acceptance(own_hash(run)), "lossless": lossless(own_hash(run))}
    measure(run, **{name: value | {"checkpoint": checkpoint} for name, value in measured.items()})
    export(run, tiny_target)
    description = json.loads((folder / "head.json").read_text())
    description["settings"]["norm_output"] = True
    (folder / "head.json").write_text(json.dumps(description))
    with pytest.raises(WrongInput, match="the same weights with other settings"):
        export(run, tiny_target)


@pytest.mark.parametrize(("change", "said"), [("settings", "no settings"), ("nonsense", "the settings nonsense")])
def test_a_damaged_head_description_is_named(change, said, run, tiny_target):
    file = run / "checkpoints" / "step-000007" / "head.json"
    description = json.loads(file.read_text())
    if change == "settings":
        del description["settings"]
    else:
        description["settings"][change] = 1
    file.write_text(json.dumps(description))
    with pytest.raises(WrongInput, match=rf"head\.json: found {said}"):
        export(run, tiny_target, untested=True)


def test_one_flipped_bit_of_the_weights_is_noticed_by_whoever_reads_them(run, tiny_target):
    folder = run / "checkpoints" / "step-000007"
    measure(run, acceptance=acceptance(own_hash(run)), lossless=lossless(own_hash(run)))
    content = bytearray((folder / "head.safetensors").read_bytes())
    content[-5] ^= 1
    (folder / "head.safetensors").write_bytes(content)
    readers = {
        "measured or not": lambda: export(run, tiny_target, untested=True),
        "gate": lambda: export(run, tiny_target),
        "evaluation": lambda: load_head(folder, tiny_target),
        "warm start": lambda: saved_start(folder),
    }
    for reader, read in readers.items():
        with pytest.raises(WrongInput, match=r"head\.safetensors: found sha256 \w+, expected \w+(.|\n)*damaged"):
            pytest.fail(f"{reader}: {read()}")
    assert not (run / "export").exists()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"schema": "headstart.acceptance/9"}'])
def test_eval_files_that_are_damaged_or_of_another_version_are_named(text, run, tiny_target):
    measure(run, acceptance=acceptance(own_hash(run)), lossless=lossless(own_hash(run)))
    (run / "eval" / "acceptance.json").write_text(text)
    with pytest.raises(WrongInput, match=r"acceptance\.json: found"):
        export(run, tiny_target)


@pytest.mark.parametrize(
    ("evals", "settings", "message"),
    [
        ({"lossless": lambda h: lossless(h, "lossy")}, SETTINGS, "losslessness is 'lossy'"),
        ({"lossless": lambda h: lossless(h, "inconclusive")}, SETTINGS, "losslessness is 'inconclusive'"),
        ({"acceptance": lambda h: acceptance(h, 1.2)}, EvalSettings(draft_length=3, min_accept_len=1.5), "min_accept_len"),
        ({"acceptance": lambda h: acceptance(h, draft_length=2)}, SETTINGS, "no row"),
        ({"acceptance": lambda h: acceptance(h, counting="engine")}, SETTINGS, "no row"),
        ({"speed": lambda h: speed(h, 0.9)}, EvalSettings(draft_length=3, min_speedup=1.1), "min_speedup"),
    ],
)  # fmt: skip
def test_a_value_that_does_not_pass_fails_the_gate(evals, settings, message, run, tiny_target):
    sha256 = own_hash(run)
    measure(run, acceptance=acceptance(sha256), lossless=lossless(sha256), speed=speed(sha256))
    measure(run, **{name: make(sha256) for name, make in evals.items()})
    with pytest.raises(GateFailed, match=message):
        export(run, tiny_target, settings=settings)
    assert not (run / "export").exists()


def test_speed_is_asked_for_only_where_it_is_gated(run, tiny_target):
    sha256 = own_hash(run)
    measure(run, acceptance=acceptance(sha256), lossless=lossless(sha256))
    export(run, tiny_target)
    with pytest.raises(WrongInput, match=r"speed\.json is missing"):
        export(run, tiny_target, settings=EvalSettings(draft_length=3, min_speedup=1.0))


def test_the_card_holds_the_figures_the_definitions_and_the_commands(run, tiny_target):
    sha256 = own_hash(run)
    measure(run, acceptance=acceptance(sha256), lossless=lossless(sha256), speed=speed(sha256, 0.87))
    out = export(run, tiny_target)
    assert out == run / "export" / "vllm"
    card = (out / "README.md").read_text()
    assert card.startswith("# EAGLE3 draft head for tiny")
    for text in (
        "1-4 (vllm): draft length 2; off for json",
        "lossless: lossless",
        "2.00 [1.90, 2.10]",
        "0.500, 0.300, 0.200",
        "0.87",
        "| accept_len |",
        sha256,
    ):
        assert text in card
    assert '"method":"eagle3"' in card
    assert '"num_speculative_tokens":2' in card
    assert "draft-eagle3 --spec-draft-n-max 2 --spec-draft-p-min 0" in card
    assert "no engine yet" in card
    record = json.loads((out / "headstart.json").read_text())
    assert record["readable_by"] == ["vllm", "llamacpp"]
    assert record["checkpoint"] == checkpoint_identity(run / "checkpoints" / "step-000007")


def test_untested_says_so_in_the_first_line_and_shows_no_foreign_figures(run, tiny_target, tmp_path):
    measure(run, acceptance=acceptance("0" * 64, accept_len=3.33))
    out = export(run, tiny_target, untested=True, out=tmp_path / "out")
    lines = (out / "README.md").read_text().splitlines()
    assert lines[0].startswith("**UNTESTED.**")
    assert any("measured another checkpoint" in line for line in lines)
    assert not any("3.33" in line for line in lines)


def test_the_length_trained_on_is_said_and_is_not_the_context(run, tiny_target):
    (run / "traffic").mkdir()
    settings = {"max_prompt_tokens": 40, "max_new_tokens": 24}
    manifest = {"schema": "headstart.manifest/1", "key": "0", "inputs": {"settings": settings}}
    (run / "traffic" / "manifest.json").write_text(json.dumps(manifest))
    out = export(run, tiny_target, untested=True)
    assert json.loads((out / "config.json").read_text())["max_position_embeddings"] == 1024
    card = (out / "README.md").read_text()
    assert "at most 64 tokens long" in card
    assert "positions written for: 1024" in card
    assert "read back by the rules of: vllm (0.32.0), llamacpp (11434)" in card


@pytest.mark.parametrize("engine", ["vllm", "speculators"])
def test_no_absolute_path_leaves_with_an_export_and_its_target_is_found_from_there(engine, tiny_folder, tmp_path):
    """A run of a target in a folder: neither path tells where it lay, and the card's places lead to both."""
    source = shutil.copytree(tiny_folder, tmp_path / "models" / "mine")
    target = load_target(TargetSettings(model=str(source), dtype="float32", device="cpu"))
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000007"
    checkpoint.mkdir(parents=True)
    save_head(checkpoint, make_head(target), step=7)
    out = export(tmp_path / "run", target, engine, checkpoint=checkpoint.name, untested=True)
    card, record = (out / "README.md").read_text(), read_json(out / "headstart.json")
    for file in out.iterdir():
        assert str(tmp_path).encode() not in file.read_bytes(), file.name
    assert card.partition("# EAGLE3")[2].startswith(f" draft head for mine, for {engine}")
    assert engines.target_model(out, record) == str(source)
    places = card.split("## Serve it")[1].split("```")[1]
    said = subprocess.run(["bash", "-euc", f'{places}\necho "$TARGET $HEAD"'], cwd=out, capture_output=True, check=True)
    assert said.stdout.decode().split() == [str(source), str(out)]


def test_a_target_of_the_hub_is_served_by_its_id():
    record = {"kind": "medusa", "target": {"name": "org/model", "folder": "../x"}, "readable_by": [], "taps": []}
    text = serving_text({**record, "draft_length": 3, "dtype": "float32", "tensors": {}})
    assert "TARGET=org/model\n" in text


def test_a_missing_checkpoint_names_what_is_there(run, tiny_target):
    with pytest.raises(WrongInput, match="step-000007"):
        export(run, tiny_target, checkpoint="step-000500")
    for text in ("", "step-000500", "..", "/"):
        (run / "checkpoints" / "best").write_text(text)
        with pytest.raises(WrongInput, match=f"best names '{text}', which is no checkpoint.*step-000007"):
            export(run, tiny_target)


def test_an_engines_figures_reach_the_eval_file_and_the_card_once(run, tiny_target):
    sha256 = own_hash(run)
    body = {"interval": {"replicates": 100, "seed": 0}}
    measure(run, acceptance=acceptance(sha256) | body, lossless=lossless(sha256))
    out = export(run, tiny_target)
    paths = [Path(name, "chat", "heldout", *[np.zeros(2)] * 3, "stop", {}) for name in "ab"]
    drafted = EngineRun("vllm", "0.32.0", [EngineReply([1], 10, [6, 3, 1]), EngineReply([2], 10, [4, 1, 1])])
    result = engines.compare(drafted, drafted, drafted.replies, [[1], [2]], Rescorer(tiny_target))
    for _ in range(2):
        record = json.loads((out / "headstart.json").read_text())
        engines.keep(run, out, record, result, drafted, paths, 3)
    rows = json.loads((run / "eval" / "acceptance.json").read_text())["rows"]
    assert [row["source"] for row in rows] == ["offline", "vllm-0.32.0"]
    assert rows[1]["survival"][0]["value"] == pytest.approx(0.5)
    card = (out / "README.md").read_text()
    assert "loaded and compared in: vllm 0.32.0" in card
    assert card.count("vllm 0.32.0: survival 0.500, 0.200, 0.100 over 20 drafts (2 prompts), verdict pass") == 1
    assert "accept_len: 2.00" in card  # the headline stays our own measurement
    assert json.loads((out / "headstart.json").read_text())["loaded_in"][0]["verdict"] == "pass"


def test_a_heads_own_rotary_base_is_exported_as_trained_and_told(tiny_target, run, capsys):
    save_head(run / "checkpoints" / "step-000007", make_head(tiny_target, rope_theta=500.0), step=7)
    out = export_head(run, "vllm", tiny_target, SETTINGS, ExportSettings(), untested=True)
    assert json.loads((out / "config.json").read_text())["rope_theta"] == 500.0
    told = capsys.readouterr().out
    assert "rotary positions are written as trained" in told
    assert "'rope_theta': 10000.0" in told
