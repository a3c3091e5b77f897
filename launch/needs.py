"""What a recipe needs of the machine beside time: memory for the target and a head; and how much is here."""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headstart.heads.checkpoint import build_head
from headstart.heads.model_files import ParameterCount, count_parameters, read_config, weight_bytes
from headstart.heads.precision import DTYPES
from headstart.heads.settings import HeadSettings
from headstart.heads.target import TargetLoader, choose_device
from headstart.launch.processes import Processes
from headstart.launch.variants import Loaded
from headstart.trainer.features import gigabytes

HEAD_BYTES = 4 * torch.float32.itemsize  # of a trained parameter: itself, its gradient and two moments
# Of a sharded target: the layer that computes, as gathered and laid out, and the one gathered before it (`fully_shard`).
GATHERED_LAYERS = 3
SHOWN_PROCESSES, MOST_PROCESSES = (2, 4, 8, 16, 32), 1024
MOMENT = "beside what a pass or a step takes for the moment"
Row = tuple[str, str, str]
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Needs:
    """Bytes on each process, beside what a pass or a step takes for the moment."""

    counted: ParameterCount  # of the target
    target: dict[str, int]  # its weights in each precision that it is loaded in, one at a time
    cache: int  # keys and values of the replies that are generated at once
    num_trained: int  # parameters of the largest head
    head: int
    device: torch.device
    memory: int | None  # what a process has of the device; None where it does not tell
    sharded: bool = False  # whether the target's layers are spread over the processes
    num_processes: int = 1
    streams: bool = False  # whether the layers stay while a head is trained, for its states

    @property
    def total(self) -> int:
        """Replies are generated before a head is trained; what of the target stays for that depends on where it lies."""
        if not self.sharded:
            return max(self.target.values()) + max(self.cache, self.head)
        layers = self.own_layers + self.gathered
        return self.ends + max(layers + self.cache, layers + self.head if self.streams else self.head)

    @property
    def fits(self) -> bool:
        return self.memory is None or self.unknown or self.total <= self.memory

    @property
    def unknown(self) -> bool:
        """Whether it is not known yet over how many processes the target will be spread."""
        return self.sharded and self.num_processes == 1

    @property
    def bytes_each(self) -> float:
        """Of a parameter of the target, in the largest precision."""
        return max(self.target.values()) / self.counted.total

    @property
    def ends(self) -> int:
        """What lies around the layers, which every process holds."""
        return round((self.counted.total - self.counted.layers) * self.bytes_each)

    @property
    def own_layers(self) -> int:
        """What a process holds of the layers when they are spread."""
        return math.ceil(self.counted.layers * self.bytes_each / self.num_processes)

    @property
    def gathered(self) -> int:
        """Layers that are whole at a time when they are spread."""
        return round(GATHERED_LAYERS * self.counted.largest_layer * self.bytes_each)

    def spread(self, num_processes: int) -> "Needs":
        """The same with the target spread over so many processes."""
        return replace(self, sharded=True, num_processes=num_processes)

    @property
    def least_processes(self) -> int | None:
        """How many hold the target when it is spread; None where no number does."""
        return next((number for number in range(2, MOST_PROCESSES + 1) if self.spread(number).fits), None)

    def refusal(self) -> str:
        """Why this machine cannot run the recipe."""
        name, size = max(self.target.items(), key=lambda item: item[1])
        least = self.least_processes
        each = f" on each of {self.num_processes} processes" if self.sharded else ""
        way_out = f"spread it over at least {least} processes: target.sharded=true" if least else "lower traffic.slots"
        return (
            f"needs {gigabytes(self.total)} of memory{each} ({gigabytes(size)} for the target in {name}), but {self.device} "
            f"has {gigabytes(self.memory or 0)}. Choose a smaller target or a larger device, or {way_out}"
        )


def measure_needs(loaded: Loaded, target: TargetLoader, processes: Processes | None = None) -> Needs:
    """Needs of a recipe, from the configs alone."""
    recipe, facts, processes = loaded.shared, target.facts, processes or Processes()
    device, counted = choose_device(recipe.target.device), count_parameters(target.folder)
    num_trained = max(trained_parameters(own.head, target) for own in loaded.recipes.values())
    longest = recipe.traffic.max_prompt_tokens + recipe.traffic.max_new_tokens
    precisions = {target.dtype, recipe.traffic.eval_dtype}
    value_bytes = max(DTYPES[name].itemsize for name in precisions)
    memory = device_memory(device)
    if memory is not None and device.type == "cpu":
        memory //= processes.local_world_size  # an accelerator is one process's own
    return Needs(
        counted=counted,
        target={name: weight_bytes(target.folder, counted.total, DTYPES[name]) for name in precisions},
        cache=recipe.traffic.slots * longest * facts.num_layers * cached_numbers(target) * value_bytes,
        num_trained=num_trained,
        head=num_trained * HEAD_BYTES,
        device=device,
        memory=memory,
        sharded=recipe.target.sharded,
        num_processes=processes.world_size,
        streams=recipe.features.mode != "cache",  # auto is not decided yet
    )


def cached_numbers(target: TargetLoader) -> int:
    """Numbers that a layer keeps of a token: keys and values, those of latent attention as transformers keeps them."""
    config, facts = read_config(target.folder).get_text_config(), target.facts
    if getattr(config, "kv_lora_rank", None):
        return int(facts.num_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim))
    return 2 * facts.num_kv_heads * facts.head_dim


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


def memory_rows(needs: Needs) -> list[Row]:
    """The table of a plan: name, value, remark."""
    in_each = ", ".join(f"{gigabytes(size)} in {name}" for name, size in sorted(needs.target.items()))
    return [
        ("target", parameters(needs.counted.total), in_each),
        ("cache", gigabytes(needs.cache), "keys and values of the replies that are generated at once"),
        ("head", parameters(needs.num_trained), f"{gigabytes(needs.head)} with gradients and moments"),
        *(spread_rows(needs) if needs.sharded else []),
        *(each_rows(needs) if needs.unknown else [("in all", gigabytes(needs.total), MOMENT)]),
        ("here", "unknown" if needs.memory is None else gigabytes(needs.memory), here(needs)),
    ]


def parameters(number: int) -> str:
    return f"{number / 1e9:,.2f} B parameters" if number >= 1e9 else f"{number / 1e6:,.1f} M parameters"


def spread_rows(needs: Needs) -> list[Row]:
    """Where a target lies that is spread."""
    return [
        ("spread", gigabytes(needs.spread(1).own_layers), "of layers, over the processes"),
        (
            "on each",
            gigabytes(needs.ends),
            f"around them, and {gigabytes(needs.gathered)} of layers while they compute",
        ),
    ]


def each_rows(needs: Needs) -> list[Row]:
    """What lies on each process, by their number."""
    return [(f"each of {number}", gigabytes(needs.spread(number).total), MOMENT) for number in SHOWN_PROCESSES]


def here(needs: Needs) -> str:
    """What this machine is, and how many of them would do where one does not."""
    if needs.fits and not needs.unknown:
        return str(needs.device)
    least = needs.least_processes
    enough = f"{least} processes with as much each would do, with target.sharded=true" if least else "not enough"
    return f"{needs.device}: {enough}"
