"""What training is about to learn, held against the rule it is meant to follow, on a few paths before the first step.

The rule (docs/design.md): the pair (t, j) counts exactly when x_{t+1} .. x_{t+2+j} all lie in one reply. It is said once
more here, path by path and in plain loops, and compared with the pairs of the batch that training would be given. A mask
that is off by one, or on the wrong side, trains well and serves badly: no curve would show it.
"""

from collections.abc import Collection, Sequence
from pathlib import Path as FilePath

import numpy as np
import torch

from headstart.heads.batch import pack, supervised_pairs
from headstart.heads.errors import WrongInput
from headstart.heads.paths import UNKNOWN, Path, read_paths

NUM_CHECKED = 16

Pair = tuple[int, int]
"""Start t within its path, and depth j."""


def training_paths(traffic: FilePath, cut_replies: bool) -> list[Path]:
    """The training replies of a finished traffic stage; those that a limit cut are counted, and left out where not wanted.

    Raises:
        WrongInput: none is left.
    """
    paths = list(read_paths(traffic, "train"))
    whole = [path for path in paths if path.finish_reason != "length"]
    fate = "kept, without a stop token" if cut_replies else "left out"
    print(f"{len(paths) - len(whole):,} of {len(paths):,} training replies were cut at a limit ({fate})")
    if paths and not whole and not cut_replies:
        raise WrongInput(
            f"train.cut_replies: found all {len(paths)} replies cut at a limit, expected whole ones among them.\n"
            "Raise traffic.max_new_tokens, or learn from cut replies too: train.cut_replies=true"
        )
    return paths if cut_replies else whole


def check_supervision(paths: Sequence[Path], stop_ids: Collection[int], depth: int) -> list[int]:
    """Check a packed batch of the first paths: every label is a token of a reply, the first block of each reply is there,
    nothing lies behind an end of turn, and nothing reaches from one path into another.

    Returns:
        Number of pairs at each depth.

    Raises:
        WrongInput: naming the path, the place and the rule that it breaks.
    """
    checked = list(paths[:NUM_CHECKED])
    for path in checked:
        check_end(path, stop_ids)
    counts = [0] * depth
    for path, pairs in zip(checked, trained_pairs(checked, depth), strict=True):
        expected = serving_pairs(path, depth)
        if wrong := sorted(pairs - expected):
            refuse(
                path, f"start {wrong[0][0]}, depth {wrong[0][1]} is trained, and its tokens are not all in one reply"
            )
        if missing := sorted(expected - pairs):
            refuse(path, f"start {missing[0][0]}, depth {missing[0][1]} is not trained, and serving drafts there")
        for _, j in pairs:
            counts[j] += 1
    return counts


def trained_pairs(paths: Sequence[Path], depth: int) -> list[set[Pair]]:
    """The pairs that each path has in the batch they are packed into."""
    if not paths:
        return []
    empty = [torch.zeros(path.num_slots, 0) for path in paths]
    batch = pack([(path, states, states) for path, states in zip(paths, empty, strict=True)])
    start_S, valid_SD = supervised_pairs(batch, depth)
    row_S = np.searchsorted(batch.offsets[1:], start_S.numpy(), side="right")
    pairs: list[set[Pair]] = [set() for _ in paths]
    for s, j in valid_SD.nonzero().tolist():
        row = int(row_S[s])
        pairs[row].add((int(start_S[s]) - batch.offsets[row], j))
    return pairs


def serving_pairs(path: Path, depth: int) -> set[Pair]:
    """The pairs that serving can meet, by the rule's own words."""
    generated = path.generated_N.tolist()
    last = len(generated) - 1
    return {
        (t, j)
        for t in range(last)
        for j in range(depth)
        if t + 2 + j <= last and all(generated[i] for i in range(t + 1, t + 3 + j))
    }


def check_end(path: Path, stop_ids: Collection[int]) -> None:
    """Refuse a path with a reply that goes on behind a stop token, or that misses the one it says it ended with."""
    tokens, generated = path.token_N.tolist(), path.generated_N.tolist()
    for i, (token, said) in enumerate(zip(tokens, generated, strict=True)):
        if said and token in stop_ids and i + 1 < len(tokens) and generated[i + 1]:
            refuse(path, f"position {i} holds the stop token {token}, and its reply goes on behind it")
    own = path.sampling != UNKNOWN  # templates may end the replies of sources by other tokens
    if own and path.finish_reason == "stop" and not (generated[-1] and tokens[-1] in stop_ids):
        refuse(path, f"it says that it was ended, and its last token {tokens[-1]} ends nothing")
    if path.finish_reason == "length" and tokens and generated[-1] and tokens[-1] in stop_ids:
        refuse(path, f"it was cut by a limit, and ends in the stop token {tokens[-1]} all the same")


def refuse(path: Path, what: str) -> None:
    raise WrongInput(
        f"prompt {path.prompt_id[:12]}: {what}.\n"
        "Look at it with headstart inspect RUN; the traffic stage it comes from is not to be trained on."
    )
