"""Training prompts answered by servers; the target here reads every reply, for its states and as a check of it."""

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

from headstart.heads.errors import GateFailed
from headstart.heads.sampling import Sampling
from headstart.heads.store import Stage
from headstart.heads.target import States, Target
from headstart.trainer.dialects import Asked
from headstart.trainer.generation import Reply, Request
from headstart.trainer.progress import Progress
from headstart.trainer.recorded import score_with_gaps
from headstart.trainer.server_check import check_choices, check_difference, check_evidence, check_servers
from headstart.trainer.servers import Servers
from headstart.trainer.settings import TrafficSettings

AHEAD = 2  # chunks at least that are asked for together, so that servers stay busy while the target reads
NUM_NAMED = 3


def backend_name(settings: TrafficSettings) -> str:
    """Who gave the replies, as the record says it."""
    return f"openai-{settings.server.engine}-{settings.server.model}"


class Served:
    """Replies of servers for several chunks at once; a context manager, which ends what is under way."""

    def __init__(
        self,
        target: Target,
        settings: TrafficSettings,
        sampling: Sampling,
        seed: int,
        progress: Progress,
        failed: "Failed",
    ) -> None:
        self.target, self.failed = target, failed
        self.asked = Asked(target.facts, target.tokenizer, settings.server, seed)
        self.servers = Servers(self.asked, sampling, settings.max_new_tokens, progress.add)
        self._reading = nullcontext() if target.concurrent else threading.Lock()

    def __enter__(self) -> "Served":
        self.servers.__enter__()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.stop()
        if error is None:
            self.failed.tell()

    def stop(self) -> None:
        """End requests that are under way, and whoever waits for them."""
        self.servers.__exit__()

    def check(self, requests: Sequence[Request]) -> None:
        """Hold every server against the target on the first of these. Raises WrongInput: it is not the one asked for."""
        check_servers(self.servers, self.target, requests)

    def generate(self, requests: Sequence[Request], states_dtype: torch.dtype | None, chunk: int = 0) -> list[Reply]:
        """Replies in the order of the requests, which are of the chunk of this number, with the target's states on them.

        Raises:
            WrongInput: no server answers any more, or the replies are not the target's.
            GateFailed: more prompts than `max_failed` stay without a reply.
        """
        replies = self.servers.wait(self.servers.send(requests, chunk))
        self.failed.add(replies)
        answered = [(q, r) for q, r in zip(requests, replies, strict=True) if r.finish_reason != "error"]
        with self._reading:
            self._read(answered, states_dtype)
        return replies

    @torch.inference_mode()
    def _read(self, answered: Sequence[tuple[Request, Reply]], states_dtype: torch.dtype | None) -> None:
        """Give replies their states, check their log-probabilities by these, and fill in those that were not told."""
        paths = [np.array(request.token_ids + reply.token_ids) for request, reply in answered]
        own, gaps = [], []
        for states, (request, reply) in zip(self.target.read(paths), answered, strict=True):
            logprobs, below = score_with_gaps(self.target, states.final[len(request.token_ids) - 1 :], reply.token_ids)
            own.append(logprobs)
            gaps.append(below)
            if states_dtype is not None:
                reply.states = States(*(x.to("cpu", states_dtype) for x in (states.taps, states.final)))
        told = [reply.logprobs for _, reply in answered]
        check_difference(told, own, "a server", self.asked)
        check_evidence(told, "a server", self.servers.sampling)
        if self.servers.sampling.temperature == 0:
            check_choices(gaps, "a server")
        for (_, reply), found in zip(answered, own, strict=True):
            reply.logprobs = [mine if told is None else told for told, mine in zip(reply.logprobs, found, strict=True)]


class Failed:
    """Requests that stayed without a reply, those of recorded chunks included."""

    def __init__(self, most: float, traffic: Stage, num_requests: int) -> None:
        """`num_requests` are still to be asked."""
        self._most = most
        recorded = [reason for name in traffic.outputs for reason in finish_reasons(traffic.folder / name)]
        self._number = recorded.count("error")
        self._total = len(recorded) + num_requests
        self._reasons: list[str] = []
        self._lock = threading.Lock()

    def add(self, replies: Sequence[Reply]) -> None:
        """Count the failed ones. Raises GateFailed: there are too many; what was just asked is not recorded."""
        with self._lock:
            reasons = [reply.error for reply in replies if reply.finish_reason == "error"]
            self._number += len(reasons)
            self._reasons += reasons
            if self._number > self._most * self._total:
                raise GateFailed(
                    f"{self._number:,} of {self._total:,} training requests got no reply from the servers, expected at "
                    f"most {self._most:.1%} (traffic.server.max_failed): {'; '.join(self._reasons[:NUM_NAMED])}\n"
                    "Mend the servers and run again, which asks for what is missing, or raise traffic.server.max_failed."
                )

    def tell(self) -> None:
        if self._reasons:
            print(
                f"traffic: {self._number:,} of {self._total:,} training requests got no reply and are left out: "
                f"{'; '.join(self._reasons[:NUM_NAMED])}"
            )


def finish_reasons(part: Path) -> list[str]:
    """Finish reasons of a recorded chunk's training rows."""
    import pyarrow.parquet as parquet

    table = parquet.read_table(part, columns=["split", "finish_reason"]).to_pylist()
    return [row["finish_reason"] for row in table if row["split"] == "train"]
