"""A draft model as the folder of an ordinary language model, in the form of transformers' `save_pretrained`.

Every engine with draft models reads that form, so there is one for all: config.json, the weights and the target's tokenizer.
Adapters are merged. Tables have as many rows as the target's, because engines compare these numbers: rows of ids that are
never drafted are those of the model it was made of, or zero.
"""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from headstart.heads.contract import Head
from headstart.heads.draft import DraftModel
from headstart.heads.export.layer import decoder_config
from headstart.heads.export.layout import Layout, Request, given, reduced, unknown_target
from headstart.heads.export.readers.draft import ServedDraft, read_draft
from headstart.heads.export.shards import write_model
from headstart.heads.facts import TargetFacts
from headstart.heads.lora import is_adapter, merge, plain_name
from headstart.heads.settings import DraftSettings
from headstart.heads.store import write_json
from headstart.heads.target import Target


def limits(settings: DraftSettings, facts: TargetFacts, taps: list[int], engine: str) -> Iterator[str]:
    yield from unknown_target(facts, engine)
    yield from reduced(settings, facts, "it would draft every token")


def write(head: DraftModel, folder: Path, request: Request) -> dict[str, Tensor]:
    target, plain = given(request.target), written_head(head, request.dtype)
    tensors = draft_tensors(plain, target, request.dtype)
    write_json(folder / "config.json", draft_config(plain, request.dtype_name, "lm_head.weight" not in tensors))
    write_model(folder, tensors, request.shard_bytes)
    target.tokenizer.save_pretrained(folder)
    return tensors


def read(folder: Path, engine: str, head: DraftModel, target: Target | None) -> ServedDraft:
    return read_draft(folder, head.model.facts, head.facts)


def as_written(head: DraftModel, written: dict[str, Tensor]) -> AbstractContextManager[Head]:
    return nullcontext(written_head(head, written["model.embed_tokens.weight"].dtype))


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


LAYOUT = Layout(
    "draft",
    {
        "vllm": "0.32.0",
        "sglang": "0.5.23",
        "trtllm": "1.3, commit 00679c6",
        "llamacpp": "11434",
        "transformers": "5.24",
    },
    limits,
    write,
    read,
    as_written,
    alike=True,
)
