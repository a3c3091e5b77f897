"""The forms of the files that other tools read; tests/schema_rules.py holds files against them.

A form is a type, a tuple of allowed forms or values, a list of one form, `Length(form, n)`, or a dict of keys in their
order. Unknown keys are allowed between and after known ones; a known key is never absent; NULL admits null.
"""

from dataclasses import dataclass
from typing import Any

NULL = None
NUMBER = (float, int)
TEXT_OR_NULL = (str, NULL)
NUMBER_OR_NULL = (float, int, NULL)
INTERVAL = {"value": NUMBER_OR_NULL, "low": NUMBER_OR_NULL, "high": NUMBER_OR_NULL}
CHECKPOINT = {"kind": str, "step": (int, NULL), "sha256": str}
TARGET = {"name": str, "fingerprint": str}
PROMPTS = {"name": str, "sha256": str, "max_new_tokens": int}
PERCENTILES = {"p50": NUMBER_OR_NULL, "p95": NUMBER_OR_NULL}

ACCEPTANCE_ROW = {
    "source": str,
    "drafter": str,
    "route": str,
    "context": str,
    "temperature": NUMBER,
    "top_k": int,
    "top_p": NUMBER,
    "draft": ("greedy", "sampled"),
    "draft_length": int,
    "tree": (NULL, list),
    "counting": ("reply", "engine"),
    "num_prompts": int,
    "num_tokens": int,
    "num_steps": NUMBER,
    "num_short_steps": NUMBER,
    "accept_len": INTERVAL,
    "accept_len_macro": INTERVAL,
    "conditional": [INTERVAL],
    "survival": [INTERVAL],
    "accepted_histogram": [NUMBER],
    "uniform_start_estimate": NUMBER_OR_NULL,
    "product_of_marginals": NUMBER_OR_NULL,
    "out_of_vocab_share": NUMBER_OR_NULL,
    "num_conversations": int,
}
ACCEPTANCE = {
    "schema": ("headstart.acceptance/1",),
    "checkpoint": CHECKPOINT,
    "target": TARGET,
    "prompts": PROMPTS,
    "environment": {"device": str, "dtype": str, "threads": int},
    "interval": {"level": NUMBER, "kind": ("bootstrap over prompts",), "replicates": int, "seed": int},
    "rows": [ACCEPTANCE_ROW],
}
CUT_VOCABULARY = {**ACCEPTANCE_ROW, "draft_vocab_size": int, "ratio": INTERVAL}
PROMPT_SUMS = {
    "schema": ("headstart.prompts/1",),
    "target": TARGET,
    "prompts": PROMPTS,
    "sampling": {"temperature": NUMBER, "top_k": int, "top_p": NUMBER},
    "prompt_ids": [str],
    "routes": [str],
    "prompt_tokens": [int],
    "num_tokens": [int],
    "conversations": [str],
    "rows": [
        {
            "checkpoint": (NULL, dict),
            "drafter": str,
            "draft": ("greedy", "sampled"),
            "draft_length": int,
            "num_steps": [NUMBER],
        }
    ],
}
SPEED_ROW = {
    "engine": str,
    "drafter": str,
    "route": str,
    "temperature": NUMBER,
    "dtype": str,
    "threads": int,
    "concurrency": int,
    "draft_length": int,
    "tree": (NULL, dict),
    "num_prompts": int,
    "num_repeats": int,
    "order": str,
    "num_tokens": int,
    "plain_tokens_per_s": NUMBER,
    "tokens_per_s": NUMBER,
    "speedup": INTERVAL,
    "predicted_speedup": NUMBER_OR_NULL,
    "accept_len": NUMBER_OR_NULL,
    "target_step_ms": NUMBER_OR_NULL,
    "verify_step_ms": NUMBER_OR_NULL,
    "draft_step_ms": NUMBER_OR_NULL,
    "cost_ratio": NUMBER_OR_NULL,
    "ttft_ms": PERCENTILES,
    "tpot_ms": PERCENTILES,
    "num_divergences": (int, NULL),
    "num_near_ties": (int, NULL),
}
SPEED = {
    "schema": ("headstart.speed/1",),
    "checkpoint": CHECKPOINT,
    "target": TARGET,
    "prompts": PROMPTS,
    "hardware": {"cpu": TEXT_OR_NULL, "cores": int, "gpu": TEXT_OR_NULL, "versions": dict},
    "absolute": {
        "generate_tokens_per_s": NUMBER_OR_NULL,
        "plain_tokens_per_s": NUMBER_OR_NULL,
        "memory_bandwidth_bound_tokens_per_s": NUMBER_OR_NULL,
    },
    "rows": [SPEED_ROW],
    "recommended": [{"engine": str, "concurrency": [int], "draft_length": int, "routes_off": [str], "flags": str}],
    "crossover_concurrency": (int, NULL),
}
RELIABILITY_BIN = {
    "low": NUMBER,
    "high": NUMBER,
    "weight": NUMBER,
    "confidence": NUMBER_OR_NULL,
    "acceptance": INTERVAL,
}
CALIBRATION = {
    "schema": ("headstart.calibration/1",),
    "checkpoint": CHECKPOINT,
    "target": TARGET,
    "prompts": PROMPTS,
    "interval": {"level": NUMBER, "kind": ("bootstrap over prompts",), "replicates": int, "seed": int},
    "sampling": {"temperature": NUMBER, "top_k": int, "top_p": NUMBER},
    "rows": [
        {
            "draft": ("greedy", "sampled"),
            "depth": int,
            "weight": NUMBER,
            "confidence": INTERVAL,
            "acceptance": INTERVAL,
            "calibration_error": INTERVAL,
            "bins": [RELIABILITY_BIN],
        }
    ],
    "thresholds": [
        {
            "draft": ("greedy", "sampled"),
            "draft_length": int,
            "stop_below": NUMBER,
            "accept_len": INTERVAL,
            "drafts_per_step": INTERVAL,
            "draft_steps_per_step": INTERVAL,
            "predicted_speedup": INTERVAL,
            "gain": INTERVAL,
        }
    ],
    "recommended": [{"draft": ("greedy", "sampled"), "draft_length": int, "stop_below": NUMBER_OR_NULL}],
}
TIMED = {
    "draft_length": int,
    "concurrency": int,
    "tokens_per_s": NUMBER,
    "speedup": INTERVAL,
    "predicted_speedup": NUMBER_OR_NULL,
    "cost_ratio": NUMBER_OR_NULL,
}
COMPARED = {"ratio": INTERVAL, "p": NUMBER_OR_NULL, "verdict": ("better", "worse", "tied", "too few prompts")}
BAKEOFF = {
    "schema": ("headstart.bakeoff/1",),
    "target": (TARGET, NULL),
    "prompts": (PROMPTS, NULL),
    "sampling": (dict, NULL),
    "hardware": (dict, NULL),
    "rule": {"name": ("equal_tokens", "equal_time"), "num_tokens": (int, NULL)},
    "draft_length": int,
    "num_prompts": int,
    "best": TEXT_OR_NULL,
    "rows": [
        {
            "variant": str,
            "run": str,
            "kind": str,
            "checkpoint": (CHECKPOINT, NULL),
            "num_steps": int,
            "num_tokens": int,
            "num_parameters": (int, NULL),
            "num_prompts": (int, NULL),
            "accept_len": INTERVAL,
            "conditional": [INTERVAL],
            "against_best": (COMPARED, NULL),
            "against_ngram": (COMPARED, NULL),
            "above_ngram": (bool, NULL),
            "speed": (TIMED, NULL),
            "train_seconds": NUMBER_OR_NULL,
            "eval_seconds": NUMBER_OR_NULL,
            "engines": [str],
            "failed": TEXT_OR_NULL,
        }
    ],
    "ngram": ({"accept_len": INTERVAL, "conditional": [INTERVAL], "speed": (TIMED, NULL)}, NULL),
    "seconds": dict.fromkeys(
        ("prompts", "traffic", "features", "shared", "heads", "one_pass", "apart", "share"), NUMBER_OR_NULL
    ),
}
REHEARSAL = {"schema": ("headstart.rehearsal/1",), "num_steps": int, "variants": dict}
PREDICTION = {"schema": ("headstart.plan/1",), "key": str, "threads": int, "stages": dict}
DIVERGENCE = {
    "prompt_id": str,
    "position": int,
    "plain": (int, NULL),
    "speculative": (int, NULL),
    "gap": NUMBER_OR_NULL,
    "verdict": ("tie", "bug"),
}
CHECK = {
    "name": ("enumeration", "first_tokens", "martingale", "greedy_identity"),
    "target": str,
    "dtype": str,
    "sampler": {"temperature": NUMBER, "top_k": int, "top_p": NUMBER},
    "draft": ("greedy", "sampled"),
    "shape": ("chain", "tree"),
    "draft_length": int,
    "batch": int,
    "num_samples": int,
    "num_tokens": int,
    "statistic": NUMBER_OR_NULL,
    "p_value": NUMBER_OR_NULL,
    "level": NUMBER_OR_NULL,
    "max_difference": NUMBER_OR_NULL,
    "verdict": ("pass", "fail"),
    "divergences": [DIVERGENCE],
}
LOSSLESS = {
    "schema": ("headstart.lossless/1",),
    "checkpoint": CHECKPOINT,
    "target": TARGET,
    "verdict": ("lossless", "lossy", "inconclusive"),
    "checks": [CHECK],
    "faults": [{"name": str, "caught_by": TEXT_OR_NULL, "p_value": NUMBER_OR_NULL, "target": ("tiny", "toy")}],
}
MANIFEST = {
    "schema": ("headstart.manifest/1",),
    "stage": str,
    "state": ("running", "complete"),
    "key": str,
    "inputs": {"stage_version": int, "settings": dict, "parents": dict, "target": (dict, NULL)},
    "outputs": dict,
    "made_by": {
        "headstart": str,
        "commit": TEXT_OR_NULL,
        "argv": [str],
        "versions": dict,
        "seed": int,
        "started": str,
        "finished": TEXT_OR_NULL,
        "seconds": NUMBER,
    },
}
OUTPUT = {"sha256": str, "bytes": int, "rows": (int, NULL)}
METRICS_LINE = {"step": int, "time": NUMBER, "stage": str, "tokens": int}
TRAIN_KEYS = {
    "train/loss": NUMBER,
    "train/lr": NUMBER,
    "train/grad_norm": NUMBER,
    "train/num_supervised": int,
    "train/tokens_per_s": NUMBER,
}
HEAD = {"schema": str, "kind": str, "step": int, "settings": dict, "target": dict, "taps": [int], "weights_sha256": str}
TRAFFIC_COLUMNS = {
    "prompt_id": "string",
    "route": "string",
    "split": "string",
    "messages": "string",
    "template_kwargs": "string",
    "token_ids": "list<int32>",
    "generated": "list<bool>",
    "logprob": "list<float>",
    "finish_reason": "string",
    "stop_token_id": "int",
    "sampling": "string",
    "backend": "string",
    "chunk": "int",
    "conversation": "string",
}


@dataclass(frozen=True)
class Length:
    """A list of `number` items of one form."""

    form: Any
    number: int
