"""Fixtures that all suites share: the demo's model, converted once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import hypothesis
import pytest

from kvist_cli import models

MODEL_VARIABLE = "KVIST_TEST_MODEL"

# No test asserts a time, so neither does the library that makes inputs: a busy machine is no failure.
hypothesis.settings.register_profile(
    "kvist", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("kvist")


def pytest_configure() -> None:
    """Ctrl-C works in tests and in what they start, also where a shell runs them in its background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct in bf16; KVIST_TEST_MODEL names another copy."""
    given = os.environ.get(MODEL_VARIABLE)
    return Path(given) if given else models.demo_model(os.environ)
