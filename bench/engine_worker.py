"""A vLLM CPU engine in a process of its own, driven over JSON lines; used by benches and long tests.

    python -m bench.engine_worker '{"model": "...", "connector": {...} | null, "kv_events": "tcp://..."}'

Requests on stdin, one JSON object a line, answered by one line on the descriptor that was stdout:

    {"op": "generate", "prompt": [ids], "max_tokens": 1, "logprobs": 5}
        -> {"ttft": s, "seconds": s, "tokens": [...], "logprobs": [[[id, value], ...], ...], "cached": n}
    {"op": "reset"}   forget the engine's own prefix cache, keep the connector's chunks
    {"op": "exit"}

One request at a time, temperature 0, so that runs can be compared bit by bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

START_SECONDS = 180
ANSWER_SECONDS = 120

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}


class EngineWorker:
    """Starts the process; `ask` sends one request and waits for its answer within a deadline."""

    def __init__(self, config: dict[str, Any], log: Path) -> None:
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.engine_worker", json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | ENVIRONMENT,
            text=True,
        )
        self.pid = self._process.pid
        self._log_path = log

    def wait_ready(self) -> None:
        """Blocks until the engine answers; raises RuntimeError with the log's end if it died."""
        self._read(START_SECONDS)

    def ask(self, **request: Any) -> dict[str, Any]:
        """One request, one answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read(ANSWER_SECONDS)

    def generate(self, prompt: Sequence[int], max_tokens: int = 1, logprobs: int = 0) -> dict[str, Any]:
        """Tokens, logprobs and times of one greedy request."""
        return self.ask(op="generate", prompt=list(prompt), max_tokens=max_tokens, logprobs=logprobs)

    def close(self) -> None:
        """End the process, by force after a deadline."""
        if self._process.poll() is None and self._process.stdin is not None:
            try:
                self._process.stdin.write('{"op": "exit"}\n')
                self._process.stdin.flush()
                self._process.wait(30)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait(30)
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, seconds: float) -> dict[str, Any]:
        import select

        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], seconds)
        line = self._process.stdout.readline() if readable else ""
        if not line:
            state = "died" if self._process.poll() is not None else f"gave no answer in {seconds} s"
            tail = "\n".join(self._log_path.read_text(errors="replace").splitlines()[-30:])
            raise RuntimeError(f"engine {state}; the end of {self._log_path}:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _engine(config: dict[str, Any]) -> Any:
    from vllm import LLM  # heavy: only the worker process pays for it

    arguments: dict[str, Any] = {
        "model": config["model"],
        "dtype": "bfloat16",
        "enforce_eager": True,
        "block_size": 32,
        "max_model_len": config.get("max_model_len", 8192),
        "max_num_seqs": config.get("max_num_seqs", 8),
        "max_num_batched_tokens": config.get("max_num_batched_tokens", 2048),
        "kv_cache_memory_bytes": config.get("kv_cache_memory_bytes", 1 << 30),
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "seed": 0,
    }
    if config.get("connector") is not None:
        arguments["kv_transfer_config"] = {
            "kv_connector": "KvistConnector",
            "kv_connector_module_path": "kvist_connector.engines.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": config["connector"],
        }
    if config.get("kv_events"):
        arguments["kv_events_config"] = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": config["kv_events"],
            "topic": "",
        }
    return LLM(**arguments)


def _generate(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    count = request.get("logprobs", 0)
    sampling = SamplingParams(
        temperature=0, max_tokens=request["max_tokens"], logprobs=count or None, ignore_eos=True
    )
    began = time.perf_counter()
    (output,) = engine.generate([{"prompt_token_ids": request["prompt"]}], sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    completion = output.outputs[0]
    steps = completion.logprobs or []
    return {
        "ttft": output.metrics.first_token_latency if output.metrics else seconds,
        "seconds": seconds,
        "tokens": list(completion.token_ids),
        "logprobs": [sorted((token, entry.logprob) for token, entry in step.items()) for step in steps],
        "cached": output.num_cached_tokens,
    }


def _serve(config: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints must not mix with answers
    engine = _engine(config)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "exit":
            break
        if request["op"] == "reset":
            answer: dict[str, Any] = {"reset": bool(engine.reset_prefix_cache())}
        else:
            answer = _generate(engine, request)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
