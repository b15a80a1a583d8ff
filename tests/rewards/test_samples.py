"""What reward functions are given of a response."""

import numpy as np
from step_parts import experience, with_context

from mindrlhf.rewards.samples import reward_samples
from mindrlhf.trainer.rollouts import with_tokens


def decode(ids):
    return " ".join(map(str, ids))


def test_a_response_without_a_partner():
    group = experience(3, [0.0, 1.0], lengths=[2, 4]).group
    samples = reward_samples(decode, [group], 9)
    for sample, one, n in zip(samples, group.rollouts, ("2", "4"), strict=True):
        assert sample[:2] == (decode(group.prompt.token_ids), decode(one.response_ids))
        assert sample.fields == {"response_length": n, "max_new_tokens": "9"}
        assert sample.prompt_ids is group.prompt.token_ids
        np.testing.assert_array_equal(sample.completion_ids, one.response_ids)


def test_of_a_conversation_what_the_policy_said_is_the_completion():
    groups = [with_context(experience(number, [0.0, 1.0], lengths=[2, 4])).group for number in (3, 4)]
    own = [0.1, None, np.nan, 0.0]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for sample, rollout, reward in zip(reward_samples(decode, groups, 9, own), rollouts, own, strict=True):
        assert not rollout.sampled.all()
        fields, said = sample.fields, rollout.response_ids[rollout.sampled]
        assert sample.completion == decode(said)
        np.testing.assert_array_equal(sample.completion_ids, said)
        assert fields["conversation"] == decode(rollout.response_ids)
        assert int(fields["response_length"]) == rollout.sampled.sum()
        assert fields.get("environment_reward") == (None if reward is None else str(reward))


def test_rewards_of_turns_go_to_their_rollouts():
    groups = [experience(number, [0.0, 1.0], lengths=[2, 4]).group for number in (3, 4)]
    rewards = [{}, {1: 0.5, 3: -1.0}, {0: 2.0}, {}]
    changed = with_tokens(groups, [{"turn_rewards": given} for given in rewards])
    for rollout, given in zip((one for group in changed for one in group.rollouts), rewards, strict=True):
        places = np.arange(len(rollout.response_ids))
        np.testing.assert_array_equal(rollout.row("turn_rewards"), [given.get(place, np.nan) for place in places])
        assert ("turn_rewards" in rollout.tokens) == bool(given)
    for group, one in zip(groups, changed, strict=True):
        assert one.prompt is group.prompt
        for before, after in zip(group.rollouts, one.rollouts, strict=True):
            assert vars(after) | {"tokens": before.tokens} == vars(before)
            assert all(after.tokens[name] is array for name, array in before.tokens.items())
    for none in ((), [{}] * 4):
        assert with_tokens(groups, none) is groups
