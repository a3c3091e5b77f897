"""The gate before every export: acceptance and losslessness of this very checkpoint were measured, and passed."""

from pathlib import Path
from typing import Any

from headstart.eval.file_reader import read_eval
from headstart.eval.settings import EvalSettings
from headstart.eval.summary import plain_below_generate
from headstart.eval.temperatures import split_settings
from headstart.heads.errors import GateFailed, WrongInput

AGREEMENT_LEVEL = 1e-4  # p-value below which sampled live replies do not agree with the offline figures
FILES = ("acceptance", "lossless", "speed", "calibration")


def read_evals(folder: Path) -> dict[str, Any]:
    """The eval files of a run, by name; None where one was not written.

    Rows of acceptance at other settings than the run's own are apart (`split_settings`): no verdict speaks of them.

    Raises:
        WrongInput: a file that is damaged or was edited (`read_eval`).
    """
    files = {name: folder / f"{name}.json" for name in FILES}
    found = {name: read_eval(file) if file.exists() else None for name, file in files.items()}
    if found["acceptance"] is not None:
        found["acceptance"] = split_settings(found["acceptance"])
    return found


def same_checkpoint(recorded: dict[str, Any], identity: dict[str, Any]) -> bool:
    """Whether a record speaks of this head; older records name no settings."""
    names = ("sha256", *(["settings_sha256"] if "settings_sha256" in recorded else []))
    return all(recorded.get(name) == identity.get(name) for name in names)


def of_checkpoint(evals: dict[str, Any], checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The eval files that measured this checkpoint (`checkpoint_identity`); None for the others."""
    return {name: v if v and same_checkpoint(v["checkpoint"], checkpoint) else None for name, v in evals.items()}


def unmeasured(evals: dict[str, Any], checkpoint: dict[str, Any], settings: EvalSettings) -> list[str]:
    """What was never measured on this checkpoint."""
    needed = ["acceptance", "lossless"] + (["speed"] if settings.min_speedup > 0 else [])
    problems = []
    for name in needed:
        found = evals[name]
        if found is None:
            problems.append(f"eval/{name}.json is missing")
        elif not same_checkpoint(found["checkpoint"], checkpoint):
            step, sha256 = found["checkpoint"].get("step"), str(found["checkpoint"].get("sha256"))
            other = f"step {step} ({sha256[:12]}), not {checkpoint['sha256'][:12]}"
            other = "the same weights with other settings in head.json" if sha256 == checkpoint["sha256"] else other
            problems.append(f"eval/{name}.json measured another checkpoint: {other}")
    return problems


def failures(evals: dict[str, Any], settings: EvalSettings) -> list[str]:
    """What was measured and does not pass."""
    problems = []
    if (acceptance := evals["acceptance"]) is not None:
        rows = [row for row in acceptance["rows"] if is_main_row(row, acceptance["checkpoint"]["kind"], settings)]
        if not rows:
            problems.append(f"eval/acceptance.json has no row of the head at draft length {settings.draft_length}")
        for row in rows:
            accept_len = row["accept_len"]
            most = accept_len["value"] if accept_len["high"] is None else accept_len["high"]
            if most is None or most < settings.min_accept_len:
                problems.append(
                    f"accept_len {accept_len['value']} ({row['source']}, at most {most}) is below "
                    f"eval.min_accept_len = {settings.min_accept_len}"
                )
    problems += disagreements((acceptance or {}).get("live_agreement") or {})
    if (lossless := evals["lossless"]) is not None:
        failed = [check["name"] for check in lossless["checks"] if check["verdict"] != "pass"]
        compared = any(check["num_tokens"] for check in lossless["checks"])
        if failed or not compared or lossless["verdict"] != "lossless":  # whatever the verdict says, checks decide
            reason = f"checks that did not pass: {', '.join(failed)}" if failed else "no check has compared a token"
            problems.append(f"losslessness is {lossless['verdict']!r} ({reason})")
    if settings.fail_slow_plain and (speed := evals["speed"]) is not None and plain_below_generate(speed):
        problems.append(
            "plain decoding is slower than transformers.generate: speed-ups over it mean nothing (eval/speed.json, "
            "`absolute`)"
        )
    if (speed := evals["speed"]) is not None and settings.min_speedup > 0:
        kind = speed["checkpoint"]["kind"]
        lowest = min((row["concurrency"] for row in speed["rows"]), default=1)
        mine = [row for row in speed["rows"] if (row["drafter"], row["concurrency"]) == (kind, lowest)]
        values = [row["speedup"]["value"] for row in mine if row["speedup"]]
        best = max((value for value in values if value is not None), default=None)
        if best is None or best < settings.min_speedup:
            problems.append(
                f"best speedup {best} at concurrency {lowest} is below eval.min_speedup = {settings.min_speedup}"
            )
    return problems


def disagreements(agreed: dict[str, Any]) -> list[str]:
    """Where live replies contradict the offline figures: greedy ones step by step, sampled ones in the mean."""
    problems = []
    if unexplained := agreed.get("unexplained"):
        problems.append(
            f"{len(unexplained)} live replies took other steps than computed offline "
            f"(first: prompt {unexplained[0][:12]})"
        )
    for draft in ("greedy", "sampled"):
        found = agreed.get(draft)
        if found and found["p_value"] is not None and found["p_value"] < AGREEMENT_LEVEL:
            problems.append(
                f"accept_len of sampled live replies with {draft} drafts is {found['difference']:+.3f} from the offline one "
                f"(z = {found['z']:.1f}, p = {found['p_value']:.1g})"
            )
    return problems


def is_main_row(row: dict[str, Any], kind: str, settings: EvalSettings) -> bool:
    """Whether a row is the head's own figure over all held-out prompts at the reported draft length."""
    return (
        row["drafter"] == kind
        and row["tree"] is None
        and row["counting"] == "reply"
        and (row["route"], row["context"], row["draft_length"]) == ("all", "all", settings.draft_length)
    )


def require_gate(run: Path, folder: Path, checkpoint: dict[str, Any], settings: EvalSettings) -> None:
    """Let the checkpoint in `folder` pass, or say what to run.

    Raises:
        WrongInput: acceptance or losslessness of this checkpoint was not measured.
        GateFailed: they were, and a value does not pass.
    """
    evals = read_evals(run / "eval")
    if problems := unmeasured(evals, checkpoint, settings):
        raise WrongInput(_message(run, problems, f"Measure it: headstart eval {folder}"))
    if problems := failures(evals, settings):
        raise GateFailed(
            _message(run, problems, "Train longer or change the head, then run headstart eval " + str(run))
        )


def _message(run: Path, problems: list[str], advice: str) -> str:
    listed = "\n".join(f"  - {problem}" for problem in problems)
    return f"{run}: this head may not be exported yet:\n{listed}\n{advice}\nTo export it as it is: --untested"
