"""The generation engine against stored greedy continuations, the train graph, and a simulation in float64."""

import gc
from dataclasses import replace

import numpy as np
import pytest
from engine_subject import FILTERS, NEW, SEED, STEP, STOP, Subject, by_sample
from slow_cases import few_of
from small_model import Golden

from mindrlhf.configs.grpo import SamplingSettings
from mindrlhf.errors import UserError
from mindrlhf.rollout.engine import Engine
from mindrlhf.types import Prompt


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject.random()


@pytest.fixture(scope="module")
def plain(subject) -> Engine:
    """Nothing filtered; fewer slots than samples, so that slots are refilled."""
    return subject.engine(slots=4)


@pytest.fixture(scope="module")
def groups(subject, plain):
    return plain.generate(subject.prompts, 3, STEP)


@pytest.fixture(scope="module")
def filtering(subject) -> Engine:
    return subject.engine(slots=6, min_new_tokens=4, **FILTERS)


def test_a_prompt_that_comes_again_gets_further_samples(subject, plain, groups):
    """The same as if it had come once and been asked for twice as many; the first time as it always was."""
    again = [replace(prompt, occurrence=1) for prompt in subject.prompts]
    both = plain.generate([*subject.prompts, *again], 3, STEP)
    assert_same(groups, both[: len(groups)])
    many = by_sample(plain.generate(subject.prompts, 6, STEP))
    for first, group in zip(groups, both[len(groups) :], strict=True):
        said = [rollout.response_ids.tolist() for rollout in group.rollouts]
        assert said == [many[group.prompt.id, sample].response_ids.tolist() for sample in (3, 4, 5)]
        assert said != [rollout.response_ids.tolist() for rollout in first.rollouts]


def assert_same(groups, others):
    """Every sample of `groups` is in `others`, with the same tokens."""
    known = by_sample(others)
    for key, rollout in by_sample(groups).items():
        np.testing.assert_array_equal(rollout.response_ids, known[key].response_ids)
        assert rollout.finish_reason == known[key].finish_reason
        for name in ("policy_log_probs", "behaviour_log_probs"):
            np.testing.assert_allclose(rollout.row(name), known[key].row(name), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "slots"),
    few_of(
        [("qwen2_tiny_lora", 2), ("qwen3_moe_tiny", 6)],
        [
            ("qwen3_tiny", 5),
            ("llama3_tiny", 3),
            ("qwen3_moe_tiny", 1),
            ("qwen2_tiny", 2),
            ("qwen3_tiny_lora", 5),
            ("qwen2_tiny", 6),
            ("qwen3_tiny", 1),
            ("qwen3_moe_dense_first_tiny", 3),
        ],
    ),
)
def test_greedy_tokens_are_the_stored_ones(shared, name, slots):
    """Prompts of 19, 11 and 6 tokens in one batch, in any order and with leftovers of others in the cache."""
    golden = Golden.load(shared / "golden" / name)
    decoder, _ = golden.build()
    new = golden.greedy.shape[1]
    engine = Engine(golden.config, decoder, SamplingSettings(max_new_tokens=new, temperature=0.0), slots, 19, (), 0)
    prompts = [Prompt(i, ids) for i, ids in enumerate(golden.sequences)]
    for order in ((0, 1, 2), (2, 0, 1)):
        for group in engine.generate([prompts[i] for i in order], 2, 1):
            for rollout in group.rollouts:
                np.testing.assert_array_equal(rollout.response_ids, golden.greedy[group.prompt.id])
                assert rollout.finish_reason == "length"
                assert (rollout.row("behaviour_log_probs") == 0).all()


def test_shape_of_what_comes_out(subject, plain, groups):
    assert [group.prompt for group in groups] == subject.prompts
    reasons = set()
    for group in groups:
        assert [rollout.sample_index for rollout in group.rollouts] == [0, 1, 2]
        for rollout in group.rollouts:
            assert rollout.prompt_id == group.prompt.id
            assert rollout.seed == SEED
            assert rollout.response_ids.dtype == np.int32
            assert rollout.sampled.tolist() == [True] * len(rollout.response_ids)
            for log_probs in (rollout.row("behaviour_log_probs"), rollout.row("policy_log_probs")):
                assert log_probs.dtype == np.float32
                assert log_probs.shape == rollout.response_ids.shape
            reasons.add(rollout.finish_reason)
            assert not np.isin(rollout.response_ids[:-1], STOP).any()
            if rollout.finish_reason == "eos":
                assert rollout.response_ids[-1] in STOP
            else:
                assert rollout.finish_reason == "length"
                assert len(rollout.response_ids) == NEW
    assert reasons == {"eos", "length"}  # otherwise this test has seen half of it


def test_tokens_and_log_probs_are_those_of_the_simulation(subject, groups):
    for (prompt_id, sample), rollout in by_sample(groups).items():
        prompt = next(p for p in subject.prompts if p.id == prompt_id)
        response, log_probs = subject.simulated(prompt, sample)
        assert rollout.response_ids.tolist() == response
        np.testing.assert_allclose(rollout.row("policy_log_probs"), log_probs, rtol=0, atol=2e-5)
        np.testing.assert_array_equal(rollout.row("behaviour_log_probs"), rollout.row("policy_log_probs"))


def test_log_probs_are_those_of_the_train_graph(subject, groups):
    for group, scored in zip(groups, subject.score(groups), strict=True):
        for rollout, expected in zip(group.rollouts, scored, strict=True):
            np.testing.assert_allclose(rollout.row("policy_log_probs"), expected, rtol=0, atol=2e-5)


def test_order_number_and_company_of_prompts_do_not_matter(subject, plain, groups):
    assert_same(plain.generate(subject.prompts[::-1], 3, STEP), groups)
    assert_same(plain.generate([subject.prompts[i] for i in (4, 0)], 2, STEP), groups)


@pytest.mark.parametrize(("slots", "bucket"), few_of([(7, 16)], [(40, 4), (5, 64)]))
def test_slots_and_bucket_do_not_matter(subject, groups, slots, bucket):
    """Seven slots are refilled one at a time, forty take all samples at once; prompts are padded beyond the longest."""
    assert_same(subject.engine(slots, bucket).generate(subject.prompts, 3, STEP), groups)


def test_step_seed_and_sample_give_other_tokens(subject, plain, groups):
    responses = [rollout.response_ids.tolist() for rollout in groups[2].rollouts]
    other = plain.generate(subject.prompts[2:], 3, STEP + 1)
    responses += [rollout.response_ids.tolist() for rollout in other[0].rollouts]
    assert len({tuple(response) for response in responses}) == 6


def test_new_weights_are_seen_at_once(subject, plain, groups):
    """Training writes into the same parameters: the next rollouts come from what it wrote."""
    head = subject.parameters["lm_head.weight"].asnumpy()
    kept = head.copy()
    try:
        head[...] = kept[::-1]
        for group in plain.generate(subject.prompts[3:], 3, STEP):
            for rollout in group.rollouts:
                response, log_probs = subject.simulated(
                    group.prompt, rollout.sample_index, {"lm_head.weight": kept[::-1]}
                )
                assert rollout.response_ids.tolist() == response
                np.testing.assert_allclose(rollout.row("policy_log_probs"), log_probs, rtol=0, atol=2e-5)
    finally:
        head[...] = kept
    assert_same(plain.generate(subject.prompts, 3, STEP), groups)


@pytest.mark.slow
def test_filters_penalty_and_least_length(subject, filtering):
    """All of them at once, with slots refilled: what a slot's last sample has seen must not stay behind."""
    groups = filtering.generate(subject.prompts, 3, STEP)
    for group in groups:
        for rollout in group.rollouts:
            response, log_probs = subject.simulated(group.prompt, rollout.sample_index, min_new_tokens=4, **FILTERS)
            assert rollout.response_ids.tolist() == response
            np.testing.assert_allclose(rollout.row("behaviour_log_probs"), log_probs, rtol=0, atol=5e-5)
    assert min(len(rollout.response_ids) for rollout in by_sample(groups).values()) > 4
    for group in groups:
        for rollout in group.rollouts:
            expected = subject.model.log_probs(group.prompt.token_ids, rollout.response_ids, FILTERS["temperature"])
            np.testing.assert_allclose(rollout.row("policy_log_probs"), expected, rtol=0, atol=2e-5)


def test_stop_strings_end_a_response_where_they_appear(subject, groups):
    def text(ids):
        return "".join(chr(ord("0") + i) for i in ids)

    # A text that a response holds across two tokens, so that it cannot be found token by token.
    longest = max(by_sample(groups).values(), key=lambda rollout: len(rollout.response_ids)).response_ids
    stop = text(longest[4:6])
    engine = subject.engine(slots=5, decode_text=text, stop_strings=(stop, "not to be found"))
    known, ended = by_sample(groups), 0
    for key, rollout in by_sample(engine.generate(subject.prompts, 3, STEP)).items():
        whole = known[key].response_ids
        found = text(whole).find(stop)
        length = found + 2 if found >= 0 else len(whole)
        np.testing.assert_array_equal(rollout.response_ids, whole[:length])
        by_stop_id = length == len(whole) and known[key].finish_reason == "eos"
        assert rollout.finish_reason == ("stop" if found >= 0 and not by_stop_id else known[key].finish_reason)
        ended += rollout.finish_reason == "stop"
    assert ended


def test_every_graph_compiles_once(subject, plain):
    """However often the pool of prefilled prompts is filled anew."""
    gc.collect()  # a compiled graph that dies takes the keys of equal inputs with it, and others compile again
    plain.generate(subject.prompts, 3, STEP)
    every = (plain.graphs.prefill, plain.graphs.admit, *plain.graphs.decodes.values())
    graphs = [len(graph.compile_cache) for graph in every]
    plain.generate(subject.prompts, 3, STEP)
    assert [len(graph.compile_cache) for graph in every] == graphs


def test_progress_and_statistics(subject, plain):
    calls = []
    groups = plain.generate(subject.prompts, 3, STEP, lambda *call: calls.append(call))
    seen, totals = np.array(calls).T
    lengths = [len(rollout.response_ids) for rollout in by_sample(groups).values()]
    assert seen.sum() == totals[-1] == sum(lengths)
    assert totals[0] == 15 * 12, "before anything is drawn, each may go on to the limit"
    assert np.all(np.diff(totals) <= 0), "an answer that ends leaves the rest of its limit"
    assert len(set(totals)) > 2
    assert seen.min() >= 0
    assert plain.statistics.tokens == sum(lengths)
    assert plain.statistics.compile_s == 0
    assert plain.statistics.decode_s > 0
    # Refilled slots: better than batches of four that wait for their longest.
    waiting = sum(max(lengths[start : start + 4]) for start in range(0, 15, 4))
    drawn_one_by_one = sum(lengths) - plain.statistics.accepted
    assert drawn_one_by_one / 4 <= plain.statistics.decode_steps < waiting


def test_cache_counts_its_bytes(subject, plain):
    # 2 layers of keys and values, 4 slots, 2 heads of width 8, 17 + 12 positions rounded up to 32, 4 bytes each.
    assert sum(p.nbytes for p in plain.cache.parameters) == 2 * 2 * 4 * 2 * 8 * 32 * 4


def test_a_prompt_beyond_the_limit_is_named(subject, plain):
    long = Prompt(42, np.zeros(18, np.int32))
    with pytest.raises(UserError, match="prompt 42 has 18 tokens and the limit is 17"):
        plain.generate([subject.prompts[0], long], 1, STEP)


def test_stop_strings_need_a_decoder(subject):
    with pytest.raises(ValueError, match="decode_text"):
        subject.engine(slots=1, stop_strings=("x",))
