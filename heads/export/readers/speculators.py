"""The speculators layout as vLLM unwraps it: the layer's config becomes the draft's, with a few outer keys laid over it."""

from pathlib import Path
from typing import Any

from torch import Tensor

from headstart.heads.export.readers.files import key_problems, refuse_any, value_problems
from headstart.heads.facts import TargetFacts

# Outer keys that reach the draft, with what vLLM takes where they are absent.
OUTER = {
    "draft_vocab_size": None,
    "target_hidden_size": None,
    "norm_before_residual": True,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "eagle_aux_hidden_state_layer_ids": None,
}
KEYS = {
    *("architectures", "speculators_model_type", "speculators_config", "transformer_layer_config"),
    *("dtype", "torch_dtype", *OUTER),
}


def as_classic(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], facts: TargetFacts
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors in the classic layout, which both forms become when loaded.

    Raises:
        WrongInput: what of the wrapping is not as it should be.
    """
    refuse_any(folder, key_problems(config, KEYS, set()))
    inner, outer = config["transformer_layer_config"], config["speculators_config"]
    if wrong := [
        f"{k} is no object" for k in ("transformer_layer_config", "speculators_config") if not is_object(config[k])
    ]:
        refuse_any(folder, wrong)
    problems = value_problems(config, {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"})
    problems += key_problems(
        outer, {"algorithm", "default_proposal_method", "proposal_methods", "verifier"}, set(), "speculators_config"
    )
    refuse_any(folder, problems)
    expected = {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": facts.shown_name, "architectures": facts.architectures},
    }
    problems = value_problems(outer, expected)
    proposals = outer["proposal_methods"]
    lengths = [p.get("speculative_tokens") for p in proposals if is_object(p) and p.get("proposal_type") == "greedy"]
    if len(lengths) != 1 or len(proposals) != 1 or type(lengths[0]) is not int or lengths[0] < 1:
        problems.append(f"proposal_methods is {proposals!r}, expected one, greedy, of speculative_tokens tokens")
    twice = sorted(inner.keys() & {*OUTER, "architectures", "eagle_config"})
    problems += [f"transformer_layer_config holds {name}, which the outer config decides" for name in twice]
    problems += value_problems(config, {name: inner.get(name) for name in ("dtype", "torch_dtype")})
    problems += [f"tensor {n} is not read, so it should not be there" for n in tensors if n.startswith("midlayer.")]
    refuse_any(folder, problems)
    taps = config["eagle_aux_hidden_state_layer_ids"]
    classic = {
        **inner,
        **{name: config.get(name, default) for name, default in OUTER.items()},
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": taps},
    }
    return classic, {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in tensors.items()}


def is_object(value: Any) -> bool:
    return isinstance(value, dict)
