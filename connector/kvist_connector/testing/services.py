"""Real servers for tests and benches of shared tiers: redis-server and versitygw (S3 over a folder).

`tools/services.sh` installs both; `missing()` says what is not there, as the reason of a skip.
Each server lives in a folder of its own and ends with `stop` or `kill`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import Final

from kvist_connector.testing.ports import free_port

START_SECONDS: Final = 60.0
ACCESS_KEY: Final = "testaccess"
SECRET_KEY: Final = "testsecret"
BUCKET: Final = "chunks"
VERSITYGW: Final = "versitygw-1.8.0/versitygw"


def redis_binary() -> Path | None:
    """Where redis-server is, None when it is not installed."""
    found = shutil.which("redis-server", path=os.environ.get("PATH", "") + ":/usr/bin:/usr/local/bin")
    return Path(found) if found else None


def s3_binary() -> Path | None:
    """Where versitygw is, None when it was not built."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    tools = os.environ.get("KVIST_TOOLS") or f"{cache}/kvist/tools"
    path = Path(tools) / VERSITYGW
    return path if path.is_file() else None


def missing() -> str:
    """What tests of shared tiers need and this machine lacks; empty when it has everything."""
    lacking = [
        name for name, path in (("redis-server", redis_binary()), ("versitygw", s3_binary())) if path is None
    ]
    return f"not installed: {', '.join(lacking)} (make services)" if lacking else ""


class Server:
    """A server process whose output says when it is ready."""

    def __init__(self, command: list[str], ready: bytes) -> None:
        self._command = command
        self._ready = ready
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Returns when it answers; RuntimeError with its output when it ends instead."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        assert self._process.stdout is not None
        said = b""
        async with asyncio.timeout(START_SECONDS):
            while self._ready not in said:
                line = await self._process.stdout.readline()
                if not line:
                    await self._process.wait()
                    raise RuntimeError(f"{self._command[0]} did not start: {said.decode()}")
                said += line
        # What it says later would fill the pipe.
        self._reading = asyncio.create_task(self._drain(self._process.stdout))

    async def stop(self) -> None:
        """End it."""
        await self._end(signal.SIGTERM)

    async def kill(self) -> None:
        """kill -9."""
        await self._end(signal.SIGKILL)

    def pause(self) -> None:
        """It stops answering, its connections stay."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """It goes on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def _end(self, number: signal.Signals) -> None:
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(START_SECONDS):
            await process.wait()
            if self._reading is not None:
                await self._reading

    async def _drain(self, output: asyncio.StreamReader) -> None:
        while await output.read(65536):
            pass


class RedisProcess(Server):
    """redis-server without persistence; `options` are those of its command line, without dashes."""

    def __init__(self, folder: Path, port: int | None = None, **options: str) -> None:
        self.port = free_port() if port is None else port
        folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": str(folder),
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
        }
        settings |= {name.replace("_", "-"): value for name, value in options.items()}
        arguments = [word for name, value in settings.items() for word in (f"--{name}", value)]
        super().__init__([str(redis_binary()), *arguments], b"Ready to accept connections")

    @property
    def url(self) -> str:
        """For `redis.urls`."""
        return f"redis://127.0.0.1:{self.port}/0"


class S3Process(Server):
    """versitygw over a folder with one bucket; any program that knows the keys may use it."""

    def __init__(self, folder: Path, port: int | None = None) -> None:
        self.port = free_port() if port is None else port
        self.folder = folder / "root"
        (self.folder / BUCKET).mkdir(parents=True, exist_ok=True)
        self._sidecar = folder / "sidecar"
        self._sidecar.mkdir(exist_ok=True)
        self.credentials_file = folder / "credentials"
        self.write_credentials(ACCESS_KEY, SECRET_KEY)
        command = [str(s3_binary()), "--port", f"127.0.0.1:{self.port}", "--keep-alive"]
        command += ["--access", ACCESS_KEY, "--secret", SECRET_KEY]
        # Metadata beside the files: not every temporary folder has extended attributes.
        command += ["posix", "--sidecar", str(self._sidecar), str(self.folder)]
        super().__init__(command, b"listening on")

    @property
    def url(self) -> str:
        """For `object_store.url`."""
        return f"s3://{BUCKET}/tests"

    @property
    def endpoint(self) -> str:
        """For `object_store.endpoint`."""
        return f"http://127.0.0.1:{self.port}"

    def remove_bucket(self) -> None:
        """With all that is in it."""
        for folder in (self.folder, self._sidecar):
            shutil.rmtree(folder / BUCKET, ignore_errors=True)

    def write_credentials(self, access: str, secret: str) -> None:
        """What clients find in the credentials file from now on."""
        text = f"[default]\naws_access_key_id = {access}\naws_secret_access_key = {secret}\n"
        self.credentials_file.write_text(text)
