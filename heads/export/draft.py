"""Write a draft model as the folder of an ordinary language model, in the form of transformers' `save_pretrained`.

Every engine with draft models reads that form, so there is one for all: config.json, model.safetensors and the target's
tokenizer. Adapters are merged. Tables have as many rows as the target's, because engines compare these numbers: rows of
ids that are never drafted are those of the model it was made of, or zero.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from headstart.heads.checkpoint import write_tensors
from headstart.heads.draft import DraftModel
from headstart.heads.errors import WrongInput
from headstart.heads.export.folder import check_folder_name, fresh_folder
from headstart.heads.export.layer import decoder_config
from headstart.heads.export.limits import refuse_unservable
from headstart.heads.export.readers.files import DTYPES
from headstart.heads.facts import TargetFacts
from headstart.heads.lora import is_adapter, merge, plain_name
from headstart.heads.model_files import read_model
from headstart.heads.store import write_json
from headstart.heads.target import Target

TOLERANCE = 1e-5  # of the largest logit; both sides compute in float32
PROBE_LENGTHS = (40, 23)  # tokens of the texts that both sides continue


def write_draft(
    head: DraftModel, target: Target, out: Path, engine: str, dtype: str, describe: Callable[[Path], None] | None = None
) -> Path:
    """Write `out`, checked: transformers' own class, loaded from it, must continue texts as the head does.

    Args:
        dtype: of the written tensors, by name.
        describe: may add the card before the folder gets its name.

    Raises:
        WrongInput: the engine could not serve this head as trained, `out` cannot be used, or what was written does not
            reproduce the head's logits. Nothing is left under `out` then.
    """
    refuse_unservable(head, engine)
    check_folder_name(out, head.kind)
    plain = written_head(head, DTYPES[dtype])
    with fresh_folder(out) as folder:
        tensors = draft_tensors(plain, target, DTYPES[dtype])
        tied = "lm_head.weight" not in tensors
        write_json(folder / "config.json", draft_config(plain, dtype, tied))
        write_tensors(folder / "model.safetensors", tensors)
        target.tokenizer.save_pretrained(folder)
        difference = logit_difference(plain, folder, set(tensors))
        if not difference <= TOLERANCE:
            raise WrongInput(
                f"{out}: the written folder does not say what the head says: largest difference {difference:.2e} of the "
                f"largest logit, allowed {TOLERANCE:.0e}.\nThis is a fault of the export, not of the head: please report it."
            )
        if describe is not None:
            describe(folder)
    return out


@torch.no_grad()
def written_head(head: DraftModel, dtype: torch.dtype) -> DraftModel:
    """The head with adapters merged and every weight rounded as in the written folder, computing in float32."""
    plain = copy.deepcopy(head).float().to("cpu").eval()
    if plain.settings.lora_rank:
        merge(plain.model)
    for parameter in plain.parameters():
        parameter.copy_(parameter.to(dtype))
    plain.embedding_VH = plain.embedding_VH.to(dtype).float()
    return plain


def draft_tensors(plain: DraftModel, target: Target, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors under transformers' names; the output layer only where it is not the embedding, bit by bit."""
    rows = plain.facts.vocab_size
    layers = {name: p for name, p in plain.model.named_parameters(prefix="model") if not is_adapter(name)}
    tensors = {plain_name(name): p.detach().to(dtype).contiguous() for name, p in layers.items()}
    embedding_VH = with_rows(plain.embedding_VH, rows).to(dtype)
    source, _ = plain.source(target)
    output_VH = with_rows(source.output_weight().cpu(), rows).to(dtype)
    output_VH[plain.draft_ids_V] = plain.lm_head.weight.detach().to(dtype)
    tensors["model.embed_tokens.weight"] = embedding_VH
    if not torch.equal(embedding_VH, output_VH):
        tensors["lm_head.weight"] = output_VH
    return tensors


def with_rows(table_VH: Tensor, rows: int) -> Tensor:
    """A copy with so many rows: cut, or filled up with zeros."""
    return functional.pad(table_VH[:rows], (0, 0, 0, max(rows - len(table_VH), 0))).clone()


def draft_config(plain: DraftModel, dtype: str, tied: bool) -> dict[str, Any]:
    """The whole config.json: an allow-list, of the family whose layers have these norms and biases."""
    facts = plain.model.facts
    model_type, architecture = family(facts)
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        **decoder_config(replace(facts, vocab_size=plain.facts.vocab_size), dtype),
        "tie_word_embeddings": tied,
        # The target's: a draft is asked in the target's turn, and ends where that does.
        "bos_token_id": None,
        "eos_token_id": plain.facts.stop_ids,
        "pad_token_id": None,
    }
    if model_type != "qwen2":  # whose biases are not for its config to say
        config["attention_bias"] = "self_attn.o_proj" in facts.layer_biases
    if model_type == "llama":
        config["mlp_bias"] = "mlp.up_proj" in facts.layer_biases
    return config


def family(facts: TargetFacts) -> tuple[str, str]:
    """Model type and class: Mistral's layers are Llama's without a window."""
    if facts.query_key_norm:
        return "qwen3", "Qwen3ForCausalLM"
    if facts.layer_biases and "self_attn.o_proj" not in facts.layer_biases:
        return "qwen2", "Qwen2ForCausalLM"
    return "llama", "LlamaForCausalLM"


@torch.no_grad()
def logit_difference(plain: DraftModel, folder: Path, written: set[str]) -> float:
    """Largest difference of logits behind random texts, relative to the largest, of the folder as transformers loads it.

    Raises:
        WrongInput: a tensor of the model is missing, or one is written that it has no place for.
    """
    model = read_model(str(folder), folder, dtype=torch.float32).eval()
    if left_over := sorted(written - set(model.state_dict())):
        raise WrongInput(f"{folder}: {type(model).__name__} has no place for {left_over}.")
    generator, worst = torch.Generator().manual_seed(0), 0.0
    for length in PROBE_LENGTHS:
        token_T = plain.draft_ids_V[torch.randint(len(plain.draft_ids_V), (length,), generator=generator)]
        final_TH = plain.model.paths(plain.embed(token_T), torch.arange(length), [0, length])
        ours_TV, theirs_TV = plain.logits(final_TH), model(token_T[None]).logits[0][:, plain.draft_ids_V]
        worst = max(worst, float((ours_TV - theirs_TV).abs().max() / ours_TV.abs().max()))
    return worst
