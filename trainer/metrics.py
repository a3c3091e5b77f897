"""metrics.jsonl: the record of a run. Trackers show the same keys; this file is what later readers trust."""

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headstart.heads.store import atomic_path
from headstart.trainer.losses import PairSums

METRICS = "metrics.jsonl"


class MetricsFile:
    """One JSON object a line; `step` strictly increases."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last_step = max((line["step"] for line in read_metrics(path)), default=-1)

    def cut(self, step: int) -> list[dict[str, Any]]:
        """Drop the lines after `step`, as a resume does with what its checkpoint does not hold; returns those that stay."""
        kept = [line for line in read_metrics(self.path) if line["step"] <= step]
        if self.path.exists():  # half a line of a killed process goes too
            with atomic_path(self.path) as temporary:
                temporary.write_text("".join(_encode(line) for line in kept), encoding="utf-8")
        self.last_step = kept[-1]["step"] if kept else -1
        return kept

    def write(self, step: int, tokens: int, values: dict[str, Any]) -> dict[str, Any]:
        """Append one line.

        Raises:
            ValueError: the step does not follow the last one.
        """
        if step <= self.last_step:
            raise ValueError(f"{self.path}: step {step} after step {self.last_step}")
        line = {"step": step, "time": time.time(), "stage": "train", "tokens": tokens, **values}
        with self.path.open("a", encoding="utf-8") as handle:
            handle.write(_encode(line))
        self.last_step = step
        return line


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines; one that a killed process left half written is passed over."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


class Window:
    """Sums over the steps since the last line. They travel with checkpoints, so that a resumed run writes the line an
    unbroken one would have written; the clock does not."""

    def __init__(self, depth: int, state: dict[str, list[float]]) -> None:
        self.sums = PairSums.zeros(depth, torch.device("cpu"))
        for name, values in state.items():
            getattr(self.sums, name).copy_(torch.tensor(values, dtype=torch.float64))
        self._restart_clock()

    def state(self) -> dict[str, list[float]]:
        return {name: values.tolist() for name, values in vars(self.sums).items()}

    def add(self, sums: PairSums, num_tokens: int, seconds: float) -> None:
        self.sums.add(PairSums(**{name: values.cpu().double() for name, values in vars(sums).items()}))
        self.num_tokens += num_tokens
        self.seconds += seconds

    def close(self, depth_decay: float) -> dict[str, Any]:
        """Ratios of the sums, under the keys of metrics.jsonl; the next window begins."""
        sums = {name: values.numpy() for name, values in vars(self.sums).items()}
        weight_D = depth_decay ** np.arange(len(sums["pairs_D"]))
        with np.errstate(divide="ignore", invalid="ignore"):
            loss = (sums["loss_D"] @ weight_D) / (sums["pairs_D"] @ weight_D)
            mean = {name: (values / sums["pairs_D"]).tolist() for name, values in sums.items()}
            totals = {name: float(values.sum() / sums["pairs_D"].sum()) for name, values in sums.items()}
        values: dict[str, Any] = {"train/loss": float(loss)}
        for shown, name in (("loss", "loss_D"), ("top1", "hits_D")):
            values |= {f"train/{shown}/position_{j}": value for j, value in enumerate(mean[name])}
        values["train/overlap"] = totals["overlap_D"]
        values["train/in_vocab_mass"] = totals["mass_D"]
        values["train/out_of_vocab_share"] = totals["outside_D"]
        values["train/tokens_per_s"] = self.num_tokens / self.seconds if self.seconds else math.nan
        for total in vars(self.sums).values():
            total.zero_()
        self._restart_clock()
        return values

    def _restart_clock(self) -> None:
        self.num_tokens, self.seconds = 0, 0.0


def _encode(line: dict[str, Any]) -> str:
    """JSON has no nan and no infinity: what was not measured is null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
    return json.dumps(finite, ensure_ascii=False) + "\n"
