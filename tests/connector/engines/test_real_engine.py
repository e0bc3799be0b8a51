"""A real vLLM engine on the CPU with a real agent process: answers from every tier are bit-equal.

Batch shapes alone change bf16 results, so requests run one at a time with a token budget of
one chunk, and answers are compared where the computed steps are the same: a load against a
local hit of the same length, and against cold where the load ends on a chunk boundary.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path

import psutil
import pytest

from kvist_connector.testing.ports import free_port

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
CHUNK, BLOCK = 256, 32
KV_BLOCKS = 260


class AgentProcess:
    """`python -m kvist_connector` and its HTTP API."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.socket = folder / "agent.sock"
        self.disk = folder / "disk"
        self.port = free_port()
        self.process = None

    def start(self):
        with (self.folder / "agent.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "kvist_connector", "--replica", "test"),
                    *("--socket", str(self.socket), "--arena", str(self.folder / "arena")),
                    *("--memory", "400Mi", "--http.port", str(self.port)),
                    *("--disk.path", str(self.disk), "--disk.size", "2Gi"),
                ],
                stdout=log,
                stderr=log,
            )
        return self

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def stop(self):
        self.process.terminate()
        self.process.wait(60)

    def call(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data=data)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def hits_of(self, ask):
        """Tokens that one request loaded, by tier, as the agent's counters say."""

        def counters():
            found = self.call("/v1/kvist/stats")["counters"]
            hits = {tier: found.get(f"hit_tokens_{tier}", 0) for tier in ("memory", "disk")}
            return found.get("requests", 0), hits

        requests, before = counters()
        answer = ask()
        pause = threading.Event()
        for _ in range(3000):
            if counters()[0] > requests:
                break
            pause.wait(0.01)
        after = counters()[1]
        return answer, {tier: after[tier] - before[tier] for tier in after if after[tier] > before[tier]}

    def chunks_only_on_disk(self):
        self.call("/v1/kvist/flush", {"deadline": 60})
        self.call("/v1/kvist/clear", {"tier": "memory"})

    def forget(self):
        self.call("/v1/kvist/flush", {"deadline": 60})
        self.call("/v1/kvist/clear", {"tier": "all"})


class Engine:
    """In-process `LLM`; `ask` returns tokens, top-5 logprobs and the cached tokens."""

    def __init__(self, model: Path, agent: AgentProcess):
        from vllm import LLM

        self.agent = agent
        self.llm = LLM(
            str(model),
            dtype="bfloat16",
            max_model_len=6400,
            enforce_eager=True,
            block_size=BLOCK,
            max_num_batched_tokens=CHUNK,
            max_num_seqs=4,
            seed=0,
            disable_log_stats=False,
            kv_cache_memory_bytes=KV_BLOCKS * 24576 * 30,
            kv_transfer_config={
                "kv_connector": "KvistConnector",
                "kv_connector_module_path": "kvist_connector.engines.vllm.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"agent": str(agent.socket)},
            },
        )
        connector = self.llm.llm_engine.engine_core.engine_core.scheduler.connector
        self.half = connector.scheduler_half

    def ask(self, prompt, count=8):
        return self.ask_all([prompt], count)[0]

    def ask_all(self, prompts, count=8):
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=count, logprobs=5, ignore_eos=True)
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
        )
        answers = []
        for output in outputs:
            first = output.outputs[0]
            logprobs = [sorted((token, p.logprob) for token, p in step.items()) for step in first.logprobs]
            answers.append(((list(first.token_ids), logprobs), output.num_cached_tokens))
        return answers

    def preemptions(self):
        return sum(m.value for m in self.llm.get_metrics() if m.name == "vllm:num_preemptions")

    def forget_local(self):
        assert self.llm.reset_prefix_cache()

    def wait_connected(self):
        pause = threading.Event()
        for _ in range(3000):
            self.half.poll()
            if self.half.ready:
                return
            pause.wait(0.01)
        raise AssertionError("the engine did not find its agent again")


@pytest.fixture(scope="module")
def agent():
    folder = Path(tempfile.mkdtemp(prefix="kvist-test-", dir="/dev/shm"))
    process = AgentProcess(folder).start()
    yield process
    process.stop()
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def engine(smollm2, agent):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("PYTHONHASHSEED", "0")
        patch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
        made = Engine(smollm2, agent)
        made.wait_connected()
        yield made
        made.llm.llm_engine.engine_core.shutdown()


@pytest.fixture(autouse=True)
def nothing_cached(engine, agent):
    engine.forget_local()
    agent.forget()


def prompt_of(length, seed=0):
    source = random.Random(seed)
    return [source.randrange(200, 40000) for _ in range(length)]


def loaded_tokens(length):
    return min(length // CHUNK * CHUNK, length - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("length", [300, 511, 512, 513, 3073, 6000])
def test_every_tier_answers_as_the_engines_own_prefix_cache(engine, agent, length):
    prompt = prompt_of(length, length)
    count = loaded_tokens(length)
    engine.ask(prompt[: count + 1], 1)
    local, cached = engine.ask(prompt)
    assert cached == count  # the local hit that a load must not be told from

    engine.forget_local()
    (memory, cached), hits = agent.hits_of(lambda: engine.ask(prompt))
    assert (cached, hits) == (count, {"memory": count})
    engine.forget_local()
    agent.chunks_only_on_disk()
    (disk, cached), hits = agent.hits_of(lambda: engine.ask(prompt))
    assert (cached, hits) == (count, {"disk": count})
    assert memory == disk == local


@pytest.mark.parametrize("length", [513, 2049])
def test_a_load_up_to_a_chunk_boundary_answers_as_cold(engine, agent, length):
    prompt = prompt_of(length, length)
    cold, cached = engine.ask(prompt)
    assert cached == 0
    engine.forget_local()
    assert engine.ask(prompt) == (cold, length - 1)
    engine.forget_local()
    agent.chunks_only_on_disk()
    assert engine.ask(prompt) == (cold, length - 1)


def test_diverging_prompts(engine):
    first = prompt_of(1300)
    second = first[:700] + prompt_of(700, 1)
    cold, _ = engine.ask(second)
    engine.forget_local()
    engine.agent.forget()
    engine.ask(first)
    engine.forget_local()
    loaded, cached = engine.ask(second)
    assert cached == 512
    assert loaded == cold


def test_decoded_chunks(engine):
    prompt = prompt_of(200)
    (answer, _), _ = engine.ask(prompt, 330)
    follow_up = prompt + answer[:313]  # 513 tokens: hits of 512 on both ways
    local, cached = engine.ask(follow_up)
    assert cached == 512
    engine.forget_local()
    loaded, cached = engine.ask(follow_up)
    assert cached == 512
    assert loaded == local


def test_preempted_requests_store_what_is_right(engine):
    prompts = [prompt_of(2689, seed) for seed in (5, 6, 7)]  # 255 of 259 blocks: their answers need more
    before = engine.preemptions()
    engine.ask_all(prompts, 100)
    assert engine.preemptions() > before
    # Batches differ from a request alone, so what was stored is compared with the very pages it came from.
    follow_up = prompts[2][:2560] + prompt_of(100, 8)  # of the request that ended last
    local, cached = engine.ask(follow_up)
    assert cached == 2560
    for prompt in (follow_up, prompts[0], prompts[1]):
        engine.forget_local()
        loaded, cached = engine.ask(prompt)
        assert cached == 2560
        assert prompt is not follow_up or loaded == local


def test_the_agent_is_killed_while_the_engine_answers(engine, agent):
    prompt = prompt_of(1537)
    cold, _ = engine.ask(prompt)
    engine.forget_local()
    timer = threading.Timer(0.5, agent.kill)
    timer.start()
    answer, _ = engine.ask(prompt_of(1100, 3), 60)
    timer.join()
    assert len(answer[0]) == 60
    without, cached = engine.ask(prompt)
    assert (without, cached) == (cold, 0)
    agent.start()
    engine.wait_connected()
    engine.forget_local()
    again, cached = engine.ask(prompt)
    assert cached == 1536  # the arena survived its agent
    assert again == cold


def test_flipped_bytes_on_disk_are_recomputed(engine, agent):
    prompt = prompt_of(1025)
    cold, _ = engine.ask(prompt)
    engine.forget_local()
    agent.chunks_only_on_disk()
    files = [path for path in agent.disk.rglob("*") if path.is_file() and path.stat().st_size > 1_000_000]
    assert len(files) >= 4
    for path in files:
        with path.open("r+b") as file:
            file.seek(-1000, os.SEEK_END)
            byte = file.read(1)
            file.seek(-1000, os.SEEK_END)
            file.write(bytes([byte[0] ^ 1]))
    answer, cached = engine.ask(prompt)
    assert (answer, cached) == (cold, 0)


def run_spawned_engine(model, folder):
    """What spawned_engine.py prints, in a process of its own, and what Kvist says in the engine's log."""
    script = Path(__file__).with_name("spawned_engine.py")
    command = [sys.executable, str(script), str(model), folder]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=240)
    lines = ran.stdout.splitlines()
    (line,) = [line for line in lines if line.startswith('{"cached"')]
    return json.loads(line), [line for line in lines if "Kvist" in line and "INFO" in line]


def test_an_engine_without_an_agents_address_spawns_one(smollm2):
    with tempfile.TemporaryDirectory(prefix="kvist-own-", dir="/dev/shm") as folder:
        (first, said), (second, _) = (run_spawned_engine(smollm2, folder) for _ in range(2))
        for process in psutil.process_iter(["cmdline"]):
            if f"{folder}/agent.sock" in (process.info["cmdline"] or []):
                process.terminate()
                process.wait(60)
    assert first["cached"] == [0, 512]  # loaded after its own prefix cache was dropped
    assert second["cached"] == [512, 512]  # the agent outlived the first engine
    assert first["tokens"][0] == first["tokens"][1] == second["tokens"][0]
    assert any("Kvist agent ready: memory for " in line and folder in line for line in said)
