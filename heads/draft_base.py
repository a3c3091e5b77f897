"""The model that a draft is made of, where it is not the target: a small causal language model that numbers tokens alike.

Draft and target meet in token ids alone: the target's tokenizer renders prompts, and its stop tokens end replies. So every
id of the target has to mean the same token for the draft. How text is cut into tokens, the chat template and the stop
tokens of the draft's own tokenizer decide nothing, nor do rows of its tables that only pad them, nor tokens that it has
beyond the target's, which are never drafted.
"""

import torch
from safetensors import safe_open

from headstart.heads.errors import WrongInput
from headstart.heads.model_files import read_model
from headstart.heads.settings import TargetSettings
from headstart.heads.start import stored_tensors
from headstart.heads.target import Target, TargetLoader


def open_base(name: str) -> TargetLoader:
    """Config and tokenizer of the model called `name`; no weights.

    Raises:
        WrongInput: beginning with `head.model`.
    """
    try:
        return TargetLoader(TargetSettings(model=name, dtype="float32", device="cpu"), key="head.model")
    except WrongInput as error:
        text = str(error)
        raise WrongInput(text if text.startswith("head.model: ") else f"head.model: {text}") from None


def read_base(base: TargetLoader, device: torch.device) -> Target:
    """Its weights in float32, frozen.

    Raises:
        WrongInput: files that cannot be read, or an output layer of its own that its config says is the embedding.
    """
    model = read_model(base.facts.name, base.folder, dtype=torch.float32)
    stored = stored_tensors(sorted(base.folder.glob("*.safetensors"))).get("lm_head.weight")
    if stored is not None and model.config.get_text_config().tie_word_embeddings:
        with safe_open(stored.file, framework="pt") as file:
            output_VH = file.get_tensor(stored.name).float()
        if not torch.equal(output_VH, model.get_input_embeddings().weight.detach().cpu()):
            raise WrongInput(
                f"head.model: {base.folder} has an output layer that differs from its embedding, but its config.json says "
                "tie_word_embeddings = true, so that loading drops it.\nSet that to false, or delete lm_head.weight."
            )
    model.to(device).eval().requires_grad_(False)
    return Target(model, base.tokenizer, base.facts, taps=[0], direct=False)


def check_tokens(base: TargetLoader, target: TargetLoader | Target) -> None:
    """Refuse a draft that would read or write other text than the target under the same ids.

    Raises:
        WrongInput: naming the first id that differs and what both call it, or a table without rows for all ids.
    """
    names = (f"draft model {base.facts.name!r}", f"target {target.facts.name!r}")
    way_out = "Choose a draft model with the target's tokenizer, or leave head.model empty to cut one from the target."
    ours = {i: token for token, i in target.tokenizer.get_vocab().items() if i < target.facts.num_tokens}
    theirs = {i: token for token, i in base.tokenizer.get_vocab().items()}
    differing = [i for i in sorted(ours) if theirs.get(i) != ours[i]]
    if differing:
        first = differing[0]
        called = f"{theirs[first]!r}" if first in theirs else "no token"
        raise WrongInput(
            f"head.model: {names[0]} numbers tokens otherwise than {names[1]}: {len(differing)} of {len(ours)} ids differ. "
            f"The first is {first}: {ours[first]!r} for the target, {called} for the draft.\n{way_out}"
        )
    if base.facts.vocab_size < target.facts.num_tokens:
        raise WrongInput(
            f"head.model: {names[0]} has {base.facts.vocab_size} rows in its embedding, expected at least "
            f"{target.facts.num_tokens}, the tokens of {names[1]}.\n{way_out}"
        )
