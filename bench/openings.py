"""The first frame of a made-up agent's feed. Called by bench.router, bench.gap_parts and bench.mirror."""

from __future__ import annotations

from kvist_connector.protocol.feed import FEED_VERSION, Opening


def opening(
    replica: str, model: str, fingerprint: bytes, block_tokens: int = 32, gpu_known: bool = True
) -> Opening:
    """Of an agent whose engine has registered, with chunks of 256 tokens."""
    return Opening(
        version=FEED_VERSION,
        epoch=1,
        replica=replica,
        fingerprint=fingerprint,
        group=0,
        model=model,
        chunk_tokens=256,
        block_tokens=block_tokens,
        gpu_known=gpu_known,
        draining=False,
    )
