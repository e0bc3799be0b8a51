"""Fixtures that all suites share: the demo's model, converted once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvist_cli import models

MODEL_VARIABLE = "KVIST_TEST_MODEL"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct in bf16; KVIST_TEST_MODEL names another copy."""
    given = os.environ.get(MODEL_VARIABLE)
    return Path(given) if given else models.demo_model(os.environ)
