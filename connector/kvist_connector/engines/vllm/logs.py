"""What Kvist says inside an engine, where the engine's own words are. Called by connector.py.

vLLM configures its own logger only, so information of other packages is dropped and their warnings come bare.
"""

from __future__ import annotations

import logging

OURS, THEIRS = "kvist_connector", "vllm"


def speak_through_vllm() -> None:
    """Use the handlers and the level of vLLM's logger, where nobody has said what becomes of ours.

    A program does by handlers of the root logger or of ours (`VLLM_LOGGING_CONFIG_PATH`).
    """
    ours, theirs = logging.getLogger(OURS), logging.getLogger(THEIRS)
    if ours.hasHandlers() or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
