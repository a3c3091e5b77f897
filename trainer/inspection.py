"""Paths as text: every token with its mask, and what each supervised pair reads and predicts."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from headstart.eval.tables import columns
from headstart.heads.paths import UNKNOWN, Path
from headstart.trainer.supervision import trained_pairs

NUM_STARTS = 3  # starts of a reply whose pairs are listed
REPLY, PROMPT, END = "\x1b[1;32m", "\x1b[2m", "\x1b[0m"


def inspection_text(paths: Sequence[Path], tokenizer: Any, depth: int, colour: bool) -> str:
    """The paths one after another; with `colour`, reply tokens are green and prompt tokens dim."""
    parts = [
        "\n".join([title(path), *token_lines(path, tokenizer, colour), *pair_lines(path, pairs, tokenizer)])
        for path, pairs in zip(paths, trained_pairs(paths, depth), strict=True)
    ]
    return "\n\n".join(parts)


def title(path: Path) -> str:
    source = "a reply the source brought" if path.sampling == UNKNOWN else f"sampling {path.sampling}"
    return (
        f"prompt {path.prompt_id[:12]}, route {path.route}, {path.split}: {path.num_prompt_tokens} prompt tokens, "
        f"{path.num_reply_tokens} of the reply, finish {path.finish_reason}, {source}"
    )


def shown(tokenizer: Any, token: int) -> str:
    """A token on one line: its text, control characters spelled out, or its id where it is no text by itself."""
    text: str = tokenizer.decode([token])
    if not text or "\ufffd" in text:
        return f"<{token}>"
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def token_lines(path: Path, tokenizer: Any, colour: bool) -> list[str]:
    """Runs of prompt and of reply tokens, tokens set apart by bars."""
    lines = []
    tokens = [shown(tokenizer, int(token)) for token in path.token_N]
    for generated, run in groupby(range(len(tokens)), key=lambda i: bool(path.generated_N[i])):
        places = list(run)
        text = "|".join(tokens[i] for i in places)
        if colour:
            text = (REPLY if generated else PROMPT) + text + END
        name = "reply, trained" if generated else "prompt"
        lines.append(f"  {name} x_{places[0]}..x_{places[-1]}: |{text}|")
    return lines


def pair_lines(path: Path, pairs: set[tuple[int, int]], tokenizer: Any) -> list[str]:
    """A table of the pairs at the first starts."""
    starts = sorted({t for t, _ in pairs})[:NUM_STARTS]
    if not starts:
        return ["  no supervised pair: a reply needs two tokens"]
    rows = [("start", "depth", "state at", "tokens read", "token predicted", "target's probability")]
    for t, j in sorted(pair for pair in pairs if pair[0] in starts):
        read = "|".join(shown(tokenizer, int(token)) for token in path.token_N[t + 1 : t + 2 + j])
        label = t + 2 + j
        predicted = f"x_{label} {shown(tokenizer, int(path.token_N[label]))}"
        reads = f"x_{t + 1}" + (f"..x_{t + 1 + j}" if j else "")
        probability = f"{np.exp(path.logprob_N[label]):.4f}"
        state = f"x_{t} {shown(tokenizer, int(path.token_N[t]))}"
        rows.append((str(t), str(j), state, f"{reads} {read}", predicted, probability))
    return [f"  {line}" for line in columns(rows)]
