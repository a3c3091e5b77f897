"""A target with its MTP layer as engines read it: every tensor of the target as it was, the layer by transformers' class.

    step j      slot p reads (state of p, x_{p+1}); y = block(projection(norm(embedding), norm(state))), over all slots anew;
                logits = target's output head(norm(y)); norm(y) is the state of the next slot

Engines differ in the families they know, in whether the embedding at position 0 is zero, and in which state of the target
the first slots read: given is the one behind the final norm, and the one in front of it is that without the gain, but for
its length, which norm(state) takes away. Read in vLLM 0.33.0
(`deepseek_mtp.py`, `glm4_moe_mtp.py`, `qwen3_next_mtp.py`, `mimo_mtp.py` of its models), SGLang (`deepseek_nextn.py`,
`glm4_moe_nextn.py`, `qwen3_next_mtp.py`, `mimo_mtp.py`) and TensorRT-LLM (`modeling_speculative.py` and what it names).
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

from headstart.heads.export.readers.files import (
    dtype_problems,
    key_problems,
    read_config_file,
    refuse_any,
    value_problems,
    weight_places,
)
from headstart.heads.export.readers.llama_layer import LAYER_KEYS, rotary_problems, width_values
from headstart.heads.facts import TargetFacts
from headstart.heads.model_files import read_config
from headstart.heads.mtp_shipped import family
from headstart.heads.shipped import LAYOUTS, load_pieces, pieces, read_shipped, tensor_files
from headstart.heads.store import read_json

FAMILIES = {
    "vllm": ("deepseek_v3", "glm4_moe", "qwen3_next", "qwen2"),
    "sglang": ("deepseek_v3", "glm4_moe", "qwen3_next", "qwen2"),
    "trtllm": ("deepseek_v3", "glm4_moe", "qwen3_next"),
}
ZEROED = {"vllm": ("deepseek_v3", "glm4_moe", "qwen2"), "sglang": ("qwen2",), "trtllm": ()}
# Whose layer is handed the state in front of the final norm.
BEFORE_NORM: dict[str, tuple[str, ...]] = {"vllm": ("qwen2",), "sglang": (), "trtllm": ()}
EMBEDDING, FINAL_NORM, OUTPUT = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
BIASED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # of every Qwen2
MIMO_KEYS = LAYER_KEYS - {"attention_bias", "mlp_bias"} | {
    *("architectures", "num_nextn_predict_layers", "use_sliding_window"),
}
ENDING_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


class ServedMTP:
    """The loaded layer beside its target's embedding and output head."""

    taps: list[int] = []

    def __init__(self, folder: Path, engine: str, facts: TargetFacts, embedding_VH: Tensor, output_VH: Tensor) -> None:
        self.embedding_VH, self.output_VH, self.vocab_size = embedding_VH, output_VH, facts.vocab_size
        self.layout = LAYOUTS[facts.shipped["layout"]]
        self.zeroed = facts.shipped["layout"] in ZEROED[engine]
        config, layer, norm, rotary = family(facts.shipped["config"])
        width, eps = facts.hidden_size, facts.rms_norm_eps
        self.parts = nn.ModuleDict({name: norm(width, eps=eps) for name in ("enorm", "hnorm", "norm")})
        self.parts["eh_proj"] = nn.Linear(2 * width, width, bias=False)
        self.parts["block"] = layer(config, 0)
        self.rotary = rotary(config)
        self.trained = {
            path: tensor
            for name, parameter in self.parts.named_parameters()
            for path, tensor in pieces(self.layout, facts.num_layers, name, parameter.detach())
        }
        self.gain_H = torch.ones(width)
        if facts.shipped["layout"] in BEFORE_NORM[engine]:
            with safe_open(tensor_files(folder)[FINAL_NORM], framework="pt") as file:
                self.gain_H = file.get_tensor(FINAL_NORM).float()
        buffers = {f"block.{name}": buffer for name, buffer in self.parts["block"].named_buffers()}
        with torch.no_grad():
            load_pieces(folder, self.layout, facts.num_layers, dict(self.parts.named_parameters()) | buffers)
        infinite = [path for path, tensor in self.trained.items() if not bool(tensor.isfinite().all())]
        refuse_any(folder, [f"tensor {path} holds values that are not finite" for path in infinite])

    @torch.no_grad()
    def chain(self, features_TF: Tensor, token_U: Tensor, drafted: list[int], depth: int) -> Tensor:
        """Draft logits [depth, V], -inf for rows of the table that no token of the target has."""
        hidden_TH, token_T, rows = features_TF.float() / self.gain_H, token_U[1:], []
        for j in range(depth):
            state_H = self.parts["norm"](self.block(hidden_TH, token_T)[-1])
            row_V = torch.full((self.vocab_size,), float("-inf"))
            row_V[: len(self.output_VH)] = functional.linear(state_H, self.output_VH.float())
            rows.append(row_V)
            hidden_TH = torch.cat((hidden_TH, state_H[None]))
            token_T = torch.cat((token_T, torch.tensor(drafted[j : j + 1])))
        return torch.stack(rows)

    def block(self, hidden_TH: Tensor, token_T: Tensor) -> Tensor:
        embedded_TH = self.embedding_VH[token_T].float()
        if self.zeroed:
            embedded_TH[0] = 0
        read = (self.parts["enorm"](embedded_TH), self.parts["hnorm"](hidden_TH))
        x_1TH = self.parts["eh_proj"](torch.cat(read[::-1] if self.layout.hidden_first else read, dim=-1))[None]
        position_1T = torch.arange(len(token_T))[None]
        earlier_TT = torch.ones(len(token_T), len(token_T), dtype=torch.bool).tril()
        state_1TH: Tensor = self.parts["block"](
            x_1TH,
            attention_mask=earlier_TT[None, None],
            position_ids=position_1T,
            position_embeddings=self.rotary(x_1TH, position_1T),
        )
        return state_1TH[0]


def read_merged(folder: Path, engine: str, head: Any, source: Path) -> ServedMTP:
    """A target whose own MTP layer was tuned, beside that target's folder.

    Raises:
        WrongInput: a config or a tensor outside the layer that is not the target's, or a layer that cannot be read.
    """
    texts = [json.dumps(read_json(path / "config.json"), sort_keys=True) for path in (folder, source)]
    refuse_any(folder, ["config.json is not the target's"] if texts[0] != texts[1] else [])
    old, new = ({name: path.name for name, path in tensor_files(path).items()} for path in (source, folder))
    refuse_any(
        folder,
        [
            f"tensor {name} is in {new.get(name)}, the target has it in {old.get(name)}"
            for name in sorted(old.keys() | new.keys())
            if old.get(name) != new.get(name)
        ],
    )
    names = head.trained_tensors().items()
    trained = {path for name, tensor in names for path, _ in pieces(head.layout, head.facts.num_layers, name, tensor)}
    refuse_any(folder, sorted(unlike(folder, source, trained)))
    return ServedMTP(folder, engine, head.facts, head.embedding_VH.cpu(), head.lm_head.weight.detach().cpu())


def unlike(folder: Path, source: Path, trained: set[str]) -> Iterator[str]:
    """Tensors of the target that are not as they were; of trained ones only the precision is the target's."""
    old, new = tensor_files(source), tensor_files(folder)
    yield from (f"tensor {name} is missing" for name in old.keys() - new.keys())
    with ExitStack() as stack:
        files = {path: stack.enter_context(safe_open(path, framework="pt")) for path in {*old.values(), *new.values()}}
        for name in old.keys() & new.keys():
            expected, found = files[old[name]].get_tensor(name), files[new[name]].get_tensor(name)
            if found.dtype != expected.dtype or not (name in trained or torch.equal(found, expected)):
                yield f"tensor {name} is not the target's"


def read_mimo(folder: Path, engine: str, head: Any, source: Path) -> ServedMTP:
    """A Llama-like target with an MTP layer of our own, as a MiMo; beside that target's folder.

    Raises:
        WrongInput: everything found wrong with its config, or with its tensors.
    """
    config, target = read_config_file(folder), read_json(source / "config.json")
    endings = {name: target[name] for name in ENDING_KEYS if name in target}
    refuse_any(folder, key_problems(config, MIMO_KEYS | endings.keys(), {"rope_scaling"}))
    expected = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        **width_values(head.facts),
        **endings,
    }
    problems = value_problems(config, expected) + dtype_problems(config) + rotary_problems(config, head.facts)
    refuse_any(folder, problems)
    new = weight_places(folder)
    refuse_any(folder, sorted(unlike(folder, source, set())))
    facts = replace(head.facts, shipped=read_shipped(folder, read_config(folder)))
    refuse_any(folder, [] if facts.shipped else ["no tensor of an MTP layer is there"])
    served = ServedMTP(folder, engine, facts, head.embedding_VH.cpu(), head.lm_head.weight.detach().cpu())
    refuse_any(folder, sorted(added_problems(new, source, served, config["dtype"])))
    return served


def added_problems(new: dict[str, Path], source: Path, served: ServedMTP, dtype: str) -> Iterator[str]:
    """What a MiMo holds beside its target's tensors: zero biases, an output head, the layer; and nothing else."""
    old = tensor_files(source)
    stems = {name.removesuffix(".weight") for name in old if name.endswith(tuple(f"{part}.weight" for part in BIASED))}
    biases = {f"{stem}.bias" for stem in stems} - old.keys()
    added = biases | served.trained.keys() | {OUTPUT}
    yield from (f"tensor {name} is missing" for name in added - new.keys())
    yield from (f"tensor {name} is not read" for name in new.keys() - old.keys() - added)
    for name in sorted((added - old.keys()) & new.keys()):
        with safe_open(new[name], framework="pt") as file:
            found = file.get_tensor(name)
        if str(found.dtype) != f"torch.{dtype}":
            yield f"tensor {name} is {found.dtype}, the config says {dtype}"
        if name in biases and bool(found.any()):
            yield f"tensor {name} is not zero, and the target has no such bias"
        if name == OUTPUT:
            with safe_open(new[EMBEDDING], framework="pt") as file:
                if not torch.equal(found, file.get_tensor(EMBEDDING)):
                    yield f"tensor {name} is not the embedding, which is the target's output head"
