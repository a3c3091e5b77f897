"""The files of an evaluation: what was measured now, beside what was measured before on the same checkpoint and stays."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from headstart.eval.acceptance import ReplyAcceptance
from headstart.eval.calibration import calibration_entries
from headstart.eval.file_reader import SCHEMAS, read_eval
from headstart.eval.gate import of_checkpoint, read_evals, same_checkpoint
from headstart.eval.heldout import PREVIOUS
from headstart.eval.identity import overall_verdict
from headstart.eval.prompt_sums import write_sums
from headstart.eval.speed import ABSOLUTE, crossover, hardware, recommend
from headstart.eval.statistics import LEVEL
from headstart.eval.subject import Subject
from headstart.eval.temperatures import SETTING
from headstart.heads.errors import WrongInput
from headstart.heads.store import write_json


@dataclass
class EvalFiles:
    """The eval folder of a run, for one checkpoint; `names` are the first entries of every file."""

    folder: Path
    subject: Subject
    names: dict[str, Any]  # checkpoint, target, prompts

    def kept(self, name: str, entry: str) -> Any:
        """What a file says already of this very checkpoint and target (and prompts, where it names them); or nothing."""
        file = self.folder / f"{name}.json"
        if not file.exists():
            return []
        try:
            old = read_eval(file)
        except WrongInput:  # damaged: all of it is measured again
            return []
        same = all(old.get(key, self.names[key]) == self.names[key] for key in ("target", "prompts"))
        if not same or not same_checkpoint(old["checkpoint"], self.names["checkpoint"]):
            return []
        return old.get(entry, [])

    def write_acceptance(self, rows: list[dict[str, Any]], extra: dict[str, Any]) -> None:
        """acceptance.json; rows and the live agreement that were measured before stay, but for a previous head's.

        They belong to the comparison beside them, which is made anew or not at all.
        """
        target = self.subject.target
        environment = {"device": str(target.device), "dtype": str(target.dtype).removeprefix("torch.")}
        kept = [
            row
            for row in self.kept("acceptance", "rows")
            if row["drafter"] != PREVIOUS and not measured_again(row, rows)
        ]
        if "live_agreement" not in extra and (agreed := self.kept("acceptance", "live_agreement")):
            extra = {**extra, "live_agreement": agreed}
        body = {"environment": {**environment, "threads": torch.get_num_threads()}, **self._method()}
        self._write("acceptance", {**self.names, **body, "rows": rows + kept, **extra})

    def write_calibration(self, heads: Sequence[tuple[str, list[ReplyAcceptance]]]) -> None:
        """calibration.json; speed-ups are predicted where steps of this checkpoint were timed, now or before."""
        speed = of_checkpoint(read_evals(self.folder), self.names["checkpoint"])["speed"]
        settings = self.subject.settings
        body = calibration_entries(
            heads,
            self.names["checkpoint"]["kind"],
            max(settings.draft_lengths),
            speed["rows"] if speed else [],  # whatever prompts: a step costs what it costs
            settings.replicates,
            self.subject.seed,
            self.subject.conversations,
        )
        self._write("calibration", {**self.names, **self._method(), **body})

    def write_prompt_sums(self, sums: Sequence[dict[str, Any]]) -> None:
        """prompts.json; sums of lookup belong to no checkpoint."""
        paths, own = self.subject.paths, self.names["checkpoint"]
        content = {
            "target": self.names["target"],
            "prompts": self.names["prompts"],
            "sampling": asdict(self.subject.sampling),
            "prompt_ids": [path.prompt_id for path in paths],
            "routes": [path.route for path in paths],
            "prompt_tokens": [path.num_prompt_tokens for path in paths],
            "num_tokens": [max(path.num_reply_tokens - 1, 0) for path in paths],
            "conversations": list(self.subject.conversations.values()),
        }
        rows = [{"checkpoint": own if row["drafter"] == own["kind"] else None, **row} for row in sums]
        write_sums(self.folder, content, rows)

    def write_lossless(self, checks: list[dict[str, Any]], proof: tuple[list[dict[str, Any]], list[str]]) -> None:
        """lossless.json. A check made before on this checkpoint stays until it is made again at its own settings.

        A failed one too: measured at another draft length or batch a fault may not show, and the weights are the same.
        `proof` holds the seeded faults of this evaluation, and what they say is wrong with the battery.
        """
        kept = [c for c in self.kept("lossless", "checks") if not any(same_check(c, new) for new in checks)]
        for check in kept:
            if check["verdict"] == "fail":
                self.subject.tell(
                    f"a failed check made earlier stays until the same check passes: {check['name']} against "
                    f"{check.get('against')} in {check['dtype']}, draft length {check['draft_length']}, batch "
                    f"{check['batch']}"
                )
        checks = [*checks, *kept]
        named = {name: self.names[name] for name in ("checkpoint", "target")}
        if not proof[0]:  # no proof this time: what the last one found stays
            proof = self.kept("lossless", "faults") or [], self.kept("lossless", "battery_problems") or []
        body = {"verdict": overall_verdict(checks), "checks": checks, "faults": proof[0], "battery_problems": proof[1]}
        self._write("lossless", {**named, **body})

    def write_speed(
        self,
        rows: list[dict[str, Any]],
        absolute: dict[str, float | None],
        route_accept_len: dict[int, dict[str, float | None]],
        device: torch.device,
    ) -> None:
        """speed.json, with what all timings of the reference decoder recommend; `route_accept_len` as of `recommend`.

        Its rows of other concurrencies stay where they were timed on this machine, with these versions.
        """
        machine = hardware(device)
        same_machine = self.kept("speed", "hardware") == machine
        if same_machine:
            absolute = self.kept("speed", "absolute") | absolute
        kept = [row for row in self.kept("speed", "rows") if same_machine or row["engine"] != "reference"]
        rows = [*rows, *(row for row in kept if not timed_again(row, rows))]
        reference = [row for row in rows if row["engine"] == "reference"]
        recommended = recommend(reference, self.names["checkpoint"]["kind"], route_accept_len)
        body: dict[str, Any] = {"hardware": machine, "absolute": dict.fromkeys(ABSOLUTE) | absolute, "rows": rows}
        body |= {"recommended": recommended, "crossover_concurrency": crossover(recommended)}
        self._write("speed", {**self.names, **body})

    def _method(self) -> dict[str, Any]:
        """How intervals were made, and the setting that replies were recorded at."""
        interval = {
            "level": LEVEL,
            "kind": "bootstrap over prompts",
            "replicates": self.subject.settings.replicates,
            "seed": self.subject.seed,
            "method": "percentiles, expanded for the number of prompts; turns of a conversation are drawn together",
        }
        return {"interval": interval, "sampling": asdict(self.subject.sampling)}

    def _write(self, name: str, content: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / f"{name}.json", {"schema": SCHEMAS[name], **content})


def measured_again(row: dict[str, Any], new: Sequence[dict[str, Any]]) -> bool:
    keys = ("source", "drafter", "route", "context", *SETTING, "draft", "draft_length", "tree", "counting")
    return any(all(row[key] == other[key] for key in keys) for other in new)


def timed_again(row: dict[str, Any], new: Sequence[dict[str, Any]]) -> bool:
    """Whether an older row of the reference decoder is measured by a new one, or would stand beside other conditions."""
    if row["engine"] != "reference":
        return False
    same = all(row[key] == new[0][key] for key in ("temperature", "dtype", "threads"))
    return not same or any(row["concurrency"] == other["concurrency"] for other in new)


def same_check(check: dict[str, Any], other: dict[str, Any]) -> bool:
    keys = [
        "name",
        "target",
        "dtype",
        "sampler",
        "draft",
        "shape",
        "draft_length",
        "tree",
        "against",
        "batch",
        "drafter",
        "rule",
    ]
    return all(check.get(key) == other.get(key) for key in keys)
