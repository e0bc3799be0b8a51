"""The scheduler half under vLLM's own Scheduler and AsyncScheduler: loads, stores, commits, leases.

Every answer is compared with the model without a cache, and the simulated model checks all
KV it attends to (conftest.py), so these tests fail on any wrong page.
"""

from __future__ import annotations

import random

import pytest
from vllm.lora.request import LoRARequest

from kvist_connector.names import TAG_LORA
from kvist_connector.protocol.engine import Retired

CHUNK = 256


def prompt_of(length, seed=0):
    source = random.Random(seed)
    return [source.randrange(4000) for _ in range(length)]


def records(agent):
    return [record for step in agent.steps for record in step.records]


def releases(agent):
    return [request for step in agent.steps for request in step.releases]


def lookups(agent):
    return [message for message in agent.messages if type(message).__name__ == "Lookup"]


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def asynchronous(request):
    return request.param


@pytest.fixture
def simulator(engine, asynchronous):
    return engine(asynchronous=asynchronous)


@pytest.mark.parametrize("length", [255, 256, 257, 300, 511, 512, 513, 1000, 1024, 2049])
def test_loaded_prompts_answer_as_computed_ones(simulator, oracle, fake_agent, length):
    prompt = prompt_of(length)
    assert simulator.answer(prompt) == oracle(prompt, 4)
    simulator.forget_local()
    assert simulator.answer(prompt) == oracle(prompt, 4)
    fake_agent.wait_for(lambda: len(records(fake_agent)) == 2)
    usable = min(length // CHUNK * CHUNK, length - 1) // 32 * 32
    assert records(fake_agent)[1].hit_tokens == ({1: usable} if usable else {})
    assert records(fake_agent)[1].prompt_tokens == length


def test_a_load_may_begin_inside_a_chunk(simulator, oracle, fake_agent):
    prompt = prompt_of(1100)
    simulator.answer(prompt)
    simulator.forget_local()
    simulator.answer(prompt[:352], 1)
    assert simulator.answer(prompt) == oracle(prompt, 4)
    fake_agent.wait_for(lambda: len(records(fake_agent)) == 3)
    assert records(fake_agent)[2].hit_tokens == {0: 352 // 32 * 32, 1: 1024 - 352}


def test_a_retirement_empties_the_engines_own_cache_and_marks_what_is_stored_afterwards(
    simulator, oracle, fake_agent
):
    prompt = prompt_of(900)
    simulator.answer(prompt)
    fake_agent.push("scheduler", Retired(epoch=5))
    while simulator.half.retired < 5:
        assert simulator.connector._link.wait(60)
        simulator.half.poll()
    longer = prompt + prompt_of(300, seed=2)
    assert simulator.answer(longer) == oracle(longer, 4)
    fake_agent.wait_for(lambda: len(records(fake_agent)) == 2)
    # What the agent still has is loaded; nothing comes from the engine's own blocks.
    assert records(fake_agent)[1].hit_tokens == {1: 768}
    epochs = {commit.index: commit.epoch for step in fake_agent.steps for commit in step.commits}
    assert epochs == {0: 0, 1: 0, 2: 0, 3: 5}


def test_diverging_prompts_share_what_is_equal(simulator, oracle, fake_agent):
    first = prompt_of(900)
    second = first[:600] + prompt_of(400, seed=1)
    simulator.answer(first)
    simulator.forget_local()
    assert simulator.answer(second) == oracle(second, 4)
    fake_agent.wait_for(lambda: len(records(fake_agent)) == 2)
    assert records(fake_agent)[1].hit_tokens == {1: 512}


def test_decoded_chunks_are_stored_and_loaded(simulator, oracle, fake_agent):
    prompt = prompt_of(200)
    answer = simulator.answer(prompt, 400)
    assert answer == oracle(prompt, 400)
    fake_agent.wait_for(lambda: len(fake_agent.chunks) == 2)
    simulator.forget_local()
    follow_up = prompt + answer + prompt_of(30, seed=2)
    assert simulator.answer(follow_up) == oracle(follow_up, 4)
    fake_agent.wait_for(lambda: len(records(fake_agent)) == 2)
    assert records(fake_agent)[1].hit_tokens == {1: 512}


def test_two_equal_prompts_at_once_store_each_chunk_once(simulator, oracle, fake_agent):
    prompt = prompt_of(1000)
    simulator.add("one", prompt)
    simulator.add("two", prompt)
    simulator.run()
    assert simulator.outputs["one"] == simulator.outputs["two"] == oracle(prompt, 4)
    fake_agent.wait_for(lambda: len(fake_agent.chunks) == 3)
    commits = [commit.key for step in fake_agent.steps for commit in step.commits]
    assert len(commits) == len(set(commits)) == 3


def test_stored_chunks_are_not_stored_again(simulator, fake_agent):
    prompt = prompt_of(1000)
    simulator.answer(prompt)
    fake_agent.wait_for(lambda: len(fake_agent.chunks) == 3)
    simulator.forget_local()
    simulator.answer(prompt[:600])
    simulator.answer(prompt)
    simulator.half.poll()
    assert sum(len(step.commits) + len(step.discards) for step in fake_agent.steps) == 3


def test_evicted_chunks_are_stored_again(simulator, fake_agent):
    prompt = prompt_of(600)
    simulator.answer(prompt)
    fake_agent.wait_for(lambda: len(fake_agent.chunks) == 2)
    fake_agent.evict(list(fake_agent.chunks)[::-1])
    simulator.answer(prompt_of(40, seed=3))
    simulator.answer(prompt)
    fake_agent.wait_for(lambda: len(fake_agent.chunks) == 2)


@pytest.fixture
def adapter(tmp_path):
    """`adapter(name, content)`: a LoRA adapter in a folder of its own."""

    def build(name, content):
        folder = tmp_path / f"adapter-{name}-{content}"
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_text(content)
        return LoRARequest(name, 1, str(folder))

    return build


def assert_no_reuse(simulator, oracle, fake_agent, first, second):
    prompt = prompt_of(600)
    simulator.answer(prompt, **first)
    fake_agent.wait_for(lambda: len(fake_agent.chunks) == 2)
    simulator.forget_local()
    assert simulator.answer(prompt, **second) == oracle(prompt, 4)
    fake_agent.wait_for(lambda: len(records(fake_agent)) == 2)
    assert records(fake_agent)[1].hit_tokens == {}
    fake_agent.wait_for(lambda: len(fake_agent.chunks) == 4)
    simulator.forget_local()
    simulator.answer(prompt, **second)
    fake_agent.wait_for(lambda: len(records(fake_agent)) == 3)
    assert records(fake_agent)[2].hit_tokens == {1: 512}


def test_salted_prompts_share_nothing(simulator, oracle, fake_agent):
    assert_no_reuse(simulator, oracle, fake_agent, {}, {"cache_salt": "tenant"})


def test_adapters_share_nothing_with_the_model(simulator, oracle, fake_agent, adapter):
    assert_no_reuse(simulator, oracle, fake_agent, {}, {"lora_request": adapter("sql", "a")})


def test_adapters_of_one_name_share_nothing(simulator, oracle, fake_agent, adapter):
    first, second = ({"lora_request": adapter("sql", content)} for content in ("a", "b"))
    assert_no_reuse(simulator, oracle, fake_agent, first, second)


def test_what_an_adapter_computes_has_the_tags_by_which_it_is_retired(simulator, fake_agent, adapter):
    simulator.answer(prompt_of(600), lora_request=adapter("sql", "a"))
    fake_agent.wait_for(lambda: len(fake_agent.chunks) == 2)
    (tags,) = {commit.tags for step in fake_agent.steps for commit in step.commits}
    every, one = sorted(tags)
    name, revision = one.split("@")
    assert every == name == f"{TAG_LORA}sql"
    assert revision
    assert {lookup.tags for lookup in lookups(fake_agent)} == {tags}


def test_a_failed_load_is_recomputed_and_not_offered_again(engine, oracle, fake_agent):
    simulator = engine()
    prompt = prompt_of(1000)
    simulator.answer(prompt)
    fake_agent.wait_for(lambda: len(fake_agent.chunks) == 3)
    simulator.forget_local()
    victim = list(fake_agent.chunks)[1]
    simulator.before_step = lambda output: output.has_sync_kv_loads and fake_agent.take_away(victim)
    assert simulator.answer(prompt) == oracle(prompt, 4)
    assert simulator.failed_steps == 1
    fake_agent.wait_for(lambda: fake_agent.bad_keys == [victim])
    fake_agent.wait_for(lambda: victim in fake_agent.chunks)  # recomputed, stored anew
    assert records(fake_agent)[-1].failed_load


def test_nothing_filled_from_a_failed_load_is_committed(engine, oracle, fake_agent):
    simulator = engine()
    prompt = prompt_of(1030)
    simulator.answer(prompt[:520])
    fake_agent.wait_for(lambda: len(fake_agent.chunks) == 2)
    simulator.forget_local()
    victim = next(iter(fake_agent.chunks))

    def take(output):
        if output.has_sync_kv_loads:
            fake_agent.take_away(victim)

    simulator.before_step = take
    assert simulator.answer(prompt) == oracle(prompt, 4)  # its first step computes chunks 2 and 3
    assert any(step.discards for step in fake_agent.steps)
    simulator.before_step = None
    simulator.forget_local()
    assert simulator.answer(prompt) == oracle(prompt, 4)


def test_a_slot_that_changes_during_the_copy_is_noticed(engine, oracle, fake_agent):
    simulator = engine()
    prompt = prompt_of(600)
    simulator.answer(prompt)
    fake_agent.wait_for(lambda: len(fake_agent.chunks) == 2)
    simulator.forget_local()
    victim = list(fake_agent.chunks)[1]
    simulator.after_load = lambda: victim in fake_agent.chunks and fake_agent.take_away(victim)
    assert simulator.answer(prompt) == oracle(prompt, 4)
    assert simulator.failed_steps == 1


def test_a_failed_load_while_steps_overlap_stops_the_engine(engine, fake_agent):
    simulator = engine(asynchronous=True)
    prompt = prompt_of(600)
    simulator.answer(prompt)
    fake_agent.wait_for(lambda: len(fake_agent.chunks) == 2)
    simulator.forget_local()
    victim = list(fake_agent.chunks)[1]
    simulator.before_step = lambda output: output.has_sync_kv_loads and fake_agent.take_away(victim)
    with pytest.raises(Exception, match="must restart rather than answer wrongly"):
        simulator.answer(prompt)


def test_two_requests_on_one_failed_chunk_are_both_right(engine, oracle, fake_agent):
    simulator = engine(budget=2048)
    prompt = prompt_of(600)
    simulator.answer(prompt)
    fake_agent.wait_for(lambda: len(fake_agent.chunks) == 2)
    simulator.forget_local()
    victim = next(iter(fake_agent.chunks))
    simulator.before_step = lambda output: (
        output.has_sync_kv_loads and victim in fake_agent.chunks and fake_agent.take_away(victim)
    )
    simulator.add("one", prompt)
    simulator.add("two", prompt)
    simulator.run()
    assert simulator.outputs["one"] == simulator.outputs["two"] == oracle(prompt, 4)
    assert simulator.failed_steps


def test_preempted_requests_go_on_rightly(engine, asynchronous, oracle, fake_agent):
    simulator = engine(blocks=44, asynchronous=asynchronous)
    prompts = {f"r{n}": prompt_of(500, seed=n) for n in range(3)}
    for name, prompt in prompts.items():
        simulator.add(name, prompt, 200)
    simulator.run()
    assert any(lookup.tokens > 500 for lookup in lookups(fake_agent)), "nobody was preempted"
    for name, prompt in prompts.items():
        assert simulator.outputs[name] == oracle(prompt, 200)


def test_a_reset_of_running_requests_matches_anew(simulator, oracle):
    prompt = prompt_of(600)
    simulator.add("one", prompt, 30)
    for _ in range(6):
        simulator.step()
    while simulator.in_flight:
        simulator.take_back()
    simulator.scheduler.reset_prefix_cache(reset_running_requests=True)
    simulator.run()
    assert simulator.outputs["one"] == oracle(prompt, 30)


def test_aborted_requests_release_their_leases(simulator, oracle, fake_agent):
    prompt = prompt_of(1000)
    simulator.answer(prompt)
    fake_agent.wait_for(lambda: len(fake_agent.chunks) == 3)
    simulator.forget_local()
    simulator.add("gone", prompt)
    simulator.abort("gone")
    simulator.add("loading", prompt)
    simulator.step()
    simulator.abort("loading")
    simulator.run()
    fake_agent.wait_for(lambda: {"gone", "loading"} <= set(releases(fake_agent)))
    assert simulator.half.live_requests == 0
    assert simulator.answer(prompt) == oracle(prompt, 4)


def test_leases_last_until_the_step_that_loaded_is_reported(engine, fake_agent):
    simulator = engine(asynchronous=True)
    prompt = prompt_of(600)
    simulator.answer(prompt)
    fake_agent.wait_for(lambda: len(fake_agent.chunks) == 2)
    simulator.forget_local()
    simulator.add("loading", prompt)
    simulator.step()
    simulator.abort("loading")
    assert simulator.half.live_requests == 1
    simulator.run()
    fake_agent.wait_for(lambda: releases(fake_agent).count("loading") == 1)


def test_requests_that_finish_in_their_first_step_are_stored_and_recorded(engine, asynchronous, fake_agent):
    simulator = engine(asynchronous=asynchronous, budget=2048)
    simulator.answer(prompt_of(600), 1)
    fake_agent.wait_for(lambda: len(fake_agent.chunks) == 2 and len(records(fake_agent)) == 1)
    assert simulator.half.live_requests == 0


@pytest.mark.parametrize("right", [0, 1, 3], ids=["none-accepted", "one-accepted", "all-accepted"])
def test_speculative_tokens_are_never_committed(engine, oracle, draft, fake_agent, asynchronous, right):
    simulator = engine(spec_tokens=3, asynchronous=asynchronous)
    simulator.drafts = draft(right)
    prompt = prompt_of(500)
    assert simulator.answer(prompt, 300)[:300] == oracle(prompt, 300)
    fake_agent.wait_for(lambda: len(fake_agent.chunks) >= 3)
    simulator.drafts = None if not asynchronous else simulator.drafts
    simulator.forget_local()
    follow_up = prompt + oracle(prompt, 300) + [1, 2, 3]
    assert simulator.answer(follow_up, 1)[:1] == oracle(follow_up, 1)


def test_prompt_logprobs_load_nothing(engine, oracle, fake_agent):
    simulator = engine()
    prompt = prompt_of(600)
    simulator.answer(prompt)
    fake_agent.wait_for(lambda: len(fake_agent.chunks) == 2)
    simulator.forget_local()
    assert simulator.answer(prompt, sampling={"prompt_logprobs": 1}) == oracle(prompt, 4)
    fake_agent.wait_for(lambda: len(records(fake_agent)) == 2)
    assert records(fake_agent)[1].hit_tokens == {}
    fake_agent.wait_for(lambda: len(releases(fake_agent)) == 2)


def test_an_agent_that_does_not_answer_is_not_waited_for(simulator, oracle, fake_agent):
    prompt = prompt_of(600)
    simulator.answer(prompt)
    fake_agent.wait_for(lambda: len(fake_agent.chunks) == 2)
    simulator.forget_local()
    fake_agent.answering = False
    assert simulator.answer(prompt) == oracle(prompt, 4)
    fake_agent.release_answers()
    simulator.forget_local()
    assert simulator.answer(prompt) == oracle(prompt, 4)
    fake_agent.wait_for(lambda: len(records(fake_agent)) == 3)
    assert [record.hit_tokens for record in records(fake_agent)[1:]] == [{}, {1: 512}]


def test_a_pending_answer_is_waited_for_and_loads_all(simulator, oracle, fake_agent):
    prompt = prompt_of(1000)
    simulator.answer(prompt)
    fake_agent.wait_for(lambda: len(fake_agent.chunks) == 3)
    simulator.forget_local()
    fake_agent.pending, fake_agent.tier = True, 2
    simulator.add("slow", prompt)
    for _ in range(5):
        simulator.step()
    assert simulator.outputs["slow"] == []
    fake_agent.finish_pending()
    simulator.run()
    assert simulator.outputs["slow"] == oracle(prompt, 4)
    fake_agent.wait_for(lambda: len(records(fake_agent)) == 2)
    assert records(fake_agent)[1].hit_tokens == {2: 768}


def test_more_chunks_than_slots_store_a_prefix(tiny_model, tmp_path, engine, oracle):
    engine.agent.grant = 2
    engine.agent.slots = 2
    simulator = engine()
    prompt = prompt_of(1500)
    assert simulator.answer(prompt) == oracle(prompt, 4)
    engine.agent.wait_for(lambda: len(engine.agent.chunks) == 2)
    assert {len(step.discards) for step in engine.agent.steps} == {0}


@pytest.mark.parametrize("keep", [True, False], ids=["arena-kept", "arena-lost"])
def test_the_agent_may_die_and_come_back_at_any_step(simulator, engine, oracle, fake_agent, keep):
    prompt = prompt_of(1500)
    for step in range(4):
        simulator.add(f"r{step}", prompt, 20)
        for _ in range(step + 1):
            simulator.step()
        fake_agent.restart(keep)
        simulator.run()
        assert simulator.outputs[f"r{step}"] == oracle(prompt, 20)
        engine.wait_ready(simulator)
        simulator.forget_local()
    assert simulator.answer(prompt) == oracle(prompt, 4)
    assert simulator.answer(prompt_of(600, seed=5)) == oracle(prompt_of(600, seed=5), 4)
    fake_agent.wait_for(lambda: len(fake_agent.chunks) >= 5)


def test_no_agent_at_all_is_only_a_miss(engine, oracle, fake_agent):
    fake_agent.close()
    simulator = engine(ready=False)
    prompt = prompt_of(600)
    assert simulator.answer(prompt) == oracle(prompt, 4)
    fake_agent.start()
    engine.wait_ready(simulator)
    simulator.forget_local()
    simulator.answer(prompt)
    fake_agent.wait_for(lambda: len(fake_agent.chunks) == 2)


def test_a_disabled_agent_gets_records_and_no_chunks(engine, oracle, fake_agent):
    fake_agent.disabled = "memory: 0"
    simulator = engine(ready=False)
    fake_agent.wait_for(lambda: fake_agent.roles == ["scheduler", "worker"])
    prompt = prompt_of(600)
    assert simulator.answer(prompt) == oracle(prompt, 4)
    fake_agent.wait_for(lambda: len(records(fake_agent)) == 1)
    assert fake_agent.chunks == {}
    assert not lookups(fake_agent)


def test_a_reset_with_the_connector_forgets_the_agents_chunks(simulator, fake_agent):
    prompt = prompt_of(600)
    simulator.answer(prompt)
    fake_agent.wait_for(lambda: len(fake_agent.chunks) == 2)
    assert simulator.scheduler.reset_prefix_cache(reset_connector=True)
    fake_agent.wait_for(lambda: not fake_agent.chunks)
    simulator.answer(prompt)
    fake_agent.wait_for(lambda: len(fake_agent.chunks) == 2)


def test_load_reports_end_with_an_idle_engine(simulator, fake_agent):
    # Reports are 50 ms apart: the two must decode together for longer than that on any machine.
    simulator.add("one", prompt_of(900), 600)
    simulator.add("two", prompt_of(900, seed=1), 600)
    simulator.run()

    def loads():
        return [step.load for step in fake_agent.steps if step.load is not None]

    fake_agent.wait_for(lambda: loads() and loads()[-1].running_requests == 0)
    assert any(load.running_requests == 2 for load in loads())
    assert loads()[-1].kv_tokens_total == 600 * 32
    assert loads()[-1].prefill_seconds_per_token >= 0


def test_load_reports_name_the_last_request_of_a_router(simulator, fake_agent):
    sent = "0123456789abcdef" * 2
    simulator.add(f"chatcmpl-{sent}-1a2b3c4d", prompt_of(300))
    simulator.add("somebody-else", prompt_of(40, seed=1))
    simulator.run()
    fake_agent.wait_for(
        lambda: any(step.load and step.load.last_accepted == {"": sent} for step in fake_agent.steps)
    )


def test_quiesce_is_answered_by_an_idle_engine(simulator, fake_agent):
    fake_agent.quiesce(7)
    fake_agent.wait_for(lambda: fake_agent.quiesced() == [7])


def test_many_requests_in_random_order(engine, asynchronous, oracle, fake_agent):
    source = random.Random(11)
    simulator = engine(blocks=160, asynchronous=asynchronous)
    stems = [prompt_of(800, seed=n) for n in range(3)]
    wanted = {}
    for number in range(30):
        stem = source.choice(stems)
        prompt = stem[: source.randrange(1, 800)] + prompt_of(source.randrange(1, 300), seed=100 + number)
        wanted[f"r{number}"] = (prompt, source.randrange(1, 60))
        simulator.add(f"r{number}", *wanted[f"r{number}"])
        for _ in range(source.randrange(4)):
            simulator.step()
        if source.random() < 0.2:
            simulator.abort(f"r{number}")
            del wanted[f"r{number}"]
        if source.random() < 0.2:
            fake_agent.drop()
    simulator.run()
    for name, (prompt, count) in wanted.items():
        assert simulator.outputs[name] == oracle(prompt, count), name
    assert simulator.half.live_requests == 0
