"""Load exported heads in real engines and compare what they accept with what we measure, by their own counting.

    python -m headstart.eval.engines [RUN ..]     (`make engines`; RUN: a folder under runs/, default the newest export)

How engines count is in `engine_counts.py`, how they are run in `vllm_engine.py` and `llamacpp_engine.py`.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open

from headstart.eval.decode import decode
from headstart.eval.drafters import HeadDrafter
from headstart.eval.engine_counts import Comparison, by_rule, compare, engine_row, print_comparison
from headstart.eval.engine_runs import Drafts, Engine, EngineRun, Requests
from headstart.eval.engines_setup import install_llamacpp, install_vllm
from headstart.eval.file_reader import read_eval
from headstart.eval.gate import of_checkpoint, read_evals
from headstart.eval.identity import Rescorer
from headstart.eval.llamacpp_engine import open_llamacpp
from headstart.eval.speculation import Speculation
from headstart.eval.timings import balanced
from headstart.eval.vllm_engine import open_vllm
from headstart.heads.builtin import BUILTIN_TARGETS, resolve_model
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


class EngineKind(NamedTuple):
    """An engine: how it is run, and how it is put in place (what that returns is printed)."""

    opened: Callable[[], AbstractContextManager[Engine]]
    install: Callable[[], object]


VLLM, LLAMACPP = EngineKind(open_vllm, install_vllm), EngineKind(open_llamacpp, install_llamacpp)
# By the engine that a folder was written for; speculators is a layout, which vLLM loads.
ENGINES = {"vllm": VLLM, "speculators": VLLM, "llamacpp": LLAMACPP}


@contextmanager
def opened_engines() -> Iterator[Callable[[str], Engine]]:
    """Yield `get(name)` of `ENGINES`: each engine is opened when it is first asked for, and closed at the end."""
    opened: dict[EngineKind, Engine] = {}
    with ExitStack() as stack:

        def get(name: str) -> Engine:
            if (kind := ENGINES[name]) not in opened:
                opened[kind] = stack.enter_context(kind.opened())
            return opened[kind]

        yield get


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
        way = Speculation(HeadDrafter(written.pack()), draft_length, whole_blocks=True)
        live = decode(target, prompts, way, max_new_tokens, batch=8)
    served = folder if record["kind"] in WHOLE else resolve_model(target_model(folder, record))
    requests = Requests(served, prompts, max_new_tokens, target.facts.stop_ids)
    plain, drafted = engine.decode(requests), engine.decode(requests, Drafts(folder, record["kind"], draft_length))
    expected = [by_rule(reply, engine.name, max_new_tokens, draft_length) for reply in live]
    return compare(drafted, plain, expected, prompts, Rescorer(target)), drafted


def target_model(folder: Path, record: dict[str, Any]) -> str:
    """What the target of an export is loaded by: its folder as seen from there, or its name."""
    name, place = record["target"]["name"], (folder.resolve() / record["target"]["folder"]).resolve()
    return name if name in BUILTIN_TARGETS or not place.is_dir() else str(place)


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


def find_exports(run: Path, engines: list[str]) -> dict[str, Path]:
    """For every engine the run's export folder that it reads as trained: its own, else another's.

    Args:
        engines: names of `ENGINES`; none means all that an export of the run is for.
    """
    found: dict[str, Path] = {}
    for engine in engines or ENGINES:
        for file in sorted(run.glob(f"export/*/{RECORD}"), key=lambda file: file.parent.name != engine):
            if engine in read_json(file, RECORD_SCHEMA)["readable_by"]:
                found.setdefault(engine, file.parent)
    lacking = [engine for engine in engines or ENGINES if engine not in found]
    if lacking and (engines or not found):
        raise WrongInput(
            f"{run}: found no export that {' or '.join(lacking)} can read. "
            f"Write one: headstart export {run} --engine {lacking[0]}"
        )
    return found


def find_checkpoint(run: Path, sha256: str) -> Path:
    for file in sorted(run.glob(f"checkpoints/*/{WEIGHTS}")):
        if head_hash(file.parent) == sha256:
            return file.parent
    raise WrongInput(
        f"{run}: the exported checkpoint ({sha256[:12]}) is no longer there. Export again: headstart export"
    )


def compare_run(
    run: Path,
    exports: dict[str, Path],
    engine_of: Callable[[str], Engine],
    num_prompts: int,
    max_new_tokens: int,
    draft_length: int,
) -> list[Comparison]:
    """Compare exports of a run on its held-out prompts; eval/acceptance.json and the card of each keep the figures."""
    paths = heldout_prompts(run, num_prompts)
    prompts = [path.prompt_token_ids for path in paths]
    results = []
    for name, folder in exports.items():
        record = read_json(folder / RECORD, RECORD_SCHEMA)
        settings = TargetSettings(model=target_model(folder, record), device="cpu")
        target = load_target(settings, record["taps"], "float32")
        head = load_head(find_checkpoint(run, record["checkpoint"]["sha256"]), target).eval()
        compared = compare_export(engine_of(name), folder, head, target, prompts, max_new_tokens, draft_length)
        print_comparison(compared[0])
        keep(run, folder, record, *compared, paths, draft_length)
        results.append(compared[0])
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
        row = engine_row(drafted, paths, record["kind"], draft_length, acceptance["interval"])
        same = [(r["source"], r["draft_length"]) == (row["source"], draft_length) for r in acceptance["rows"]]
        acceptance["rows"] = [r for r, old in zip(acceptance["rows"], same, strict=True) if not old] + [row]
        write_json(file, acceptance)
    entry = {**asdict(result), "draft_length": draft_length, "verdict": "fail" if result.problems else "pass"}
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
    parser.add_argument("runs", nargs="*", type=Path, help="run folders (default: the one exported last under runs/)")
    parser.add_argument(
        "--engines", default="", help=f"some of {','.join(ENGINES)} (default: those that an export of the run is for)"
    )
    parser.add_argument("--prompts", type=int, default=60, help="held-out prompts (default 60)")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="longest reply (default 96)")
    parser.add_argument("--draft-length", type=int, default=3, help="drafted tokens a step (default 3)")
    parser.add_argument("--install", action="store_true", help="only install the engines, or those of --engines")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    engines = [name for name in options.engines.split(",") if name]
    try:
        if unknown := set(engines) - set(ENGINES):
            raise WrongInput(f"--engines: found {sorted(unknown)}, expected some of {', '.join(ENGINES)}.")
        if options.install:
            for install in dict.fromkeys(ENGINES[name].install for name in engines or ENGINES):
                print(install())
            return 0
        exports = {run: find_exports(run, engines) for run in options.runs or [newest_run(Path("runs"))]}
        lengths = (options.prompts, options.max_new_tokens, options.draft_length)
        with opened_engines() as engine_of:
            results = [r for run, found in exports.items() for r in compare_run(run, found, engine_of, *lengths)]
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
