"""A user's advantage and policy loss on small numbers: one sentence for each mistake, before a run generates."""

import os

import pytest

from mindrlhf.algorithms.advantages import ADVANTAGES
from mindrlhf.algorithms.losses import POLICY_LOSSES, policy_loss
from mindrlhf.algorithms.rehearsal import rehearse_advantage, rehearse_loss
from mindrlhf.errors import UserError


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_shipped_advantage_passes(name):
    needs_tokens = name in ("reinforce_plus_plus", "gae")
    rehearse_advantage(ADVANTAGES[name], {"gamma": 1.0} if needs_tokens else {})


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_shipped_loss_passes(name):
    rehearse_loss(policy_loss(name))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return [scores[:-1] for scores in batch.scores()]", "gives an array [3] for a group of 4 rewards"),
        ("return batch.scores()[:1]", "gives a list of 1 for 2 groups of 4 rewards"),
        ("return 'text'", "gives str 'text' for 2 groups"),
        ("return None", "gives NoneType None for 2 groups"),
        ("return [['a'] * 4] * 2", "gives str 'a' for a response"),
        ("return [scores / 0 for scores in batch.scores()]", "for finite rewards; look for a division by 0"),
        ("return [[[0.0] * 9] * 4] * 2", "gives 9 numbers for a response of 3 tokens"),
        ("return batch.nothing", "fails on 2 groups of 4 rewards with AttributeError: 'RewardBatch' object has no"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_mistakes_of_an_advantage(tmp_path, body, words):
    file = tmp_path / "mine.py"
    file.write_text(f"def f(batch):\n    {body}\n")
    with pytest.raises(UserError) as caught:
        rehearse_advantage(ADVANTAGES.find(f"{file}:f"), {})
    assert words in str(caught.value)
    assert str(caught.value).startswith("advantage ")


LOSS = """
from mindspore import ops

def f():
    def losses(log_probs, old_log_probs, advantages, mask):
        {body}
    return losses
"""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return (log_probs * mask).sum(), {}", "losses for 2 rows of 4 tokens: shape ()"),
        ("return log_probs * mask", "gives Tensor"),
        ("return log_probs * mask, {'a': mask.sum()}", "metric a for 2 rows of 4 tokens: shape ()"),
        ("return ops.log(log_probs) * mask, {}", "gives a loss that is not finite"),
        ("return ops.sqrt(log_probs - log_probs) * mask, {}", "gives a gradient that is not finite"),
        ("return nothing, {}", "fails on 2 rows of 4 tokens with NameError: name 'nothing' is not defined"),
        ("return log_probs[:, :3] * mask, {}", "fails on 2 rows of 4 tokens with ValueError"),
    ],
)
def test_mistakes_of_a_loss(tmp_path, monkeypatch, body, words):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.py"
    file.write_text(LOSS.format(body=body))
    with pytest.raises(UserError) as caught:
        rehearse_loss(policy_loss(f"{file}:f"))
    assert words in str(caught.value)
    assert os.getcwd() == str(tmp_path)
    assert not (tmp_path / "rank_0").exists(), "MindSpore's file about a graph that cannot be compiled"
