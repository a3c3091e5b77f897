"""The laws of an exported draft model: transformers loads it as it is and continues texts as the head does."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config, Qwen3Config

from headstart.eval.settings import EvalSettings, ExportSettings
from headstart.heads.checkpoint import save_head
from headstart.heads.draft import DraftModel
from headstart.heads.errors import WrongInput
from headstart.heads.export.draft import TOLERANCE, logit_difference, write_draft, written_head
from headstart.heads.settings import DraftSettings
from headstart.launch.export_gate import export_head
from tests.test_builtin_targets import SMALL, save_random

SETTINGS = [{}, {"layers": [0, 1, 3], "train_output": True}, {"lora_rank": 3}, {"lora_rank": 3, "train_output": True}]
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
MODELS = [
    Qwen2Config(**{**SMALL, "vocab_size": 504}),
    Qwen3Config(**{**SMALL, "vocab_size": 560}, tie_word_embeddings=True),
    LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3),
    LlamaConfig(**SMALL, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}),
]


def trained(target, **settings):
    """A head none of whose trained tensors is what it started as."""
    torch.manual_seed(0)
    head = DraftModel(DraftSettings(**settings), target.facts, torch.arange(target.facts.num_tokens))
    head.load_target(target, initialise=True)
    with torch.no_grad():
        for tensor in head.trained_tensors().values():
            tensor += 0.05 * torch.randn_like(tensor)
    return head.eval()


def assert_says_the_same(head, folder, tolerance=TOLERANCE):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    token_T = torch.randint(0, 500, (48,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected_TV = head.logits(head.model.paths(head.embed(token_T), torch.arange(48), [0, 48]))
        found_TV = model(token_T[None]).logits[0, :, :500]
    assert (found_TV - expected_TV).abs().max() <= tolerance * expected_TV.abs().max()
    return model


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_a_cut_draft_is_loaded_as_an_ordinary_model(settings, tied, request, tmp_path):
    target = request.getfixturevalue("tiny_tied_target" if tied else "tiny_target")
    head = trained(target, **settings)
    folder = write_draft(head, target, tmp_path / "out", "transformers", "float32")
    model = assert_says_the_same(head, folder)
    assert model.config.vocab_size == target.facts.vocab_size == 512
    shared = tied and not head.settings.train_output
    assert model.config.tie_word_embeddings is shared
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) is not shared  # a tied table is stored once
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == target.tokenizer.get_vocab()


@pytest.mark.parametrize("config", MODELS, ids=lambda config: config.model_type)
def test_a_draft_of_another_model_has_its_family_and_the_targets_rows(config, tmp_path, tiny_folder, tiny_target):
    save_random(tmp_path / "model", config, tiny_folder)
    head = trained(tiny_target, model=str(tmp_path / "model"), lora_rank=2)
    folder = write_draft(head, tiny_target, tmp_path / "out", "vllm", "float32")
    model = assert_says_the_same(head, folder)
    assert (model.config.model_type, model.config.vocab_size) == (config.model_type, 512)


def test_rounded_weights_say_what_the_rounded_head_says(tiny_target, tmp_path):
    head = trained(tiny_target)
    folder = write_draft(head, tiny_target, tmp_path / "out", "llamacpp", "bfloat16")
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert_says_the_same(written_head(head, torch.bfloat16), folder)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_folder_that_says_something_else_is_found_out(tiny_target, tmp_path):
    head = trained(tiny_target)
    folder = write_draft(head, tiny_target, tmp_path / "out", "transformers", "float32")
    tensors, plain = load_file(folder / "model.safetensors"), written_head(head, torch.float32)
    assert logit_difference(plain, folder, set(tensors)) <= TOLERANCE
    with pytest.raises(WrongInput, match=r"no place for \['model.layers.0.extra'\]"):
        logit_difference(plain, folder, {*tensors, "model.layers.0.extra"})
    name = "model.layers.1.self_attn.k_proj.weight"
    save_file(tensors | {name: tensors[name].flip(0)}, folder / "model.safetensors")
    assert logit_difference(plain, folder, set(tensors)) > 100 * TOLERANCE
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WrongInput, match="lacks 1 weights"):
        logit_difference(plain, folder, set(tensors))


def test_a_reduced_vocabulary_is_refused_before_anything_is_written(tiny_target, tmp_path):
    head = DraftModel(DraftSettings(draft_vocab_size=64), tiny_target.facts, torch.arange(64))
    head.load_target(tiny_target, initialise=True)
    with pytest.raises(WrongInput, match="draft_vocab_size = 64, expected 0"):
        write_draft(head, tiny_target, tmp_path / "out", "vllm", "float32")
    assert not (tmp_path / "out").exists()


def test_the_card_of_a_draft_model_serves_it_in_every_engine(tiny_target, tmp_path):
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000007"
    checkpoint.mkdir(parents=True)
    save_head(checkpoint, trained(tiny_target), step=7)
    (checkpoint.parent / "best").write_text("step-000007\n")
    options = (EvalSettings(draft_length=3), ExportSettings(dtype="float32"))
    folder = export_head(tmp_path / "run", "transformers", tiny_target, *options, untested=True)
    card = (folder / "README.md").read_text()
    assert card.startswith("**UNTESTED.**")
    for text in (
        "Draft model for tiny",
        '"method":"draft_model"',
        "STANDALONE",
        "draft-simple",
        "assistant_model=draft",
    ):
        assert text in card


def test_transformers_own_speculation_gives_the_targets_replies(tiny_target, tmp_path):
    head = DraftModel(DraftSettings(layers=[0, 1, 2]), tiny_target.facts, torch.arange(500))
    head.load_target(tiny_target, initialise=True)
    draft = AutoModelForCausalLM.from_pretrained(
        write_draft(head, tiny_target, tmp_path / "out", "transformers", "float32")
    )
    tokens = torch.arange(5, 20)[None]
    options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 16, "do_sample": False}
    plain = tiny_target.model.generate(tokens, **options)
    assert torch.equal(tiny_target.model.generate(tokens, assistant_model=draft, **options), plain)
