"""How engines are told to draft with an exported folder: what each calls a kind, and the commands that serve it."""

import json
import shlex
from typing import Any

# What each engine calls a kind of head.
METHODS = {
    "eagle3": {
        "vllm": "eagle3",
        "speculators": "eagle3",
        "sglang": "EAGLE3",
        "trtllm": "Eagle3",
        "llamacpp": "draft-eagle3",
    },
    "eagle1": {"vllm": "eagle", "sglang": "EAGLE"},
    "medusa": {"vllm": "medusa"},
    "draft": {
        "vllm": "draft_model",
        "sglang": "STANDALONE",
        "trtllm": "Draft_Target",
        "llamacpp": "draft-simple",
        "transformers": "assistant_model",
    },
    "mtp": {"vllm": "mtp", "sglang": "NEXTN", "trtllm": "MTP"},
}
# Kinds whose folder is target and head in one, and kinds whose folder llama.cpp's converter reads beside the target's.
WHOLE = ("mtp",)
BESIDE_TARGET = ("eagle3",)

# A target in float32 files is said to be one: engines by themselves serve it in 16 bits, where it answers otherwise.
OUTTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}

# The method is always named: left out, vLLM guesses it from the path.
VLLM_DRAFTS = (
    '"{target}" --port 8000{dtype} \\\n{loader}'
    '  --speculative-config \'{{"method":"{method}",{vllm_model}"num_speculative_tokens":{k}}}\''
)
VLLM = f"vllm serve {VLLM_DRAFTS}"
# vLLM's CPU build has no `vllm serve`, and takes nearly all memory unless told how many GiB its cache may have.
VLLM_CPU = f"VLLM_CPU_KVCACHE_SPACE=4 python -m vllm.entrypoints.openai.api_server --model {VLLM_DRAFTS}"
# By engine: what to say of each command, and the command. Where a folder is target and head in one, it is the {target}.
SERVE = {
    "vllm": [("vLLM:", VLLM), ("vLLM's CPU build:", VLLM_CPU)],
    "speculators": [
        (
            "vLLM by this folder alone, which names its target, where that is a hub id (draft length as the config says):",
            'vllm serve "$HEAD" --port 8000{dtype}',
        ),
        ("vLLM with a target that lies in a folder:", VLLM),
        ("vLLM's CPU build:", VLLM_CPU),
    ],
    "sglang": [
        (
            "SGLang:",
            'python -m sglang.launch_server --model-path "{target}"{dtype} --speculative-algorithm {method} \\\n'
            '  --speculative-draft-model-path "$HEAD" --speculative-num-steps {k} --speculative-eagle-topk 1 \\\n'
            "  --speculative-num-draft-tokens {verify}",
        )
    ],
    "trtllm": [
        (
            "TensorRT-LLM (its PyTorch backend; what it captures of a target is said here, not in the folder):",
            "cat > trtllm.yaml <<EOF\nspeculative_config:\n  decoding_type: {method}\n  max_draft_len: {k}\n"
            '{trtllm_model}EOF\ntrtllm-serve "{target}" --extra_llm_api_options trtllm.yaml',
        )
    ],
    "llamacpp": [
        (
            "llama.cpp (`convert_hf_to_gguf.py` is in its source tree):",
            'python convert_hf_to_gguf.py "{target}" --outtype {target_outtype} --outfile target.gguf\n'
            'python convert_hf_to_gguf.py "$HEAD"{beside} --outtype {head_outtype} --outfile head.gguf\n'
            "llama-server --port 8080 -m target.gguf -md head.gguf \\\n"
            "  --spec-type {method} --spec-draft-n-max {k} --spec-draft-p-min 0",
        )
    ],
    "transformers": [
        (
            "transformers (it chooses the number of drafts itself):",
            "target, draft = (AutoModelForCausalLM.from_pretrained(folder) for folder in (TARGET, HEAD))\n"
            "target.generate(**inputs, {method}=draft)",
        )
    ],
}


def serving_text(record: dict[str, Any]) -> str:
    """The card's section on serving: where things lie, then the commands of every engine that reads the folder."""
    place = f'"$(realpath {shlex.quote(record["target"]["folder"])})"'
    target = shlex.quote(record["target"]["name"]) if is_hub_id(record["target"]["name"]) else place
    lines = ["## Serve it", "", "In this folder (the target's place is as it was seen from here):"]
    lines += ["", f'```\nTARGET={target}\nHEAD="$PWD"\n```']
    whole = record["kind"] in WHOLE
    lines += ["", "The folder is the target and its head in one."] if whole else []
    methods, loader = METHODS[record["kind"]], loader_options(record)
    stored = record["target"].get("dtype")  # older folders have none
    outputs = [tap - 1 for tap in record["taps"]]
    capture = f"  eagle3_layers_to_capture: {outputs}  # by their outputs\n" if outputs else ""
    values = {
        "k": record["draft_length"],
        "verify": record["draft_length"] + 1,
        "target": "$HEAD" if whole else "$TARGET",
        "vllm_model": "" if whole else """"model":"'"$HEAD"'",""",
        "trtllm_model": "" if whole else f"  speculative_model: $HEAD\n{capture}",
        "dtype": " --dtype float32" if stored == "float32" else "",
        "target_outtype": OUTTYPES.get(stored, "auto"),
        "head_outtype": OUTTYPES.get(record["dtype"], "auto"),
        "beside": ' --target-model-dir "$TARGET"' if record["kind"] in BESIDE_TARGET else "",
        "loader": f"  --model-loader-extra-config '{json.dumps(loader)}' \\\n" if loader else "",
    }
    for engine in record["readable_by"]:
        for how, command in SERVE[engine]:
            lines += ["", how, "", "```", command.format(method=methods[engine], **values), "```"]
    if others := [name for name in methods if name not in record["readable_by"]]:
        lines += ["", f"Not for {', '.join(others)}: `headstart export --engine` writes their folder, or says why not."]
    return "\n".join(lines)


def is_hub_id(name: str) -> bool:
    """Whether a shown name is ORG/NAME; those of folders and built-in targets have no slash."""
    return "/" in name


def loader_options(record: dict[str, Any]) -> dict[str, bool]:
    """What vLLM's loader has to be told of a folder.

    vLLM makes a parameter of a Medusa head's token map while it reads the file, and then misses it among what the file
    should have filled: 0.32 loads such a head only without that check.
    """
    return {"enable_weights_track": False} if "token_map" in record["tensors"] else {}
