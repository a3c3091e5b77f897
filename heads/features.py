"""Reader of a features stage: tap states and final states of every path, mapped from disk.

Training reads bfloat16, which is what it multiplies in, or close enough to it. Held-out states stay in the precision of the
replies: acceptance is exact only on the states that the target really had.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from headstart.heads.errors import WrongInput
from headstart.heads.paths import Path as ReplyPath
from headstart.heads.store import finished_stage

# safetensors orders metadata keys by hash, so everything goes into one key and files stay bit-equal.
METADATA = "headstart"


class FeatureReader:
    """Features of a stage folder by prompt id, without loading them: tensors are views of the mapped files.

    Args:
        taps: those that are read, ascending; default: all that the stage holds.
        traffic: key of the replies that the states have to be of; default: any. Replies of another stage have the same
            prompt ids, and where they ran to their limit the same lengths.

    Raises:
        WrongInput: no finished stage, one without these taps, or one of other replies.
    """

    def __init__(self, folder: Path, taps: Sequence[int] | None = None, traffic: str = "") -> None:
        self.folder = folder
        self._columns: list[slice] = []
        self._taps: list[Tensor] = []
        self._final: list[Tensor] = []
        self._place: dict[str, tuple[int, int, int]] = {}
        stage = finished_stage(folder)
        if traffic and (found := stage.manifest["inputs"]["parents"]["traffic"]) != traffic:
            raise WrongInput(
                f"{folder}: found states of the replies {found[:12]}, expected those of {traffic[:12]}.\n"
                "Run the recipe again, which links the right ones, or delete that link: the target then reads the replies."
            )
        stored: list[int] = stage.manifest["inputs"]["settings"]["taps"]
        self.taps = stored if taps is None else list(taps)
        for shard, name in enumerate(sorted(stage.outputs)):
            with safe_open(folder / name, framework="pt") as file:
                metadata = read_metadata(file.metadata())
                self._taps.append(file.get_tensor("taps"))
                self._final.append(file.get_tensor("final"))
                offsets = file.get_tensor("offsets").tolist()
            if self.taps != stored:
                self._columns = self._choose(stored, self._final[-1].shape[1])
            for row, prompt_id in enumerate(metadata["prompt_ids"]):
                self._place[prompt_id] = (shard, offsets[row], offsets[row + 1])

    def __len__(self) -> int:
        return len(self._place)

    def dtype(self, prompt_id: str) -> torch.dtype | None:
        """Precision of a path's states; None where it has none."""
        place = self._place.get(prompt_id)
        return None if place is None else self._final[place[0]].dtype

    def get(self, prompt_id: str) -> tuple[Tensor, Tensor]:
        """(taps_SF, final_SH) of a path, S = N - 1: the last token is never fed.

        Raises:
            WrongInput: the stage holds no features of this prompt.
        """
        place = self._place.get(prompt_id)
        if place is None:
            raise WrongInput(
                f"{self.folder}: found no features of prompt {prompt_id[:12]} among {len(self)} paths.\n"
                "Run the traffic and features stages again: headstart train RECIPE"
            )
        shard, begin, end = place
        taps_SF = self._taps[shard][begin:end]
        if self._columns:
            taps_SF = torch.cat([taps_SF[:, columns] for columns in self._columns], dim=1)
        return taps_SF, self._final[shard][begin:end]

    def of(self, paths: Sequence[ReplyPath]) -> list[tuple[Tensor, Tensor]]:
        """As `get`, for several paths."""
        return [self.get(path.prompt_id) for path in paths]

    def _choose(self, stored: list[int], width: int) -> list[slice]:
        """Columns of the taps that are read."""
        if missing := sorted({*self.taps} - {*stored}):
            raise WrongInput(
                f"{self.folder}: found the taps {stored}, expected {missing} among them.\n"
                "Run the traffic and features stages again: headstart train RECIPE"
            )
        return [slice(place * width, (place + 1) * width) for place in map(stored.index, self.taps)]


def write_metadata(prompt_ids: list[str], taps: list[int], key: str) -> dict[str, str]:
    return {METADATA: json.dumps({"prompt_ids": prompt_ids, "taps": taps, "key": key})}


def read_metadata(metadata: dict[str, str] | None) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((metadata or {})[METADATA])
    return found
