"""The files of an eval folder as their readers need them: what is damaged, or was edited, is refused by name."""

from pathlib import Path
from typing import Any

from headstart.heads.errors import WrongInput
from headstart.heads.store import read_json

SCHEMAS = {name: f"headstart.{name}/1" for name in ("acceptance", "lossless", "speed", "calibration", "prompts")}

# Of every file: the entries that are read, the one that is a list, and what each of its members has.
ENTRIES = {
    "acceptance": ("checkpoint target prompts rows", "rows"),
    "lossless": ("checkpoint verdict checks faults", "checks"),
    "speed": ("checkpoint hardware absolute rows recommended crossover_concurrency", "rows"),
    "calibration": ("checkpoint rows thresholds recommended", "rows"),
    "prompts": ("target prompts sampling prompt_ids routes num_tokens rows", "rows"),
}
OBJECTS = ("checkpoint", "target", "prompts", "sampling", "hardware", "absolute")  # entries that have entries
MEMBERS = {
    "acceptance": (
        "source drafter route context temperature top_k top_p draft draft_length tree counting num_prompts num_tokens "
        "num_steps accept_len conditional accepted_histogram uniform_start_estimate product_of_marginals out_of_vocab_share"
    ),
    "lossless": "name verdict dtype sampler draft draft_length batch num_samples num_tokens p_value level divergences",
    "speed": (
        "engine drafter temperature dtype threads concurrency draft_length tokens_per_s plain_tokens_per_s speedup "
        "predicted_speedup accept_len target_step_ms verify_step_ms cost_ratio num_divergences num_near_ties"
    ),
    "calibration": "draft depth weight confidence acceptance calibration_error bins",
    "prompts": "checkpoint drafter draft draft_length num_steps",
}


def read_eval(file: Path) -> dict[str, Any]:
    """One file of eval/, by its name.

    Raises:
        WrongInput: damaged, of another schema, or without an entry that is read.
    """
    name = file.stem
    content: dict[str, Any] = read_json(file, SCHEMAS[name])
    entries, listed = ENTRIES[name]
    lacking = [entry for entry in entries.split() if entry not in content]
    for entry in entries.split():
        if entry in OBJECTS and entry in content and not (isinstance(content[entry], dict) and content[entry]):
            lacking.append(f"entries in {entry}")
    if not lacking and not isinstance(content[listed], list):
        lacking = [f"list of {listed}"]
    if not lacking and name == "acceptance" and not content[listed]:
        lacking = ["row"]
    if not lacking:
        for i, member in enumerate(content[listed]):
            found = member if isinstance(member, dict) else {}
            lacking += [f"{listed}[{i}].{entry}" for entry in MEMBERS[name].split() if entry not in found]
            if lacking:
                break
    if lacking:
        raise WrongInput(
            f"{file}: found no {', '.join(lacking)}, expected what an evaluation writes: it was edited, or by another "
            f"version.\nMove it away and measure again: headstart eval {file.absolute().parents[1]}"
        )
    return content
