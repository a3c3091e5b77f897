"""eval/prompts.json: each held-out prompt's tokens and steps, from which measured heads are compared without a model.

    {"schema":"headstart.prompts/1","target":{"name","fingerprint"},"prompts":{"name","sha256","max_new_tokens"},
     "sampling":{"temperature","top_k","top_p","min_p"},
     "prompt_ids":[..],"routes":[..],"prompt_tokens":[..],"num_tokens":[..],"conversations":[..],      one entry a prompt
     "rows":[{"checkpoint":{"kind","step","sha256"},"drafter","draft","draft_length","num_steps":[..]}]}

All sums are exact offline ones by counting rule `reply`: accept_len = sum num_tokens / sum num_steps. A reply of n tokens
has num_tokens = n - 1 whatever drafts it. Lookup drafters, which no checkpoint changes, have a null checkpoint. Rows of
checkpoints that were measured earlier on the same replies stay, so that two checkpoints of a run can be compared.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headstart.eval.file_reader import SCHEMAS, read_eval
from headstart.eval.gate import same_checkpoint
from headstart.heads.errors import WrongInput
from headstart.heads.store import write_json

PROMPTS_FILE = "prompts.json"
SAME_REPLIES = ("target", "prompts", "sampling", "prompt_ids", "num_tokens")  # else older rows speak of others


@dataclass
class PromptSums:
    """One head's sums of every held-out prompt, at one draft length."""

    label: str
    checkpoint: dict[str, Any]
    prompt_ids: list[str]
    routes: list[str]
    tokens_R: np.ndarray
    steps_R: np.ndarray
    conversations: list[str]  # that of each prompt: turns of one are drawn together
    conditions: dict[str, Any]  # what must be equal for two of them to be compared, by dotted name

    def ordered(self, prompt_ids: Sequence[str]) -> "PromptSums":
        """The same prompts in another order."""
        place = {prompt_id: i for i, prompt_id in enumerate(self.prompt_ids)}
        order = [place[prompt_id] for prompt_id in prompt_ids]
        return replace(
            self,
            prompt_ids=list(prompt_ids),
            routes=[self.routes[i] for i in order],
            tokens_R=self.tokens_R[order],
            steps_R=self.steps_R[order],
            conversations=[self.conversations[i] for i in order],
        )


def write_sums(folder: Path, content: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write eval/prompts.json; `content` is all of the file but its schema and rows.

    Rows of the same replies that were measured before are kept, unless `rows` has them anew.
    """
    file = folder / PROMPTS_FILE
    old: dict[str, Any] = {"rows": []}
    if file.exists():
        with suppress(WrongInput):  # damaged: what it held is measured again
            old = read_eval(file)
    same = all(old.get(name) == content[name] for name in SAME_REPLIES)
    new = [row_key(row) for row in rows]
    kept = [row for row in old["rows"] if row_key(row) not in new] if same else []
    write_json(file, {"schema": SCHEMAS["prompts"], **content, "rows": rows + kept})


def row_key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("checkpoint", "drafter", "draft", "draft_length"))


def read_sums(
    run: Path,
    checkpoint: dict[str, Any] | None = None,
    label: str = "",
    draft_length: int | None = None,
    draft: str = "greedy",
) -> PromptSums:
    """The stored sums of a run's head.

    Args:
        checkpoint: identity of the checkpoint that is meant; default: the one that eval/ speaks of.
        draft_length: default: the longest that was measured.

    Raises:
        WrongInput: nothing is stored for this head, these drafts or this draft length.
    """
    label = label or run.name
    measure = f"Measure it: headstart eval {run}"
    acceptance, file = run / "eval" / "acceptance.json", run / "eval" / PROMPTS_FILE
    if not file.exists() or (checkpoint is None and not acceptance.exists()):
        raise WrongInput(
            f"{label}: found no eval/{PROMPTS_FILE}, expected the tokens and steps of each prompt.\n{measure}"
        )
    wanted = checkpoint or read_eval(acceptance)["checkpoint"]
    content = read_eval(file)
    rows = [row for row in content["rows"] if row["checkpoint"] and same_checkpoint(row["checkpoint"], wanted)]
    if not rows:
        known = sorted({f"step {row['checkpoint']['step']}" for row in content["rows"] if row["checkpoint"]})
        raise WrongInput(
            f"{label}: eval/{PROMPTS_FILE} holds {', '.join(known) or 'no head'}, expected step {wanted['step']} "
            f"({wanted['sha256'][:12]}).\n{measure} --checkpoint NAME"
        )
    lengths = sorted(row["draft_length"] for row in rows if row["draft"] == draft)
    length = draft_length or max(lengths, default=0)
    found = [row for row in rows if (row["draft"], row["draft_length"]) == (draft, length)]
    if not found:
        raise WrongInput(
            f"{label}: {draft} drafts were measured at draft lengths {lengths}, expected {draft_length or 'any'} among "
            f"them.\n{measure} --draft-length {draft_length or 4}"
        )
    return sums_of(content, found[0], label)


def read_lookup_sums(run: Path, draft_length: int) -> PromptSums | None:
    """The stored sums of n-gram lookup beside a run's head; None where it was not measured."""
    content = read_eval(run / "eval" / PROMPTS_FILE)
    rows = [row for row in content["rows"] if row_key(row) == (None, "ngram", "greedy", draft_length)]
    return sums_of(content, rows[0], "ngram") if rows else None


def sums_of(content: dict[str, Any], row: dict[str, Any], label: str) -> PromptSums:
    """A row of eval/prompts.json with the prompts that its numbers belong to."""
    return PromptSums(
        label=label,
        checkpoint=row["checkpoint"],
        prompt_ids=content["prompt_ids"],
        routes=content["routes"],
        tokens_R=np.array(content["num_tokens"], float),
        steps_R=np.array(row["num_steps"], float),
        conversations=content.get("conversations", content["prompt_ids"]),
        conditions={
            "target.fingerprint": content["target"]["fingerprint"],
            "prompts.max_new_tokens": content["prompts"]["max_new_tokens"],
            **{f"sampling.{name}": value for name, value in content["sampling"].items()},
            "draft": row["draft"],
            "draft_length": row["draft_length"],
        },
    )
