"""What a tier's compression does now is in stats and metrics, one figure a tier."""

import pytest

from kvist_connector.protocol.tiers import Tier
from kvist_connector.testing.fake_engine import prompt_keys
from kvist_connector.testing.whole_agent import WholeAgent
from kvist_connector.tiers.gain import Gain

KEYS = prompt_keys(range(8 * 4))


@pytest.fixture
async def agent(tmp_path):
    """Starts one whose disk has this rule."""
    started = []

    async def begin(compression):
        whole = await WholeAgent.start(tmp_path, disk={"path": tmp_path / "disk", "compression": compression})
        started.append(whole)
        return whole

    yield begin
    for whole in started:
        await whole.stop()


async def figures(whole):
    stats = (await whole.stats())["tiers"]
    assert "compression" not in stats["memory"]
    state = stats["disk"]["compression"]
    for name, metric in (
        ("compresses", "kvist_agent_tier_compresses"),
        ("ratio", "kvist_agent_tier_compression_ratio"),
    ):
        assert await whole.metric(metric, tier="disk") == pytest.approx(float(state[name]))
    rate = await whole.metric("kvist_agent_tier_coding_bytes_per_second", tier="disk", operation="write")
    assert rate == pytest.approx(state["write_bytes_per_second"])
    return state


@pytest.mark.parametrize(("compression", "compresses"), [("none", False), ("zstd", True)])
async def test_a_rule_and_what_comes_of_it(agent, compression, compresses):
    whole = await agent(compression)
    await whole.computed(KEYS)
    await whole.written()
    assert await whole.found(KEYS) == [Tier.DISK] * 4
    state = await figures(whole)
    assert (state["codec"], state["compresses"]) == (compression, compresses)
    assert (state["ratio"] < 1) is compresses
    assert (state["unpack_bytes_per_second"] > 0) is compresses
    assert (state["packed_read_bytes_per_second"] > 0) is compresses
    assert (state["plain_read_bytes_per_second"] > 0) is not compresses
    assert state["write_bytes_per_second"] > 0


@pytest.mark.parametrize(("writing", "compresses"), [(50e6, True), (5e9, False)])
async def test_auto_says_what_it_has_decided(agent, writing, compresses):
    whole = await agent("auto")
    assert (await figures(whole))["compresses"] is False  # nothing is known yet
    coding = whole.parts.lower[Tier.DISK].coding
    coding.gain = Gain().wrote(int(writing), 1.0).packed(1000, 700).unpacked(1_000_000_000, 1.0)
    state = await figures(whole)
    assert (state["codec"], state["compresses"], state["ratio"]) == ("auto", compresses, pytest.approx(0.7))
