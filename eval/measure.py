"""The eval stage: what a head accepts, whether its output is the target's own, and what it is worth in time.

Three measurements of one checkpoint on the held-out replies, in this order, each in a file of its own:

    acceptance.json   exact offline acceptance in float32, per position, route and prompt length; n-gram lookup and a live
                      run (`live.py`) beside it; the sums of each prompt are in prompts.json (`prompt_sums.py`)
    lossless.json     greedy identity of live replies with the recorded ones, plain decoding and transformers.generate; for
                      sampled replies, or if asked for, the certificate (`lossless.py`): rules enumerated, samples tested
    speed.json        tokens per second against plain decoding, interleaved, at every concurrency asked for

From the first and the last comes calibration.json: the head's confidence beside its acceptance, and where to stop drafts.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path as FilePath
from typing import Any

import torch

from headstart.eval.acceptance import (
    ReplyAcceptance,
)
from headstart.eval.calibration import calibration_entries
from headstart.eval.calibration_text import calibration_text
from headstart.eval.gate import SCHEMAS, of_checkpoint, read_evals, same_checkpoint
from headstart.eval.heldout import PREVIOUS, check_paths, head_acceptance, measure_acceptance, measure_setting
from headstart.eval.identity import overall_verdict
from headstart.eval.live import measure_live
from headstart.eval.lossless import certificate
from headstart.eval.previous import compared, previous_acceptance
from headstart.eval.prompt_sums import write_sums
from headstart.eval.proof import prove
from headstart.eval.sampled_live import measure_sampled_live
from headstart.eval.settings import EvalSettings
from headstart.eval.speed import (
    ABSOLUTE,
    crossover,
    hardware,
    recommend,
    timed_rows,
)
from headstart.eval.statistics import LEVEL
from headstart.eval.subject import Subject
from headstart.eval.summary import lossless_text, summary
from headstart.eval.temperatures import SETTING
from headstart.eval.timings import balanced, choose_speed_dtype
from headstart.eval.tree_acceptance import tree_rows
from headstart.heads.checkpoint import checkpoint_identity, load_head
from headstart.heads.errors import WrongInput
from headstart.heads.paths import Path
from headstart.heads.store import hash_json, read_json, write_json
from headstart.heads.target import Target

CERTIFICATE = ({"lossless"}, {"lossless", "prove"})  # parts that ask for nothing else
REPEAT_LENGTH = 8  # tokens of the n-grams whose repetition is told beside acceptance


def evaluate(
    load_target: Callable[[str], Target],
    head_folder: FilePath,
    paths: Sequence[Path],
    settings: EvalSettings,
    folder: FilePath,
    *,
    parts: Sequence[str] = (),
    previous: FilePath | None = None,
    prompts_name: str = "heldout",
    routes: Sequence[str] = (),
    max_new_tokens: int = 0,
    others: Sequence[Sequence[Path]] = (),
    seed: int = 0,
    tell: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure a saved head on held-out paths, write the files, and print the table.

    Args:
        load_target: gives the target, with the head's taps, in a named dtype.
        paths: held-out replies, recorded in float32 at one sampling setting.
        parts: of `live`, `lossless`, `speed`: what is measured beside offline acceptance, or `offline` for nothing else.
            None named means all; greedy replies then have their identity alone, without the certificate that `lossless`
            names. `prove` adds the seeded faults to catch.
        previous: checkpoint folder of a head that is measured on the same replies and compared with.
        routes: routes that prompts carry; one without held-out replies is shown as empty.
        max_new_tokens: the limit of the recorded replies; 0 takes the longest.
        others: replies to the same prompts at other sampling settings, one list a setting: their rows stand beside the
            own ones, and `live` decodes at their settings too. They decide no verdict.

    Returns:
        The contents of acceptance.json, lossless.json, speed.json and calibration.json by name; None for a file that does
        not exist.

    Raises:
        WrongInput: no paths, paths of several sampling settings, or a previous head of another target.
    """
    check_paths(paths)
    wanted = set(parts) or {"live", "lossless", "speed"}
    target = load_target("float32")
    head = load_head(head_folder, target).to(target.device).eval().pack()
    all_routes = sorted({*routes, *(path.route for path in paths)})
    subject = Subject(target, head, list(paths), all_routes, settings, seed, tell)
    greedy = subject.sampling.temperature == 0
    names = identity_of(head_folder, target, subject.paths, prompts_name)
    if set(parts) in CERTIFICATE and kept_entries(folder / "acceptance.json", "rows", names):
        return certify(subject, names, folder, "prove" in parts)

    replies = head_acceptance(subject)
    names = identity_of(head_folder, target, subject.paths, prompts_name)  # of the prompts that were taken
    old = {} if previous is None else previous_acceptance(subject, previous)
    rows, sums = measure_acceptance(subject, replies, old)
    rows += tree_rows(subject)
    limit = max_new_tokens or names["prompts"]["max_new_tokens"]
    extra: dict[str, Any] = {"repeated_8grams": repeated_ngrams(subject.paths)}
    if previous is not None:
        extra["previous"] = compared(subject, previous, replies["greedy"], old["greedy"])
        for row in (*rows, *sums):
            row.update({"checkpoint": extra["previous"]["checkpoint"]} if row["drafter"] == PREVIOUS else {})
    checks: list[dict[str, Any]] = []
    if greedy and wanted & {"live", "lossless"}:
        live_rows, checks, extra["live_agreement"] = measure_live(subject, replies["greedy"])
        rows += live_rows
    elif "live" in wanted:
        live_rows, extra["live_agreement"] = measure_sampled_live(subject, replies, limit)
        rows += live_rows
    other_rows = [row for recorded in others for row in measure_setting(subject, recorded, "live" in parts, limit)]
    if "lossless" in (parts if greedy else wanted):
        checks += certificate(target, head, subject.paths, settings, seed, tell)
    proof = prove(seed, tell) if "prove" in parts else ([], [])
    folder.mkdir(parents=True, exist_ok=True)
    write_acceptance(subject, folder, names, rows + other_rows, extra)
    write_prompt_sums(subject, folder, names, sums)

    if "speed" in wanted:
        prompt = subject.paths[0].token_N[: subject.paths[0].num_prompt_tokens].tolist()
        device = target.device
        del target, head, subject.target, subject.head  # two copies of a large target may not fit
        dtype, _ = choose_speed_dtype(load_target, settings.speed_dtype, prompt, device)
        checks += write_speed(load_target(dtype), head_folder, subject, folder, names, rows)
    if checks:
        write_lossless(folder, names, checks, proof, tell)
    write_calibration(subject, folder, names, list(replies.items()))
    results = read_evals(folder)
    tell(calibration_text(results["calibration"]))
    tell(summary(of_checkpoint(results, names["checkpoint"]), settings.draft_length))
    return results


def certify(subject: Subject, names: dict[str, Any], folder: FilePath, with_proof: bool) -> dict[str, Any]:
    """The losslessness certificate alone, of a checkpoint whose acceptance is known: its other files stay as they are.

    So does the comparison with transformers.generate, which says nothing of the head.
    """
    checks: list[dict[str, Any]] = []
    if subject.sampling.temperature == 0:
        settings = replace(subject.settings, stop_at_width=0.0)
        paths = balanced(subject.paths, settings.live_prompts or len(subject.paths))
        live = replace(subject, paths=paths, settings=settings)
        checks = measure_live(live, head_acceptance(live)["greedy"], with_generate=False)[1]
    checks += certificate(subject.target, subject.head, subject.paths, subject.settings, subject.seed, subject.tell)
    proof = prove(subject.seed, subject.tell) if with_proof else ([], [])
    write_lossless(folder, names, checks, proof, subject.tell)
    results = read_evals(folder)
    subject.tell(lossless_text(results["lossless"]))
    return results


def identity_of(head_folder: FilePath, target: Target, paths: Sequence[Path], prompts_name: str) -> dict[str, Any]:
    """The first entries of every file: which checkpoint, target and prompts it speaks of."""
    return {
        "checkpoint": checkpoint_identity(head_folder),
        "target": {"name": target.facts.name, "fingerprint": hash_json(target.facts.fingerprint)},
        "prompts": {
            "name": prompts_name,
            "sha256": hash_json([path.prompt_id for path in paths]),
            "max_new_tokens": max(path.num_reply_tokens for path in paths),
        },
    }


def write_acceptance(
    subject: Subject, folder: FilePath, names: dict[str, Any], rows: list[dict[str, Any]], extra: dict[str, Any]
) -> None:
    """acceptance.json; rows and the live agreement that were measured before on the same checkpoint and prompts stay."""
    file = folder / "acceptance.json"
    environment = {"device": str(subject.target.device), "dtype": "float32", "threads": torch.get_num_threads()}
    kept = [row for row in kept_entries(file, "rows", names) if not measured_again(row, rows)]
    if "live_agreement" not in extra and (agreed := kept_entries(file, "live_agreement", names)):
        extra["live_agreement"] = agreed
    own = {"interval": interval_method(subject), "sampling": asdict(subject.sampling)}
    body = {"environment": environment, **own, "rows": rows + kept, **extra}
    write_json(file, {"schema": SCHEMAS["acceptance"], **names, **body})


def interval_method(subject: Subject) -> dict[str, Any]:
    """How the intervals of a file were made."""
    return {
        "level": LEVEL,
        "kind": "bootstrap over prompts",
        "replicates": subject.settings.replicates,
        "seed": subject.seed,
        "method": "percentiles, expanded for the number of prompts",
    }


def write_calibration(
    subject: Subject, folder: FilePath, names: dict[str, Any], heads: Sequence[tuple[str, list[ReplyAcceptance]]]
) -> None:
    """calibration.json; speed-ups are predicted where steps of this checkpoint were timed, now or before."""
    speed = of_checkpoint(read_evals(folder), names["checkpoint"])["speed"]
    timed = speed["rows"] if speed else []  # whatever prompts: a step costs what it costs
    body = calibration_entries(
        heads,
        names["checkpoint"]["kind"],
        max(subject.settings.draft_lengths),
        timed,
        subject.settings.replicates,
        subject.seed,
    )
    sampling = {"sampling": asdict(subject.sampling)}
    content = {**names, "interval": interval_method(subject), **sampling, **body}
    write_json(folder / "calibration.json", {"schema": SCHEMAS["calibration"], **content})


def write_prompt_sums(
    subject: Subject, folder: FilePath, names: dict[str, Any], sums: Sequence[dict[str, Any]]
) -> None:
    content = {
        "target": names["target"],
        "prompts": names["prompts"],
        "sampling": asdict(subject.sampling),
        "prompt_ids": [path.prompt_id for path in subject.paths],
        "routes": [path.route for path in subject.paths],
        "prompt_tokens": [path.num_prompt_tokens for path in subject.paths],
        "num_tokens": [max(path.num_reply_tokens - 1, 0) for path in subject.paths],
    }
    own = names["checkpoint"]
    write_sums(folder, content, [{"checkpoint": own if row["drafter"] == own["kind"] else None, **row} for row in sums])


def write_lossless(
    folder: FilePath,
    names: dict[str, Any],
    checks: list[dict[str, Any]],
    proof: tuple[list[dict[str, Any]], list[str]],
    tell: Callable[[str], None],
) -> None:
    """lossless.json. A check made before on this checkpoint stays until it is made again at its own settings.

    A failed one too: measured at another draft length or batch a fault may not show, and the weights are the same.
    `proof` holds the seeded faults of this evaluation, and what they say is wrong with the battery.
    """
    file = folder / "lossless.json"
    kept = [check for check in kept_entries(file, "checks", names) if not any(same_check(check, new) for new in checks)]
    for check in kept:
        if check["verdict"] == "fail":
            tell(
                f"a failed check made earlier stays until the same check passes: {check['name']} against "
                f"{check.get('against')} in {check['dtype']}, draft length {check['draft_length']}, batch {check['batch']}"
            )
    checks = [*checks, *kept]
    named = {name: names[name] for name in ("checkpoint", "target")}
    body = {"verdict": overall_verdict(checks), "checks": checks, "faults": proof[0], "battery_problems": proof[1]}
    write_json(file, {"schema": SCHEMAS["lossless"], **named, **body})


def write_speed(
    target: Target,
    head_folder: FilePath,
    subject: Subject,
    folder: FilePath,
    names: dict[str, Any],
    acceptance_rows: Sequence[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Time the head, write speed.json, and return the identity checks of the timed replies."""
    head = load_head(head_folder, target).to(target.device, target.dtype).eval().pack()
    rows, checks, absolute = timed_rows(target, head, subject)
    file = folder / "speed.json"
    absolute = dict.fromkeys(ABSOLUTE) | (kept_entries(file, "absolute", names) or {}) | absolute
    by_route: dict[int, dict[str, float | None]] = {}
    for row in acceptance_rows:
        if (row["source"], row["drafter"], row["draft"]) == ("offline", head.kind, "greedy") and row["route"] != "all":
            by_route.setdefault(row["draft_length"], {})[row["route"]] = row["accept_len"]["value"]
    rows += [row for row in kept_entries(file, "rows", names) if not timed_again(row, rows)]
    recommended = recommend([row for row in rows if row["engine"] == "reference"], head.kind, by_route)
    write_json(
        file,
        {
            "schema": SCHEMAS["speed"],
            **names,
            "hardware": hardware(target.device),
            "absolute": absolute,
            "rows": rows,
            "recommended": recommended,
            "crossover_concurrency": crossover(recommended),
        },
    )
    return checks


def repeated_ngrams(paths: Sequence[Path]) -> dict[str, float | None]:
    """Share of reply 8-grams that already occurred in the same reply, by route: loops flatter every drafter."""
    total: dict[str, int] = {}
    repeated: dict[str, int] = {}
    for path in paths:
        tokens = path.token_N[path.num_prompt_tokens :].tolist()
        ngrams = [tuple(tokens[i : i + REPEAT_LENGTH]) for i in range(len(tokens) - REPEAT_LENGTH + 1)]
        for route in ("all", path.route):
            total[route] = total.get(route, 0) + len(ngrams)
            repeated[route] = repeated.get(route, 0) + len(ngrams) - len(set(ngrams))
    return {route: repeated[route] / num if num else None for route, num in total.items()}


def kept_entries(file: FilePath, entry: str, names: dict[str, Any]) -> Any:
    """What a file says already of this very checkpoint and target (and prompts, where it names them); empty if nothing."""
    if not file.exists():
        return []
    try:
        old = read_json(file, SCHEMAS[file.stem])
    except WrongInput:  # damaged: all of it is measured again
        return []
    same = all(old.get(name, names[name]) == names[name] for name in ("target", "prompts"))
    if not same or not same_checkpoint(old["checkpoint"], names["checkpoint"]):
        return []
    return old.get(entry, [])


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
