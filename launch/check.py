"""Checks of a recipe against its target and prompts, before anything is computed: config and tokenizer, no weights."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.heads.builtin import resolve_model
from headstart.heads.errors import WrongInput
from headstart.heads.facts import default_taps
from headstart.heads.paths import Prompt
from headstart.launch.recipe import describe, place_of
from headstart.launch.schema import Problem
from headstart.launch.settings import Recipe
from headstart.trainer.prompts import PromptSet, gather


@dataclass(frozen=True)
class TargetSketch:
    """What a target's config and tokenizer say, without its weights."""

    folder: Path
    tokenizer: Any
    num_layers: int
    hidden_size: int
    num_tokens: int
    max_position: int

    def taps(self, recipe: Recipe) -> list[int]:
        return recipe.head.taps or default_taps(self.num_layers)


@dataclass(frozen=True)
class Checked:
    """What the checks found on the way; a plan is made of it."""

    target: TargetSketch
    prompts: PromptSet
    prompt_tokens: dict[str, int]
    """Length of every rendered prompt by id; empty where rendering was not asked for."""


def check_recipe(recipe: Recipe, path: Path, overrides: list[str], render: bool = True) -> Checked:
    """Check everything that can be known without weights; `render` also measures every prompt (a few ms each).

    Raises:
        WrongInput: with every problem found, each with its place in the recipe.
    """
    found: list[tuple[str, str]] = []
    target = attempt(found, "target.model", lambda: read_sketch(recipe.target.model))
    prompts = attempt(found, "prompts", lambda: gather(recipe.prompts, path.parent))
    attempt(found, "target.device", lambda: check_device(recipe.target.device))
    lengths: dict[str, int] = {}
    if target is not None:
        found += target_problems(recipe, target)
        if prompts is not None and render and target.tokenizer.chat_template:
            lengths = {prompt.prompt_id: rendered_length(target.tokenizer, prompt) for prompt in prompts.prompts}
            found += length_problems(recipe, prompts.prompts, lengths)
    if found or target is None or prompts is None:
        raise WrongInput(describe(path, [Problem(place_of(path, overrides, key), key, text) for key, text in found]))
    return Checked(target, prompts, lengths)


def attempt(found: list[tuple[str, str]], key: str, read: Any) -> Any:
    """The result of `read`, or None with its WrongInput noted under `key`, or under the key that it names itself."""
    try:
        return read()
    except WrongInput as error:
        named = re.match(r"(\w+\.\w+): ", str(error))
        found.append((named[1], str(error)[named.end() :]) if named else (key, str(error)))
        return None


def read_sketch(model: str) -> TargetSketch:
    """Config and tokenizer of a target."""
    from transformers import AutoConfig, AutoTokenizer

    folder = resolve_model(model)
    try:
        config = AutoConfig.from_pretrained(folder).get_text_config()
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise WrongInput(f"{folder} holds no model that transformers reads without remote code: {reason}") from None
    try:
        return TargetSketch(
            folder,
            tokenizer,
            config.num_hidden_layers,
            config.hidden_size,
            min(len(tokenizer), config.vocab_size),
            config.max_position_embeddings,
        )
    except AttributeError as error:
        raise WrongInput(f"{folder}: expected a decoder-only language model; {error}") from None


def check_device(name: str) -> None:
    """Refuse a device that torch does not know or this machine does not have."""
    if name in ("auto", "cpu"):
        return
    import torch

    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise WrongInput(f"found {name!r}, expected auto, cpu or a device of this machine: {reason}") from None


def target_problems(recipe: Recipe, target: TargetSketch) -> list[tuple[str, str]]:
    """Settings that do not fit this target."""
    found = []
    beyond = [tap for tap in recipe.head.taps if tap > target.num_layers]
    if beyond:
        found.append(
            ("head.taps", f"found {beyond}, but the target has {target.num_layers} layers: taps are 0 to that")
        )
    if recipe.head.draft_vocab_size > target.num_tokens:
        text = f"found {recipe.head.draft_vocab_size}, but the target's tokenizer has {target.num_tokens} tokens"
        text += "; 0 takes them all"
        found.append(("head.draft_vocab_size", text))
    if not target.tokenizer.chat_template:
        text = f"{target.folder} has a tokenizer without chat template, which chat prompts need"
        found.append(
            ("target.model", f"{text}; put a chat_template.jinja beside it or choose an instruction-tuned target")
        )
    longest = recipe.traffic.max_prompt_tokens + recipe.traffic.max_new_tokens
    if longest > target.max_position:
        text = f"prompt and reply may take {longest} tokens, but the target's context is {target.max_position}"
        found.append(
            (
                "traffic.max_prompt_tokens",
                f"{text}; expected at most {target.max_position - recipe.traffic.max_new_tokens}",
            )
        )
    return found


def rendered_length(tokenizer: Any, prompt: Prompt) -> int:
    rendered = tokenizer.apply_chat_template(
        list(prompt.messages), tokenize=True, add_generation_prompt=True, return_dict=True, **prompt.template_kwargs
    )
    return len(rendered["input_ids"])


def length_problems(recipe: Recipe, prompts: list[Prompt], lengths: dict[str, int]) -> list[tuple[str, str]]:
    """Prompts over the limit, with the longest one shown."""
    limit = recipe.traffic.max_prompt_tokens
    over = [prompt for prompt in prompts if lengths[prompt.prompt_id] > limit]
    if not over:
        return []
    worst = max(over, key=lambda prompt: lengths[prompt.prompt_id])
    start = str(worst.messages[-1].get("content", ""))[:60]
    routes = ", ".join(sorted({prompt.route for prompt in over}))
    text = f"found {limit}, but {len(over)} prompts are longer (routes: {routes}), the longest with"
    text += f" {lengths[worst.prompt_id]} tokens ({start!r}); raise it, or choose other prompts.routes"
    return [("traffic.max_prompt_tokens", text)]


def feature_bytes(recipe: Recipe, checked: Checked) -> tuple[int, int]:
    """Most bytes that the features can take if every reply runs to its limit, and bytes a token."""
    cached = [prompt for prompt in checked.prompts.prompts if prompt.split in ("train", "validation")]
    tokens = sum(checked.prompt_tokens[p.prompt_id] + recipe.traffic.max_new_tokens - 1 for p in cached)
    per_token = 2 * checked.target.hidden_size * (len(checked.target.taps(recipe)) + 1)
    return tokens * per_token, per_token


def free_bytes(folder: Path) -> int:
    """Free disk where `folder` is or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
