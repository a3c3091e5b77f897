"""Engines accept exactly what we count, and cards start their servers.

HEADSTART_ENGINE_TESTS=1 (`make engines`) runs all of it on SmolLM2-135M and installs what is missing; `quick` (`make
engines-quick`, CI) runs what engines accept on a random target, in those that are there.
"""

import json
import os
import re
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from headstart.eval.decode import decode
from headstart.eval.engine_counts import print_comparison
from headstart.eval.engines import compare_export, opened_engines
from headstart.eval.engines_setup import find_llamacpp, find_vllm, install_llamacpp, install_vllm
from headstart.eval.local_server import fetch, free_port, running_server
from headstart.eval.settings import EvalSettings, ExportSettings
from headstart.eval.speculation import PLAIN
from headstart.heads.batch import pack
from headstart.heads.checkpoint import build_head, save_head
from headstart.heads.paths import Path, Prompt
from headstart.heads.settings import HEADS, TargetSettings
from headstart.heads.smollm2 import find_gguf, write_tokenizer
from headstart.heads.target import load_target
from headstart.heads.tiny import TINY, tiny_tokenizer
from headstart.heads.vocabulary import choose_draft_vocabulary
from headstart.launch.export_gate import export_head
from tests.kinds import rollout_logits

ASKED = os.environ.get("HEADSTART_ENGINE_TESTS", "")
pytestmark = pytest.mark.skipif(
    ASKED not in ("1", "quick"), reason="`make engines` runs them, `make engines-quick` a part"
)
whole_only = pytest.mark.skipif(ASKED == "quick", reason="needs the real target: `make engines` runs it")

K, NEW_TOKENS = 3, 24
QUESTIONS = ["What is the capital of France?", "Explain gravity to a child.", "Who was Albert Einstein?"]

# The engine a folder is written for, the kind of head, its settings.
CASES = [
    ("vllm", "eagle1", {"draft_vocab_size": 0}),
    ("vllm", "eagle3", {"draft_vocab_size": 300}),
    ("vllm", "eagle3", {"draft_vocab_size": 0, "norm_before_residual": True, "taps": [0, 12, 29]}),
    ("vllm", "eagle3", {"draft_vocab_size": 300, "fc_norm": True, "norm_output": True, "taps": [1, 9, 21, 30]}),
    ("speculators", "eagle3", {"draft_vocab_size": 300, "taps": [1, 10, 20]}),
    ("vllm", "medusa", {"num_heads": K + 1, "draft_vocab_size": 300, "num_layers": 2}),
    ("vllm", "medusa", {"num_heads": K, "draft_vocab_size": 0, "own_output": True}),
    ("vllm", "mtp", {}),
    ("vllm", "mtp", {"shipped": True}),
    ("vllm", "draft", {"layers": [0, 15, 29]}),
    ("llamacpp", "eagle3", {"draft_vocab_size": 300}),
    ("llamacpp", "eagle3", {"draft_vocab_size": 300, "norm_before_residual": True, "taps": [0, 12, 29]}),
    ("llamacpp", "eagle3", {"draft_vocab_size": 0, "taps": [1, 10, 20]}),
    ("llamacpp", "draft", {"layers": [0, 15, 29]}),
]


@pytest.fixture(scope="module")
def engine():
    """Engines by the name of a layout."""
    with opened_engines() as engine_of:

        def get(layout):
            there = find_llamacpp() if layout == "llamacpp" else find_vllm()
            if ASKED == "quick" and there is None:
                pytest.skip(
                    f"found no engine for {layout}: `make engines` installs it, docs/engines.md names existing ones"
                )
            return engine_of(layout)

        yield get


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """By layout: SmolLM2-135M, or a narrow random Llama of as many layers, with heads that engines have kernels for."""
    made = {}

    def get(layout):
        if ASKED != "quick":
            return "smollm2-135m"
        if (known := layout == "llamacpp") not in made:
            made[known] = random_target(tmp_path_factory.mktemp("target"), known)
        return made[known]

    return get


def random_target(folder, known_tokenizer):
    """Its tokenizer is SmolLM2's where one has to be known: llama.cpp converts no other."""
    if known_tokenizer:
        write_tokenizer(find_gguf(), folder)
    else:
        tiny_tokenizer().save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    narrow = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    shape = {**TINY["config"], **narrow, "num_hidden_layers": 30, "vocab_size": len(tokenizer)}
    config = LlamaConfig(**shape, eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"), bos_token_id=None)
    random, model = torch.Generator().manual_seed(0), LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            gain = 4.0 if "embed" in name or "lm_head" in name else 1.0
            parameter.data = torch.randn(parameter.shape, generator=random) * gain / parameter.shape[1] ** 0.5
        else:  # gains of norms: were they all 1, states in front of a norm and behind it would serve alike
            parameter.data = torch.exp(0.5 * torch.randn(parameter.shape, generator=random))
    model.save_pretrained(folder)
    return str(folder)


def shipping_target(model, run):
    """A target that ships an MTP layer: the folder that an untrained layer of our own is served from."""
    target = load_target(TargetSettings(model=model, device="cpu"), dtype="float32")
    head = build_head(HEADS["mtp"](), target.facts, torch.arange(target.facts.num_tokens))
    head.load_target(target, initialise=True)
    return str(exported(head.eval(), target, run, "vllm"))


def load(model, taps):
    """The target with these taps, its prompts, and its own replies to them."""
    target = load_target(TargetSettings(model=model, device="cpu"), taps, "float32")
    prompts = [target.render(Prompt("chat", ({"role": "user", "content": text},))) for text in QUESTIONS]
    return target, prompts, [reply.token_ids for reply in decode(target, prompts, PLAIN, NEW_TOKENS, batch=3)]


def fitted_head(kind, settings, target, prompts, replies):
    """A head that knows most of these replies by heart, so that engines accept some drafts and refuse others."""
    settings = HEADS[kind](**settings)
    counts_V = np.bincount(np.concatenate(replies), minlength=target.facts.vocab_size)
    torch.manual_seed(0)
    ids_V = torch.from_numpy(choose_draft_vocabulary(counts_V, settings.draft_vocab_size, target.facts))
    head = build_head(settings, target.facts, ids_V)
    head.load_target(target, initialise=True)
    rows = []
    for prompt, reply in zip(prompts, replies, strict=True):
        tokens, generated = np.array(prompt + reply, np.int32), np.arange(len(prompt) + len(reply)) >= len(prompt)
        path = Path("", "chat", "train", tokens, generated, np.zeros(len(tokens), np.float32), "length", {})
        states = target.read([tokens])[0]
        rows.append((path, states.taps.clone(), states.final.clone()))
    batch = pack(rows, None)
    optimiser = torch.optim.AdamW(
        [p for p in head.parameters() if p.requires_grad], lr=3e-3 if ASKED == "quick" else 1e-3
    )
    for _ in range(200):
        rollout = head.rollout(batch, K)
        slot_SD = (rollout.start_S[:, None] + 1 + torch.arange(K)).clamp(max=len(batch.next_token_T) - 1)
        label_SD = torch.searchsorted(ids_V, batch.next_token_T[slot_SD]).clamp(max=len(ids_V) - 1)
        logits_SDV, valid_SD = rollout_logits(head, rollout), rollout.valid_SD
        right_SD = (logits_SDV.argmax(-1) == label_SD) & valid_SD
        if (right_SD.sum(0) / valid_SD.sum(0))[:2].min() > 0.6:
            return head.eval()
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(logits_SDV[valid_SD], label_SD[valid_SD]).backward()
        optimiser.step()
    raise AssertionError(f"the {kind} head did not learn three replies by heart")


def exported(head, target, run, layout):
    """The folder of a run's only checkpoint, for an engine."""
    folder = run / "checkpoints" / "step-000001"
    folder.mkdir(parents=True)
    save_head(folder, head, step=1)
    (folder.parent / "best").write_text(folder.name)
    return export_head(run, layout, target, EvalSettings(), ExportSettings(), untested=True)


@pytest.mark.parametrize(("layout", "kind", "settings"), CASES, ids=lambda value: str(value))
def test_an_engine_accepts_exactly_what_we_count(layout, kind, settings, engine, model, tmp_path):
    running = engine(layout)
    name = shipping_target(model(layout), tmp_path / "shipping") if settings.get("shipped") else model(layout)
    target, prompts, replies = load(name, settings.get("taps", []))
    head = fitted_head(kind, settings, target, prompts, replies)
    folder = exported(head, target, tmp_path / "run", layout)
    result, _ = compare_export(running, folder, head, target, prompts, NEW_TOKENS, K)
    print_comparison(result)
    assert result.problems == []
    assert result.num_as_ours == result.num_same_counts == result.num_prompts
    assert min(result.survival[:2]) > 0.2
    assert max(result.survival) < 1


def commands(card):
    """The blocks of a card's section on serving, by the words above them; the first one says where things lie."""
    serving = card.split("## Serve it")[1].split("\n## ")[0]
    blocks = re.findall(r"([^\n]*)\n\n?```\n(.*?)\n```", serving, re.DOTALL)
    return blocks[0][1], dict(blocks[1:])


@contextmanager
def served(folder, how, programs, work):
    """The address of the server that a card's command starts: only its port and the folders of programs are changed."""
    places, found = commands((folder / "README.md").read_text())
    (command,) = [text for words, text in found.items() if words.startswith(how)]
    port = free_port()
    command, changed = re.subn(r"--port \d+", f"--port {port}", command)
    assert changed == 1
    for name, path in programs.items():
        command = re.sub(rf"(?m)(^| ){re.escape(name)} ", rf"\g<1>{path} ", command)
    script = f"set -eu\ncd {folder}\n{places}\ncd {work}\n{command}\n"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with running_server(["bash", "-c", script], f"http://127.0.0.1:{port}", environment, work) as url:
        yield url


SERVED = [
    ("vllm", "eagle3", {"draft_vocab_size": 300}, "vLLM's CPU build"),
    ("vllm", "mtp", {}, "vLLM's CPU build"),
    ("llamacpp", "eagle3", {"draft_vocab_size": 300}, "llama.cpp"),
    ("llamacpp", "draft", {"layers": [0, 29]}, "llama.cpp"),
]


@whole_only
@pytest.mark.parametrize(("layout", "kind", "settings", "how"), SERVED, ids=lambda value: str(value))
def test_a_cards_own_command_starts_a_server_that_answers_as_the_target_does(
    layout, kind, settings, how, model, tmp_path
):
    target, _, replies = load(model(layout), [])
    ids_V = torch.arange(settings.get("draft_vocab_size", target.facts.num_tokens))
    head = build_head(HEADS[kind](**settings), target.facts, ids_V)
    head.load_target(target, initialise=True)
    folder = exported(head.eval(), target, tmp_path / "run", layout)
    if layout == "vllm":
        programs = {"python": install_vllm()}
    else:
        built = install_llamacpp()
        programs = {"python": sys.executable, "llama-server": built.server, "convert_hf_to_gguf.py": built.convert}
    question = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": NEW_TOKENS, "temperature": 0}
    with served(folder, how, programs, tmp_path) as url:
        answer = json.loads(fetch(f"{url}/v1/chat/completions", question))
        if layout == "vllm":
            counted = re.search(r"^vllm:spec_decode_num_drafts_total\S* (\S+)", fetch(f"{url}/metrics"), re.MULTILINE)
            drafts = float(counted[1])
        else:
            drafts = answer["timings"]["draft_n"]
    own = target.tokenizer.decode(replies[0], skip_special_tokens=True)
    assert answer["choices"][0]["message"]["content"].strip() == own.strip()
    assert drafts > 0
