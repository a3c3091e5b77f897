"""The eval stage: what a head accepts, whether its output is the target's own, and what it is worth in time.

Three measurements of one checkpoint on the held-out replies, in this order, each in a file of its own (`file_writer.py`):

    acceptance.json   exact offline acceptance, per position, route and prompt length; n-gram lookup and a live
                      run (`live.py`) beside it; the sums of each prompt are in prompts.json (`prompt_sums.py`)
    lossless.json     greedy identity of live replies with the recorded ones, plain decoding and transformers.generate; for
                      sampled replies, or if asked for, the certificate (`lossless.py`): rules enumerated, samples tested
    speed.json        tokens per second against plain decoding, interleaved, at every concurrency asked for

From the first and the last comes calibration.json: the head's confidence beside its acceptance, and where to stop drafts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

from headstart.eval.acceptance import ReplyAcceptance
from headstart.eval.calibration_text import calibration_text
from headstart.eval.cut_vocabulary import cut_rows
from headstart.eval.file_reader import read_eval
from headstart.eval.file_writer import EvalFiles
from headstart.eval.gate import of_checkpoint, read_evals
from headstart.eval.heldout import PREVIOUS, Heldout, check_paths, head_acceptance, measure_acceptance, measure_setting
from headstart.eval.live import measure_live
from headstart.eval.lossless import certificate
from headstart.eval.lossless_text import lossless_text
from headstart.eval.previous import compared, previous_acceptance
from headstart.eval.proof import prove
from headstart.eval.sampled_live import measure_sampled_live
from headstart.eval.settings import EvalSettings
from headstart.eval.speed import timed_rows
from headstart.eval.subject import Subject
from headstart.eval.summary import summary
from headstart.eval.timings import balanced, choose_speed_dtype
from headstart.eval.tree_acceptance import tree_rows
from headstart.heads.checkpoint import checkpoint_identity, load_head
from headstart.heads.errors import WrongInput
from headstart.heads.paths import Path
from headstart.heads.store import hash_json
from headstart.heads.target import Target

CERTIFICATE = ({"lossless"}, {"lossless", "prove"})  # parts that ask for nothing else
REPEAT_LENGTH = 8  # tokens of the n-grams whose repetition is told beside acceptance


def evaluate(
    load_target: Callable[[str], Target],
    head_folder: FilePath,
    heldout: Heldout,
    settings: EvalSettings,
    folder: FilePath,
    *,
    parts: Sequence[str] = (),
    seed: int = 0,
    tell: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure a saved head on held-out paths, write the files, and print the table.

    Args:
        load_target: gives the target, with the head's taps, in a named dtype.
        parts: of `live`, `lossless`, `speed`: what is measured beside offline acceptance, or `offline` for nothing else.
            None named means all; greedy replies then have their identity alone, without the certificate that `lossless`
            names. `prove` adds the seeded faults to catch.

    Returns:
        What acceptance.json, lossless.json, speed.json and calibration.json hold, by name; None for one that is not there.

    Raises:
        WrongInput: no paths, paths of several sampling settings, more concurrent requests than there are paths, a tree
            that the head cannot draft, a head that is the target, a previous head of another target, or a damaged file
            that would stay.
    """
    paths, dtype = list(heldout.paths), heldout.dtype
    check_paths(paths)
    wanted = set(parts) or {"live", "lossless", "speed"}
    check_wanted(wanted, settings, folder, len(paths))
    target = load_target(dtype)
    head = load_head(head_folder, target).to(target.device).eval()
    head.refuse_own_target(target)
    head.pack()
    routes = sorted({*heldout.routes, *(path.route for path in paths)})
    subject = Subject(target, head, paths, routes, settings, seed, tell, heldout.features)
    files = EvalFiles(folder, subject, identity_of(head_folder, target, subject.paths))
    if set(parts) in CERTIFICATE and files.kept("acceptance", "rows"):
        return certify(files, "prove" in parts)

    replies = head_acceptance(subject)
    files.names = identity_of(head_folder, target, subject.paths)  # of the prompts that were taken
    rows, sums, extra = offline_part(subject, replies, heldout)
    limit = heldout.max_new_tokens or files.names["prompts"]["max_new_tokens"]
    live_rows, checks, agreed = live_part(subject, replies, wanted, limit)
    rows += live_rows
    other_rows = [
        row for recorded in heldout.others for row in measure_setting(subject, recorded, "live" in parts, limit)
    ]
    if "lossless" in (wanted if subject.sampling.temperature else parts):
        checks += certificate(subject)
    proof = prove(seed, tell) if "prove" in parts else ([], [])
    files.write_acceptance(rows + other_rows, extra | agreed)
    files.write_prompt_sums(sums)

    if "speed" in wanted:
        path, device = subject.paths[0], target.device
        del target, head, subject.target, subject.head  # two copies of a large target may not fit
        wanted_dtype = dtype if (settings.speed_dtype, dtype) == ("auto", "bfloat16") else settings.speed_dtype
        speed_dtype, _ = choose_speed_dtype(load_target, wanted_dtype, path.prompt_token_ids, device)
        checks += speed_part(load_target(speed_dtype), head_folder, files, rows)
    if checks:
        files.write_lossless(checks, proof)
    files.write_calibration(list(replies.items()))
    results = read_evals(folder)
    tell(calibration_text(results["calibration"]))
    tell(summary(of_checkpoint(results, files.names["checkpoint"]), settings.draft_length))
    return results


def certify(files: EvalFiles, with_proof: bool) -> dict[str, Any]:
    """The losslessness certificate alone, of a checkpoint whose acceptance is known: its other files stay as they are.

    So does the comparison with transformers.generate, which says nothing of the head.
    """
    subject = files.subject
    checks: list[dict[str, Any]] = []
    if subject.sampling.temperature == 0:
        settings = replace(subject.settings, stop_at_width=0.0)
        paths = balanced(subject.paths, settings.live_prompts or len(subject.paths))
        live = replace(subject, paths=paths, settings=settings)
        checks = measure_live(live, head_acceptance(live)["greedy"], with_generate=False)[1]
    checks += certificate(subject)
    proof = prove(subject.seed, subject.tell) if with_proof else ([], [])
    files.write_lossless(checks, proof)
    results = read_evals(files.folder)
    subject.tell(lossless_text(results["lossless"]))
    return results


def check_wanted(wanted: set[str], settings: EvalSettings, folder: FilePath, num_prompts: int) -> None:
    """Refuse, before anything is computed, timings that no prompts suffice for, and damaged files that would stay.

    Raises:
        WrongInput: either of them.
    """
    if "speed" in wanted and min(settings.concurrency) > num_prompts:
        raise WrongInput(
            f"eval.concurrency: found {settings.concurrency}, but there are {num_prompts} held-out prompts, and requests "
            f"that run together are different ones; expected one of at most {num_prompts}.\nTime fewer together "
            "(--speed --concurrency 1), or give the recipe more prompts (prompts.num_heldout)."
        )
    for file in (folder / f"{name}.json" for name in ("lossless", "speed") if name not in wanted):
        if file.exists():  # read in the end, and not written anew
            read_eval(file)


def identity_of(head_folder: FilePath, target: Target, paths: Sequence[Path]) -> dict[str, Any]:
    """The first entries of every file: which checkpoint, target and prompts it speaks of."""
    return {
        "checkpoint": checkpoint_identity(head_folder),
        "target": {"name": target.facts.name, "fingerprint": hash_json(target.facts.fingerprint)},
        "prompts": {
            "name": "heldout",
            "sha256": hash_json([path.prompt_id for path in paths]),
            "max_new_tokens": max(path.num_reply_tokens for path in paths),
        },
    }


def offline_part(
    subject: Subject, replies: Mapping[str, list[ReplyAcceptance]], heldout: Heldout
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """What is computed on recorded replies: rows of acceptance.json, those of prompts.json, and entries beside the first."""
    previous = heldout.previous
    old = {} if previous is None else previous_acceptance(subject, previous)
    rows, sums = measure_acceptance(subject, replies, old)
    rows += tree_rows(subject, replies["greedy"])
    extra: dict[str, Any] = {"repeated_8grams": repeated_ngrams(subject.paths)}
    if heldout.vocabularies:
        extra["vocabularies"] = cut_rows(subject, heldout.vocabularies)
    if previous is not None:
        extra["previous"] = compared(subject, previous, replies["greedy"], old["greedy"])
        for row in (*rows, *sums):
            if row["drafter"] == PREVIOUS:
                row["checkpoint"] = extra["previous"]["checkpoint"]
    return rows, sums, extra


def live_part(
    subject: Subject, replies: Mapping[str, list[ReplyAcceptance]], wanted: set[str], max_new_tokens: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Live replies, where they are wanted: their rows, identity checks, and the entry `live_agreement`.

    Losslessness of greedy replies is the identity of live ones, so it wants them too.
    """
    if subject.sampling.temperature == 0 and wanted & {"live", "lossless"}:
        rows, checks, agreed = measure_live(subject, replies["greedy"])
        return rows, checks, {"live_agreement": agreed}
    if "live" in wanted:
        rows, agreed = measure_sampled_live(subject, replies, max_new_tokens)
        return rows, [], {"live_agreement": agreed}
    return [], [], {}


def speed_part(
    target: Target, head_folder: FilePath, files: EvalFiles, acceptance_rows: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Time the head, write speed.json, and return the identity checks of the timed replies."""
    head = load_head(head_folder, target).to(target.device, target.dtype).eval().pack()
    rows, checks, absolute = timed_rows(target, head, files.subject)
    if not rows:  # the stopping rule took fewer prompts than have to run together
        return checks
    by_route: dict[int, dict[str, float | None]] = {}
    for row in acceptance_rows:
        if (row["source"], row["drafter"], row["draft"]) == ("offline", head.kind, "greedy") and row["route"] != "all":
            by_route.setdefault(row["draft_length"], {})[row["route"]] = row["accept_len"]["value"]
    files.write_speed(rows, absolute, by_route, target.device)
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
