"""Every kind of head there is, in every variant that a switch makes: a new kind is in all matrices by its registry line."""

import json
from dataclasses import fields

import torch
from transformers import Glm4MoeConfig

from headstart.heads.checkpoint import KINDS, build_head
from headstart.heads.decoder import DecoderLayer
from headstart.heads.settings import HEADS

# Variants that are not one switch turned over.
MORE = {
    "eagle3": [{"fc_norm": True, "norm_output": True}, {"taps": [0, 6], "intermediate_size": 40, "rope_theta": 500.0}],
    "medusa": [{"num_layers": 2, "own_output": True}],
    "hydra": [{"num_layers": 3}],
    "draft": [{"layers": [0, 2, 5]}, {"lora_rank": 2}],
    "mtp": [{"num_modules": 5}, {"intermediate_size": 40}],
    "mlp": [{"inner_size": 24}, {"inner_size": 24, "tie_weights": False, "own_output": True}],
}
assert HEADS.keys() == KINDS.keys()


def switches(kind):
    """Each boolean setting of a kind, turned over; where the first weights come from says nothing of the contract."""
    settings = HEADS[kind]()
    names = [field.name for field in fields(settings) if isinstance(getattr(settings, field.name), bool)]
    return [{name: not getattr(settings, name)} for name in names if name != "init_from_target"]


# Kinds, and after a slash the setting that makes another form of one: a switch, or the number of drafted tokens.
FORMS = [*KINDS, "mtp/num_modules", "mtp/shipped"]
VARIANTS = [(kind, flags) for kind in KINDS for flags in [{}, *switches(kind), *MORE.get(kind, [])]]


def make_settings(kind, depth, **flags):
    """Settings of a kind, or of a form of it, that can draft `depth` tokens."""
    kind, _, form = kind.partition("/")
    settings = HEADS[kind]()
    formed = {form: isinstance(getattr(settings, form), bool) or depth} if form else {}
    sized = {settings.depth_setting: depth} if settings.max_depth is not None else {}
    return HEADS[kind](**{**sized, **formed, **flags})


def random_head(kind, depth, facts, draft_ids_V, dtype=torch.float32, seed=0, **flags):
    """A head none of whose tensors is plain: what starts at zero, one or identity would hide mistakes."""
    torch.manual_seed(seed)
    head = build_head(make_settings(kind, depth, **flags), facts, draft_ids_V).to(dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += (0.3 if parameter.dim() == 1 else 0.1) * torch.randn_like(parameter)
    return head


def shipped_layer(width):
    """`TargetFacts.shipped` of a target with four experts and four heads; their values are `fill_shipped`'s."""
    config = Glm4MoeConfig(
        hidden_size=width, num_attention_heads=4, num_key_value_heads=2, head_dim=width // 4, moe_intermediate_size=24,
        n_routed_experts=4, num_experts_per_tok=2, use_qk_norm=True, rms_norm_eps=1e-5, max_position_embeddings=256,
        vocab_size=96, intermediate_size=48,
    )  # fmt: skip
    return {"layout": "glm4_moe", "config": json.loads(config.to_json_string(use_diff=False))}


def fill_shipped(tensors, whole):
    """Stands for a target's files, which hold some tensors of its MTP layer (`Target.read_shipped`)."""
    for name, tensor in tensors.items():
        random = torch.Generator().manual_seed(len(name))
        noise = torch.randn(tensor.shape, generator=random)
        tensor.copy_(1 + 0.3 * noise if name.endswith("norm.weight") else 0.1 * noise)


def random_layer(facts, index, dtype=torch.float32):
    """Tensors of a target's decoder layer."""
    random = torch.Generator().manual_seed(100 + index)
    return {
        name: ((p.dim() == 1) + 0.3 * torch.randn(p.shape, generator=random)).to(dtype)
        for name, p in DecoderLayer(facts).named_parameters()
    }


def rollout_logits(head, rollout):
    """Draft logits [S, D, Vd] of a whole rollout."""
    return torch.stack([head.logits(state_SH, j) for j, state_SH in enumerate(rollout.state_SDH.unbind(1))], dim=1)
