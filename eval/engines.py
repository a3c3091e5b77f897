"""Load an exported head in real engines and compare what they accept with what we measure, by their own counting.

    python -m headstart.eval.engines [RUN]        (`make engines`; RUN: a folder under runs/, default the newest export)

Every figure is s_j, drafts accepted at position j / drafts. vLLM counts the last block whole. llama.cpp cuts a draft to
what the token limit leaves less one, counts no step without a draft, and ends a block before a drafted stop token.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headstart.eval.acceptance import PromptCounts, acceptance_row
from headstart.eval.decode import decode
from headstart.eval.drafters import HeadDrafter
from headstart.eval.engine_runs import (
    EngineReply,
    EngineRun,
    accepted_per_position,
    convert_to_gguf,
    run_llamacpp,
    run_vllm,
)
from headstart.eval.engines_setup import engines_folder, install_llamacpp, install_vllm
from headstart.eval.file_reader import read_eval
from headstart.eval.gate import of_checkpoint, read_evals
from headstart.eval.replies import Reply
from headstart.eval.timings import balanced
from headstart.heads.builtin import resolve_model
from headstart.heads.checkpoint import WEIGHTS, head_hash, load_head
from headstart.heads.errors import GateFailed, WrongInput
from headstart.heads.export.card import METHODS, RECORD, RECORD_SCHEMA, write_card
from headstart.heads.export.comparison import rounded
from headstart.heads.export.readers.files import DTYPES
from headstart.heads.export.scheme import LAYOUTS
from headstart.heads.paths import Path as ReplyPath
from headstart.heads.paths import read_paths
from headstart.heads.settings import TargetSettings
from headstart.heads.store import hash_json, read_json, write_json
from headstart.heads.target import Target, load_target

POSITIONS, MAX_SURVIVAL_DIFFERENCE, MAX_DRAFTS_DIFFERENCE = 3, 0.02, 0.02


@dataclass
class Comparison:
    """One engine beside our own decoding of the same prompts with the same head."""

    engine: str
    version: str
    num_prompts: int
    num_drafts: int
    expected_drafts: int
    survival: list[float]
    expected_survival: list[float]
    num_as_plain: int  # replies equal to the engine's own plain decoding
    num_as_ours: int  # replies equal to our plain decoding
    num_same_counts: int  # prompts whose drafts and accepted counts are all ours

    @property
    def problems(self) -> list[str]:
        found = []
        for k, (theirs, ours) in enumerate(zip(self.survival, self.expected_survival, strict=True)):
            if k < POSITIONS and not abs(theirs - ours) <= MAX_SURVIVAL_DIFFERENCE:
                found.append(f"survival at position {k} is {theirs:.3f}, ours {ours:.3f}")
        if abs(self.num_drafts - self.expected_drafts) > MAX_DRAFTS_DIFFERENCE * self.expected_drafts:
            found.append(f"{self.num_drafts} drafts, ours {self.expected_drafts}")
        if self.num_as_plain != self.num_prompts:
            found.append(f"{self.num_prompts - self.num_as_plain} replies differ from the engine's plain decoding")
        return found


def by_rule(reply: Reply, engine: str, max_new_tokens: int, draft_length: int) -> EngineReply:
    """Our live steps (decoded with whole blocks) as `engine` counts them."""
    accepted, emitted = [], 1  # prefill gave the first token
    for step in reply.steps:
        count = step.whole_accepted
        if engine == "llamacpp":
            drafted = min(step.whole_drafted, max_new_tokens - emitted - 1)
            if drafted <= 0:
                break
            stopped = reply.finish_reason == "stop" and step.short  # its last token is an accepted draft
            count = step.accepted - 1 if stopped and step.accepted < drafted else min(count, drafted)
        accepted.append(count)
        emitted += count + 1
    return EngineReply(reply.token_ids, len(accepted), accepted_per_position(accepted, draft_length))


def compare(
    drafted: EngineRun, plain: EngineRun, expected: list[EngineReply], own_plain: list[list[int]]
) -> Comparison:
    """Totals of both sides, and how many replies and counts are the same."""
    survival, expected_survival = _survival(drafted.replies), _survival(expected)
    replies = [reply.token_ids for reply in drafted.replies]
    return Comparison(
        engine=drafted.engine,
        version=drafted.version,
        num_prompts=len(replies),
        num_drafts=sum(reply.num_drafts for reply in drafted.replies),
        expected_drafts=sum(reply.num_drafts for reply in expected),
        survival=survival,
        expected_survival=expected_survival,
        num_as_plain=sum(a == b.token_ids for a, b in zip(replies, plain.replies, strict=True)),
        num_as_ours=sum(a == b for a, b in zip(replies, own_plain, strict=True)),
        num_same_counts=sum(
            (a.num_drafts, a.accepted_K) == (b.num_drafts, b.accepted_K)
            for a, b in zip(drafted.replies, expected, strict=True)
        ),
    )


def _survival(replies: list[EngineReply]) -> list[float]:
    drafts = sum(reply.num_drafts for reply in replies)
    return [sum(column) / max(drafts, 1) for column in zip(*(reply.accepted_K for reply in replies), strict=True)]


def engine_row(
    run: EngineRun, prompt_ids: Sequence[str], routes: Sequence[str], drafter: str, draft_length: int, interval: Any
) -> dict[str, Any]:
    """The row of eval/acceptance.json: the engine's counters, under counting `engine`."""
    counts = []
    for reply, prompt_id, route in zip(run.replies, prompt_ids, routes, strict=True):
        accepted_K = np.array(reply.accepted_K, dtype=float)
        reached = np.append(reply.num_drafts, accepted_K)  # drafts with at least k accepted
        counts.append(
            PromptCounts(
                prompt_id=prompt_id,
                route=route,
                num_tokens=reply.num_drafts + float(accepted_K.sum()),
                num_steps=float(reply.num_drafts),
                num_short_steps=0.0,
                accepted_K=accepted_K,
                judged_K=reached[:-1],
                histogram=reached - np.append(accepted_K, 0.0),
            )
        )
    return acceptance_row(
        counts,
        source=f"{run.engine}-{run.version}",
        drafter=drafter,
        draft_length=draft_length,
        counting="engine",
        replicates=interval["replicates"],
        seed=interval["seed"],
    )


def run_engine(
    engine: str,
    folder: Path,
    target: Target,
    target_folder: Path,
    prompts: list[list[int]],
    max_new_tokens: int,
    k: int,
    kind: str = "eagle3",
) -> tuple[EngineRun, EngineRun]:
    """Decode in an engine plainly and with the head, of a kind; installs the engine if it is not there."""
    if engine == "vllm":
        python = install_vllm()
        stop_ids = target.facts.stop_ids
        plain = run_vllm(python, target_folder, prompts, max_new_tokens, stop_ids)
        return plain, run_vllm(
            python, target_folder, prompts, max_new_tokens, stop_ids, folder, k, METHODS[kind]["vllm"]
        )
    llamacpp, facts = install_llamacpp(), target.facts
    identity = hash_json([facts.fingerprint, str(target_folder), (target_folder / "config.json").stat().st_mtime_ns])
    target_file = convert_to_gguf(llamacpp, target_folder, engines_folder() / "gguf" / f"target-{identity[:12]}.gguf")
    with tempfile.TemporaryDirectory(prefix="headstart-gguf-") as scratch:
        head_file = convert_to_gguf(llamacpp, folder, Path(scratch) / "head.gguf", target_folder)
        plain = run_llamacpp(llamacpp, target_file, prompts, max_new_tokens)
        return plain, run_llamacpp(llamacpp, target_file, prompts, max_new_tokens, head_file, k)


def heldout_prompts(run: Path, count: int) -> list[ReplyPath]:
    """The first held-out paths of every route in turn, `count` in all."""
    paths = balanced(list(read_paths(run / "traffic", "heldout")), count)
    if not paths:
        raise WrongInput(f"{run}/traffic: found no held-out replies. Train first: headstart train RECIPE")
    return paths


def find_export(run: Path, engine: str) -> Path:
    """The run's export folder that `engine` reads as trained: its own, else another engine's."""
    records = sorted(run.glob(f"export/*/{RECORD}"), key=lambda file: file.parent.name != engine)
    for file in records:
        if engine in read_json(file, RECORD_SCHEMA)["readable_by"]:
            return file.parent
    raise WrongInput(
        f"{run}: found no export that {engine} can read. Write one: headstart export {run} --engine {engine}"
    )


def find_checkpoint(run: Path, sha256: str) -> Path:
    for file in sorted(run.glob(f"checkpoints/*/{WEIGHTS}")):
        if head_hash(file.parent) == sha256:
            return file.parent
    raise WrongInput(
        f"{run}: the exported checkpoint ({sha256[:12]}) is no longer there. Export again: headstart export"
    )


def compare_run(
    run: Path, engines: list[str], num_prompts: int, max_new_tokens: int, draft_length: int
) -> list[Comparison]:
    """Compare every engine on held-out prompts, and record it in eval/acceptance.json and on the export's card."""
    paths = heldout_prompts(run, num_prompts)
    prompts = [path.prompt_token_ids for path in paths]
    results = []
    for engine in engines:
        folder = find_export(run, engine)
        record = read_json(folder / RECORD, RECORD_SCHEMA)
        if record["kind"] not in LAYOUTS:
            raise WrongInput(
                f"{folder}: found a head of kind {record['kind']!r}, expected one of {', '.join(LAYOUTS)}: no other kind is "
                "compared with engines yet. Its card has the command that serves it."
            )
        settings = TargetSettings(model=record["target"]["name"], device="cpu")
        target = load_target(settings, record["taps"], "float32")
        head = load_head(find_checkpoint(run, record["checkpoint"]["sha256"]), target).eval()
        with rounded(head, DTYPES[record["dtype"]]):
            drafter = HeadDrafter(head.pack())  # packed while rounded: the layout does not follow its weights
            live = decode(target, prompts, drafter, draft_length, max_new_tokens, batch=8, whole_blocks=True)
        own_plain = [reply.token_ids for reply in decode(target, prompts, None, 0, max_new_tokens, batch=8)]
        target_folder = resolve_model(settings.model)
        plain, drafted = run_engine(
            engine, folder, target, target_folder, prompts, max_new_tokens, draft_length, record["kind"]
        )
        expected = [by_rule(reply, engine, max_new_tokens, draft_length) for reply in live]
        result = compare(drafted, plain, expected, own_plain)
        print_comparison(result)
        keep(run, folder, record, result, drafted, paths, draft_length)
        results.append(result)
    return results


def keep(
    run: Path,
    folder: Path,
    record: dict[str, Any],
    result: Comparison,
    drafted: EngineRun,
    paths: list[ReplyPath],
    draft_length: int,
) -> None:
    """Add the engine's row to eval/acceptance.json (in place of an older one) and its line to the card."""
    file = run / "eval" / "acceptance.json"
    acceptance = read_eval(file) if file.exists() else None
    if acceptance and acceptance["checkpoint"]["sha256"] == record["checkpoint"]["sha256"]:
        ids, routes = [path.prompt_id for path in paths], [path.route for path in paths]
        row = engine_row(drafted, ids, routes, record["kind"], draft_length, acceptance["interval"])
        same = [(r["source"], r["draft_length"]) == (row["source"], draft_length) for r in acceptance["rows"]]
        acceptance["rows"] = [r for r, old in zip(acceptance["rows"], same, strict=True) if not old] + [row]
        write_json(file, acceptance)
    entry = {
        **{
            name: getattr(result, name)
            for name in ("engine", "version", "num_prompts", "num_drafts", "expected_drafts")
        },
        "draft_length": draft_length,
        "survival": result.survival,
        "expected_survival": result.expected_survival,
        "verdict": "fail" if result.problems else "pass",
    }
    kept = [e for e in record["loaded_in"] if (e["engine"], e["version"]) != (result.engine, result.version)]
    record["loaded_in"] = [*kept, entry]
    write_json(folder / RECORD, record)
    write_card(folder, of_checkpoint(read_evals(run / "eval"), record["checkpoint"]))


def print_comparison(result: Comparison) -> None:
    print(f"\n{result.engine} {result.version}: {result.num_prompts} prompts", flush=True)
    print(f"  drafts     {result.num_drafts:7d}   ours {result.expected_drafts:7d}")
    for k, (theirs, ours) in enumerate(zip(result.survival, result.expected_survival, strict=True)):
        print(f"  survival {k} {theirs:7.4f}   ours {ours:7.4f}   difference {theirs - ours:+.4f}")
    total = result.num_prompts
    print(f"  replies equal to its plain decoding {result.num_as_plain}/{total}, to ours {result.num_as_ours}/{total}")
    print(f"  prompts with exactly our counts {result.num_same_counts}/{total}")
    print("  " + ("; ".join(result.problems) or "agrees"), flush=True)


def newest_run(root: Path) -> Path:
    """The run exported last; random built-in targets are left out, their heads accept nothing worth comparing."""
    records = sorted(root.glob(f"*/export/*/{RECORD}"), key=lambda file: file.stat().st_mtime)
    records = [
        file for file in records if read_json(file, RECORD_SCHEMA)["target"]["name"] not in ("tiny", "tiny-tied")
    ]
    if not records:
        raise WrongInput(f"{root}/: found no run with an exported head of a real target. Make one first: make demo")
    return records[-1].parents[2]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m headstart.eval.engines", description=__doc__.splitlines()[0])
    parser.add_argument("run", nargs="?", type=Path, help="run folder (default: the one exported last under runs/)")
    parser.add_argument("--engines", default="vllm,llamacpp", help="comma-separated (default vllm,llamacpp)")
    parser.add_argument("--prompts", type=int, default=60, help="held-out prompts (default 60)")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="longest reply (default 96)")
    parser.add_argument("--draft-length", type=int, default=3, help="drafted tokens a step (default 3)")
    parser.add_argument("--install", action="store_true", help="only install the engines")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    engines = options.engines.split(",")
    try:
        if unknown := set(engines) - {"vllm", "llamacpp"}:
            raise WrongInput(f"--engines: found {sorted(unknown)}, expected vllm and/or llamacpp.")
        if options.install:
            print(*(install() for install in (install_vllm, install_llamacpp)), sep="\n")
            return 0
        run = options.run or newest_run(Path("runs"))
        results = compare_run(run, engines, options.prompts, options.max_new_tokens, options.draft_length)
        if problems := [f"{result.engine}: {problem}" for result in results for problem in result.problems]:
            raise GateFailed("\n".join(problems))
    except WrongInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except GateFailed as error:
        print(f"gate failed: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
