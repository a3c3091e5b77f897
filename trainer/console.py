"""What training says: the table of tensors at its start, and one line of progress."""

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from headstart.eval.tables import columns
from headstart.heads.contract import Head
from headstart.heads.precision import Precision
from headstart.trainer.data import TrainingRows
from headstart.trainer.settings import TrainSettings
from headstart.trainer.strategy import Strategy


def tensor_table(
    head: Head, shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
) -> list[tuple[str, str, str, str, str]]:
    """(tensor, shape, source, trained or frozen, exported) of everything the head holds or borrows.

    Args:
        shapes: of trained tensors, which may lie on several ranks.
    """
    trained, origins = head.trained_tensors(), head.origins()
    table = []
    for name, tensor in [*head.named_parameters(), *head.named_buffers()]:
        shape = " x ".join(str(size) for size in shapes.get(name, tensor.shape))
        if name in trained:
            table.append((name, shape, origins.get(name, "random"), "trained", "yes"))
        else:
            borrowed = "yes" if head.exports_frozen else "no, shared by the engine"
            exported = "as the vocabulary map" if name == "draft_ids_V" else borrowed
            table.append((name, shape, origins.get(name, "target"), "frozen", exported))
    return table


def print_start(strategy: Strategy, rows: TrainingRows, settings: TrainSettings, precision: Precision) -> None:
    shapes = strategy.shapes()
    table = [("tensor", "shape", "starts from", "state", "exported"), *tensor_table(strategy.head, shapes)]
    print("".join(f"  {line}\n" for line in columns(table)), end="")
    epochs = settings.num_steps * settings.batch_tokens / rows.num_tokens
    print(f"{strategy.num_trained:,} trained parameters; the target's own weights are frozen and never saved")
    print(
        f"{len(rows.paths):,} paths, {rows.num_tokens:,} slots ({rows.num_skipped} without a supervised pair left out); "
        f"{settings.num_steps:,} steps of {settings.batch_tokens:,} tokens are about {epochs:.1f} epochs; packing adds "
        f"{rows.filler_share(settings.accumulate * strategy.ranks.world):.1%} of filler"
    )
    print(f"matrix products in {precision.name} ({precision.reason}); weights, softmax and optimiser in float32")
    print(strategy.describe(), flush=True)


class Pace:
    """Time to the end, from the pace of this process since it began, evaluations and checkpoints included."""

    def __init__(self, step: int, num_steps: int) -> None:
        self.first, self.num_steps, self.began = step, num_steps, time.monotonic()

    def eta(self, step: int) -> str:
        seconds = round((time.monotonic() - self.began) / max(1, step - self.first) * (self.num_steps - step))
        minutes, hours = seconds // 60, seconds // 3600
        return f"{hours}:{minutes % 60:02d}:{seconds % 60:02d}" if hours else f"{minutes}:{seconds % 60:02d}"


def progress_line(step: int, values: dict[str, Any], pace: Pace) -> str:
    top1 = _curve(values, "train/top1/")
    line = (
        f"step {step}/{pace.num_steps}  loss {_number(values['train/loss'], 3)}  top-1 {top1}  "
        f"{values['train/tokens_per_s']:,.0f} tokens/s  ETA {pace.eta(step)}"
    )
    if "accept_len" in values:
        value, low, high = (_number(values[key], 3) for key in ("accept_len", "accept_len_low", "accept_len_high"))
        line += f"\n  validation: accept_len {value} [{low}, {high}]  acceptance {_curve(values, 'acceptance/')}"
    return line


def _curve(values: dict[str, Any], prefix: str) -> str:
    return " ".join(_number(value, 2) for key, value in values.items() if key.startswith(prefix))


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
