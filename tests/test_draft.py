"""Laws of the draft model: it is the language model that it was made of, and what it cannot be made of is refused."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GemmaConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from headstart.eval.acceptance import count_replies, reply_acceptance
from headstart.eval.decode import decode
from headstart.eval.drafters import HeadDrafter
from headstart.eval.replies import live_counts
from headstart.eval.speculation import PLAIN, Speculation
from headstart.heads.batch import pack
from headstart.heads.checkpoint import WEIGHTS, checkpoint_identity, load_head, save_head
from headstart.heads.draft import DraftModel, default_layers
from headstart.heads.draft_base import check_tokens, open_base
from headstart.heads.errors import WrongInput
from headstart.heads.settings import DraftSettings
from headstart.heads.start import saved_start
from headstart.heads.target import load_target
from headstart.heads.warm_start import shape_problems
from headstart.trainer.loop import Job, optimizer_step
from tests.small_decoding import NO_STOP, make_path, make_prompts
from tests.small_training import SETTINGS, SmallTarget, make_rows
from tests.small_training import make_head as small_head
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
    with pytest.raises(WrongInput, match=r"head\.kind: .*Llama"):
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


@pytest.fixture(scope="module")
def small_model(tmp_path_factory, tiny_folder):
    """Folder of a random model of another family and width, with the tiny target's tokenizer and a table of 504 rows."""
    folder = tmp_path_factory.mktemp("models") / "small"
    save_random(folder, Qwen2Config(**{**SMALL, "vocab_size": 504, "max_position_embeddings": 64}), tiny_folder)
    return folder


def made_of(folder, target, **settings):
    head = DraftModel(DraftSettings(model=str(folder), **settings), target.facts, torch.arange(target.facts.num_tokens))
    head.load_target(target, initialise=True)
    return head


def test_a_model_with_the_targets_tokenizer_drafts_as_it_speaks(small_model, tiny_target):
    """Tables of 512 and 504 rows for 500 tokens: the pair works, and neither proposes a padding row."""
    head = made_of(small_model, tiny_target)
    model = load_target(replace(tiny_target_settings(), model=str(small_model)))
    prompts = make_prompts(tiny_target, [5, 12, 3])
    session = HeadDrafter(head).start(prompts, [7, 8, 9], tiny_target.read([torch.tensor([1, 2, 3]).numpy()])[0], 64)
    proposal = session.propose([4, 4, 4])
    for row, prompt in enumerate(prompts):
        text = [*prompt, 7 + row]
        for token in proposal.tokens_BK[row].tolist():
            logits_V = model.model(torch.tensor([text])).logits[0, -1, :500]
            assert token == int(logits_V.argmax())
            text.append(token)


def tiny_target_settings():
    from headstart.heads.settings import TargetSettings

    return TargetSettings(model="tiny", dtype="float32", device="cpu")


def test_beyond_the_models_context_nothing_is_drafted_and_offline_knows(small_model, tiny_target):
    head = made_of(small_model, tiny_target)
    prompts = make_prompts(tiny_target, [32, 55, 62, 80])
    plain = decode(tiny_target, prompts, PLAIN, 12, NO_STOP)
    paths = [make_path(p, r.token_ids, name) for p, r, name in zip(prompts, plain, "abcd", strict=True)]
    states = tiny_target.read([path.token_N for path in paths])
    batch = pack([(path, s.taps, s.final) for path, s in zip(paths, states, strict=True)])
    live = decode(tiny_target, prompts, Speculation(HeadDrafter(head), 4), 12, NO_STOP, batch=4)
    assert [reply.token_ids for reply in live] == [reply.token_ids for reply in plain]
    assert max(step.whole_drafted for step in live[0].steps) == 4
    assert {step.whole_drafted for step in live[3].steps} == {0}
    offline = count_replies(reply_acceptance(head, [batch], 4), 4)
    for a, b in zip(offline, live_counts(live, "abcd", ["chat"] * 4, 4), strict=True):
        assert a.num_steps == b.num_steps
        assert a.judged_K.tolist() == b.judged_K.tolist()


def test_frozen_tensors_of_the_model_are_found_again_by_fingerprint(small_model, tiny_target, tmp_path):
    head = made_of(small_model, tiny_target)
    save_head(tmp_path, head, step=1)
    saved = load_head(tmp_path, tiny_target)
    for name, tensor in [*head.named_parameters(), *head.named_buffers()]:
        assert torch.equal(tensor, {**dict(saved.named_parameters()), **dict(saved.named_buffers())}[name])
    assert (tmp_path / WEIGHTS).stat().st_size < 4 * sum(p.numel() for p in head.parameters())  # no frozen tensor
    identity = checkpoint_identity(tmp_path)
    description = json.loads((tmp_path / "head.json").read_text())
    description["base"]["fingerprint"]["weights"] = "others"
    (tmp_path / "head.json").write_text(json.dumps(description))
    assert checkpoint_identity(tmp_path) != identity
    with pytest.raises(WrongInput, match="now differs in weights"):
        load_head(tmp_path, tiny_target)
    (problem,) = shape_problems(saved_start(tmp_path), head.settings, tiny_target.facts)
    assert "frozen tensors of another" in problem


def test_an_output_layer_that_the_config_calls_the_embedding_is_not_dropped(tiny_folder, tiny_target, tmp_path):
    save_random(tmp_path, LlamaConfig(**SMALL, tie_word_embeddings=True), tiny_folder)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding_VH = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding_VH.clone()}, tmp_path / "model.safetensors", {"format": "pt"})
    made_of(tmp_path, tiny_target)
    save_file(tensors | {"lm_head.weight": embedding_VH.flip(0)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(WrongInput, match="tie_word_embeddings = true"):
        made_of(tmp_path, tiny_target)


def with_tokens(folder, small_model, change=lambda parsed: None, renamed=("", "")):
    """The model with another tokenizer: `change` is given the parsed tokenizer.json; an added token may be renamed."""
    shutil.copytree(small_model, folder)
    for file in folder.glob("*token*.json"):
        file.write_text(file.read_text().replace(*renamed))
    parsed = json.loads((folder / "tokenizer.json").read_text())
    change(parsed)
    (folder / "tokenizer.json").write_text(json.dumps(parsed))
    return open_base(str(folder))


def swap(parsed):
    vocab = parsed["model"]["vocab"]
    first, second = (next(token for token, i in vocab.items() if i == wanted) for wanted in (402, 411))
    vocab[first], vocab[second] = vocab[second], vocab[first]


def add(content, i):
    more = {"id": i, "content": content, "special": True}
    more |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return lambda parsed: parsed["added_tokens"].append(more)


def test_tokenizers_are_compared_by_content(small_model, tiny_target, tmp_path):
    check_tokens(open_base(str(small_model)), tiny_target)  # of the same tokens, in tables of 504 and 512 rows
    check_tokens(with_tokens(tmp_path / "more", small_model, add("<|think|>", 500)), tiny_target)  # never drafted
    token = tiny_target.tokenizer.convert_ids_to_tokens
    for name, change, message in (
        (
            "swapped",
            {"change": swap},
            f"2 of 500 ids differ. The first is 402: {token(402)!r} for the target, {token(411)!r}",
        ),
        (
            "renamed",
            {"renamed": (token(1), "<|turn|>")},
            f"1 of 500 ids differ. The first is 1: {token(1)!r} for the target",
        ),
    ):
        base = with_tokens(tmp_path / name, small_model, **change)
        assert len(base.tokenizer) == len(tiny_target.tokenizer)
        with pytest.raises(WrongInput) as caught:
            check_tokens(base, tiny_target)
        assert str(caught.value).startswith("head.model: ")
        assert message in str(caught.value)
    grown = with_tokens(tmp_path / "grown", small_model, add("<|think|>", 500))
    grown_target = replace_facts(grown, num_tokens=501)
    with pytest.raises(WrongInput, match=r"The first is 500: '<\|think\|>' for the target, no token for the draft"):
        check_tokens(open_base(str(small_model)), grown_target)


def replace_facts(loader, **facts):
    loader.facts = replace(loader.facts, **facts)
    return loader


def test_a_table_without_rows_for_all_tokens_is_refused(small_model, tiny_target):
    base = replace_facts(open_base(str(small_model)), vocab_size=480)
    with pytest.raises(WrongInput, match=r"480 rows.*\n?.*at least 500"):
        check_tokens(base, tiny_target)


def test_adapters_start_as_the_layers_themselves_and_are_merged_for_drafting(tiny_target):
    heads = [
        DraftModel(DraftSettings(layers=[0, 3], lora_rank=rank), tiny_target.facts, torch.arange(500))
        for rank in (0, 4)
    ]
    for head in heads:
        head.load_target(tiny_target, initialise=True)
    plain, adapted = heads
    token_T, position_T = torch.arange(5, 25), torch.arange(20)

    def states(head):
        with torch.no_grad():
            return head.model.paths(head.embed(token_T), position_T, [0, 20])

    first = states(plain)
    assert torch.equal(states(adapted), first)
    for name, tensor in adapted.trained_tensors().items():
        assert ".lora_" in name
        tensor.data += 0.05 * torch.randn_like(tensor)
    moved = states(adapted)
    assert (moved - first).abs().max() > 0.1
    for _ in range(2):  # merged once, however often it is made ready
        torch.testing.assert_close(states(adapted.pack()), moved, atol=1e-5, rtol=1e-5)


def test_only_adapters_learn():
    head = small_head(kind="draft", lora_rank=2)
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    job = Job.open(head, SmallTarget().output, make_rows(), SETTINGS)
    for step in (1, 2):
        optimizer_step(job, step)
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, before[name]) == (".lora_" not in name), name
