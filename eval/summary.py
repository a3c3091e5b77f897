"""The table that an evaluation prints: what was measured, in plain words and aligned columns."""

from typing import Any

from headstart.eval.contexts import break_even_text, context_rows, step_cost
from headstart.eval.lossless_text import lossless_text
from headstart.eval.tables import number_text, table, tree_text
from headstart.eval.temperatures import temperature_table
from headstart.eval.vocabulary_text import vocabulary_table
from headstart.heads.intervals import interval_text

DEFINITIONS = """\
accept_len            tokens emitted / target steps, all prompts together, the corrected or bonus token included
drafts kept           accepted drafts / target steps: the same without that token
uniform starts        1 + mean survival over all positions of the replies, as if steps began anywhere alike (too high)
product of marginals  1 + products of each depth's own mean acceptance there, as if depths were independent too
a_k                   accepted at position k / judged there, which needs all drafts before it to be accepted
[low, high]           95 % interval, bootstrap over prompts, turns of a conversation drawn together"""


def find_rows(acceptance: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    """Rows with these values, in the file's order; of chains, unless a tree is asked for."""
    wanted = {"tree": None, **wanted}
    return [row for row in acceptance["rows"] if all(row[name] == value for name, value in wanted.items())]


def main_row(acceptance: dict[str, Any], drafter: str, source: str = "offline") -> dict[str, Any] | None:
    """The row over all prompts at the reported draft length: the live run's, else the longest measured."""
    live = find_rows(acceptance, source="live", counting="reply", route="all", context="all")
    common = {"counting": "reply", "route": "all", "context": "all", "draft": "greedy"}
    rows = find_rows(acceptance, source=source, drafter=drafter, **common)
    if live:
        rows = [row for row in rows if row["draft_length"] == live[0]["draft_length"]] or rows
    return max(rows, key=lambda row: row["draft_length"], default=None)


def routes_lost_to_ngram(acceptance: dict[str, Any], draft_length: int) -> list[str]:
    """Routes where n-gram lookup, which costs nothing, has the larger accept_len."""
    kind = acceptance["checkpoint"]["kind"]
    common = {"source": "offline", "draft_length": draft_length, "draft": "greedy", "context": "all"}
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
        parts.append(acceptance_text(results["acceptance"], draft_length, results["speed"]))
    if results["lossless"]:
        parts.append(lossless_text(results["lossless"]))
    if results["speed"] and results["speed"]["rows"]:
        parts.append(speed_text(results["speed"]))
    return "\n\n".join(parts)


def acceptance_text(acceptance: dict[str, Any], draft_length: int, speed: dict[str, Any] | None = None) -> str:
    """The table over all prompts with what its columns mean, then by route, by prompt length, and live agreement."""
    checkpoint, prompts = acceptance["checkpoint"], acceptance["prompts"]
    whole = [row for row in whole_rows(acceptance) if row["counting"] == "reply"]
    depth = max(row["draft_length"] for row in whole)
    header = ["drafter", "source", "draft length", "accept_len [95 %]", "drafts kept"]
    header += ["uniform starts", "product of marginals", *(f"a_{k}" for k in range(depth)), "out of vocab"]
    lines = [
        [
            drafter_text(row),
            row["source"],
            str(row["draft_length"]),
            interval_text(row["accept_len"]),
            number_text(drafts_kept(row), 2),
            number_text(row["uniform_start_estimate"], 2),
            number_text(row["product_of_marginals"], 2),
            *(number_text(a["value"], 3) for a in row["conditional"]),
            *[""] * (depth - row["draft_length"]),
            "-" if row["out_of_vocab_share"] is None else f"{row['out_of_vocab_share']:.1%}",
        ]
        for row in whole
    ]
    parts = [
        f"acceptance: {checkpoint['kind']} step {checkpoint['step']} on {whole[0]['num_prompts']} prompts "
        f"({prompts['name']}, replies of at most {prompts['max_new_tokens']} tokens{at_temperature(whole[0])}, "
        f"{whole[0]['num_tokens']} tokens judged)",
        table(header, lines),
        "",
        DEFINITIONS,
        "",
        route_text(acceptance, draft_length),
    ]
    if by_length := context_text(acceptance, draft_length, speed):
        parts += ["", by_length]
    header, lines = temperature_table(acceptance, draft_length)
    if lines:
        parts += ["", f"by temperature, draft length {draft_length}", table(header, lines)]
    if acceptance.get("vocabularies"):
        parts += [
            "",
            "with fewer draft tokens, nothing trained anew",
            table(*vocabulary_table(acceptance["vocabularies"])),
        ]
    if acceptance.get("previous"):
        parts.append(previous_text(acceptance["previous"]))
    if acceptance.get("live_agreement"):
        parts.append(agreement_text(acceptance["live_agreement"]))
    return "\n".join(parts)


def at_temperature(row: dict[str, Any]) -> str:
    """Where a row's replies were sampled, at which temperature."""
    return f" at temperature {row['temperature']:g}" if row["temperature"] else ""


def whole_rows(acceptance: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows over all prompts: those of chains, then those of trees."""
    rows = [row for row in acceptance["rows"] if row["route"] == row["context"] == "all"]
    return sorted(rows, key=lambda row: row["tree"] is not None)


def drafter_text(row: dict[str, Any]) -> str:
    drafts = "" if row["draft"] == "greedy" else f" {row['draft']}"
    return row["drafter"] + drafts + tree_text(row)


def drafts_kept(row: dict[str, Any]) -> float | None:
    """Accepted drafts per target step: accept_len without the token that the target adds."""
    kept: float = sum(k * steps for k, steps in enumerate(row["accepted_histogram"]))
    return kept / row["num_steps"] if row["num_steps"] else None


def route_text(acceptance: dict[str, Any], draft_length: int) -> str:
    header, lines = route_table(acceptance, draft_length)
    text = [f"by route, draft length {draft_length}", table(header, lines)]
    if find_rows(acceptance, source="offline", drafter="ngram", draft_length=draft_length):
        lost = routes_lost_to_ngram(acceptance, draft_length)
        text.append(f"routes where the head loses to n-gram lookup: {', '.join(lost) or 'none'}")
    return "\n".join(text)


def route_table(acceptance: dict[str, Any], draft_length: int) -> tuple[list[str], list[list[str]]]:
    """Header and lines: every route's prompts and tokens, the head beside n-gram lookup.

    A route without replies has a line too: 0 prompts, and no figures.
    """
    kind = acceptance["checkpoint"]["kind"]
    common = {"source": "offline", "draft": "greedy", "draft_length": draft_length, "context": "all"}
    ngram = find_rows(acceptance, drafter="ngram", **common)
    lookup = {row["route"]: interval_text(row["accept_len"]) for row in ngram}
    repeated = acceptance.get("repeated_8grams", {})
    lines = [
        [
            row["route"],
            str(row["num_prompts"]),
            str(row["num_tokens"]),
            interval_text(row["accept_len"]),
            lookup.get(row["route"], "-"),
            "-" if repeated.get(row["route"]) is None else f"{repeated[row['route']]:.1%}",
        ]
        for row in find_rows(acceptance, drafter=kind, **common)
    ]
    return ["route", "prompts", "tokens", kind, "ngram", "repeated 8-grams"], lines


def context_text(acceptance: dict[str, Any], draft_length: int, speed: dict[str, Any] | None) -> str:
    """Acceptance by prompt length, and from where on drafting loses; empty where all prompts are of one bucket."""
    header, lines = context_table(acceptance, draft_length, speed)
    if len(lines) < 2:
        return ""
    rows = context_rows(acceptance, acceptance["checkpoint"]["kind"], draft_length)
    verdict = break_even_text(rows, step_cost(acceptance, speed, draft_length))
    return "\n".join([f"by prompt length, draft length {draft_length}", table(header, lines), verdict])


def context_table(
    acceptance: dict[str, Any], draft_length: int, speed: dict[str, Any] | None
) -> tuple[list[str], list[list[str]]]:
    """Header and lines by prompt length: the head, n-gram lookup, and the speed-up that timed steps predict."""
    kind = acceptance["checkpoint"]["kind"]
    ngram = context_rows(acceptance, "ngram", draft_length)
    lookup = {row["context"]: interval_text(row["accept_len"]) for row in ngram}
    cost = step_cost(acceptance, speed, draft_length)
    lines = []
    for row in context_rows(acceptance, kind, draft_length):
        value = row["accept_len"]["value"]
        lines.append(
            [
                row["context"],
                str(row["num_prompts"]),
                str(row["num_tokens"]),
                interval_text(row["accept_len"]),
                lookup.get(row["context"], "-"),
                number_text(value / cost if value and cost else None, 2),
            ]
        )
    return ["prompt tokens", "prompts", "tokens", kind, "ngram", "predicted speedup"], lines


def previous_text(found: dict[str, Any]) -> str:
    """One line: the new head against the one in use so far."""
    p = "" if found["p"] is None else f", p = {found['p']:.4f}"
    return (
        f"against the previous head (step {found['checkpoint']['step']}, {found['checkpoint']['sha256'][:12]}), draft "
        f"length {found['draft_length']}: {number_text(found['accept_len'], 2)} against "
        f"{number_text(found['previous_accept_len'], 2)}, ratio {interval_text(found['ratio'], 3)}{p}: {found['verdict']}"
    )


def agreement_text(agreed: dict[str, Any]) -> str:
    if "num_equal" not in agreed:
        found = [f"{draft} drafts {difference_text(agreed[draft])}" for draft in ("greedy", "sampled")]
        return f"live accept_len of {agreed['num_replies']} sampled replies minus offline: {', '.join(found)}"
    line = f"live steps equal to offline: {agreed['num_equal']} of {agreed['num_replies']} replies"
    if agreed["num_draft_ties"] or agreed["num_other_tokens"] or agreed["unexplained"]:
        line += (
            f" ({agreed['num_draft_ties']} part at a tie of draft logits, {agreed['num_other_tokens']} have other "
            f"tokens, {len(agreed['unexplained'])} unexplained)"
        )
    return line


def difference_text(found: dict[str, float | None]) -> str:
    """A live accept_len minus the offline one, and how surprising that is."""
    if found["p_value"] is None or found["difference"] is None:
        return "unknown, too few prompts"
    return f"{found['difference']:+.3f} (z = {found['z']:.2f}, p = {found['p_value']:.2g})"


def speed_text(speed: dict[str, Any]) -> str:
    absolute, hardware = speed["absolute"], speed["hardware"]
    where = hardware["gpu"] or hardware["cpu"]
    header = [
        "drafter",
        "dtype",
        "concurrency",
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
            str(row["concurrency"]),
            str(row["draft_length"]),
            number_text(row["tokens_per_s"]),
            number_text(row["plain_tokens_per_s"]),
            interval_text(row["speedup"]),
            number_text(row["predicted_speedup"], 2),
            number_text(row["accept_len"], 2),
            number_text(row["cost_ratio"], 2),
            near_ties_text(row, " parted"),
        ]
        for row in speed["rows"]
    ]
    text = [
        f"speed on {where}, {hardware['cores']} cores, {speed['rows'][0]['threads']} threads",
        table(header, lines),
        f"tokens/s: transformers.generate {number_text(absolute['generate_tokens_per_s'])}, plain "
        f"{number_text(absolute['plain_tokens_per_s'])}, bound by memory bandwidth "
        f"{number_text(absolute['memory_bandwidth_bound_tokens_per_s'])}",
    ]
    if plain_below_generate(speed):
        text.append(
            "plain decoding is slower than transformers.generate, so no speedup above counts; measure again with nothing "
            "beside it (`headstart eval RUN --speed`), and where times are milliseconds with more eval.speed_prompts"
        )
    text += recommended_text(speed)
    kind = speed["checkpoint"]["kind"]
    mine = [row["speedup"] for row in speed["rows"] if row["drafter"] == kind and row["speedup"]["value"] is not None]
    if mine and not any((x["low"] or 0) > 1 for x in mine):
        text.append(
            "no draft length has a speedup whose interval lies above 1: a step with drafts costs more than the "
            "accepted tokens give back (compare accept_len with tokens/s and c)"
        )
    return "\n".join(text)


def near_ties_text(row: dict[str, Any], suffix: str = "") -> str:
    """Near ties of the replies that differ from plain decoding's; sampled replies are not compared one by one."""
    if row["num_divergences"] is None:
        return "-"
    return f"{row['num_near_ties']} of {row['num_divergences']}{suffix}"


def recommended_text(speed: dict[str, Any], quote: str = "") -> list[str]:
    """One sentence for every span of concurrencies, and where drafting is to be switched off."""
    lines = []
    for advice in speed["recommended"]:
        first, last = advice["concurrency"][0], advice["concurrency"][-1]
        where = f"concurrency {first}" if first == last else f"concurrency {first} to {last}"
        if not advice["draft_length"]:
            lines.append(f"recommended by these times at {where}: no drafting, every draft length is slower")
            continue
        off = f", off for {', '.join(advice['routes_off'])}" if advice["routes_off"] else ""
        flags = f"  {quote}{advice['flags']}{quote}" if advice["flags"] else ""
        lines.append(f"recommended by these times at {where}: draft length {advice['draft_length']}{off}{flags}")
    if (limit := speed["crossover_concurrency"]) is not None:
        below = [row["concurrency"] for row in speed["rows"] if row["concurrency"] < limit]
        pays = (
            f"at {max(below)} it still pays"
            if below
            else "no smaller one was measured"
            if limit > 1
            else "it never pays"
        )
        lines.append(f"switch drafting off from concurrency {limit} on ({pays})")
    return lines
