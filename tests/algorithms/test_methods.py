"""Names and options of policy losses: what is refused, and in which words."""

import subprocess
import sys

import numpy as np
import pytest

from mindrlhf.algorithms.advantages import ADVANTAGES, RewardBatch, compute_advantages
from mindrlhf.algorithms.aggregation import MODES
from mindrlhf.algorithms.losses import POLICY_LOSSES, policy_loss
from mindrlhf.algorithms.methods import DESCRIPTIONS
from mindrlhf.configs.algorithm import AlgorithmSettings
from mindrlhf.errors import UserError


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_name_gives_a_loss(name):
    loss = policy_loss(name)
    assert loss.name == name
    assert callable(loss.losses)
    assert loss.aggregation is None or loss.aggregation in MODES
    assert (loss.select is not None) == (name in ("clip_cov", "kl_cov"))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("clp", {}, r"Unknown policy loss 'clp': did you mean 'clip'\? Known are .*cispo"),
        ("clip", {"epsilon": 0.2}, r"Unknown option of policy loss clip 'epsilon': did you mean 'epsilon_low'\?"),
        ("gpg", {"epsilon_low": 0.2}, r"Unknown option of policy loss gpg 'epsilon_low': there are none"),
        (
            "clip",
            {"epsilon_low": -0.1},
            r"Option epsilon_low of policy loss clip is -0.1: .*greater than or equal to 0",
        ),
        ("clip", {"dual_clip": 1.0}, r"Option dual_clip of policy loss clip is 1.0: .*greater than 1"),
        ("clip", {"epsilon_high": "wide"}, r"Option epsilon_high of policy loss clip is 'wide': .*number"),
        ("clip", {"epsilon_high": float("nan")}, r"Option epsilon_high of policy loss clip is nan: .*finite"),
        (
            "cispo",
            {"cispo_cap": "both"},
            r"Option cispo_cap of policy loss cispo is 'both': .*'relative' or 'absolute'",
        ),
        (
            "clip_cov",
            {"clip_cov_ratio": 2},
            r"Option clip_cov_ratio of policy loss clip_cov is 2: .*less than or equal",
        ),
    ],
)
def test_mistakes_are_named(name, options, message):
    with pytest.raises(UserError, match=message):
        policy_loss(name, options)


def test_names_are_known_without_mindspore():
    """Settings are checked before anything heavy is loaded."""
    code = (
        "import sys; from mindrlhf.algorithms import losses, advantages, aggregation, mismatch; "
        "assert losses.POLICY_LOSSES; sys.exit('mindspore' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_users_function_is_found_with_its_traits_and_options(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from mindrlhf.algorithms.advantages import ADVANTAGES\n"
        "def centred(batch, *, factor: float = 1.0):\n"
        "    return [factor * (score - score.mean()) for score in batch.scores()]\n"
        "@ADVANTAGES.register(compares=True)\n"
        "def compared(batch):\n"
        "    return centred(batch)\n"
        "def half(*, share: float = 0.5):\n"
        "    def losses(log_probs, old_log_probs, advantages, mask):\n"
        "        return -share * advantages * log_probs * mask, {}\n"
        "    return losses\n"
    )
    batch = RewardBatch([np.array([1.0, 3.0])])
    (got,) = compute_advantages(f"{file}:centred", batch, factor=2.0)
    np.testing.assert_array_equal(got, [-2.0, 2.0])
    assert not ADVANTAGES.find(f"{file}:centred").compares
    assert ADVANTAGES.find(f"{file}:compared").compares
    del ADVANTAGES["compared"]  # other tests are about the shipped ones
    loss = policy_loss(f"{file}:half", {"share": 0.25})
    values, _ = loss.losses(np.full((1, 2), -1.0), None, np.ones((1, 2)), np.array([[1.0, 0.0]]))
    np.testing.assert_array_equal(values, [[0.25, 0.0]])
    with pytest.raises(
        UserError, match=r"Unknown option of advantage .*mine.py:centred 'factr': did you mean 'factor'"
    ):
        compute_advantages(f"{file}:centred", batch, factr=2.0)
    with pytest.raises(UserError, match=r"mine.py has no 'centered' \(nearest: 'centred'\)"):
        ADVANTAGES.find(f"{file}:centered")


def test_settings_offer_every_option_once_and_pass_a_users_own(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def centred(batch, *, factor: float = 1.0):\n    return []\n")
    settings = AlgorithmSettings(advantage=f"{file}:centred", advantage_options={"factor": 3.0}, epsilon_low=0.1)
    assert settings.options_of(settings.method) == {"factor": 3.0}
    assert settings.options_of(POLICY_LOSSES["clip"]) == {"epsilon_low": 0.1}
    for methods in (ADVANTAGES, POLICY_LOSSES):
        for method in methods.values():
            for name in method.options:
                if name in DESCRIPTIONS:
                    setting = AlgorithmSettings.model_fields[name]
                    assert DESCRIPTIONS[name].split(" (")[0].rstrip(".") in setting.description
