"""Laws of the draft model: it is the language model that it was cut from, and what it cannot be made of is refused."""

from dataclasses import replace

import pytest
import torch
from transformers import GemmaConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from headstart.heads.draft import DraftModel, default_layers
from headstart.heads.errors import WrongInput
from headstart.heads.settings import DraftSettings
from headstart.heads.target import load_target
from tests.test_builtin_targets import SMALL, save_random

FAMILIES = [
    LlamaConfig(**SMALL),
    LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    MistralConfig(**SMALL, sliding_window=None),
    Qwen2Config(**SMALL),
    Qwen3Config(**SMALL, attention_bias=True),
]


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.model_type)
def test_a_draft_of_all_layers_is_the_model_itself(config, tmp_path, tiny_folder):
    target = load_target(save_random(tmp_path, config, tiny_folder))
    head = DraftModel(DraftSettings(layers=[0, 1]), target.facts, torch.arange(500))
    head.load_target(target, initialise=True)
    lengths = [7, 12]
    token_T = torch.randint(0, 500, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    position_T = torch.cat([torch.arange(length) for length in lengths])
    with torch.no_grad():
        found = head.logits(head.model.paths(head.embed(token_T), position_T, [0, 7, 19]))
        for logits_SV, text_S in zip(found.split(lengths), token_T.split(lengths), strict=True):
            expected_SV = target.model(text_S[None]).logits[0, :, :500]
            assert (logits_SV - expected_SV).abs().max() <= 1e-5 * expected_SV.abs().max()
    assert {origin for name, origin in head.origins().items() if name.startswith("model.layers.1")} == {
        "target's layer 1"
    }


def test_other_decoder_layers_are_refused_by_name(tmp_path, tiny_folder):
    target = load_target(save_random(tmp_path, GemmaConfig(**SMALL), tiny_folder))
    with pytest.raises(WrongInput, match=r"head\.kind: found draft.*Llama"):
        DraftModel(DraftSettings(), target.facts, torch.arange(500))


def test_layers_that_the_target_lacks_are_refused(tiny_target):
    with pytest.raises(WrongInput, match=r"head\.layers: found \[4, 7\], expected 0 \.\. 3"):
        DraftModel.check(DraftSettings(layers=[1, 4, 7]), tiny_target)
    found = dict(DraftSettings(layers=[2, 1]).conflicts())
    assert "[1, 2]" in found["layers"]


def test_layers_are_chosen_from_the_first_to_the_last():
    for number in range(1, 90):
        layers = default_layers(number)
        assert layers == sorted(set(layers))
        assert (layers[0], layers[-1]) == (0, number - 1)
        assert len(layers) == max(1, min(number, max(2, number // 8)))


def test_a_draft_without_the_first_token_is_refused(tiny_target):
    head = DraftModel(DraftSettings(), replace(tiny_target.facts, num_layers=2), torch.arange(9))
    with pytest.raises(ValueError, match="x_0"):
        head.start(torch.zeros(1, 3, 64), torch.zeros(1, 3, dtype=torch.int64), torch.tensor([3]), 8)
