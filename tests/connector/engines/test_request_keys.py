"""What requests may share: never across adapters, media or tenants; ids as the router knows them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from kvist_connector.engines.vllm.accepted import MAX_ROUTERS, LastAccepted
from kvist_connector.engines.vllm.lora import AdapterRevisions
from kvist_connector.engines.vllm.requests import RequestState, router_request_id
from kvist_connector.keys import chunk_keys

CHUNK = 256
ROOT = b"r" * 16
ID = "0123456789abcdef" * 2


def adapter(folder, content, name="sql"):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(content)
    return LoRARequest(name, 1, str(folder))


def image(identifier, offset, length=100):
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=identifier, mm_position=PlaceholderRange(offset, length)
    )


def keys_of(tokens, *features):
    request = SimpleNamespace(all_token_ids=tokens, mm_features=list(features))
    state = RequestState(request, True, (), 0.0, 0.0, root=ROOT)
    return state.extend_keys(len(tokens) // CHUNK, CHUNK)


def shared(one, other):
    return sum(a == b for a, b in zip(one, other, strict=True))


TOKENS = [7] * 1024


def test_equal_adapters_have_one_revision_wherever_they_lie(tmp_path):
    revisions = AdapterRevisions()
    one = revisions.revision(adapter(tmp_path / "a", b"weights"))
    assert one == revisions.revision(adapter(tmp_path / "b", b"weights"))
    assert one == AdapterRevisions().revision(adapter(tmp_path / "a", b"weights"))


def test_an_adapter_replaced_in_place_has_another(tmp_path):
    revisions = AdapterRevisions()
    before = revisions.revision(adapter(tmp_path / "a", b"weights"))
    after = revisions.revision(adapter(tmp_path / "a", b"others!"))
    assert before != after


def test_files_that_swap_their_content_differ(tmp_path):
    revisions = AdapterRevisions()
    for name, (one, two) in {"a": (b"1", b"2"), "b": (b"2", b"1")}.items():
        adapter(tmp_path / name, one)
        (tmp_path / name / "other").write_bytes(two)
    found = [revisions.revision(LoRARequest("x", 1, str(tmp_path / name))) for name in "ab"]
    assert found[0] != found[1]


def test_new_weights_under_the_old_name_share_nothing_once_their_revision_is_given():
    hub = LoRARequest("sql", 1, "owner/sql")  # vLLM fetches it: no folder here tells its weights
    found = {AdapterRevisions({"sql": given}).revision(hub) for given in ("", "one", "two")}
    assert len(found) == 3
    assert AdapterRevisions({"other": "one"}).revision(hub) == AdapterRevisions().revision(hub)


def test_a_given_revision_counts_beside_the_content(tmp_path):
    weights = adapter(tmp_path / "a", b"weights"), adapter(tmp_path / "b", b"others!")
    assert len({AdapterRevisions({"sql": given}).revision(a) for a in weights for given in ("1", "2")}) == 4


def test_a_prompt_without_media_has_the_keys_of_its_text():
    assert keys_of(TOKENS) == chunk_keys(ROOT, TOKENS)


def test_other_media_at_the_same_tokens_share_only_what_lies_before():
    assert shared(keys_of(TOKENS, image("cat", 300)), keys_of(TOKENS, image("dog", 300))) == 1
    assert shared(keys_of(TOKENS, image("cat", 300)), keys_of(TOKENS)) == 1
    assert keys_of(TOKENS, image("cat", 300)) == keys_of(TOKENS, image("cat", 300))


def test_media_that_begin_elsewhere_share_only_what_lies_before():
    assert shared(keys_of(TOKENS, image("cat", 300)), keys_of(TOKENS, image("cat", 301))) == 1


def test_media_across_a_chunk_boundary_count_in_every_chunk():
    cat, dog = image("cat", 200, 400), image("dog", 200, 400)
    assert shared(keys_of(TOKENS, cat), keys_of(TOKENS, dog)) == 0
    # the chunk after the first still tells them apart when the first is equal by chance
    after = [keys_of(TOKENS, image(name, 256, 10)) for name in ("cat", "dog")]
    assert shared(*after) == 1


def test_the_order_of_media_counts():
    one = keys_of(TOKENS, image("cat", 0), image("dog", 100))
    assert shared(one, keys_of(TOKENS, image("dog", 0), image("cat", 100))) == 0


def test_decoded_chunks_extend_the_same_chain():
    tokens = list(range(1024))
    request = SimpleNamespace(all_token_ids=tokens[:512], mm_features=[image("cat", 10)])
    state = RequestState(request, True, (), 0.0, 0.0, root=ROOT)
    state.extend_keys(2, CHUNK)
    request.all_token_ids = tokens
    assert state.extend_keys(4, CHUNK) == keys_of(tokens, image("cat", 10))


@pytest.mark.parametrize(
    "engine_id",
    [
        f"chatcmpl-{ID}-1a2b3c4d",
        f"0_chatcmpl-{ID}-1a2b3c4d",  # n > 1
        f"cmpl-{ID}-0-1a2b3c4d",
        f"cmpl-{ID}-11-1a2b3c4d",  # a list of prompts
    ],
)
def test_a_routers_id_is_found_again(engine_id):
    assert router_request_id(engine_id) == ID


def test_the_last_request_of_each_router_is_kept():
    last = LastAccepted()
    other = ID[::-1]
    for engine_id in (f"chatcmpl-{ID}-1a2b3c4d", f"cmpl-west-{ID}-0-1a2b3c4d", f"chatcmpl-{other}-1a2b3c4d"):
        last.note(engine_id)
    assert last.by_router() == {"": other, "west": f"west-{ID}"}


@pytest.mark.parametrize(
    "foreign", ["chatcmpl-hello-1a2b3c4d", "", "0", f"chatcmpl-{'x' * 99}-{ID}-1a2b3c4d"]
)
def test_requests_of_others_are_not_taken_for_a_routers(foreign):
    last = LastAccepted()
    last.note(foreign)
    assert last.by_router() == {}


def test_the_number_of_routers_is_bounded():
    last = LastAccepted()
    for number in range(10 * MAX_ROUTERS):
        last.note(f"chatcmpl-r{number}-{ID}-1a2b3c4d")
    assert len(last.by_router()) == MAX_ROUTERS
    assert f"r{10 * MAX_ROUTERS - 1}" in last.by_router()
