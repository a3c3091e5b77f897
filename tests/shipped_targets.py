"""Tiny random targets that ship an MTP layer, one of each family, made offline with transformers.

The layer's tensors are written under their published names by hand, experts one by one.
"""

import json

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig, Qwen2Config, Qwen3NextConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer

from headstart.heads.tiny import tiny_tokenizer

LAYERS, WIDTH = 2, 64
COMMON = {
    "vocab_size": 512, "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
GROUPED = {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
# config, decoder layer, prefix, published names of (embedding norm, state norm, projection, last norm), and of the block
FAMILIES = {
    "deepseek_v3": (
        lambda: DeepseekV3Config(**COMMON, **GROUPED, **LATENT, num_key_value_heads=4),
        DeepseekV3DecoderLayer, f"model.layers.{LAYERS}.", ("enorm", "hnorm", "eh_proj", "shared_head.norm"), "",
    ),
    "glm4_moe": (
        lambda: Glm4MoeConfig(**COMMON, **GROUPED, num_key_value_heads=2, head_dim=16, use_qk_norm=True),
        Glm4MoeDecoderLayer, f"model.layers.{LAYERS}.", ("enorm", "hnorm", "eh_proj", "shared_head.norm"), "",
    ),
    "qwen3_next": (
        lambda: Qwen3NextConfig(
            **COMMON, **EXPERTS, num_key_value_heads=2, head_dim=16, num_experts=4, shared_expert_intermediate_size=24,
            layer_types=["full_attention"] * LAYERS,
        ),
        Qwen3NextDecoderLayer, "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), "layers.0.",
    ),
    "mimo": (
        lambda: Qwen2Config(**COMMON, num_key_value_heads=2, num_nextn_predict_layers=1),
        Qwen2DecoderLayer, "model.mtp_layers.0.",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"), "",
    ),
}  # fmt: skip


def fill(name, tensor, gain=2.0):
    """Values that make every tensor matter; routing and residual streams stay of a reasonable size."""
    random = torch.Generator().manual_seed(sum(map(ord, name)))
    noise = torch.randn(tensor.shape, generator=random)
    if tensor.dim() > 1:
        return noise * gain / tensor.shape[-1] ** 0.5
    return 0.1 * noise + tensor


def published_layer(family):
    """The tensors of a random MTP layer by published names."""
    make_config, layer, prefix, ends, inside = FAMILIES[family]
    config = make_config()
    config._attn_implementation = "eager"
    norm = torch.zeros(WIDTH) if family == "qwen3_next" else torch.ones(WIDTH)  # gains are 1 + weight there
    found = {}
    for name, plain in zip(ends, (norm, norm, torch.zeros(WIDTH, 2 * WIDTH), norm), strict=True):
        found[f"{prefix}{name}.weight"] = fill(name, plain)
    for name, tensor in layer(config, LAYERS - 1).state_dict().items():
        value = fill(name, tensor if "norm" in name else torch.zeros_like(tensor))
        path = f"{prefix}{inside}{name}"
        if not name.startswith("mlp.experts."):
            found[path] = value
            continue
        for e in range(len(value)):
            if name.endswith("down_proj"):
                found[path.replace("experts.", f"experts.{e}.") + ".weight"] = value[e]
            else:
                half = value.shape[1] // 2
                for part, rows in (("gate", value[e, :half]), ("up", value[e, half:])):
                    found[path.replace("experts.gate_up", f"experts.{e}.{part}") + ".weight"] = rows
    return {name: tensor.contiguous() for name, tensor in found.items()}


def write_target(folder, family, shards=False, layer=True):
    """A target's folder, with its layer or without; in several files with an index where `shards` is true."""
    torch.manual_seed(5)
    tokenizer = tiny_tokenizer()
    config = FAMILIES[family][0]()
    config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    config.bos_token_id, config.pad_token_id = None, tokenizer.pad_token_id
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(fill(name, parameter, 4.0 if "embed" in name or "lm_head" in name else 2.0))
    model.save_pretrained(folder, max_shard_size="150KB" if shards else "5GB")
    tokenizer.save_pretrained(folder)
    if not layer:
        return folder
    if family == "mimo":
        content = json.loads((folder / "config.json").read_text())
        content |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "auto_map": {"AutoConfig": "mimo.MiMo"}}
        (folder / "config.json").write_text(json.dumps(content))
    published = published_layer(family)
    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    halves = (dict(list(published.items())[::2]), dict(list(published.items())[1::2])) if shards else (published,)
    for file, tensors in zip(files[:2], halves, strict=False):
        save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
    if shards:
        content = json.loads(index.read_text())
        for file, tensors in zip(files[:2], halves, strict=True):
            content["weight_map"] |= dict.fromkeys(tensors, file.name)
        index.write_text(json.dumps(content, indent=2))
    return folder
