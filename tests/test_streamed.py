"""Laws of `features.mode: stream`: states that are read inside the step train the head that stored ones do."""

from dataclasses import replace

import pytest
import torch

from headstart.heads.features import FeatureReader
from headstart.heads.paths import read_paths
from headstart.heads.settings import DraftSettings
from headstart.heads.store import read_json, stage_there
from headstart.heads.target import TargetLoader
from headstart.launch import cli
from headstart.launch.check import sharded_problems
from headstart.launch.run import RunFolder
from headstart.launch.settings import Recipe
from headstart.launch.storing import choose_mode, claim_mode
from headstart.trainer.data import EvaluationRows, TrainingRows
from headstart.trainer.features import stored_splits
from headstart.trainer.loop import Job, train
from headstart.trainer.metrics import METRICS, read_metrics
from headstart.trainer.settings import FeatureSettings, TrainSettings
from headstart.trainer.streamed import StreamedStates
from headstart.trainer.traffic import make_traffic
from tests.schema_rules import run_violations
from tests.small_decoding import untrained_head
from tests.test_traffic import SETTINGS as TRAFFIC
from tests.test_traffic import TINY, hashes, prompts_stage, some_prompts

STREAM = stored_splits("stream")
SETTINGS = TrainSettings(
    num_steps=9, batch_tokens=300, accumulate=2, learning_rate=4e-3, warmup_steps=2, dtype="float32", eval_every=6,
    save_every=6, log_every=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """Traffic and features of the same prompts by mode, each under a root of its own."""
    prompts = some_prompts(24, ("train", "train", "train", "validation", "train", "heldout"))
    made = {}
    for mode in ("cache", "stream"):
        root = tmp_path_factory.mktemp(mode)
        stage = prompts_stage(root, prompts)
        made[mode] = make_traffic(TargetLoader(TINY), stage, TRAFFIC, root, stored=stored_splits(mode))
    return made


def train_on(stages, mode, target, folder, seed=5, settings=SETTINGS):
    """The head after some steps on states of a mode; it goes on from what lies in the folder."""
    traffic, features = stages[mode]
    reader = FeatureReader(features.folder)
    states = StreamedStates(target) if mode == "stream" else reader
    torch.manual_seed(seed)
    head = untrained_head(target)
    rows = TrainingRows(list(read_paths(traffic.folder, "train")), states, settings.batch_tokens, 0)
    validation = EvaluationRows(list(read_paths(traffic.folder, "validation")), reader, 256)
    train(Job.open(head, target.output_weight(), rows, settings, draft_length=3), validation, folder)
    return head


def curve(folder):
    return [line["train/loss"] for line in read_metrics(folder / METRICS) if line["step"]]


@pytest.fixture(scope="module")
def streamed(stages, tiny_target, tmp_path_factory):
    """A head that was trained on streamed states, and its folder."""
    folder = tmp_path_factory.mktemp("streamed")
    return train_on(stages, "stream", tiny_target, folder), folder


def test_no_training_state_is_stored_and_nothing_else_differs(stages):
    (cached, all_states), (traffic, features) = stages["cache"], stages["stream"]
    assert traffic.key == cached.key
    assert hashes(traffic) == hashes(cached)
    splits = {path.prompt_id: path.split for path in read_paths(traffic.folder)}
    reader, whole = FeatureReader(features.folder), FeatureReader(all_states.folder)
    for prompt_id, split in splits.items():
        assert (reader.dtype(prompt_id) is None) == (split == "train")
        if split != "train":
            for ours, theirs in zip(reader.get(prompt_id), whole.get(prompt_id), strict=True):
                assert torch.equal(ours, theirs)


def test_streamed_states_train_the_head_that_stored_ones_do(stages, streamed, tiny_target, tmp_path):
    """But for rounding: a state that generating left behind and one that is read again are neighbours in bfloat16."""
    expected = train_on(stages, "cache", tiny_target, tmp_path).trained_tensors()
    assert curve(streamed[1]) == pytest.approx(curve(tmp_path), rel=1e-3)
    torch.manual_seed(5)
    start = untrained_head(tiny_target).trained_tensors()
    for name, tensor in streamed[0].trained_tensors().items():
        assert (tensor - expected[name]).norm() <= 0.02 * (expected[name] - start[name]).norm(), name


def test_streaming_resumes_as_if_never_stopped(stages, streamed, tiny_target, tmp_path):
    train_on(stages, "stream", tiny_target, tmp_path)
    (tmp_path / "checkpoints" / "last").write_text("step-000006\n")
    resumed = train_on(stages, "stream", tiny_target, tmp_path, seed=9).trained_tensors()
    assert curve(tmp_path) == curve(streamed[1])
    for name, tensor in streamed[0].trained_tensors().items():
        assert torch.equal(tensor, resumed[name]), name


def test_a_rank_reads_the_rows_of_its_micro_batch_alone(stages, tiny_target):
    asked = []

    class Noted(StreamedStates):
        def of(self, paths):
            asked.append({path.prompt_id for path in paths})
            return super().of(paths)

    paths = list(read_paths(stages["stream"][0].folder, "train"))
    rows = TrainingRows(paths, Noted(tiny_target), SETTINGS.batch_tokens, 0)
    shares = [rows.batch(1, micro, 2, rank, 2).prompt_ids for rank in range(2) for micro in range(2)]
    assert asked == [set(share) for share in shares if share]
    assert sum(map(len, asked)) == len(rows.rows(1))
    assert {rows.batch(1).taps_TF.dtype, rows.batch(1).final_TH.dtype} == {torch.bfloat16}  # as a cache stores them


def test_own_words_beside_a_spread_target_need_its_layers():
    recipe = Recipe(target=replace(TINY, sharded=True), head=DraftSettings(), train=TrainSettings(on_policy=0.5))
    assert "expected 0, or features.mode=stream" in dict(sharded_problems(recipe))["train.on_policy"]
    assert "train.on_policy" not in dict(sharded_problems(replace(recipe, features=FeatureSettings("stream"))))


def test_what_is_stored_of_all_replies_serves_and_less_does_not(tmp_path):
    prompts = prompts_stage(tmp_path, some_prompts(12, ("train", "validation", "heldout")))
    auto, run = Recipe(features=FeatureSettings("auto")), RunFolder(tmp_path / "mine")
    traffic, less = make_traffic(TargetLoader(TINY), prompts, TRAFFIC, tmp_path, stored=STREAM)
    assert choose_mode(auto, run, TargetLoader(TINY), traffic, list)[0] == "stream"
    _, more = make_traffic(TargetLoader(TINY, [0, 1, 2, 4]), prompts, TRAFFIC, tmp_path)
    assert choose_mode(auto, run, TargetLoader(TINY), traffic, list)[0] == "cache"
    assert len(FeatureReader(less.folder)) < len(FeatureReader(more.folder)) == 12
    _, served = make_traffic(TargetLoader(TINY, [2, 4]), prompts, TRAFFIC, tmp_path, stored=STREAM)
    assert served.folder == more.folder
    _, made = make_traffic(TargetLoader(TINY, [0, 1, 2]), prompts, TRAFFIC, tmp_path)
    assert made.folder == more.folder
    _, own = make_traffic(TargetLoader(TINY), prompts, TRAFFIC, tmp_path, stored=STREAM)
    assert own.folder == less.folder


def test_auto_stores_where_the_disk_has_room_and_a_run_stays_as_it_began(tmp_path):
    targets, recipe = TargetLoader(TINY), Recipe(features=FeatureSettings("auto"))
    run, traffic = RunFolder(tmp_path / "mine"), stage_there(tmp_path, "traffic", {})
    for tokens, mode in ((100, "cache"), (10**15, "stream")):
        chosen, reason = choose_mode(recipe, run, targets, traffic, lambda tokens=tokens: [("train", tokens)])
        assert chosen == mode
        assert "GB are free" in reason
    run.folder.mkdir()
    for tokens in (10**15, 100):  # the disk is larger when it is started again
        assert claim_mode(recipe, run, targets, traffic, lambda tokens=tokens: [("train", tokens)]) == "stream"
    other = replace(recipe, features=FeatureSettings("cache"))
    assert choose_mode(other, run, targets, traffic, list) == ("cache", "as the recipe says")


def test_a_recipe_that_streams_runs_whole(tmp_path, monkeypatch, capsys):
    """From prompts to an export with its figures; as another mode it is refused."""
    monkeypatch.chdir(tmp_path)
    shorter = ["prompts.routes=[chat]", "prompts.num_train=6", "prompts.num_validation=2", "prompts.num_heldout=4"]
    shorter += ["traffic.max_new_tokens=12", "train.num_steps=6", "train.eval_every=6", "eval.speed_prompts=1"]
    shorter += ["eval.speed_repeats=1", "eval.speed_draft_lengths=[2]", "eval.live_prompts=2"]
    command = ["train", "smoke", *shorter, "features.mode=stream"]
    assert cli.run([*command, "--dry-run"]) == 0
    assert cli.run(command) == 0
    run = tmp_path / "runs" / "smoke"
    assert run_violations(run) == []
    replies = {path.prompt_id for path in read_paths(run / "traffic", "train")}
    stored = FeatureReader(run / "features")
    assert replies
    assert all(stored.dtype(prompt_id) is None for prompt_id in replies)
    assert read_json(run / "eval" / "lossless.json")["verdict"] == "lossless"
    assert (run / "export" / "vllm" / "model.safetensors").is_file()
    assert cli.run(["train", "smoke", *shorter]) == 2
    assert "settings.features.mode ('stream' there, 'cache' here)" in capsys.readouterr().err
