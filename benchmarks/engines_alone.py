"""vLLM by itself, in its own environment: `engines.py` starts this and asks for rounds, one line of JSON each."""

from __future__ import annotations

import json
import os
import sys
import time

from vllm import LLM, SamplingParams


def main() -> None:
    """Arguments: model directory, slots. Each line of input: [[prompt tokens, completion tokens], ...]."""
    model, slots = sys.argv[1], int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM and its processes print
    options = {"enforce_eager": True, "dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": slots}
    engine = LLM(model, logprobs_mode="processed_logprobs", generation_config="vllm", **options)
    for line in sys.stdin:
        asked = json.loads(line)
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in asked]
        params = [SamplingParams(max_tokens=n, ignore_eos=True, logprobs=0, detokenize=False) for _, n in asked]
        started = time.perf_counter()
        found = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        print(json.dumps([sum(len(one.outputs[0].token_ids) for one in found), seconds]), file=answers, flush=True)


if __name__ == "__main__":
    main()
