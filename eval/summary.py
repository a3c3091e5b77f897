"""The table that an evaluation prints: what was measured, in plain words and aligned columns."""

from collections.abc import Sequence
from typing import Any


def interval_text(value: dict[str, float | None] | None, digits: int = 2) -> str:
    """`1.79 [1.72, 1.86]`, or a dash where nothing was measured."""
    if value is None or value["value"] is None:
        return "-"
    text = f"{value['value']:.{digits}f}"
    if value["low"] is None or value["high"] is None:
        return text
    return f"{text} [{value['low']:.{digits}f}, {value['high']:.{digits}f}]"


def number_text(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first flush left, the rest flush right."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def find_rows(acceptance: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    """Rows with these values, in the file's order."""
    return [row for row in acceptance["rows"] if all(row[name] == value for name, value in wanted.items())]


def routes_lost_to_ngram(acceptance: dict[str, Any], draft_length: int) -> list[str]:
    """Routes where n-gram lookup, which costs nothing, has the larger accept_len."""
    kind = acceptance["checkpoint"]["kind"]
    common = {"source": "offline", "draft_length": draft_length, "draft": "greedy"}
    found = {
        drafter: {row["route"]: row["accept_len"]["value"] for row in find_rows(acceptance, drafter=drafter, **common)}
        for drafter in (kind, "ngram")
    }
    return [
        route
        for route, value in found[kind].items()
        if route != "all" and value is not None and (found["ngram"].get(route) or 0) > value
    ]


def plain_below_generate(speed: dict[str, Any]) -> bool:
    """Whether plain decoding, which speed-ups are measured against, is slower than transformers.generate.

    Two loops that are equally fast differ by a per cent or two from run to run; that much is not held against it.
    """
    plain, generated = (speed["absolute"][f"{name}_tokens_per_s"] for name in ("plain", "generate"))
    return plain is not None and generated is not None and plain < 0.98 * generated


def summary(results: dict[str, Any], draft_length: int) -> str:
    """All tables of one evaluation; a part that was not measured is left out."""
    parts = []
    if results["acceptance"]:
        parts.append(acceptance_text(results["acceptance"], draft_length))
    if results["lossless"]:
        parts.append(lossless_text(results["lossless"]))
    if results["speed"]:
        parts.append(speed_text(results["speed"]))
    return "\n\n".join(parts)


def acceptance_text(acceptance: dict[str, Any], draft_length: int) -> str:
    checkpoint, prompts = acceptance["checkpoint"], acceptance["prompts"]
    kind = checkpoint["kind"]
    whole = [row for row in acceptance["rows"] if row["route"] == "all" and row["counting"] == "reply"]
    depth = max(row["draft_length"] for row in whole)
    header = [
        "drafter",
        "source",
        "draft length",
        "accept_len [95 %]",
        *(f"a_{k}" for k in range(depth)),
        "out of vocab",
    ]
    lines = [
        [
            row["drafter"] + ("" if row["draft"] == "greedy" else " sampled"),
            row["source"],
            str(row["draft_length"]),
            interval_text(row["accept_len"]),
            *(number_text(a["value"], 3) for a in row["conditional"]),
            *[""] * (depth - row["draft_length"]),
            "-" if row["out_of_vocab_share"] is None else f"{row['out_of_vocab_share']:.1%}",
        ]
        for row in whole
    ]
    text = [
        f"acceptance: {kind} step {checkpoint['step']} on {whole[0]['num_prompts']} prompts ({prompts['name']}, replies "
        f"of at most {prompts['max_new_tokens']} tokens, {whole[0]['num_tokens']} tokens judged)",
        table(header, lines),
    ]
    main = find_rows(acceptance, source="offline", drafter=kind, draft_length=draft_length, draft="greedy")
    ngram = find_rows(acceptance, source="offline", drafter="ngram", draft_length=draft_length)
    lookup = {row["route"]: interval_text(row["accept_len"]) for row in ngram}
    repeated = acceptance.get("repeated_8grams", {})
    lines = [
        [
            row["route"],
            str(row["num_prompts"]),
            interval_text(row["accept_len"]),
            lookup.get(row["route"], "-"),
            "-" if repeated.get(row["route"]) is None else f"{repeated[row['route']]:.1%}",
        ]
        for row in main
    ]
    text += [
        "",
        f"by route, draft length {draft_length}",
        table(["route", "prompts", kind, "ngram", "repeated 8-grams"], lines),
    ]
    if ngram:
        lost = routes_lost_to_ngram(acceptance, draft_length)
        text.append(f"routes where the head loses to n-gram lookup: {', '.join(lost) or 'none'}")
    if agreed := acceptance.get("live_agreement"):
        line = f"live steps equal to offline: {agreed['num_equal']} of {agreed['num_replies']} replies"
        if agreed["num_draft_ties"] or agreed["num_other_tokens"] or agreed["unexplained"]:
            line += (
                f" ({agreed['num_draft_ties']} part at a tie of draft logits, {agreed['num_other_tokens']} have other "
                f"tokens, {len(agreed['unexplained'])} unexplained)"
            )
        text.append(line)
    return "\n".join(text)


def lossless_text(lossless: dict[str, Any]) -> str:
    lines = []
    for check in lossless["checks"]:
        ties = sum(d["verdict"] == "tie" for d in check["divergences"])
        bugs = len(check["divergences"]) - ties
        lines.append(
            [
                check.get("drafter", "-"),
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
    return "\n".join([f"lossless: {lossless['verdict']}", table(header, lines)])


def speed_text(speed: dict[str, Any]) -> str:
    absolute, hardware = speed["absolute"], speed["hardware"]
    where = hardware["gpu"] or hardware["cpu"]
    header = [
        "drafter",
        "dtype",
        "draft length",
        "tokens/s",
        "plain",
        "speedup [95 %]",
        "predicted",
        "accept_len",
        "c",
        "near ties",
    ]
    lines = [
        [
            row["drafter"],
            row["dtype"],
            str(row["draft_length"]),
            number_text(row["tokens_per_s"]),
            number_text(row["plain_tokens_per_s"]),
            interval_text(row["speedup"]),
            number_text(row["predicted_speedup"], 2),
            number_text(row["accept_len"], 2),
            number_text(row["cost_ratio"], 2),
            f"{row['num_near_ties']} of {row['num_divergences']} parted",
        ]
        for row in speed["rows"]
    ]
    text = [
        f"speed at concurrency 1 on {where}, {hardware['cores']} cores, {speed['rows'][0]['threads']} threads",
        table(header, lines),
        f"tokens/s: transformers.generate {number_text(absolute['generate_tokens_per_s'])}, plain "
        f"{number_text(absolute['plain_tokens_per_s'])}, bound by memory bandwidth "
        f"{number_text(absolute['memory_bandwidth_bound_tokens_per_s'])}",
    ]
    if plain_below_generate(speed):
        text.append("FAILS: plain decoding is slower than transformers.generate, so no speedup above counts")
    for advice in speed["recommended"]:
        off = f", off for {', '.join(advice['routes_off'])}" if advice["routes_off"] else ""
        text.append(
            f"recommended by these times: draft length {advice['draft_length']}{off}  {advice['flags']}".rstrip()
        )
    kind = speed["checkpoint"]["kind"]
    mine = [row["speedup"] for row in speed["rows"] if row["drafter"] == kind and row["speedup"]["value"] is not None]
    if mine and not any((x["low"] or 0) > 1 for x in mine):
        text.append(
            "no draft length has a speedup whose interval lies above 1: a step with drafts costs more than the "
            "accepted tokens give back (compare accept_len with tokens/s and c)"
        )
    return "\n".join(text)
