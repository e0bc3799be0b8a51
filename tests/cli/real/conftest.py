"""One real cluster for all tests here: two engines, two agents, the router, on free ports."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from kvist_cli.local import Cluster, Options, Ports
from kvist_connector import names
from kvist_connector.testing.ports import free_ports
from kvist_operator import spec

ADAPTER = "tuned"
RANK, LAYERS, HIDDEN, VALUES = 2, 30, 576, 192  # of SmolLM2-135M
DEADLINE = 240.0  # an engine's start takes a minute or more on a busy machine
MODEL = "smol"
# Ids, times, and what a cache held when it was asked.
VARIED = frozenset({
    "id", "created", "created_at", "completed_at", "system_fingerprint", "request_id", "kv_transfer_params",
    "prompt_tokens_details", "input_tokens_details",
})  # fmt: skip
BASE = {
    "replicas": 2,
    "dtype": "bfloat16",
    "maxModelLen": 4096,
    "kvCacheMemory": "128Mi",
    "env": [{"name": "VLLM_SERVER_DEV_MODE", "value": "1"}],
}
WORDS = "The keeper of the lighthouse wrote every evening what the sea had brought that day. "


def until(look: Callable[[], Any], what: str, seconds: float = DEADLINE) -> Any:
    """Poll until `look` gives something true; fails in words at the deadline."""
    ends = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > ends:
            pytest.fail(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.1)
    return found


def plain(value: Any) -> Any:
    """Without what varies; of numbers that depend on the batch only that they are numbers."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items() if name not in VARIED}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return float if isinstance(value, float) else value


def events(answer: httpx.Response) -> Iterator[Any]:
    """Of a stream, and lines that are none."""
    for line in answer.text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield plain(json.loads(line[6:]))
        elif line:
            yield line


class Rig:
    """The cluster and what tests ask of it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.urls = cluster.urls
        self.client = httpx.Client(timeout=httpx.Timeout(120.0))

    def messages(self, topic: str, sentences: int = 60) -> list[dict[str, str]]:
        """A conversation whose prompt starts with the topic, so that topics share no chunk."""
        text = f"Notes on {topic}. " + WORDS * sentences
        return [{"role": "system", "content": text}, {"role": "user", "content": "What did the sea bring?"}]

    def chat(self, topic: str, *, sentences: int = 60, base: str = "", **more: Any) -> httpx.Response:
        """One greedy chat request through the router, or straight to `base`."""
        body = {
            "model": MODEL,
            "messages": self.messages(topic, sentences),
            "temperature": 0,
            "max_tokens": 8,
        }
        return self.client.post(f"{base or self.urls.router}/v1/chat/completions", json=body | more)

    def plain(self, value: Any) -> Any:
        """See `plain`."""
        return plain(value)

    def asked(self, base: str, method: str, path: str, body: Any) -> tuple[Any, ...]:
        """Status, kind of content, and what was said; events of several prompts come in any order."""
        answer = self.client.request(method, base + path, json=body)
        kind = answer.headers.get("content-type", "").partition(";")[0]
        if kind == "text/event-stream":
            return answer.status_code, kind, sorted(events(answer), key=repr)
        return answer.status_code, kind, plain(answer.json())

    def text(self, response: httpx.Response) -> str:
        """The answer's text; the test fails on an error."""
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["message"]["content"])

    def decision(self, response: httpx.Response) -> dict[str, Any]:
        """The router's record of a request, joined with what the engine reported."""
        request = response.headers[names.HEADER_REQUEST_ID]

        def look() -> dict[str, Any] | None:
            answer = self.client.get(f"{self.urls.router_admin}{names.PATH_DECISIONS}/{request}")
            found: dict[str, Any] = answer.json() if answer.status_code == 200 else {}
            return found if found.get("actual") else None

        record: dict[str, Any] = until(look, f"record of {request}", 30)
        return record

    def replicas(self) -> dict[str, Any]:
        """The router's view."""
        answer: dict[str, Any] = self.client.get(f"{self.urls.router_admin}{names.PATH_REPLICAS}").json()
        return answer

    def stats(self, replica: str) -> dict[str, Any]:
        """An agent's counters."""
        answer: dict[str, Any] = self.client.get(f"{self.urls.agents[replica]}{names.PATH_STATS}").json()
        return answer

    def post(self, url: str, body: Any = None) -> None:
        """A control call that must succeed."""
        answer = self.client.post(url, json=body)
        assert answer.is_success, answer.text

    def forget_gpu(self, replica: str) -> None:
        """Empty the engine's own prefix cache."""
        self.post(f"{self.urls.engines[replica]}/reset_prefix_cache")

    def running(self, replica: str) -> int:
        """Requests that the engine is working on."""
        text = self.client.get(f"{self.urls.engines[replica]}/metrics").text
        lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
        return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines)

    def idle(self) -> None:
        """Nothing is left of any request in the router."""
        until(lambda: self.replicas()["in_flight"] == 0, "requests in flight in the router", 30)

    def at_rest(self) -> None:
        """Nothing is left of any request, in router, engines and agents."""
        self.idle()
        for replica in self.urls.engines:
            until(lambda replica=replica: self.running(replica) == 0, f"requests running on {replica}", 60)
            until(lambda replica=replica: self.stats(replica)["pending_loads"] == 0, "pending loads", 30)

    def mirrored(self) -> None:
        """The router takes all replicas and reads both feeds."""

        def look() -> bool:
            found = self.replicas()["replicas"]
            return len(found) == 2 and all(item["healthy"] and item["feed"]["live"] for item in found)

        until(look, "healthy replicas with live feeds")


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter of random numbers, large enough that the model says something else."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("adapter")
    numbers = torch.Generator().manual_seed(7)
    weights = {}
    for layer in range(LAYERS):
        for name, size in (("q_proj", HIDDEN), ("v_proj", VALUES)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("lora_A", (RANK, HIDDEN)), ("lora_B", (size, RANK))):
                weights[f"{at}.{part}.weight"] = torch.randn(shape, generator=numbers) / 5
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 16, "bias": "none"}
    (folder / "adapter_config.json").write_text(
        json.dumps({**config, "target_modules": ["q_proj", "v_proj"]})
    )
    return folder


class Rigs:
    """The cluster that runs now; one of another kind ends it. Starts take minutes, so modules share it."""

    def __init__(self, smollm2: Path, adapter: Path, folders: pytest.TempPathFactory) -> None:
        self._smollm2, self._adapter, self._folders = smollm2, adapter, folders
        self._wanted: dict[str, Any] | None = None
        self._rig: Rig | None = None
        self._events: list[str] = []

    def of(self, module: ModuleType) -> Rig:
        """What a module wants otherwise: ADAPTERS served beside the model, ENGINE and ROUTER of its spec."""
        adapters = [{"name": name, "path": str(self._adapter)} for name in getattr(module, "ADAPTERS", ())]
        model = {"name": str(self._smollm2), "servedName": MODEL, "loraAdapters": adapters}
        engine, router = getattr(module, "ENGINE", {}), getattr(module, "ROUTER", {})
        wanted = {
            "model": model,
            "engine": BASE | engine,
            "cache": {"memory": "512Mi", "disk": {"size": "2Gi"}},
            "router": router,
        }
        if self._rig is None or wanted != self._wanted:
            self.close()
            self._wanted = wanted
            self._rig = self._start(wanted)
        self._rig.mirrored()
        return self._rig

    def close(self) -> None:
        """End it."""
        if self._rig is not None:
            rig, self._rig = self._rig, None
            rig.client.close()
            rig.cluster.down()
            print(json.dumps(self._events[-20:], indent=1))

    def _start(self, wanted: dict[str, Any]) -> Rig:
        head = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": "tests-real"}}
        manifest = spec.parse({**head, "spec": wanted})
        (first,) = free_ports(1, run=8)
        ports = Ports(router=first, router_admin=first + 1, engine=first + 2, agent=first + 4)
        self._events = []
        options = Options(run_dir=self._folders.mktemp("run"), ports=ports)
        return Rig(Cluster.up(manifest, options, lambda event: self._events.append(str(event))))


@pytest.fixture(scope="session")
def rigs(smollm2: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rigs]:
    found = Rigs(smollm2, adapter, tmp_path_factory)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def rig(rigs: Rigs, request: pytest.FixtureRequest) -> Rig:
    return rigs.of(request.module)
