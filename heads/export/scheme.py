"""Write a trained head as the folder a serving engine loads, and prove it before the folder gets its name.

The config is built from the fields below and nothing else. After writing, a reader (`heads/export/readers/`) loads the
folder by the engine's own rules and must reproduce the head's logits over several drafted blocks; only then does it get
its name.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.heads.checkpoint import write_tensors
from headstart.heads.contract import Head
from headstart.heads.eagle3 import Eagle3
from headstart.heads.errors import WrongInput
from headstart.heads.export.card import METHODS, RECORD, RECORD_SCHEMA
from headstart.heads.export.readers.eagle3 import DTYPES, ServedEagle3, read_eagle3
from headstart.heads.facts import TargetFacts
from headstart.heads.settings import DraftSettings, Eagle3Settings, HeadSettings, MTPSettings
from headstart.heads.shipped import unlike_mimo
from headstart.heads.store import read_json, write_json

ENGINES = ("vllm", "sglang", "llamacpp", "transformers")
# Engines that each kind of head is written for.
WRITERS: dict[str, tuple[str, ...]] = {kind: tuple(methods) for kind, methods in METHODS.items()}
# Where no method is named, vLLM guesses it from these substrings of a path. The card names it, so that a run may be called
# eagle-2; the exported folder's own name, which is what people copy, must not mislead.
METHOD_SUBSTRINGS = {"eagle-": "eagle1", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
TOLERANCE = 1e-4  # of the largest logit; both sides compute in float32


def write_eagle3(
    head: Eagle3, out: Path, engine: str, dtype: str = "auto", describe: Callable[[Path], None] | None = None
) -> Path:
    """Write `out` for `engine`, checked; `describe` may add the card before the folder gets its name.

    Raises:
        WrongInput: the engine could not serve this head as trained, `out` cannot be used, or the reader does not
            reproduce the head's logits. Nothing is left under `out` then.
    """
    refuse_unservable(head, engine)
    check_folder_name(out, head.kind)
    with fresh_folder(out) as folder:
        chosen = export_dtype(dtype, head.embedding_VH.dtype)
        write_json(folder / "config.json", eagle3_config(head, engine, chosen))
        write_tensors(folder / "model.safetensors", eagle3_tensors(head, chosen))
        served = read_eagle3(folder, engine, head.rotary.facts, head.embedding_VH)
        with rounded(head, DTYPES[chosen]):
            difference = chain_difference(head, served)
        if not difference <= TOLERANCE:
            raise WrongInput(
                f"{out}: the written folder does not draft what the head drafts: largest difference {difference:.2e} "
                f"of the largest logit, allowed {TOLERANCE:.0e}.\n"
                "This is a fault of the export, not of the head: please report it."
            )
        if describe is not None:
            describe(folder)
    return out


def refuse_unservable(head: Head, engine: str) -> None:
    """Raise WrongInput with everything about the head that `engine` would ignore or misread."""
    if engine not in ENGINES:
        raise WrongInput(f"engine {engine!r}: found no writer, expected one of {', '.join(ENGINES)}.")
    if missing := unwritten(head.kind, engine):
        raise WrongInput(f"{engine}: {missing}. Until then the head is measured and decoded here only.")
    if problems := unservable(head.settings, head.facts, head.taps, engine):
        raise WrongInput(
            f"{engine} would not serve this head as it was trained:\n"
            + "\n".join(f"  - {p}" for p in problems)
            + "\nExport for another engine, or train with other head settings."
        )


def unwritten(kind: str, engine: str) -> str:
    """What to say where a kind of head has no writer for an engine; empty where it has one."""
    if engine in WRITERS.get(kind, ()):
        return ""
    written = "; ".join(f"{name} for {', '.join(engines)}" for name, engines in WRITERS.items())
    return f"found no writer for heads of kind {kind!r} yet (there are: {written})"


def unservable(settings: HeadSettings, facts: TargetFacts, taps: list[int], engine: str) -> list[str]:
    """What `engine` would ignore or misread about a head of these settings; known before it is trained."""
    if unwritten(settings.kind, engine):
        return []
    if isinstance(settings, DraftSettings):
        reduced = 0 < settings.draft_vocab_size < facts.num_tokens
        return (
            [f"draft_vocab_size = {settings.draft_vocab_size}, expected 0: it would draft every token"]
            if reduced
            else []
        )
    if isinstance(settings, MTPSettings):
        return unservable_mtp(settings, facts)
    assert isinstance(settings, Eagle3Settings)
    problems = []
    rope = settings.rope_parameters(facts.rope_parameters)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append("rotary positions on a part of the head dimension are not supported")
    if engine == "sglang":
        if settings.norm_before_residual:
            problems.append("norm_before_residual = true is ignored")
        if taps[0] != 2:
            problems.append(f"taps {taps}: its targets read the same layers from one list only if the first tap is 2")
        if taps[-1] == facts.num_layers:
            problems.append(f"tap {taps[-1]} (after the last layer) is never captured")
    if engine == "llamacpp":
        if len(taps) != 3:
            problems.append(f"{len(taps)} taps, exactly 3 are read")
        if settings.fc_norm:
            problems.append("fc_norm is not supported")
        if settings.norm_output:
            problems.append("norm_output = true is ignored")
        if taps[-1] == facts.num_layers:
            problems.append(f"tap {taps[-1]} (after the last layer) exists only for targets with next-token layers")
        if rope.get("rope_type", "default") == "yarn":
            problems.append("yarn rotary positions are untried")
    return problems


def unservable_mtp(settings: MTPSettings, facts: TargetFacts) -> list[str]:
    """Engines know MTP layers as a part of some targets' own files, and share the target's whole output head."""
    problems = [] if settings.shipped else list(unlike_mimo(settings, facts))
    if 0 < settings.draft_vocab_size < facts.num_tokens:
        size = settings.draft_vocab_size
        problems.append(
            f"draft_vocab_size = {size}: the layer drafts through the target's whole output head; set it to 0"
        )
    return problems


def check_folder_name(out: Path, kind: str) -> None:
    """Refuse a folder name by which vLLM would take the head for another kind."""
    name = out.name.lower()
    wrong = [text for text, meant in METHOD_SUBSTRINGS.items() if text in name and meant != kind]
    if wrong:
        raise WrongInput(
            f"{out}: vLLM guesses the drafting method from a path, and {wrong[0]!r} means "
            f"{METHOD_SUBSTRINGS[wrong[0]]}, not {kind}. Choose another folder name with --out."
        )


def export_dtype(name: str, of_target: torch.dtype) -> str:
    """`auto` is the precision the target was loaded in: engines cast a draft to the target's dtype anyway."""
    chosen = str(of_target).removeprefix("torch.") if name == "auto" else name
    if chosen not in DTYPES:
        raise WrongInput(f"export.dtype: found {chosen!r}, expected auto or one of {', '.join(DTYPES)}.")
    return chosen


def eagle3_config(head: Eagle3, engine: str, dtype: str) -> dict[str, Any]:
    """The whole config.json: an allow-list, with every flag written out because engines differ in their defaults."""
    facts, settings, taps = head.facts, head.settings, list(head.taps)
    rope = dict(head.rotary.facts.rope_parameters)  # as trained, not as the target has it
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": facts.hidden_size,
        "target_hidden_size": facts.hidden_size,
        "intermediate_size": settings.intermediate_size or facts.intermediate_size,
        "num_attention_heads": facts.num_heads,
        "num_key_value_heads": facts.num_kv_heads,
        "head_dim": facts.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": facts.rms_norm_eps,
        "max_position_embeddings": facts.max_position,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "vocab_size": facts.vocab_size,
        "draft_vocab_size": len(head.draft_ids_V),
        "tie_word_embeddings": False,
        "norm_before_residual": settings.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": settings.fc_norm,
        "norm_output": settings.norm_output,
        # Boundary ids for vLLM and llama.cpp. SGLang reads only eagle_config, and adds one.
        "num_aux_hidden_states": len(taps),
        "eagle_aux_hidden_state_layer_ids": taps,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps] if engine == "sglang" else taps,
        },
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return config


def eagle3_tensors(head: Eagle3, dtype: str) -> dict[str, Tensor]:
    """Trained tensors under their served names and, for a reduced vocabulary, the map both ways."""
    tensors = {k: v.detach().to("cpu", DTYPES[dtype]).contiguous() for k, v in head.trained_tensors().items()}
    ids_V, vocab = head.draft_ids_V.cpu(), head.facts.vocab_size
    if len(ids_V) != vocab:
        tensors["d2t"] = ids_V - torch.arange(len(ids_V))  # offsets, not ids
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids_V, True)
    return tensors


@torch.no_grad()
def chain_difference(head: Head, served: ServedEagle3, depth: int = 4, seed: int = 0) -> float:
    """Largest difference of draft logits, relative to the largest logit, over two blocks of two ragged requests.

    Features are random, so that every tap, slot and flag matters. Infinite where the greedy drafts differ beyond a tie.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths, accepted = [9, 6], [2, 0]
    num_slots, width = max(lengths) + depth + 1, len(served.taps) * served.embedding_VH.shape[1]
    taps_BTF = torch.randn(2, num_slots, width, generator=generator)
    token_BT = torch.randint(served.embedding_VH.shape[0], (2, num_slots), generator=generator)
    device, worst = head.device, 0.0

    def block(state: Any, ends: list[int]) -> float:
        draft = head.draft(state, depth)
        largest = 0.0
        for row, end in enumerate(ends):
            drafted = draft.tokens_BK[row].tolist()
            expected_KV = served.chain(taps_BTF[row, :end], token_BT[row, :end], drafted, depth)
            ours_KV = torch.full_like(expected_KV, float("-inf"))
            ours_KV[:, head.draft_ids_V.cpu()] = draft.logits_BKV[row].float().cpu()
            finite_KV = expected_KV.isfinite()
            if not torch.equal(finite_KV, ours_KV.isfinite()):
                return float("inf")
            scale = expected_KV[finite_KV].abs().max()
            gap_K = expected_KV.max(-1).values - expected_KV.gather(1, draft.tokens_BK[row, :, None].cpu()).squeeze(1)
            apart = (expected_KV - ours_KV)[finite_KV].abs().max()
            largest = max(largest, float(torch.maximum(apart, gap_K.max()) / scale))
        return largest

    longest = max(lengths)
    features_BTF, tokens_BT = taps_BTF[:, :longest].to(device), token_BT[:, :longest].to(device)
    state = head.start(features_BTF, tokens_BT, torch.tensor(lengths, device=device), num_slots + depth)
    worst = max(worst, block(state, lengths))
    verified = [slice(n, n + depth + 1) for n in lengths]
    head.accept(
        state,
        torch.stack([taps_BTF[row, part] for row, part in enumerate(verified)]).to(device),
        torch.stack([token_BT[row, part] for row, part in enumerate(verified)]).to(device),
        torch.tensor(accepted, device=device),
    )
    return max(worst, block(state, [n + k + 1 for n, k in zip(lengths, accepted, strict=True)]))


@contextmanager
def rounded(head: Head, dtype: torch.dtype) -> Iterator[None]:
    """Let the head compute with its trained tensors rounded to `dtype`, as the written ones are."""
    if any(getattr(module, "packed", None) is not None for module in head.modules()):
        raise ValueError("a packed head does not follow its weights: round it first, then pack it")
    kept = {name: tensor.detach().clone() for name, tensor in head.trained_tensors().items()}
    with torch.no_grad():
        for tensor in head.trained_tensors().values():
            tensor.copy_(tensor.to(dtype))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in head.trained_tensors().items():
                tensor.copy_(kept[name])


@contextmanager
def fresh_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary sibling that becomes `out` on success; an earlier export there is replaced."""
    if out.exists() and not (out.is_dir() and (is_export(out) or not any(out.iterdir()))):
        raise WrongInput(f"{out}: found files that are no export of ours. Move them away or choose another --out.")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary, replaced = (out.with_name(f".{out.name}.{os.getpid()}{end}.tmp") for end in ("", ".old"))
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        if out.exists():  # moved, not deleted: only between two renames is there no export at all
            out.rename(replaced)
        temporary.rename(out)
    finally:
        for folder in (temporary, replaced):
            shutil.rmtree(folder, ignore_errors=True)


def is_export(folder: Path) -> bool:
    """Whether the folder was exported by us; another tool's head is not ours to replace."""
    try:
        read_json(folder / RECORD, RECORD_SCHEMA)
    except (OSError, WrongInput):
        return False
    return True
