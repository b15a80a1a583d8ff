"""Scores of reward models and judges against the float64 oracle."""

import numpy as np
import pytest
from safetensors.numpy import save_file
from scoring_models import (
    FAMILIES,
    last_score,
    merged,
    odds,
    scoring_config,
    small_tokenizer,
    write_classifier_adapter,
    write_scoring_model,
)
from slow_cases import few_of

from mindrlhf.configs.grpo import RewardSettings
from mindrlhf.metrics.flops import forward_flops
from mindrlhf.rewards.batches import Sample
from mindrlhf.rewards.runner import RewardRunner

ANSWERS = ["4", "The answer is 4.", "no", "yes " * 30, ""]
QUESTIONS = ["What is 2 + 2?", "What is " + "1 + " * 25 + "1?"]
SAMPLES = [Sample(question, answer, {"question": question}) for question in QUESTIONS for answer in ANSWERS]
YES, NO = 269, 267


def table(samples, *functions):
    with RewardRunner(RewardSettings(functions=functions)) as runner:
        return runner.score(samples)


def scores(samples, folder, name="model", **settings):
    found = table(samples, {"name": name, "path": str(folder), **settings})
    assert found.errors == {name: {}}
    return found.by_function[name]


def classified_ids(question, answer):
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
    return small_tokenizer().encode(text)


def oracle(config, weights, ids=classified_ids):
    return [last_score(config, weights, ids(*sample[:2])) for sample in SAMPLES]


def assert_close(found, expected):
    assert np.ptp(expected) > 0.05
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """(folder, configuration, weights)."""
    folder, config = tmp_path_factory.mktemp("model") / "own", scoring_config()
    return folder, config, write_scoring_model(folder, config)


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    folder, config = tmp_path_factory.mktemp("judge") / "own", scoring_config(value_head=False)
    return folder, config, write_scoring_model(folder, config)


@pytest.mark.parametrize("family", few_of([*FAMILIES][:1], [*FAMILIES][1:]))
def test_a_classifier_s_scores_are_the_oracle_s(tmp_path, family):
    config = scoring_config(family)
    weights = write_scoring_model(tmp_path, config)
    assert_close(scores(SAMPLES, tmp_path), oracle(config, weights))


def test_a_bias_is_added(tmp_path):
    config = scoring_config()
    weights = write_scoring_model(tmp_path, config) | {"score.bias": np.array([3.5], np.float32)}
    save_file(weights, tmp_path / "model.safetensors")
    assert_close(scores(SAMPLES, tmp_path), oracle(config, weights))


def test_the_last_token_that_is_no_pad_is_read(tmp_path):
    """As in transformers, whatever the pad is: here the line break behind the last turn."""
    config = scoring_config(pad_token_id=small_tokenizer().encode("\n")[0])
    weights = write_scoring_model(tmp_path, config)
    assert_close(scores(SAMPLES, tmp_path), oracle(config, weights, lambda *texts: classified_ids(*texts)[:-1]))


@pytest.mark.parametrize(("as_path", "head"), few_of([(True, True), (False, False)], [(True, False), (False, True)]))
def test_an_adapter_over_a_classifier(tmp_path, classifier, head, as_path):
    folder, config, weights = classifier
    adapter = write_classifier_adapter(tmp_path / "adapter", folder, config, head)
    given = {"folder": tmp_path / "adapter"} if as_path else {"folder": folder, "adapter": str(tmp_path / "adapter")}
    assert_close(scores(SAMPLES, **given), oracle(config, merged(weights, adapter)))


def test_an_adapter_with_a_score_over_a_language_model(tmp_path, language_model):
    folder, config, weights = language_model
    adapter = write_classifier_adapter(tmp_path / "adapter", folder, config)
    assert_close(scores(SAMPLES, tmp_path / "adapter"), oracle(config.as_critic(), merged(weights, adapter)))


def test_a_row_s_conversation_is_read(classifier):
    """The model reads the row's messages, and not the text that the policy's template made of them."""
    folder, config, weights = classifier
    talk = '[{"role": "system", "content": "no"}, {"role": "user", "content": "4?"}]'
    fields = {"prompt": talk, "json_fields": '{"prompt": "json"}'}
    text = "<|im_start|>system\nno<|im_end|>\n<|im_start|>user\n4?<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    expected = last_score(config, weights, small_tokenizer().encode(text))
    np.testing.assert_allclose(scores([Sample("another text", "yes", fields)], folder), [expected], atol=2e-5)


def test_another_chat_template_and_no_thoughts(classifier):
    folder, config, weights = classifier
    found = scores(
        [Sample("a", "yes </think> no", {})],
        folder,
        chat_template="{% for m in messages %}{{ m.content }}|{% endfor %}",
        strip_thinking=True,
    )
    np.testing.assert_allclose(found, [last_score(config, weights, small_tokenizer().encode("a|no|"))], atol=2e-5)


@pytest.mark.parametrize("name", few_of(["judge"], ["model"]))
def test_a_score_depends_on_its_own_conversation_alone(classifier, language_model, name):
    """Not on the others, their order, how often each is there, or where batches are cut.

    Attention pads prompts to the longest of a batch, which moves the last digits with AVX-512.
    """
    folder = (classifier if name == "model" else language_model)[0]
    extra = {"template": "rubric"} if name == "judge" else {}
    whole = scores(SAMPLES, folder, name, **extra)
    order = np.random.default_rng(0).permutation(len(SAMPLES))
    mixed = scores([SAMPLES[i] for i in order] * 2, folder, name, max_tokens_per_batch=200, **extra)
    np.testing.assert_allclose(mixed, np.tile(whole[order], 2), rtol=2e-6, atol=5e-7)
    settings = {"name": name, "path": str(folder), **extra}
    with RewardRunner(RewardSettings(functions=[settings])) as runner:
        alone = [runner.score([sample]).by_function[name][0] for sample in SAMPLES[2:7]]
    np.testing.assert_allclose(alone, whole[2:7], rtol=2e-6, atol=5e-7)


def test_operations_are_those_of_distinct_conversations(classifier):
    """A question counts once with all of its answers, and an answer once."""
    folder, config, _ = classifier
    expected = 0.0
    for question in QUESTIONS:
        prompt = len(small_tokenizer().encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"))
        answers = [len(classified_ids(question, answer)) - prompt for answer in ANSWERS]
        expected += forward_flops(config, prompt, answers)
    with RewardRunner(RewardSettings(functions=[{"name": "model", "path": str(folder)}])) as runner:
        assert runner.score(SAMPLES).operations == expected
        assert runner.score(SAMPLES * 2).operations == expected


def judged_ids(settings_of, question, answer):
    _, ((message,)) = settings_of.messages(Sample(question, answer, {"question": question, "ground_truth": "4"}))
    text = f"<|im_start|>user\n{message['content']}<|im_end|>\n<|im_start|>assistant\n"
    return small_tokenizer().encode(text)


@pytest.mark.parametrize(
    ("family", "tied"),
    few_of(
        [(family, row % 2 == 0) for row, family in enumerate(FAMILIES)],
        [(family, row % 2 == 1) for row, family in enumerate(FAMILIES)],
    ),
)
def test_a_judge_s_score_is_the_share_of_yes(tmp_path, family, tied):
    config = scoring_config(family, value_head=False, tie_word_embeddings=tied, num_layers=2)
    weights = write_scoring_model(tmp_path, config)
    settings = {"name": "judge", "path": str(tmp_path), "template": "correct"}
    samples = [sample._replace(fields={**sample.fields, "ground_truth": "4"}) for sample in SAMPLES]
    with RewardRunner(RewardSettings(functions=[settings])) as runner:
        assert runner.comparing == ("judge",)
        found = runner.score(samples).by_function["judge"]
        (model,) = runner.models._models.values()
        expected = [odds(config, weights, judged_ids(model._template, *sample[:2]), (YES, NO)) for sample in SAMPLES]
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert np.ptp(np.log(expected)) > 0.5
