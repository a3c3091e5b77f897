"""Load an exported head in real engines and compare what they accept with what we measure, by their own counting.

    python -m headstart.eval.engines [RUN]        (`make engines`; RUN: a folder under runs/, default the newest export)

How engines count is in `engine_counts.py`, how they are run in `vllm_engine.py` and `llamacpp_engine.py`.
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from safetensors import safe_open

from headstart.eval.decode import decode
from headstart.eval.drafters import HeadDrafter
from headstart.eval.engine_counts import Comparison, by_rule, compare, engine_row, print_comparison
from headstart.eval.engine_runs import Drafts, Engine, EngineRun, Requests
from headstart.eval.engines_setup import install_llamacpp, install_vllm
from headstart.eval.file_reader import read_eval
from headstart.eval.gate import of_checkpoint, read_evals
from headstart.eval.llamacpp_engine import open_llamacpp
from headstart.eval.timings import balanced
from headstart.eval.vllm_engine import open_vllm
from headstart.heads.builtin import resolve_model
from headstart.heads.checkpoint import WEIGHTS, head_hash, load_head
from headstart.heads.contract import Head
from headstart.heads.errors import GateFailed, WrongInput
from headstart.heads.export.card import RECORD, RECORD_SCHEMA, write_card
from headstart.heads.export.scheme import LAYOUTS
from headstart.heads.export.serving import WHOLE
from headstart.heads.paths import Path as ReplyPath
from headstart.heads.paths import read_paths
from headstart.heads.settings import TargetSettings
from headstart.heads.shipped import tensor_files
from headstart.heads.store import read_json, write_json
from headstart.heads.target import Target, load_target

# By the engine that a folder was written for; speculators is a layout, which vLLM loads.
ENGINES: dict[str, Callable[[], AbstractContextManager[Engine]]] = {
    "vllm": open_vllm,
    "speculators": open_vllm,
    "llamacpp": open_llamacpp,
}


def compare_export(
    engine: Engine,
    folder: Path,
    head: Head,
    target: Target,
    prompts: list[list[int]],
    max_new_tokens: int,
    draft_length: int,
) -> tuple[Comparison, EngineRun]:
    """An engine's counts with the folder that was written from `head` beside our own, and its run with drafts.

    `head` and `target` compute in float32; the head is packed afterwards.

    Raises:
        WrongInput: more drafts than the head was built for, or the engine ended with an error.
    """
    record = read_json(folder / RECORD, RECORD_SCHEMA)
    if (most := head.settings.max_depth) is not None and draft_length > most:
        raise WrongInput(
            f"found a draft length of {draft_length}, expected at most {most}, the tokens this head drafts."
        )
    with as_written(head, folder, record) as written:
        # Packed while rounded: the layout does not follow its weights.
        drafter = HeadDrafter(written.pack())
        live = decode(target, prompts, drafter, draft_length, max_new_tokens, batch=8, whole_blocks=True)
    own_plain = [reply.token_ids for reply in decode(target, prompts, None, 0, max_new_tokens, batch=8)]
    served = folder if record["kind"] in WHOLE else resolve_model(record["target"]["name"])
    requests = Requests(served, prompts, max_new_tokens, target.facts.stop_ids)
    plain, drafted = engine.decode(requests), engine.decode(requests, Drafts(folder, record["kind"], draft_length))
    expected = [by_rule(reply, engine.name, max_new_tokens, draft_length) for reply in live]
    return compare(drafted, plain, expected, own_plain), drafted


def as_written(head: Head, folder: Path, record: dict[str, Any]) -> AbstractContextManager[Head]:
    """The head as it has to draft from its folder."""
    files, written = tensor_files(folder), {}
    for name in record["tensors"]:
        with safe_open(files[name], framework="pt") as file:
            written[name] = file.get_tensor(name)
    return LAYOUTS[head.kind].as_written(head, written)


def heldout_prompts(run: Path, count: int) -> list[ReplyPath]:
    """The first held-out paths of every route in turn, `count` in all."""
    paths = balanced(list(read_paths(run / "traffic", "heldout")), count)
    if not paths:
        raise WrongInput(f"{run}/traffic: found no held-out replies. Train first: headstart train RECIPE")
    return paths


def readable_exports(run: Path) -> dict[str, Path]:
    """For every engine that runs here, the run's export folder that it reads as trained: its own, else another's."""
    found: dict[str, Path] = {}
    for engine in ENGINES:
        for file in sorted(run.glob(f"export/*/{RECORD}"), key=lambda file: file.parent.name != engine):
            if engine in read_json(file, RECORD_SCHEMA)["readable_by"]:
                found.setdefault(engine, file.parent)
    return found


def find_export(run: Path, engine: str) -> Path:
    """The one for this engine."""
    if engine not in (found := readable_exports(run)):
        raise WrongInput(
            f"{run}: found no export that {engine} can read. Write one: headstart export {run} --engine {engine}"
        )
    return found[engine]


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
    """Compare engines on held-out prompts, and record it in eval/acceptance.json and on the export's card.

    Args:
        engines: names of `ENGINES`; none means all that an export of the run is for.
    """
    paths = heldout_prompts(run, num_prompts)
    prompts = [path.prompt_token_ids for path in paths]
    results = []
    if not (names := engines or list(readable_exports(run))):
        raise WrongInput(
            f"{run}: found no export for {', '.join(ENGINES)}. Write one: headstart export {run} --engine vllm"
        )
    for name in names:
        folder = find_export(run, name)
        record = read_json(folder / RECORD, RECORD_SCHEMA)
        settings = TargetSettings(model=record["target"]["name"], device="cpu")
        target = load_target(settings, record["taps"], "float32")
        head = load_head(find_checkpoint(run, record["checkpoint"]["sha256"]), target).eval()
        with ENGINES[name]() as engine:
            result, drafted = compare_export(engine, folder, head, target, prompts, max_new_tokens, draft_length)
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
    parser.add_argument(
        "--engines", default="", help=f"some of {','.join(ENGINES)} (default: those that an export of the run is for)"
    )
    parser.add_argument("--prompts", type=int, default=60, help="held-out prompts (default 60)")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="longest reply (default 96)")
    parser.add_argument("--draft-length", type=int, default=3, help="drafted tokens a step (default 3)")
    parser.add_argument("--install", action="store_true", help="only install the engines")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    engines = [name for name in options.engines.split(",") if name]
    try:
        if unknown := set(engines) - set(ENGINES):
            raise WrongInput(f"--engines: found {sorted(unknown)}, expected some of {', '.join(ENGINES)}.")
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
