"""Routing of the engine's responses: what its decoder chose, from every graph, and what replaying it is good for."""

import numpy as np
import pytest
from engine_subject import BUCKET, FILTERS, LENGTHS, SEED, STEP, STOP, TEMPERATURE, Subject
from oracle_routing import SPARSE, chosen
from scripted_partner import ScriptedPartner
from slow_cases import few_of
from small_model import SmallModel

from mindrlhf.backend.native.operators import open_operators
from mindrlhf.backend.operators import COMPOSED
from mindrlhf.configs.grpo import RolloutSettings, SamplingSettings, TrainSettings
from mindrlhf.models.decoder import Decoder
from mindrlhf.models.packed import PackedWeights
from mindrlhf.models.parameters import decoded_rows
from mindrlhf.models.routing import Routing
from mindrlhf.rollout.engine import Engine
from mindrlhf.rollout.unfinished import continued, not_begun, requests_of, unfinished
from mindrlhf.training.batch import SequenceGroup
from mindrlhf.training.graphs import PolicyLogProbs
from mindrlhf.training.scoring import Scorer
from mindrlhf.types import Prompt


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject.random(records=True, **SPARSE)


@pytest.fixture(scope="module")
def plain(subject) -> Engine:
    return subject.engine(slots=4)


def assert_are_the_oracle_s(subject: Subject, groups) -> None:
    """All experts of all tokens; those behind the last drawn token were not computed."""
    experts = subject.model.config.num_experts
    for group in groups:
        for rollout in group.rollouts:
            expected = chosen(subject.model, group.prompt.token_ids, rollout.response_ids)
            before = len(group.prompt.token_ids) - 1
            expected[before + np.flatnonzero(rollout.sampled)[-1] + 1 :] = experts
            found = np.concatenate((rollout.tokens["prompt_routing"], rollout.tokens["routing"]))
            np.testing.assert_array_equal(found, expected)
        assert len({id(rollout.tokens["prompt_routing"]) for rollout in group.rollouts}) == 1


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.0}, pytest.param(FILTERS, marks=pytest.mark.slow)],
    ids=["operator", "drafts", "one token"],
)
def test_routing_of_responses(subject, plain, settings):
    """Greedy samples are alike, so that drafts are proposed and some are rejected."""
    engine = subject.engine(slots=4, **settings) if settings else plain
    groups = engine.generate(subject.prompts, 3, STEP)
    assert_are_the_oracle_s(subject, groups)
    if settings == {"temperature": 0.0} and subject.decoder.fused:
        assert engine.statistics.drafted > 0


def test_routing_of_composed_decoding():
    one = {"num_layers": 1, "mlp_only_layers": ()}
    subject = Subject.random(COMPOSED, records=True, **SPARSE | one)
    assert_are_the_oracle_s(subject, subject.engine(slots=3, bucket=32).generate(subject.prompts, 2, STEP))


def test_routing_of_conversations(subject, plain):
    """Replies pass through the model, but for one that ends the conversation."""
    groups = plain.generate(subject.prompts, 3, STEP, partner=ScriptedPartner())
    assert_are_the_oracle_s(subject, groups)
    assert any(not rollout.sampled[-1] for group in groups for rollout in group.rollouts)


@pytest.mark.parametrize("share", few_of([3], [1]))
def test_routing_of_answers_in_parts(subject, share):
    """Each token has that of its part; those of one set of weights are the whole's, in conversations too."""
    limit = subject.engine(slots=4).sampling.max_new_tokens
    settings = RolloutSettings(max_new_tokens=limit, temperature=TEMPERATURE, num_generations=2)
    for partner in (None, InParts()):
        engine = subject.engine(slots=4)
        groups = [not_begun(prompt, settings, SEED) for prompt in subject.prompts]
        parts = 0
        while going := [i for i, group in enumerate(groups) if unfinished(group, limit)]:
            requests = requests_of([(STEP, groups[i], share) for i in going], settings, SEED, partner)
            for i, drawn in zip(going, engine.answer(requests), strict=True):
                groups[i] = continued(groups[i], drawn, limit, parts + 1)
            parts += 1
        assert parts > 3
        assert_are_the_oracle_s(subject, groups)


class InParts(ScriptedPartner):
    """A partner that answers each turn, and keeps no state."""

    def resume(self, begun):
        self.heard = {row: [] for row in range(len(begun))}
        return [(one.prompt, np.zeros(0, np.int32)) for one in begun]


def test_without_recording_there_is_none():
    subject = Subject.random(**SPARSE)
    engine = subject.engine(slots=3)
    (group,) = engine.generate(subject.prompts[:1], 1, STEP)
    assert engine.cache.routing is None
    assert not {"routing", "prompt_routing"} & group.rollouts[0].tokens.keys()


def mismatch(train, groups, replayed: bool) -> float:
    """KL(rollout || train) in nats per token, by the estimate k3."""
    scored = Scorer(PolicyLogProbs(train, TEMPERATURE), TrainSettings(length_bucket=BUCKET))(
        [
            SequenceGroup(
                group.prompt.token_ids,
                tuple(rollout.response_ids for rollout in group.rollouts),
                routing=Routing.of_rollouts(tuple(rollout.tokens for rollout in group.rollouts)) if replayed else None,
            )
            for group in groups
        ]
    )
    ratios = [
        row - rollout.row("policy_log_probs")
        for group, rows in zip(groups, scored, strict=True)
        for rollout, row in zip(group.rollouts, rows, strict=True)
    ]
    d = np.concatenate(ratios).astype(np.float64)
    return float(np.mean(np.expm1(d) - d))


@pytest.mark.slow
def test_replay_halves_the_mismatch_of_int8_rollouts(fused):
    """Rounded weights choose other experts for some tokens, which moves their log-probs most."""
    sizes = {"hidden_size": 64, "num_experts": 16, "mlp_only_layers": (), "vocab_size": 64}
    model = SmallModel.random(3, **SPARSE | sizes)
    train, parameters = model.build(replays=True)
    packed = PackedWeights("int8", decoded_rows(model.config), parameters).packed
    operators = open_operators("float32", "int8")
    decoder = Decoder(model.config, parameters, operators, 128, packed=packed, records=True)
    rng = np.random.default_rng(0)
    prompts = [Prompt(i, rng.integers(0, 64, n).astype(np.int32)) for i, n in enumerate(LENGTHS)]
    sampling = SamplingSettings(max_new_tokens=48, temperature=TEMPERATURE)
    engine = Engine(model.config, decoder, sampling, 32, max(LENGTHS), STOP[:1], SEED, BUCKET)
    groups = engine.generate(prompts, 16, STEP)
    without, with_replay = (mismatch(train, groups, replayed) for replayed in (False, True))
    print(f"KL(rollout || train) per token: {without:.2e} without replay, {with_replay:.2e} with it")
    assert without > 1e-5
    assert with_replay <= 0.5 * without
