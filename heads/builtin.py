"""Targets that need no network: resolve a model name to a folder that transformers can load.

`tiny` and `tiny-tied` are random models for tests and smoke runs. Each is made once, from a seed, in a cache folder.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headstart.heads.errors import WrongInput
from headstart.heads.store import hash_json
from headstart.heads.tiny_text import TINY_TEXT

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

# Everything that decides the bytes of a tiny target; its hash is in the folder name.
TINY: dict[str, Any] = {
    "format": 1,
    "seed": 7,
    "num_tokens": 500,
    "text": TINY_TEXT,
    "chat_template": CHATML,
    "config": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


def cache_folder() -> Path:
    """Where converted and random targets live: $HEADSTART_CACHE, $XDG_CACHE_HOME/headstart or ~/.cache/headstart."""
    if chosen := os.environ.get("HEADSTART_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headstart"


def resolve_model(name: str) -> Path:
    """Folder of the target called `name`: a folder, a built-in name (made on first use) or a downloaded hub id.

    Raises:
        WrongInput: nothing of that name can be found; the message says what was tried.
    """
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return folder.resolve()
    if name in BUILTIN_TARGETS:
        return BUILTIN_TARGETS[name]()
    raise WrongInput(f"target.model: found {name!r}, expected a folder with config.json or one of {BUILTIN_NAMES}.")


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Run `build` on a temporary folder and rename it to `folder`; two processes may race, one result stays."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        build(temporary)
        temporary.chmod(0o755)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _tiny(tied: bool) -> Path:
    name = "tiny-tied" if tied else "tiny"
    folder = cache_folder() / "targets" / f"{name}-{hash_json([TINY, tied])[:12]}"
    return build_once(folder, lambda temporary: write_tiny(temporary, tied))


def write_tiny(folder: Path, tied: bool) -> None:
    """Write a random Llama whose greedy replies wander and sometimes stop, with a byte-level ChatML tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer()
    stop_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    config = LlamaConfig(
        **TINY["config"],
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=stop_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(TINY["seed"] + tied)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 2:
                # Fan-in scaling times a gain: large enough that every layer changes the residual stream visibly.
                gain = 0.35 * config.hidden_size**0.5 if "embed" in key or "lm_head" in key else 2.0
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * gain / parameter.shape[1] ** 0.5)
        if not tied:
            model.lm_head.weight[stop_id] *= 1.3  # so that some replies stop early
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def tiny_tokenizer() -> Any:
    """Byte-level BPE trained on a committed text: `num_tokens` entries with digits split one by one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY["num_tokens"],
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TINY["text"].splitlines(), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=1024
    )
    wrapped.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    wrapped.chat_template = TINY["chat_template"]
    return wrapped


BUILTIN_TARGETS: dict[str, Callable[[], Path]] = {
    "tiny": lambda: _tiny(tied=False),
    "tiny-tied": lambda: _tiny(tied=True),
}
BUILTIN_NAMES = sorted(BUILTIN_TARGETS)
