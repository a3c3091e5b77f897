"""The laws of an exported draft model: transformers loads it as it is and continues texts as the head does."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config, Qwen3Config

from headstart.heads.draft import DraftModel
from headstart.heads.export.draft import written_head
from headstart.heads.export.scheme import write_head
from headstart.heads.settings import DraftSettings
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


def assert_says_the_same(head, folder, tolerance=1e-5):
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
    folder = write_head(head, tmp_path / "out", "transformers", target=target)
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
    folder = write_head(head, tmp_path / "out", "vllm", target=tiny_target)
    model = assert_says_the_same(head, folder)
    assert (model.config.model_type, model.config.vocab_size) == (config.model_type, 512)


def test_rounded_weights_say_what_the_rounded_head_says(tiny_target, tmp_path):
    head = trained(tiny_target)
    folder = write_head(head, tmp_path / "out", "llamacpp", "bfloat16", target=tiny_target)
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert_says_the_same(written_head(head, torch.bfloat16), folder)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_transformers_own_speculation_gives_the_targets_replies(tiny_target, tmp_path):
    head = DraftModel(DraftSettings(layers=[0, 1, 2]), tiny_target.facts, torch.arange(500))
    head.load_target(tiny_target, initialise=True)
    draft = AutoModelForCausalLM.from_pretrained(write_head(head, tmp_path / "out", "transformers", target=tiny_target))
    tokens = torch.arange(5, 20)[None]
    options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 16, "do_sample": False}
    plain = tiny_target.model.generate(tokens, **options)
    assert torch.equal(tiny_target.model.generate(tokens, assistant_model=draft, **options), plain)
