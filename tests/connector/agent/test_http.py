"""Probes before the arena is reserved and after a task died; the API in this process."""

from aiohttp.test_utils import TestClient, TestServer

from kvist_connector.agent.http import Api, Status


async def test_not_ready_and_not_healthy_say_why():
    reasons = {"ready": "the arena is being reserved", "healthy": ""}
    status = Status(healthy=lambda: reasons["healthy"], ready=lambda: reasons["ready"])
    api = Api(status, lambda: b"", token=None)
    async with TestClient(TestServer(api.application())) as client:
        response = await client.get("/readyz")
        assert response.status == 503
        assert (await response.json())["error"]["message"] == "the arena is being reserved"
        assert (await client.get("/healthz")).status == 200
        for method, path in (
            ("GET", "/v1/kvist/stats"),
            ("GET", "/v1/kvist/feed?reader=a"),
            ("POST", "/v1/kvist/lookup"),
        ):
            early = await client.request(method, path)
            assert early.status == 503
        reasons.update(ready="", healthy="task write-behind died")
        assert (await client.get("/readyz")).status == 200
        assert (await client.get("/healthz")).status == 503


async def test_errors_have_one_form():
    api = Api(Status(lambda: "", lambda: ""), lambda: b"", token=None)
    async with TestClient(TestServer(api.application())) as client:
        for path, status in (("/nowhere", 404), ("/v1/kvist/clear", 405)):
            response = await client.get(path)
            assert response.status == status
            assert set((await response.json())["error"]) == {"message", "field"}
