"""Samples that a model cannot score, unscored and counted with the reason; verdicts as text."""

import numpy as np
import pytest
from scoring_models import scoring_config, small_tokenizer, write_scoring_model

from mindrlhf.configs.grpo import RewardSettings
from mindrlhf.judging.questions import JudgeTemplate, read_verdict
from mindrlhf.rewards.batches import Sample
from mindrlhf.rewards.runner import RewardRunner

FINE = Sample("1 + 1", "2", {"question": "1 + 1"})


def score(samples, *functions):
    with RewardRunner(RewardSettings(functions=functions)) as runner:
        return runner.score(samples)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier") / "own"
    write_scoring_model(folder, scoring_config())
    return str(folder)


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judge") / "own"
    write_scoring_model(folder, scoring_config(value_head=False))
    return {"name": "judge", "path": str(folder), "template": "rubric"}


def test_a_long_answer_and_a_broken_conversation(classifier):
    broken = {"prompt": '[{"role": 3}]', "json_fields": '{"prompt": "json"}'}
    samples = [FINE, Sample("1 + 1", "2 " * 100, {}), Sample("1 + 1", "2", broken), FINE]
    table = score(samples, {"name": "model", "path": classifier, "max_length": 64})
    assert np.isnan(table.totals).tolist() == [False, True, True, False]
    assert table.totals[0] == table.totals[3]
    assert table.failures == {"model": 2}
    assert "max_length is 64" in table.errors["model"][1]
    assert "message 0 should be" in table.errors["model"][2]
    assert score([], {"name": "model", "path": classifier}).totals.tolist() == []


def test_a_template_that_fails_for_some(classifier):
    picky = "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}"
    function = {"name": "model", "path": classifier, "chat_template": picky + "{% endfor %}"}
    table = score([FINE, Sample("1", "bad", {}), FINE], function)
    assert np.isnan(table.totals).tolist() == [False, True, False]
    assert "chat template fails" in table.errors["model"][1]


def test_other_functions_count_with_their_weights(classifier, judge):
    functions = {"name": "model", "path": classifier, "weight": 0.5}, judge, {"name": "length", "args": {"target": 3}}
    fields = {"question": "1 + 1", "response_length": "3"}
    table = score([Sample("1 + 1", "2", fields)], *functions)
    parts = [table.by_function[name][0] for name in ("model", "judge", "length")]
    assert table.totals[0] == pytest.approx(0.5 * parts[0] + parts[1] + parts[2], rel=1e-12)


def test_generated_verdicts(judge):
    """Random weights say neither word of the first pair; the second's first word is in any text."""
    written = {**judge, "verdict": "generated", "max_new_tokens": 12, "max_length": 256}
    samples = [FINE, Sample("1 + 1", "3", {"question": "1 + 1"})]
    table = score(samples, {**written, "words": ["certainly", "never"]})
    assert np.isnan(table.totals).all()
    assert "the judge says neither certainly nor never: " in table.errors["judge"][0]
    said = table.errors["judge"][0].partition(": ")[2]
    assert said
    again = score(samples[::-1], {**written, "words": ["certainly", "never"]})
    assert again.errors["judge"][1] == table.errors["judge"][0]


def test_a_generated_verdict_is_recorded(judge, monkeypatch):
    from mindrlhf.judging import scorer

    monkeypatch.setattr(scorer, "read_verdict", lambda text, words: 1.0)
    table = score([FINE], {**judge, "verdict": "generated", "max_new_tokens": 4, "max_length": 256})
    assert table.totals.tolist() == [1.0]
    assert table.notes[0]["judge"]["verdict"]


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("Yes", 1.0),
        ("no.", 0.0),
        ("It says yes, but the answer is: No", 0.0),
        ("not at all, yesterday", None),
        ("", None),
        ("<think>no no</think> yes", 1.0),
    ],
)
def test_the_last_word_is_the_verdict(text, verdict):
    assert read_verdict(text, ("yes", "no")) == verdict


def test_a_judge_s_question():
    from mindrlhf.configs.reward_models import JudgeSettings

    def asked(sample, **settings):
        (bare,), (whole,) = JudgeTemplate(JudgeSettings(path="x", **settings)).messages(sample)
        assert bare["content"].partition("judge:\n")[0] == whole["content"].partition("judge:\n")[0]
        return whole["content"]

    sample = Sample("text", "my <think>reasons</think> answer", {"question": "why?", "ground_truth": "because"})
    text = asked(sample, strip_thinking=True)
    assert "why?" in text
    assert "because" in text
    assert "reasons" not in text
    assert "one word, yes or no" in text
    assert "Be kind" in asked(sample, template="rubric", rubric="Be kind", verdict="generated")
    own = sample._replace(fields={**sample.fields, "rubric": "Be brief"})
    assert "Be brief" in asked(own, template="rubric", rubric="Be kind")
    assert len(small_tokenizer().encode(text)) > 10
