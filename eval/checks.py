"""Entries of eval/lossless.json: one form for every kind of check."""

from typing import Any

from headstart.eval.law_tests import LEVEL
from headstart.heads.sampling import Sampling


def check_entry(
    name: str,
    *,
    target: str,
    dtype: str,
    sampling: Sampling,
    draft: str,
    draft_length: int,
    passed: bool,
    shape: str = "chain",
    batch: int = 1,
    num_samples: int = 0,
    num_tokens: int = 0,
    statistic: float | None = None,
    p_value: float | None = None,
    max_difference: float | None = None,
    **more: Any,
) -> dict[str, Any]:
    """One entry of `checks`, keys in the schema's order; `more` stands behind them."""
    return {
        "name": name,
        "target": target,
        "dtype": dtype,
        "sampler": sampling.to_dict(),
        "draft": draft,
        "shape": shape,
        "draft_length": draft_length,
        "batch": batch,
        "num_samples": num_samples,
        "num_tokens": num_tokens,
        "statistic": statistic,
        "p_value": p_value,
        "level": None if p_value is None else LEVEL,
        "max_difference": max_difference,
        "verdict": "pass" if passed else "fail",
        "divergences": [],
        **more,
    }
