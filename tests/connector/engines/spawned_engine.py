"""Run by test_real_engine.py: an engine whose `--kv-transfer-config` names no agent.

    python spawned_engine.py MODEL FOLDER

Asks one prompt twice, the engine's own prefix cache dropped between, and prints what was
cached and answered as one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading


def main(model: str, folder: str) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="bfloat16",
        max_model_len=1024,
        enforce_eager=True,
        block_size=32,
        max_num_batched_tokens=256,
        seed=0,
        kv_cache_memory_bytes=40 * 24576 * 30,
        kv_transfer_config={
            "kv_connector": "KvistConnector",
            "kv_connector_module_path": "kvist_connector.engines.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"memory": "100Mi", "folder": folder},
        },
    )
    core = llm.llm_engine.engine_core
    half = core.engine_core.scheduler.connector.scheduler_half
    pause = threading.Event()
    for _ in range(6000):
        half.poll()
        if half.ready:
            break
        pause.wait(0.01)
    answers = []
    for _ in range(2):
        sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": list(range(1000, 1520))}], sampling, use_tqdm=False)
        answers.append((output.num_cached_tokens, list(output.outputs[0].token_ids)))
        assert llm.reset_prefix_cache()
    core.shutdown()
    cached, tokens = zip(*answers, strict=True)
    print(json.dumps({"cached": cached, "tokens": tokens}))


if __name__ == "__main__":
    main(*sys.argv[1:])
