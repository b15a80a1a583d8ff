"""The model card: base, data, settings, seed, and the curve at a few steps."""

from mindrlhf.checkpoint.model_card import ModelCard

CARD = ModelCard("Tiny", "reinforcement learning", "train.jsonl: 8 prompts", 7, {"optimizer.lr": "1e-05"})


def test_the_curve_has_first_and_last_step_and_a_few_between():
    rows = [{"step": 0, "val/accuracy": 0.0}]  # the validation before the first step has no reward
    rows += [{"step": step, "critic/rewards/mean": step / 100, "train/loss": 9.0} for step in range(1, 101)]
    card = CARD.measured({"critic/rewards/mean": 1.0, "timing_s/step": 3.0}, rows)
    assert len(card.curve) == 11
    assert {1: 0.01, 100: 1.0}.items() <= card.curve.items()
    assert all(value == step / 100 for step, value in card.curve.items())
    text = str(card)
    assert "| seed | 7 |" in text
    assert "| 1 | 0.01 |" in text
    assert "| critic/rewards/mean | 1 |" in text
    assert "timing_s" not in text


def test_a_run_of_fine_tuning_shows_its_loss():
    assert CARD.measured({}, [{"step": 4, "train/loss": 2.5}]).curve == {4: 2.5}


def test_a_run_without_a_metrics_file_has_no_curve():
    assert "by step" not in str(CARD.measured({}, []))
