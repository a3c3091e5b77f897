"""What a recipe needs of the machine beside time: memory for the target and a head; and how much is here."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from headstart.heads.checkpoint import build_head
from headstart.heads.model_files import count_parameters, weight_bytes
from headstart.heads.precision import DTYPES
from headstart.heads.settings import HeadSettings
from headstart.heads.target import TargetLoader, choose_device
from headstart.launch.variants import Loaded
from headstart.trainer.features import gigabytes

HEAD_BYTES = 4 * torch.float32.itemsize  # of a trained parameter: itself, its gradient and two moments
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Needs:
    """Bytes, beside what a pass or a step takes for the moment."""

    num_parameters: int  # of the target
    target: dict[str, int]  # its weights in each precision that it is loaded in, one at a time
    cache: int  # keys and values of the replies that are generated at once
    num_trained: int  # parameters of the largest head
    head: int
    device: torch.device
    memory: int | None  # what the device has; None where it does not tell

    @property
    def total(self) -> int:
        """Replies are generated before a head is trained, and the largest precision comes with either."""
        return max(self.target.values()) + max(self.cache, self.head)

    @property
    def fits(self) -> bool:
        return self.memory is None or self.total <= self.memory

    def refusal(self) -> str:
        """Why this machine cannot run the recipe."""
        name, size = max(self.target.items(), key=lambda item: item[1])
        return (
            f"needs {gigabytes(self.total)} of memory ({gigabytes(size)} for the target in {name}), but {self.device} has "
            f"{gigabytes(self.memory or 0)}. Targets that are spread over several devices cannot be run yet: choose a "
            "smaller target or a larger device"
        )


def measure_needs(loaded: Loaded, target: TargetLoader) -> Needs:
    """Needs of a recipe, from the configs alone."""
    recipe, facts = loaded.shared, target.facts
    device, num_parameters = choose_device(recipe.target.device), count_parameters(target.folder)
    num_trained = max(trained_parameters(own.head, target) for own in loaded.recipes.values())
    longest = recipe.traffic.max_prompt_tokens + recipe.traffic.max_new_tokens
    precisions = {target.dtype, recipe.traffic.eval_dtype}
    value_bytes = max(DTYPES[name].itemsize for name in precisions)
    return Needs(
        num_parameters=num_parameters,
        target={name: weight_bytes(target.folder, num_parameters, DTYPES[name]) for name in precisions},
        cache=recipe.traffic.slots * longest * 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim * value_bytes,
        num_trained=num_trained,
        head=num_trained * HEAD_BYTES,
        device=device,
        memory=device_memory(device),
    )


def trained_parameters(settings: HeadSettings, target: TargetLoader) -> int:
    num_ids = settings.draft_vocab_size or target.facts.num_tokens
    with torch.device("meta"):
        head = build_head(settings, target.facts, torch.arange(num_ids))
    return sum(tensor.numel() for tensor in head.trained_tensors().values())


def device_memory(device: torch.device) -> int | None:
    """Bytes of a device in all; of a CPU those that this container may use."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type != "cpu":
        return None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = CONTAINER_LIMIT.read_text().strip() if CONTAINER_LIMIT.is_file() else "max"
    return min(memory, int(limit)) if limit.isdigit() else memory


def memory_rows(needs: Needs) -> list[tuple[str, str, str]]:
    """The table of a plan: name, value, remark."""
    in_each = ", ".join(f"{gigabytes(size)} in {name}" for name, size in sorted(needs.target.items()))
    return [
        ("target", parameters(needs.num_parameters), in_each),
        ("cache", gigabytes(needs.cache), "keys and values of the replies that are generated at once"),
        ("head", parameters(needs.num_trained), f"{gigabytes(needs.head)} with gradients and moments"),
        ("in all", gigabytes(needs.total), "beside what a pass or a step takes for the moment"),
        ("here", "unknown" if needs.memory is None else gigabytes(needs.memory), here(needs)),
    ]


def parameters(number: int) -> str:
    return f"{number / 1e9:,.2f} B parameters" if number >= 1e9 else f"{number / 1e6:,.1f} M parameters"


def here(needs: Needs) -> str:
    return str(needs.device) + ("" if needs.fits else ": not enough, and a target cannot be spread over devices yet")
