"""Our live steps and an engine's counters side by side: each engine's own rule of counting, and what has to agree.

Every figure is s_j, drafts accepted at position j / drafts. vLLM counts the last block whole, whatever the method: a step is
judged before its tokens are looked at for a stop or the limit. llama.cpp cuts a draft to what the token limit leaves less
one, counts no step without a draft, and ends a block before a drafted stop token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headstart.eval.acceptance import PromptCounts
from headstart.eval.acceptance_rows import acceptance_row
from headstart.eval.engine_runs import EngineReply, EngineRun, accepted_per_position
from headstart.eval.identity import Rescorer
from headstart.eval.replies import Reply
from headstart.heads.paths import Path, conversations

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
    num_near_ties: int  # replies that part from it where the target's two best tokens are equal but for rounding
    num_as_ours: int  # replies equal to ours
    num_same_counts: int  # prompts whose drafts and accepted counts are all ours

    @property
    def problems(self) -> list[str]:
        found = []
        for k, (theirs, ours) in enumerate(zip(self.survival, self.expected_survival, strict=True)):
            if k < POSITIONS and not abs(theirs - ours) <= MAX_SURVIVAL_DIFFERENCE:
                found.append(f"survival at position {k} is {theirs:.3f}, ours {ours:.3f}")
        if abs(self.num_drafts - self.expected_drafts) > MAX_DRAFTS_DIFFERENCE * self.expected_drafts:
            found.append(f"{self.num_drafts} drafts, ours {self.expected_drafts}")
        if unexplained := self.num_prompts - self.num_as_plain - self.num_near_ties:
            found.append(f"{unexplained} replies differ from the engine's plain decoding")
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
    drafted: EngineRun,
    plain: EngineRun,
    expected: list[EngineReply],
    prompts: Sequence[Sequence[int]],
    rescorer: Rescorer,
) -> Comparison:
    """Totals of both sides, and how many replies and counts are the same; `rescorer` judges where replies part."""
    rows = list(zip(prompts, plain.replies, drafted.replies, expected, strict=True))
    judged = [rescorer.judge("", prompt, a.token_ids, b.token_ids) for prompt, a, b, _ in rows]
    return Comparison(
        engine=drafted.engine,
        version=drafted.version,
        num_prompts=len(rows),
        num_drafts=sum(reply.num_drafts for reply in drafted.replies),
        expected_drafts=sum(reply.num_drafts for reply in expected),
        survival=_survival(drafted.replies),
        expected_survival=_survival(expected),
        num_as_plain=judged.count(None),
        num_near_ties=sum(found is not None and found.verdict == "tie" for found in judged),
        num_as_ours=sum(theirs.token_ids == ours.token_ids for *_, theirs, ours in rows),
        num_same_counts=sum(
            (theirs.num_drafts, theirs.accepted_K) == (ours.num_drafts, ours.accepted_K) for *_, theirs, ours in rows
        ),
    )


def _survival(replies: list[EngineReply]) -> list[float]:
    drafts = sum(reply.num_drafts for reply in replies)
    return [sum(column) / max(drafts, 1) for column in zip(*(reply.accepted_K for reply in replies), strict=True)]


def engine_row(run: EngineRun, paths: Sequence[Path], drafter: str, draft_length: int, interval: Any) -> dict[str, Any]:
    """The row of eval/acceptance.json: the engine's counters on the prompts of `paths`, under counting `engine`."""
    counts = []
    for reply, path in zip(run.replies, paths, strict=True):
        accepted_K = np.array(reply.accepted_K, dtype=float)
        reached = np.append(reply.num_drafts, accepted_K)  # drafts with at least k accepted
        counts.append(
            PromptCounts(
                prompt_id=path.prompt_id,
                route=path.route,
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
        conversations=conversations(paths),
    )


def print_comparison(result: Comparison) -> None:
    print(f"\n{result.engine} {result.version}: {result.num_prompts} prompts", flush=True)
    print(f"  drafts     {result.num_drafts:7d}   ours {result.expected_drafts:7d}")
    for k, (theirs, ours) in enumerate(zip(result.survival, result.expected_survival, strict=True)):
        print(f"  survival {k} {theirs:7.4f}   ours {ours:7.4f}   difference {theirs - ours:+.4f}")
    total = result.num_prompts
    ties = f" ({result.num_near_ties} part at a near tie)" if result.num_near_ties else ""
    print(
        f"  replies equal to its plain decoding {result.num_as_plain}/{total}{ties}, to ours {result.num_as_ours}/{total}"
    )
    print(f"  prompts with exactly our counts {result.num_same_counts}/{total}")
    print("  " + ("; ".join(result.problems) or "agrees"), flush=True)
