"""Laws of the frozen target: what it returns does not depend on how the tokens were fed."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headstart.heads.errors import WrongInput
from headstart.heads.paths import Prompt
from headstart.heads.rendering import render
from headstart.heads.settings import TargetSettings
from headstart.heads.target import TargetLoader, load_target

CHAT = Prompt("chat", ({"role": "user", "content": "Write a short letter about tea: 17 or 23?"},))


@pytest.mark.parametrize("name", ["tiny", "tiny-tied"])
def test_taps_are_residual_streams_after_that_many_layers(name):
    target = load_target(TargetSettings(model=name, dtype="float32", device="cpu"), taps=[4, 0, 3])
    ids = target.render(CHAT)
    states = target.read([np.array([*ids, 5])])[0]
    reference = target.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    first, second, last = states.taps.chunk(3, dim=-1)
    torch.testing.assert_close(first, target.embedding_weight()[torch.tensor(ids)])
    torch.testing.assert_close(second, reference[3][0], atol=1e-4, rtol=1e-5)
    # Tap N lies before the final norm, where transformers reports the state after it.
    torch.testing.assert_close(target.model.model.norm(last), reference[4][0], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(states.final, reference[4][0], atol=1e-4, rtol=1e-5)


def test_rendered_ids_are_the_chat_templates_own(tiny_target):
    messages = list(CHAT.messages)
    expected = tiny_target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tiny_target.render(CHAT) == expected


def test_ragged_blocks_and_rollback_equal_one_pass(tiny_target):
    generator = torch.Generator().manual_seed(0)
    paths = [torch.randint(3, 500, (n,), generator=generator) for n in (40, 23, 31)]
    whole = tiny_target.read([np.append(path.numpy(), 0) for path in paths])
    cache = tiny_target.new_cache(3, 64)
    start_B = torch.zeros(3, dtype=torch.int64)
    while bool((start_B < torch.tensor([40, 23, 31])).any()):
        length_B = torch.tensor([min(4, len(p) - int(s)) for p, s in zip(paths, start_B, strict=True)])
        tokens_BT = torch.randint(3, 500, (3, 7), generator=generator)  # wrong guesses beyond length_B
        for row, path in enumerate(paths):
            tokens_BT[row, : length_B[row]] = path[start_B[row] : start_B[row] + length_B[row]]
        states = tiny_target.forward(tokens_BT, start_B, cache, length_B=torch.full((3,), 7))
        for row in range(3):
            for i in range(int(length_B[row])):
                expected = whole[row].final[int(start_B[row]) + i]
                torch.testing.assert_close(states.final[row, i], expected, atol=1e-4, rtol=1e-4)
        start_B = start_B + length_B


def test_logits_never_offer_ids_the_tokenizer_lacks(tiny_target):
    logits = tiny_target.logits(torch.randn(2, 64))
    assert logits.dtype == torch.float32
    assert logits[:, tiny_target.facts.num_tokens :].eq(-torch.inf).all()
    assert logits[:, : tiny_target.facts.num_tokens].isfinite().all()


@pytest.mark.parametrize("attention", ["auto", "sdpa", "eager"])
def test_our_layers_and_transformers_modules_agree(attention):
    target = load_target(TargetSettings(model="tiny", dtype="float32", device="cpu", attention=attention))
    path = np.arange(3, 60)
    expected = target.model(torch.from_numpy(path[:-1])[None], output_hidden_states=True)
    states = target.read([path])[0]
    torch.testing.assert_close(states.final, expected.hidden_states[-1][0], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(states.taps[:, 128:], expected.hidden_states[2][0], atol=2e-5, rtol=1e-4)


def test_a_row_keeps_its_tokens_when_the_cache_grows_shrinks_and_moves(tiny_target):
    path = torch.arange(3, 103)
    expected = tiny_target.read([np.append(path.numpy(), 0)])[0].final
    cache = tiny_target.new_cache(3, 400)
    zero_3 = torch.zeros(3, dtype=torch.int64)
    tiny_target.forward(torch.stack([path.flip(0), path, path])[:, :50], zero_3, cache)
    tiny_target.forward(torch.zeros(1, 300, dtype=torch.int64), zero_3[:1] + 50, cache)  # row 0 grows long
    cache.move_row(2, 0, 50)
    cache.shrink(50)
    states = tiny_target.forward(path[50:].expand(2, -1), zero_3[:2] + 50, cache)
    for row in range(2):
        torch.testing.assert_close(states.final[row], expected[50:], atol=2e-5, rtol=1e-4)


def test_fused_attention_and_plain_products_agree(tiny_target):
    """What a device without packed products runs, and what long passes run, gives the same states."""
    path = np.arange(3, 73)
    expected = tiny_target.read([path])[0].final
    target = load_target(TargetSettings(model="tiny", dtype="float32", device="cpu"))
    body = target._direct
    assert body is not None
    body.longest_products, body.min_rows, body.min_queries = 0, 1, 1
    cache = target.new_cache(1, 80)
    start = torch.zeros(1, dtype=torch.int64)
    tokens = torch.from_numpy(path[None])
    parts = [target.forward(tokens[:, :40], start, cache), target.forward(tokens[:, 40:69], start + 40, cache)]
    torch.testing.assert_close(torch.cat([p.final[0] for p in parts]), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verifying_a_block_repeats_plain_decoding(dtype):
    target = load_target(TargetSettings(model="tiny", dtype=dtype, device="cpu"))
    tokens = torch.randint(3, 500, (2, 44), generator=torch.Generator().manual_seed(1))
    start = torch.zeros(2, dtype=torch.int64)
    finals = []
    for block in (1, 5):
        cache = target.new_cache(2, 64)
        states = [target.forward(tokens[:, :24], start, cache)]
        for begin in range(24, 44, block):
            states.append(target.forward(tokens[:, begin : begin + block], start + begin, cache))
        finals.append(torch.cat([s.final for s in states], dim=1))
    difference = (finals[0] - finals[1]).float().abs().mean()
    assert difference <= (1e-5 if dtype == "float32" else 2e-2) * finals[0].float().std()


def damaged(tiny_folder, folder, change=lambda weights: None, **config):
    """A copy of the tiny target with other weights or config fields, and its settings."""
    shutil.copytree(tiny_folder, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, **config}))
    return TargetSettings(model=str(folder), dtype="float32", device="cpu")


def test_no_weight_of_the_target_is_ever_random(tiny_folder, tmp_path):
    missing = damaged(
        tiny_folder, tmp_path / "missing", lambda weights: weights.pop("model.layers.2.mlp.up_proj.weight")
    )
    with pytest.raises(WrongInput, match="lacks 1 weights.*layers.2.mlp.up_proj"):
        load_target(missing)
    with pytest.raises(WrongInput, match="lacks 2 weights.*lm_head"):
        load_target(damaged(tiny_folder, tmp_path / "misshapen", vocab_size=600))
    whole = (tmp_path / "missing" / "model.safetensors").read_bytes()
    (tmp_path / "missing" / "model.safetensors").write_bytes(whole[:5000])
    with pytest.raises(WrongInput, match="cannot be read"):
        load_target(missing)
    infinite = damaged(tiny_folder, tmp_path / "nan", lambda weights: weights["model.norm.weight"].fill_(torch.nan))
    with pytest.raises(WrongInput, match="not finite"):
        load_target(infinite)


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('no system turn') }}", "{% for x in %}", "{# nothing #}"],
    ids=["raises", "syntax", "empty"],
)
def test_a_prompt_that_the_template_cannot_render_is_named(tiny_folder, tmp_path, template):
    settings = damaged(tiny_folder, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    with pytest.raises(WrongInput, match=CHAT.prompt_id[:12]):
        TargetLoader(settings).render(CHAT)


def test_prompts_hold_no_ids_without_an_embedding(tiny_target):
    with pytest.raises(WrongInput, match="below 100, the rows of its embedding"):
        render(replace(tiny_target.facts, vocab_size=100), tiny_target.tokenizer, CHAT)


def test_stop_tokens_are_part_of_the_fingerprint(tiny_folder, tmp_path):
    settings = damaged(tiny_folder, tmp_path / "model")
    before = TargetLoader(settings).facts
    assert "stop_ids" not in before.fingerprint  # they are the config's own, and hashed there
    described = tmp_path / "model" / "generation_config.json"
    described.write_text(json.dumps({**json.loads(described.read_text()), "eos_token_id": [2, 9]}))
    after = TargetLoader(settings).facts
    assert after.stop_ids == [2, 9]
    assert after.fingerprint != before.fingerprint
