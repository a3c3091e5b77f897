"""MTP layers that targets ship: under which names their files hold them, and how their pieces are combined.

A layer is known by the names of its family (`LAYOUTS`, by model type). Experts lie in the files one by one and in
transformers' modules as one tensor; `pieces` says which part of a module's tensor is which tensor of the files.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.heads.errors import WrongInput
from headstart.heads.facts import TargetFacts
from headstart.heads.settings import MTPSettings

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
BIASED = tuple(f"self_attn.{name}_proj" for name in "qkv")  # projections that have a bias in every Qwen2, so in MiMo
FUSED = (".experts.gate_up_proj", ".experts.down_proj")  # experts that modules hold as one tensor, and files one by one
ENDS = ("enorm", "hnorm", "eh_proj", "norm")  # a layer's own modules, beside the decoder layer (`block`)


@dataclass(frozen=True)
class Layout:
    """How a family ships its layer. N in `prefix` is the number of the target's decoder layers."""

    prefix: str
    ends: tuple[str, str, str, str]  # published names of `ENDS`
    block: str = ""  # where, behind the prefix, the decoder layer's tensors lie
    hidden_first: bool = False  # order of the projection's input
    zero_first: bool = True  # whether engines zero the embedding at position 0
    before_norm: bool = False  # whether it reads the target's state in front of the final norm, not behind it
    copies: tuple[str, ...] = ()  # of the target's own tensors, that its files may hold once more

    def base(self, num_layers: int) -> str:
        """The prefix of the one layer's tensors."""
        return self.prefix.replace("N", str(num_layers))


DEEPSEEK = Layout(
    "model.layers.N.",
    ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    copies=("embed_tokens.weight", "shared_head.head.weight"),
)
LAYOUTS: dict[str, Layout] = {
    "deepseek_v3": DEEPSEEK,
    "glm4_moe": DEEPSEEK,
    "qwen3_next": Layout(
        "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), block="layers.0.", zero_first=False
    ),
    # MiMo is Qwen2 with such a layer.
    "qwen2": Layout(
        "model.mtp_layers.0.",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        hidden_first=True,
        before_norm=True,
    ),
}


def read_shipped(folder: Path, config: Any) -> dict[str, Any]:
    """What heads are told of a target's MTP layer, as plain values: its family and the config; empty where none is there."""
    layout = LAYOUTS.get(config.model_type)
    if layout is None or not any(
        name.startswith(layout.base(config.num_hidden_layers)) for name in tensor_files(folder)
    ):
        return {}
    return {"layout": config.model_type, "config": json.loads(config.to_json_string(use_diff=False))}


def require_shipped(facts: TargetFacts) -> None:
    """Refuse a target without MTP layer.

    Raises:
        WrongInput: beginning with the key of the setting, and saying what was looked for.
    """
    if not facts.shipped:
        looked = "; ".join(f"{kind}: {layout.prefix}{layout.ends[2]}.weight" for kind, layout in LAYOUTS.items())
        raise WrongInput(
            f"head.shipped: found true, but {facts.name} ships no MTP layer of a known family. Looked for, by model type "
            f"(N: number of its layers): {looked}.\nTrain a layer of its own: head.shipped=false"
        )


def unlike_mimo(settings: MTPSettings, facts: TargetFacts) -> Iterator[str]:
    """Why a target and an MTP layer of its own would together be no MiMo, which is the form that engines load."""
    if settings.num_modules > 1:
        yield f"num_modules = {settings.num_modules}: engines run one layer at every depth"
    if settings.intermediate_size not in (0, facts.intermediate_size):
        yield f"intermediate_size = {settings.intermediate_size}: the layer has to be as wide as the target's"
    qwen2 = facts.llama_like and not facts.query_key_norm and facts.num_heads * facts.head_dim == facts.hidden_size
    if not qwen2 or any(name not in BIASED for name in facts.layer_biases):
        yield f"engines know MTP layers of some families only, and the layers of {facts.name} are not those of Qwen2 either"


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file of every tensor in a model folder, by the tensor's name.

    Raises:
        ValueError: a file that is damaged.
    """
    from safetensors import SafetensorError, safe_open

    if (folder / INDEX).is_file():
        places = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in places.items()}
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                found.update(dict.fromkeys(file.keys(), path))
        except SafetensorError as error:
            raise ValueError(f"{path.name} is no whole safetensors file ({error})") from None
    return found


def pieces(layout: Layout, num_layers: int, name: str, tensor: "Tensor") -> "Iterator[tuple[str, Tensor]]":
    """The published tensors that one of the head's consists of: names, and views of `tensor` where they belong."""
    base, (module, _, leaf) = layout.base(num_layers), name.partition(".")
    if module in ENDS:
        yield f"{base}{layout.ends[ENDS.index(module)]}.{leaf}", tensor
        return
    yield from stored_pieces(f"{base}{layout.block}{leaf}", tensor)


def stored_pieces(path: str, tensor: "Tensor", first: int = 0) -> "Iterator[tuple[str, Tensor]]":
    """The tensors of a model's files that a module's tensor consists of: itself, or, of fused experts, those of each.

    Args:
        first: number of the expert that `tensor` begins with.
    """
    if not path.endswith(FUSED):
        yield path, tensor
        return
    experts, _, fused = path.rpartition(".")
    for index, expert in enumerate(tensor, first):
        if fused == "down_proj":
            yield f"{experts}.{index}.down_proj.weight", expert
        else:
            for half, part in zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True):
                yield f"{experts}.{index}.{half}.weight", part


def load_pieces(
    folder: Path, layout: Layout, num_layers: int, tensors: "dict[str, Tensor]", whole: bool = True
) -> None:
    """Fill the head's tensors from a target's files.

    Args:
        whole: whether they are all that the layer has; then nothing of it may be left over.

    Raises:
        WrongInput: tensors of the layer that are missing, misshapen, quantised, or that no tensor of the head takes.
    """
    from safetensors import safe_open

    base, places = layout.base(num_layers), tensor_files(folder)
    wanted = {path: part for name, tensor in tensors.items() for path, part in pieces(layout, num_layers, name, tensor)}
    copies = {base + name for name in layout.copies}
    problems = [f"{path} is missing" for path in sorted(wanted.keys() - places.keys())]
    if whole:
        shipped = {path for path in places if path.startswith(base)}
        problems += [f"{path} has no place" for path in sorted(shipped - wanted.keys() - copies)]
    for file_path in sorted({places[path] for path in wanted.keys() & places.keys()}):
        with safe_open(file_path, framework="pt") as file:
            for path in (path for path in wanted if places.get(path) == file_path):
                found = file.get_tensor(path)
                if found.shape != wanted[path].shape or not found.is_floating_point() or found.element_size() == 1:
                    expected = "x".join(map(str, wanted[path].shape))
                    problems.append(
                        f"{path} is {tuple(found.shape)} {found.dtype}, expected {expected} of 16 bits or more"
                    )
                else:
                    wanted[path].copy_(found)
    if problems:
        more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise WrongInput(
            f"head.shipped: the MTP layer in {folder} cannot be read:\n  "
            + "\n  ".join(problems[:8])
            + more
            + "\nUse the target's unquantised checkpoint, or train an own layer: head.shipped=false"
        )
