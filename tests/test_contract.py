"""The law behind every number: `rollout`, `draft` and a slow oracle are the same function, for every kind of head."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Phi3Config, Phi3ForCausalLM

from headstart.heads.batch import pack, supervised_pairs
from headstart.heads.checkpoint import WEIGHTS, load_head, save_head
from headstart.heads.contract import Level
from headstart.heads.eagle3 import Eagle3
from headstart.heads.errors import WrongInput
from headstart.heads.facts import TargetFacts, default_taps, told_taps
from headstart.heads.paths import Path
from headstart.heads.settings import Eagle3Settings
from headstart.heads.target import Target
from headstart.heads.vocabulary import choose_draft_vocabulary, coverage
from tests.kinds import FORMS, VARIANTS, fill_shipped, random_head, random_layer, rollout_logits, shipped_layer
from tests.oracle import oracle_logits

DEPTH = 5
FACTS = TargetFacts(
    name="paper", hidden_size=32, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48,
    vocab_size=96, num_tokens=90, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    max_position=256, special_ids=[0, 1, 89], stop_ids=[89], fingerprint={"weights": "none"}, shipped=shipped_layer(32),
)  # fmt: skip
PRECISION = [(torch.float32, 1e-5), (torch.float64, 1e-10)]


class PaperTarget:
    """What a head borrows from its target: an embedding table, output rows, and its identity."""

    facts = FACTS
    device = torch.device("cpu")

    def __init__(self, dtype):
        random = torch.Generator().manual_seed(7)
        self.table = torch.randn(FACTS.vocab_size, FACTS.hidden_size, generator=random).to(dtype)

    def embedding_weight(self):
        return self.table

    def output_weight(self):
        return self.table.flip(0)

    def final_norm_weight(self):
        return self.layer(-1)["input_layernorm.weight"]

    def layer(self, index):
        return random_layer(FACTS, index, self.table.dtype)

    def read_shipped(self, tensors, whole):
        fill_shipped(tensors, whole)


def make_head(kind, flags, dtype):
    ids = choose_draft_vocabulary(np.zeros(FACTS.vocab_size), 40, FACTS)
    head = random_head(kind, DEPTH, FACTS, torch.from_numpy(ids), dtype, **flags)
    head.load_target(PaperTarget(dtype), initialise=False)
    return head


def make_rows(head, lengths, dtype, seed=1):
    """Random paths (prompt, reply lengths) whose tokens the head can draft, with random features."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i, (prompt, reply) in enumerate(lengths):
        total = prompt + reply
        picks = torch.randint(0, len(head.draft_ids_V), (total,), generator=generator)
        path = Path(
            prompt_id=str(i), route="chat", split="train", token_N=head.draft_ids_V[picks].numpy().astype(np.int32),
            generated_N=np.arange(total) >= prompt, logprob_N=np.full(total, -1, np.float32), finish_reason="length",
            sampling={},
        )  # fmt: skip
        taps = torch.randn(
            total - 1, (len(head.taps) or 1) * FACTS.hidden_size, generator=generator, dtype=torch.float64
        )
        final = torch.randn(total - 1, FACTS.hidden_size, generator=generator, dtype=torch.float64)
        rows.append((path, taps.to(dtype), final.to(dtype)))
    return rows


def pair_logits(head, rows, depth, num_slots=None):
    """{(path, t, j): logits} of every supervised pair."""
    batch = pack(rows, num_slots)
    rollout = head.rollout(batch, depth)
    logits = rollout_logits(head, rollout)
    row_of = np.searchsorted(batch.offsets, rollout.start_S.numpy(), side="right") - 1
    found = {}
    for s, (row, start) in enumerate(zip(row_of, rollout.start_S.tolist(), strict=True)):
        for j in range(depth):
            if rollout.valid_SD[s, j]:
                found[(int(row), start - batch.offsets[row], j)] = logits[s, j]
    return found


def allowed(head, tolerance):
    """Layers of transformers norm in float32 whatever the precision."""
    return tolerance if not getattr(head.settings, "shipped", False) else max(tolerance, 1e-6)


def assert_close(actual, expected, tolerance):
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize(("kind", "flags"), VARIANTS, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISION)
def test_rollout_equals_the_oracle(kind, flags, dtype, tolerance):
    head = make_head(kind, flags, dtype)
    tolerance = allowed(head, tolerance)
    rows = make_rows(head, [(5, 9), (1, 7), (4, 3)], dtype)
    with torch.no_grad():
        found = pair_logits(head, rows, DEPTH, num_slots=64)
        for i, (path, taps, final) in enumerate(rows):
            for t in sorted({t for row, t, _ in found if row == i}):
                deep = max(j for row, start, j in found if (row, start) == (i, t)) + 1
                expected = oracle_logits(head, taps, final, torch.from_numpy(path.token_N), t, deep)
                for j in range(deep):
                    assert_close(found[(i, t, j)], expected[j], tolerance)


def slots_of(head, rows, slices):
    """Features and next tokens of slots begin..end-1 of each row, right-padded."""
    width = max(end - begin for begin, end in slices)
    features = [head.features(taps, final) for _, taps, final in rows]
    padded = torch.zeros(len(rows), width, features[0].shape[1], dtype=features[0].dtype)
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    for b, (begin, end) in enumerate(slices):
        end = min(end, len(rows[b][1]))
        if end > begin:
            padded[b, : end - begin] = features[b][begin:end]
            tokens[b, : end - begin] = torch.from_numpy(rows[b][0].token_N[begin + 1 : end + 1].astype(np.int64))
    return padded, tokens


def first_tokens(rows):
    """x_0 of each row."""
    return torch.tensor([int(path.token_N[0]) for path, _, _ in rows])


@pytest.mark.parametrize(("kind", "flags"), VARIANTS, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISION)
def test_draft_equals_rollout_along_paths(kind, flags, dtype, tolerance):
    """20 paths decoded as one ragged batch, with scripted accepted counts 0..depth in random order."""
    head = make_head(kind, flags, dtype)
    tolerance = allowed(head, tolerance)
    random = np.random.default_rng(3)
    lengths = [(int(random.integers(1, 9)), int(random.integers(4, 40))) for _ in range(20)]
    rows = make_rows(head, lengths, dtype)
    prompts = [prompt for prompt, _ in lengths]
    to_draft = {int(token): i for i, token in enumerate(head.draft_ids_V)}
    fed: list[int] = []
    for output in head.outputs():
        output.register_forward_hook(lambda module, inputs, output: fed.append(inputs[0].shape[:-1].numel()))
    checked = 0
    with torch.no_grad():
        expected = pair_logits(head, rows, DEPTH)
        state = head.start(
            *slots_of(head, rows, [(0, p) for p in prompts]), torch.tensor(prompts), 128, first_tokens(rows)
        )
        start = [p - 1 for p in prompts]
        while max(start) >= 0:
            recorded = [
                [to_draft[int(token)] for token in rows[b][0].token_N[t + 2 : t + 2 + DEPTH]] if t >= 0 else []
                for b, t in enumerate(start)
            ]
            step = iter(range(DEPTH))

            def along_the_path(logits_BV, step=step, recorded=recorded):
                j = next(step)
                return torch.tensor([tokens[j] if j < len(tokens) else 0 for tokens in recorded])

            fed.clear()
            draft = head.draft(state, DEPTH, along_the_path)
            assert fed == [len(rows)] * DEPTH  # every step of a block projects one state a row
            for b, t in enumerate(start):
                for j in range(DEPTH):
                    if (b, t, j) in expected:
                        assert_close(draft.logits_BKV[b, j], expected[(b, t, j)], tolerance)
                        checked += 1
            accepted = [int(random.integers(0, DEPTH + 1)) if t >= 0 else -1 for t in start]
            slices = [(t + 1, t + 2 + DEPTH) if t >= 0 else (0, 0) for t in start]
            head.accept(state, *slots_of(head, rows, slices), torch.tensor(accepted))
            for b, t in enumerate(start):
                following = t + accepted[b] + 1
                start[b] = following if t >= 0 and following + 2 < len(rows[b][0].token_N) else -1
    assert checked > 300


def test_a_block_runs_the_layer_once_a_step_on_one_token_a_row():
    """However many slots wait to be read, the first step of a block included."""
    head = make_head("eagle3", {}, torch.float32)
    rows = make_rows(head, [(9, 12), (4, 12)], torch.float32)
    fed: list[int] = []
    head.midlayer.mlp.register_forward_hook(lambda module, inputs, output: fed.append(inputs[0].shape[:-1].numel()))
    state = head.start(*slots_of(head, rows, [(0, 9), (0, 4)]), torch.tensor([9, 4]), max_length=64)
    head.draft(state, DEPTH)
    head.accept(state, *slots_of(head, rows, [(9, 15), (4, 10)]), torch.tensor([3, 0]))
    head.draft(state, DEPTH)
    assert fed == [2] * (2 * DEPTH)


@pytest.mark.parametrize(("kind", "flags"), VARIANTS, ids=str)
def test_future_tokens_and_states_change_nothing(kind, flags):
    """(t, j) knows the target's states up to t and the tokens up to x_{t+1+j}; whatever comes later may be anything."""
    head = make_head(kind, flags, torch.float64)
    rows = make_rows(head, [(6, 18)], torch.float64)
    path, taps, final = rows[0]
    cut, slot_S = 10, torch.arange(len(final))
    other = [torch.where(slot_S[:, None] > cut, 3.0, states) for states in (taps, final)]
    text = replace(path, token_N=np.where(np.arange(len(path.token_N)) > cut + 1, 0, path.token_N))
    with torch.no_grad():
        before = pair_logits(head, rows, DEPTH)
        after_states = pair_logits(head, [(path, *other)], DEPTH)
        after_tokens = pair_logits(head, [(text, taps, final)], DEPTH)
    moved = [pair for pair, logits in after_states.items() if (logits - before[pair]).abs().max() > 0.01]
    assert bool(moved) == (head.reads != "text")  # there is something to leak
    assert min((t for _, t, _ in moved), default=cut + 1) > cut
    for (row, t, j), logits in before.items():
        if t <= cut:
            assert_close(after_states[row, t, j], logits, allowed(head, 1e-12))
        if t + j <= cut:
            assert_close(after_tokens[row, t, j], logits, allowed(head, 1e-12))


def branch_row(row, t, tokens, dtype):
    """A recorded row up to start t, then a branch of drafts, and one token more that its last logits speak of."""
    path, taps, final = row
    token_N = np.array([*path.token_N[: t + 2], *tokens, tokens[-1] if tokens else path.token_N[0]], dtype=np.int32)
    features = [torch.zeros(len(token_N) - 1, x.shape[1], dtype=dtype) for x in (taps, final)]
    for feature, known in zip(features, (taps, final), strict=True):
        feature[: t + 1] = known[: t + 1]
    generated_N = np.arange(len(token_N)) >= path.num_prompt_tokens
    branch = Path(
        prompt_id="branch", route="chat", split="train", token_N=token_N, generated_N=generated_N,
        logprob_N=np.full(len(token_N), -1, np.float32), finish_reason="length", sampling={},
    )  # fmt: skip
    return branch, *features


@pytest.mark.parametrize(("kind", "flags"), VARIANTS, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISION)
def test_a_drafted_tree_equals_rollout_along_every_branch(kind, flags, dtype, tolerance):
    """Random trees of a ragged batch, one after the other, with random accepted counts between them."""
    head = make_head(kind, flags, dtype)
    tolerance = allowed(head, tolerance)
    random = np.random.default_rng(4)
    prompts = [5, 1, 9]
    rows = make_rows(head, [(prompt, 16) for prompt in prompts], dtype)
    start = [prompt - 1 for prompt in prompts]
    with torch.no_grad():
        state = head.start(
            *slots_of(head, rows, [(0, p) for p in prompts]), torch.tensor(prompts), 64, first_tokens(rows)
        )
        for accepted in ([2, 0, 3], [0, 3, 1], [0, 0, 0]):
            widths = iter((3, 4, 2))
            level = [[()] for _ in rows]  # draft-vocabulary indices on the way to each node fed last
            found = []

            def grow(logits_BWV, widths=widths, level=level, found=found):
                for b, nodes in enumerate(level):
                    found.extend((b, node, logits_BWV[b, w]) for w, node in enumerate(nodes))
                width = next(widths, None)
                if width is None:
                    return None
                parent_BW = torch.from_numpy(random.integers(0, len(level[0]), (len(rows), width)))
                index_BW = torch.from_numpy(random.integers(0, len(head.draft_ids_V), (len(rows), width)))
                level[:] = [
                    [(*level[b][p], i) for p, i in zip(parent_BW[b].tolist(), index_BW[b].tolist(), strict=True)]
                    for b in range(len(rows))
                ]
                return Level(parent_BW, index_BW)

            head.draft_tree(state, grow)
            assert len(found) == len(rows) * (1 + 3 + 4 + 2)
            ids = head.draft_ids_V.tolist()
            branches = [branch_row(rows[b], start[b], [ids[i] for i in node], dtype) for b, node, _ in found]
            expected = pair_logits(head, branches, 4)
            for place, (b, node, logits) in enumerate(found):
                assert_close(logits, expected[(place, start[b], len(node))], tolerance)
            slices = [(t + 1, t + 5) for t in start]
            head.accept(state, *slots_of(head, rows, slices), torch.tensor(accepted))
            start = [t + number + 1 for t, number in zip(start, accepted, strict=True)]


def test_supervised_pairs_are_exactly_those_serving_can_meet():
    """Prompt x_0..x_4, reply x_5..x_8: depth 0 has t = 4, 5, 6; depth 1 has t = 4, 5; depth 2 has t = 4."""
    head = make_head("eagle3", {}, torch.float32)
    batch = pack(make_rows(head, [(5, 4), (3, 2), (2, 1)], torch.float32), num_slots=32)
    start_S, valid_SD = supervised_pairs(batch, 4)
    pairs = [[int(t) for t, ok in zip(start_S, valid_SD[:, j], strict=True) if ok] for j in range(4)]
    second = batch.offsets[1]  # the two-token reply has one pair, the one-token reply none
    assert pairs == [[4, 5, 6, second + 2], [4, 5], [4], []]


@pytest.mark.parametrize("kind", FORMS)
def test_neighbours_order_and_filler_change_nothing(kind):
    head = make_head(kind, {}, torch.float64)
    rows = make_rows(head, [(5, 9), (2, 20), (7, 4)], torch.float64)
    with torch.no_grad():
        together = pair_logits(head, [rows[2], rows[0], rows[1]], DEPTH, num_slots=128)
        for i, place in ((0, 1), (1, 2), (2, 0)):
            alone = pair_logits(head, [rows[i]], DEPTH)
            assert {(t, j) for row, t, j in together if row == place} == {(t, j) for _, t, j in alone}
            for (_, t, j), logits in alone.items():
                assert_close(together[(place, t, j)], logits, allowed(head, 1e-12))


@pytest.mark.parametrize("kind", FORMS)
def test_a_batch_without_a_reply_has_no_pairs_and_a_gradient_path(kind):
    head = make_head(kind, {}, torch.float32)
    rollout = head.rollout(pack(make_rows(head, [(6, 0)], torch.float32)), 3)
    assert rollout.start_S.numel() == 0
    rollout.state_SDH.sum().backward()


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_packing_for_drafting_changes_no_logits(kind, dtype, tolerance):
    head = make_head(kind, {}, dtype)
    rows = make_rows(head, [(5, 9), (2, 20)], dtype)
    with torch.no_grad():
        expected = pair_logits(head, rows, DEPTH)
        packed = pair_logits(head.pack(), rows, DEPTH)
    for pair, logits in expected.items():
        assert_close(packed[pair].float(), logits.float(), tolerance)


@pytest.mark.parametrize(("kind", "flags"), VARIANTS, ids=str)
def test_saved_head_is_the_same_head(kind, flags, tmp_path):
    head = make_head(kind, flags, torch.float32)
    save_head(tmp_path, head, step=3)
    again = load_head(tmp_path, PaperTarget(torch.float32))
    assert (again.kind, again.settings, again.taps) == (kind, head.settings, head.taps)
    assert again.trained_tensors().keys() == head.trained_tensors().keys()
    for name, tensor in [*head.named_parameters(), *head.named_buffers()]:
        assert torch.equal(tensor, {**dict(again.named_parameters()), **dict(again.named_buffers())}[name])
    saved, target = load_file(tmp_path / WEIGHTS).values(), PaperTarget(torch.float32)
    borrowed = (target.embedding_weight(), target.output_weight()[head.draft_ids_V])
    for tensor in saved:  # the frozen target's weights are never saved
        assert not any(tensor.shape == weight.shape and torch.equal(tensor, weight) for weight in borrowed)


def test_a_head_of_another_target_is_refused(tmp_path):
    save_head(tmp_path, make_head("eagle3", {}, torch.float32), step=3)
    other = PaperTarget(torch.float32)
    other.facts = TargetFacts(**{**FACTS.to_dict(), "fingerprint": {"weights": "other"}})
    with pytest.raises(WrongInput, match="differs in weights"):
        load_head(tmp_path, other)


def test_vocabulary_holds_specials_then_traffic_then_lowest_ids():
    counts = np.zeros(96, dtype=np.int64)
    counts[[70, 50, 95]] = 5, 9, 100  # 95 is a padding row no tokenizer can produce
    ids = choose_draft_vocabulary(counts, 8, FACTS)
    assert ids.tolist() == [0, 1, 2, 3, 4, 50, 70, 89]
    assert coverage(counts[:90], ids) == 1.0
    for size in (91, 2):
        with pytest.raises(WrongInput, match="draft_vocab_size"):
            choose_draft_vocabulary(counts, size, FACTS)
    assert len(choose_draft_vocabulary(counts, 0, FACTS)) == 90


def test_default_taps_are_distinct_and_valid_on_shallow_targets():
    assert default_taps(30) == [2, 15, 27]
    for layers in range(2, 9):
        taps = default_taps(layers)
        assert len(set(taps)) == 3
        assert all(0 <= tap <= layers for tap in taps)


def test_every_tap_is_told_by_what_it_is():
    told = (
        "the residual stream of 3 layers: 0 the embedding, 1 after 1 layer, 3 after all 3 layers, before the final norm"
    )
    assert told_taps([0, 1, 3], 3) == told
    assert told_taps(default_taps(30), 30).endswith(
        "30 layers: 2 after 2 layers, 15 after 15 layers, 27 after 27 layers"
    )


def test_taps_out_of_range_are_refused():
    with pytest.raises(WrongInput, match="taps"):
        make_head("eagle3", {"taps": [2, 7]}, torch.float32)


def test_a_head_starts_from_targets_whose_layers_have_other_names(tiny_target):
    config = Phi3Config(
        vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    target = Target(Phi3ForCausalLM(config).eval(), tiny_target.tokenizer, tiny_target.facts, tiny_target.taps)
    head = Eagle3(Eagle3Settings(), target.facts, torch.arange(500))
    before = {name: tensor.detach().clone() for name, tensor in head.trained_tensors().items()}
    head.load_target(target, initialise=True)
    source, origins = target.last_layer(), head.origins()
    assert torch.equal(head.midlayer.mlp.down_proj.weight, source["mlp.down_proj.weight"])
    assert torch.equal(head.midlayer.hidden_norm.weight, source["input_layernorm.weight"])
    for name in ("midlayer.self_attn.k_proj.weight", "midlayer.mlp.gate_proj.weight"):  # fused in this target
        assert name not in origins
        assert torch.equal(head.get_parameter(name)[:, -64:], before[name][:, -64:])
