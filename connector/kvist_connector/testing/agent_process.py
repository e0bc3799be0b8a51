"""A real agent process: started, asked, killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from kvist_connector.testing.patience import patient_flags

START_SECONDS = 60.0


class AgentProcess:
    """`start` returns when the agent is ready."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path, announced: str) -> None:
        self._process = process
        self.folder = folder
        self.announced = announced
        self.url = announced.split("http=")[1].split()[0]

    @property
    def socket(self) -> Path:
        """Where engines connect."""
        return self.folder / "agent.sock"

    @property
    def arena(self) -> Path:
        """The arena file."""
        return self.folder / "arena"

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @classmethod
    async def start(cls, folder: Path, **settings: object) -> AgentProcess:
        """Keys of `settings` are names of AgentSettings, dots written as __; limits not named are long."""
        process = await launch(folder, **settings)
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_SECONDS):
                line = (await process.stdout.readline()).decode()
        except (TimeoutError, asyncio.CancelledError):  # nobody else knows of it
            process.kill()
            await process.communicate()
            raise
        if "http=" not in line:
            _, errors = await process.communicate()
            raise RuntimeError(f"the agent did not start: {errors.decode()}")
        return cls(process, folder, line)

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        """Status and JSON (or text) of a GET."""
        return await self._request("GET", path, None, headers)

    async def post(self, path: str, body: Mapping[str, Any], **headers: str) -> tuple[int, Any]:
        """Status and JSON of a POST."""
        return await self._request("POST", path, body, headers)

    async def stats(self) -> dict[str, Any]:
        """The stats document."""
        _, body = await self.get("/v1/kvist/stats")
        assert isinstance(body, dict)
        return body

    async def kill(self) -> None:
        """kill -9, and wait for the end."""
        self._process.kill()
        await self._process.communicate()

    async def terminate(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to end; its exit status."""
        if self._process.returncode is None:
            self._process.send_signal(number)
        return await self.wait()

    async def wait(self) -> int:
        """Wait until it has ended; its exit status."""
        async with asyncio.timeout(START_SECONDS):
            await self._process.communicate()
        assert self._process.returncode is not None
        return self._process.returncode

    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]
    ) -> tuple[int, Any]:
        timeout = aiohttp.ClientTimeout(total=START_SECONDS)
        async with (
            aiohttp.ClientSession(timeout=timeout) as client,
            client.request(method, self.url + path, json=body, headers=headers) as response,
        ):
            if response.content_type == "application/json":
                return response.status, await response.json()
            return response.status, await response.text()


async def launch(folder: Path, **settings: object) -> asyncio.subprocess.Process:
    """Start the program without waiting for it to be ready."""
    values: dict[str, object] = {
        "replica": "test",
        "socket": folder / "agent.sock",
        "arena": folder / "arena",
        "memory": "1Mi",
        "http__port": 0,
    }
    arguments = []
    for name, value in patient_flags(values | settings).items():
        arguments += ["--" + name.replace("__", ".").replace("_", "-"), str(value)]
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvist_connector",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
