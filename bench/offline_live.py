"""What exact offline acceptance costs beside live decoding, at equal width of the interval.

    python bench/offline_live.py RUN [--prompts 60] [--temperatures 0,1] [--draft-length N] [--new-tokens 96]

RUN is a finished run. At every temperature the held-out prompts are answered anew, as traffic answers them, and the
target's states are kept (that is not timed: all heads and settings share replies and states). The head's accept_len is
measured on them offline, and live by decoding the prompts with random numbers of their own. Seconds are those of one
measurement in this process after a warm-up on a few prompts: processor time, which neighbours on the machine do not
stretch, or the wall clock where an accelerator does the work. Both give an interval of some width, and widths fall with
the root of the number of prompts, so the cost ratio at equal width is (live seconds x live width^2) / (offline seconds x
offline width^2).
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headstart.launch.threads import apply_threads, choose_threads


@dataclass
class Cell:
    """One measurement of accept_len."""

    seconds: float  # a prompt
    counts: list[Any]
    reading: float = 0.0  # seconds a prompt that the target would read the replies in, were its states not kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--draft-length", type=int, default=0, help="default: the recipe's")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, default=0, help="requests decoded together live (default: the recipe's)")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    threads = choose_threads(options.threads, local_world_size=1)
    apply_threads(threads)
    Bench(options).report(f"{threads}")


class Bench:
    """A run's head, its target in float32, and held-out prompts balanced over routes."""

    def __init__(self, options: argparse.Namespace) -> None:
        from headstart.eval.timings import balanced
        from headstart.heads.checkpoint import load_head
        from headstart.heads.paths import read_paths
        from headstart.launch.recipe import load_recipe
        from headstart.launch.run import find_run
        from headstart.launch.stages import target_loader
        from headstart.trainer.checkpoint import checkpoint_folder

        run, named = find_run(options.run)
        recipe = load_recipe(run.recipe)
        self.options, self.name = options, run.name
        self.target = target_loader(recipe)("float32")
        self.head = load_head(checkpoint_folder(run.folder, named or "best"), self.target)
        self.head.to(self.target.device).eval().pack()
        self.paths = balanced(list(read_paths(run.folder / "traffic", "heldout")), options.prompts)
        self.prompts = [path.prompt_token_ids for path in self.paths]
        self.length = options.draft_length or recipe.eval.draft_length
        options.batch = options.batch or recipe.eval.live_batch

    def report(self, threads: str) -> None:
        """The table of all temperatures, and the ratios."""
        from headstart.eval.tables import table

        header = ["temperature", "drafts", "source", "accept_len [95 %]", "s / prompt", "uniform starts"]
        header += ["product of marginals", "live / offline", "states read anew", "live against offline"]
        print(
            f"{self.name}: {len(self.prompts)} prompts, at most {self.options.new_tokens} tokens, draft length "
            f"{self.length}, float32, batch {self.options.batch} live, threads {threads}\n"
        )
        lines = [line for text in self.options.temperatures.split(",") for line in self.temperature(float(text))]
        print(table(header, lines))
        print(
            "\nlive / offline: cost of live over that of offline at equal width of the interval, for one figure. One\n"
            "offline pass gives both kinds of drafts and every shorter draft length, where live decodes once for each.\n"
            "states read anew: the same where no states were kept, and the target has to read the replies once more."
        )

    def temperature(self, temperature: float) -> list[list[str]]:
        from headstart.heads.sampling import Sampling

        sampling = Sampling(temperature)
        rows = self.record(sampling)
        drafts = ("greedy", "sampled") if temperature else ("greedy",)
        self.offline(rows[:8], sampling, drafts)
        offline = self.offline(rows, sampling, drafts)
        lines = []
        for draft in drafts:
            self.live(sampling, draft, 2)
            live = self.live(sampling, draft, len(self.prompts))
            lines += self.lines(temperature, draft, offline[draft], live)
        return lines

    def record(self, sampling: Any) -> list[tuple[Any, Any, Any]]:
        """Replies to every prompt as traffic records them, each path with the target's states."""
        from dataclasses import replace

        import numpy as np

        from headstart.trainer.generation import Generator, Request

        requests = [Request(path.prompt_id, prompt) for path, prompt in zip(self.paths, self.prompts, strict=True)]
        longest = max(map(len, self.prompts)) + self.options.new_tokens
        generator = Generator(self.target, sampling, self.options.new_tokens, 8, longest, seed=1)
        rows = []
        for path, prompt, reply in zip(
            self.paths, self.prompts, generator.generate(requests, self.target.dtype), strict=True
        ):
            generated_N = np.arange(len(prompt) + len(reply.token_ids)) >= len(prompt)
            logprobs = [float("nan")] * len(prompt) + reply.logprobs
            recorded = replace(
                path,
                token_N=np.array([*prompt, *reply.token_ids], dtype=np.int32),
                generated_N=generated_N,
                logprob_N=np.array(logprobs, dtype=np.float32),
                sampling=sampling.to_dict(),
            )
            rows.append((recorded, reply.states.taps, reply.states.final))
        return rows

    def decode(self, sampling: Any, draft: Any, length: int, number: int, occasion: str, batch: int = 0) -> list[Any]:
        from headstart.eval.decode import decode
        from headstart.eval.drafters import HeadDrafter
        from headstart.eval.speculation import Speculation

        return decode(
            self.target,
            self.prompts[:number],
            Speculation(HeadDrafter(self.head) if length else None, length, sampling, draft),
            self.options.new_tokens,
            batch=batch or self.options.batch,
            request_ids=[f"{occasion}/{draft}/{path.prompt_id}" for path in self.paths[:number]],
        )

    def live(self, sampling: Any, draft: str, number: int) -> Cell:
        from headstart.eval.replies import live_counts

        names = [path.prompt_id for path in self.paths[:number]]
        routes = [path.route for path in self.paths[:number]]
        seconds, replies = timed(lambda: self.decode(sampling, draft, self.length, number, "live"), self.target.device)
        return Cell(seconds / number, live_counts(replies, names, routes, self.length))

    def offline(self, rows: Sequence[tuple[Any, Any, Any]], sampling: Any, drafts: Sequence[str]) -> dict[str, Cell]:
        """Every kind of drafts from one pass."""
        from headstart.eval.acceptance import count_replies, drafts_acceptance
        from headstart.eval.subject import READ_PATHS
        from headstart.eval.target_law import TargetLaw
        from headstart.heads.batch import pack

        law = TargetLaw(self.target, sampling) if sampling.temperature else None
        temperatures = [sampling.temperature if draft == "sampled" else 0.0 for draft in drafts]
        device, number = self.target.device, len(rows)

        def measure() -> list[Any]:
            chunks = [rows[begin : begin + READ_PATHS] for begin in range(0, number, READ_PATHS)]
            batches = (pack(list(chunk)).to(device) for chunk in chunks)
            found = drafts_acceptance(self.head, batches, self.length, temperatures, law)
            return [count_replies(replies, self.length) for replies in found]

        reading, _ = timed(lambda: self.target.read([path.token_N for path, _, _ in rows]), device)
        seconds, counts = timed(measure, device)
        cells = [Cell(seconds / number, own, reading / number) for own in counts]
        return dict(zip(drafts, cells, strict=True))

    def lines(self, temperature: float, draft: str, offline: Cell, live: Cell) -> list[list[str]]:
        from headstart.eval.acceptance_rows import accept_len_interval, customary_estimates
        from headstart.eval.statistics import relative_width
        from headstart.eval.tables import number_text
        from headstart.heads.intervals import interval_text

        cells = {"offline": offline, "live": live}
        found = {source: accept_len_interval(cell.counts) for source, cell in cells.items()}
        cost = {source: cell.seconds * relative_width(found[source]) ** 2 for source, cell in cells.items()}
        lines = []
        for source, cell in cells.items():
            uniform, marginals = customary_estimates(cell.counts)
            row = [f"{temperature:g}", draft, source, interval_text(found[source]), number_text(cell.seconds, 3)]
            lines.append([*row, number_text(uniform, 2), number_text(marginals, 2), "", "", ""])
        ratio = cost["live"] / cost["offline"]
        anew = ratio * offline.seconds / (offline.seconds + offline.reading)
        lines[0][-3:-1] = [f"{ratio:.0f}", f"{anew:.1f}"]
        lines[1][-1] = self.against(temperature, offline, live)
        return lines

    def against(self, temperature: float, offline: Cell, live: Cell) -> str:
        """Greedy: how many replies took exactly the computed steps. Sampled: the paired difference of accept_len."""
        from headstart.eval.agreement import live_agreement
        from headstart.eval.summary import difference_text

        if temperature:
            return difference_text(live_agreement(live.counts, offline.counts))
        same = sum(
            a.num_steps == b.num_steps and (a.histogram == b.histogram).all()
            for a, b in zip(live.counts, offline.counts, strict=True)
        )
        return f"steps equal in {same} of {len(live.counts)} replies"


def timed(work: Callable[[], Any], device: Any) -> tuple[float, Any]:
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    began = clock()
    result = work()
    return clock() - began, result


if __name__ == "__main__":
    main()
