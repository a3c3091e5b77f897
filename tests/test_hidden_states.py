"""Laws of the target's states: kept or read again they train the same head, and they are one target's, every time."""

import copy

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipVisionConfig,
)

from headstart.eval.decode import decode
from headstart.eval.drafters import HeadDrafter
from headstart.eval.speculation import Speculation
from headstart.heads.checkpoint import build_head, load_head, save_head
from headstart.heads.errors import WrongInput
from headstart.heads.features import FeatureReader
from headstart.heads.paths import read_paths
from headstart.heads.settings import Eagle3Settings, TargetSettings
from headstart.heads.target import TargetLoader, load_target
from headstart.trainer.data import EvaluationRows, TrainingRows
from headstart.trainer.loop import Job, train
from headstart.trainer.settings import TrainSettings
from headstart.trainer.traffic import make_traffic
from tests.small_decoding import continuations, fitted_head, make_path, make_prompts
from tests.test_builtin_targets import SMALL
from tests.test_traffic import SETTINGS, TINY, prompts_stage, some_prompts


def trained(target, traffic, reader, folder):
    """A head after three steps on the training replies, and its losses."""
    torch.manual_seed(5)
    head = build_head(Eagle3Settings(), target.facts, torch.arange(target.facts.num_tokens))
    head.load_target(target, initialise=True)
    settings = TrainSettings(num_steps=3, batch_tokens=200, dtype="float32", eval_every=3, save_every=3, log_every=1)
    rows = TrainingRows(list(read_paths(traffic.folder, "train")), reader, settings.batch_tokens, 0)
    validation = EvaluationRows(list(read_paths(traffic.folder, "validation")), reader, 256)
    train(Job.open(head, target.output_weight(), rows, settings), validation, folder)
    return {name: tensor.detach() for name, tensor in head.trained_tensors().items()}


def test_states_that_were_kept_train_the_head_that_states_read_again_do(tmp_path, tiny_target):
    """Case 30. The features stage of other taps is made by reading recorded replies; the taps a head reads are the same."""
    stage = prompts_stage(tmp_path, some_prompts(12, ("train", "train", "train", "validation")))
    traffic, kept = make_traffic(TargetLoader(TINY), stage, SETTINGS, tmp_path)
    taps = tiny_target.taps
    again, read = make_traffic(TargetLoader(TINY, [*taps, 4]), stage, SETTINGS, tmp_path)
    assert again.key == traffic.key
    assert read.folder != kept.folder
    first = trained(tiny_target, traffic, FeatureReader(kept.folder, taps), tmp_path / "kept")
    second = trained(tiny_target, traffic, FeatureReader(read.folder, taps), tmp_path / "read")
    start = trained_nothing(tiny_target)
    for name, tensor in first.items():
        moved = (tensor - start[name]).norm()
        assert (second[name] - tensor).norm() <= 0.02 * moved, name


def trained_nothing(target):
    torch.manual_seed(5)
    head = build_head(Eagle3Settings(), target.facts, torch.arange(target.facts.num_tokens))
    head.load_target(target, initialise=True)
    return {name: tensor.detach().clone() for name, tensor in head.trained_tensors().items()}


def rotated(folder, out):
    """The same target with its residual stream turned by a random rotation: every output is the same, no state is."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    width = model.config.hidden_size
    torch.manual_seed(3)
    turn = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64))[0]
    with torch.no_grad():
        for layer in model.model.layers:  # gains are folded into what reads the norm, or they would not commute with it
            for norm, readers in (
                (layer.input_layernorm, [getattr(layer.self_attn, f"{name}_proj") for name in "qkv"]),
                (layer.post_attention_layernorm, [layer.mlp.gate_proj, layer.mlp.up_proj]),
            ):
                for reader in readers:
                    reader.weight.copy_(reader.weight * norm.weight @ turn)
                norm.weight.fill_(1)
            for writer in (layer.self_attn.o_proj, layer.mlp.down_proj):
                writer.weight.copy_(turn.T @ writer.weight)
        model.lm_head.weight.copy_(model.lm_head.weight * model.model.norm.weight @ turn)
        model.model.norm.weight.fill_(1)
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight @ turn)
    model.float().save_pretrained(out)
    AutoTokenizer.from_pretrained(folder).save_pretrained(out)
    return TargetSettings(model=str(out), dtype="float32", device="cpu")


def test_a_head_is_refused_for_a_target_that_says_the_same_from_other_states(tmp_path, tiny_target, tiny_folder):
    """Case 41: its outputs cannot tell, so the fingerprint has to."""
    other = load_target(rotated(tiny_folder, tmp_path / "rotated"))
    prompt = np.array(make_prompts(tiny_target, [40])[0])
    first, second = tiny_target.read([prompt])[0], other.read([prompt])[0]
    torch.testing.assert_close(tiny_target.logits(first.final), other.logits(second.final), atol=1e-3, rtol=1e-3)
    assert (first.taps - second.taps).norm() > first.taps.norm()
    paths = [make_path(p, p[1:], f"p{i}") for i, p in enumerate(make_prompts(tiny_target, [9, 12]))]
    (tmp_path / "head").mkdir()
    save_head(tmp_path / "head", fitted_head(tiny_target, paths, steps=1), step=1)
    load_head(tmp_path / "head", tiny_target)
    with pytest.raises(WrongInput, match="differs in weights"):
        load_head(tmp_path / "head", other)


def test_the_same_prompts_give_the_same_counts_however_often_they_are_asked(tiny_target):
    """Case 42: nothing of a run, such as a cache of prefixes that prompts share, reaches the next."""
    shared = make_prompts(tiny_target, [30])[0]
    prompts = [shared + tail for tail in make_prompts(tiny_target, [3, 5, 4, 9, 2], seed=4)]
    said = continuations(tiny_target, prompts, 12)
    head = fitted_head(tiny_target, [make_path(p, said[tuple(p)], f"p{i}") for i, p in enumerate(prompts)])
    drafter = HeadDrafter(head)
    runs = [decode(tiny_target, prompts, Speculation(drafter, 3), 16, batch=2) for _ in range(3)]
    first = [(reply.token_ids, reply.steps) for reply in runs[0]]
    assert any(step.accepted for reply in runs[0] for step in reply.steps)
    for run in runs[1:]:
        assert [(reply.token_ids, reply.steps) for reply in run] == first


def test_the_text_tower_of_a_wrapper_is_found_or_the_wrapper_is_refused(tmp_path, tiny_folder):
    """Case 39: sizes stand in a nested config, and the model's own class is none that only writes text."""
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = SiglipVisionConfig(**small, image_size=8, patch_size=4)
    config = LlavaConfig(text_config=LlamaConfig(**SMALL), vision_config=vision, image_token_index=7)
    torch.manual_seed(0)
    LlavaForConditionalGeneration(copy.deepcopy(config)).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).get_text_config().hidden_size == SMALL["hidden_size"]
    loader = TargetLoader(TargetSettings(model=str(tmp_path), dtype="float32", device="cpu"))
    assert loader.facts.hidden_size == SMALL["hidden_size"]
    assert loader.facts.num_layers == SMALL["num_hidden_layers"]
    with pytest.raises(WrongInput):
        loader()
