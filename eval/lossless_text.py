"""What lossless.json says, as text."""

from typing import Any

from headstart.eval.tables import table, tree_text


def named_checks(lossless: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    return [check for check in lossless["checks"] if check["name"] in names]


def certificate_lines(lossless: dict[str, Any]) -> list[str]:
    """What the certificate found beside greedy identity, a line each; nothing where it was not asked for."""
    lines = []
    if laws := named_checks(lossless, "enumeration"):
        wrong = sum(check["verdict"] != "pass" for check in laws)
        largest = max(check["max_difference"] for check in laws)
        lines.append(f"enumeration: {len(laws)} laws on a toy target, largest difference {largest:.1e}, {wrong} wrong")
    for check in named_checks(lossless, "first_tokens", "martingale"):
        kept = [f"{name} {value:g}" for name, value in check["sampler"].items()]
        lines.append(
            f"{check['name']}, {check['draft']} drafts of length {check['draft_length']}, {', '.join(kept)}: "
            f"{check['num_tokens']} tokens of {check['num_samples']} replies, p = {check['p_value']:.2g} (level "
            f"{check['level']:g}), {check['verdict']}"
        )
    if faults := lossless["faults"]:
        missed = [fault["name"] for fault in faults if fault["caught_by"] is None]
        lines.append(
            f"seeded faults: {len(faults) - len(missed)} of {len(faults)} caught"
            + "".join(f", not {n}" for n in missed)
        )
    return lines


def lossless_text(lossless: dict[str, Any]) -> str:
    lines = []
    for check in named_checks(lossless, "greedy_identity"):
        ties = sum(d["verdict"] == "tie" for d in check["divergences"])
        bugs = len(check["divergences"]) - ties
        lines.append(
            [
                check.get("drafter", "-") + tree_text(check),
                check.get("against", "-"),
                check["dtype"],
                str(check["draft_length"]),
                str(check["batch"]),
                f"{check['num_samples'] - len(check['divergences'])} of {check['num_samples']}",
                str(check["num_tokens"]),
                str(ties),
                str(bugs),
                check["verdict"],
            ]
        )
    header = [
        "greedy identity",
        "against",
        "dtype",
        "draft length",
        "batch",
        "equal",
        "tokens",
        "ties",
        "bugs",
        "verdict",
    ]
    identity = [table(header, lines)] if lines else []
    return "\n".join([f"lossless: {lossless['verdict']}", *identity, *certificate_lines(lossless)])
