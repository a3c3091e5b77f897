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

# The method is always named: left out, vLLM guesses it from the path.
DRAFTS_OF_FOLDER = (
    '{loader} --speculative-config \\\n  \'{{"method":"{method}","model":"\'"$HEAD"\'","num_speculative_tokens":{k}}}\''
)
DRAFTS_OF_TARGET = '--speculative-config \'{{"method":"{method}","num_speculative_tokens":{k}}}\''
# vLLM's CPU build has no `vllm serve`, and takes nearly all memory unless told how many GiB its cache may have.
VLLM_CPU = "VLLM_CPU_KVCACHE_SPACE=4 python -m vllm.entrypoints.openai.api_server --port 8000 --model"
# By engine: what to say of each command, and the command.
SERVE = {
    "vllm": [
        ("vLLM:", f'vllm serve "$TARGET" --port 8000{DRAFTS_OF_FOLDER}'),
        ("vLLM's CPU build:", f'{VLLM_CPU} "$TARGET"{DRAFTS_OF_FOLDER}'),
    ],
    "speculators": [
        (
            "vLLM by this folder alone, which names its target, where that is a hub id (draft length as the config says):",
            'vllm serve "$HEAD" --port 8000',
        ),
        ("vLLM with a target that lies in a folder:", f'vllm serve "$TARGET" --port 8000{DRAFTS_OF_FOLDER}'),
        ("vLLM's CPU build:", f'{VLLM_CPU} "$TARGET"{DRAFTS_OF_FOLDER}'),
    ],
    "sglang": [
        (
            "SGLang:",
            'python -m sglang.launch_server --model-path "$TARGET" --speculative-algorithm {method} \\\n'
            '  --speculative-draft-model-path "$HEAD" --speculative-num-steps {k} --speculative-eagle-topk 1 \\\n'
            "  --speculative-num-draft-tokens {verify}",
        )
    ],
    "trtllm": [
        (
            "TensorRT-LLM (its PyTorch backend; what it captures of the target is said here, not in the folder):",
            "cat > trtllm.yaml <<EOF\nspeculative_config:\n  decoding_type: {method}\n  max_draft_len: {k}\n"
            '  speculative_model: $HEAD\n{capture}EOF\ntrtllm-serve "$TARGET" --extra_llm_api_options trtllm.yaml',
        )
    ],
    "llamacpp": [
        (
            "llama.cpp (`convert_hf_to_gguf.py` is in its source tree):",
            'python convert_hf_to_gguf.py "$TARGET" --outfile target.gguf\n'
            'python convert_hf_to_gguf.py "$HEAD"{beside} --outfile head.gguf\n'
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
# Of a folder that is target and head in one.
MERGED = {
    "vllm": [
        (
            "vLLM (the folder is the target and its MTP layer in one):",
            f'vllm serve "$HEAD" --port 8000 {DRAFTS_OF_TARGET}',
        ),
        ("vLLM's CPU build:", f'{VLLM_CPU} "$HEAD" {DRAFTS_OF_TARGET}'),
    ],
    "sglang": [
        (
            "SGLang (the same folder is target and draft):",
            'python -m sglang.launch_server --model-path "$HEAD" --speculative-algorithm {method} \\\n'
            '  --speculative-draft-model-path "$HEAD" --speculative-num-steps {k} --speculative-eagle-topk 1 \\\n'
            "  --speculative-num-draft-tokens {verify}",
        )
    ],
    "trtllm": [
        (
            "TensorRT-LLM (its PyTorch backend):",
            "cat > trtllm.yaml <<EOF\nspeculative_config:\n  decoding_type: {method}\n  max_draft_len: {k}\nEOF\n"
            'trtllm-serve "$HEAD" --extra_llm_api_options trtllm.yaml',
        )
    ],
}


def serving_text(record: dict[str, Any]) -> str:
    """The card's section on serving: where things lie, then the commands of every engine that reads the folder."""
    target, head = shlex.quote(record["target"]["folder"]), shlex.quote(record["folder"])
    lines = ["## Serve it", "", f"```\nTARGET={target}\nHEAD={head}\n```"]
    methods, loader = METHODS[record["kind"]], loader_options(record)
    outputs = [tap - 1 for tap in record["taps"]]
    values = {
        "k": record["draft_length"],
        "verify": record["draft_length"] + 1,
        "beside": ' --target-model-dir "$TARGET"' if record["kind"] in BESIDE_TARGET else "",
        "capture": f"  eagle3_layers_to_capture: {outputs}  # by their outputs\n" if outputs else "",
        "loader": f" --model-loader-extra-config '{json.dumps(loader)}'" if loader else "",
    }
    for engine in record["readable_by"]:
        for how, command in (MERGED if record["kind"] in WHOLE else SERVE)[engine]:
            lines += ["", how, "", "```", command.format(method=methods[engine], **values), "```"]
    if others := [name for name in methods if name not in record["readable_by"]]:
        lines += ["", f"Not for {', '.join(others)}: `headstart export --engine` writes their folder, or says why not."]
    return "\n".join(lines)


def loader_options(record: dict[str, Any]) -> dict[str, bool]:
    """What vLLM's loader has to be told of a folder.

    vLLM makes a parameter of a Medusa head's token map while it reads the file, and then misses it among what the file
    should have filled: 0.32 loads such a head only without that check.
    """
    return {"enable_weights_track": False} if "token_map" in record["tensors"] else {}
