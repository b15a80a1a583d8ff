"""Bytes between the sides of a split job. Pure Python."""

import numpy as np

from mindrlhf.configs.vision import CHANNELS
from mindrlhf.memory.work import Work
from mindrlhf.model_roles import ROLES, arrays_beside
from mindrlhf.models.routing import RoutingForm
from mindrlhf.reshard.plan import Plan
from mindrlhf.token_arrays import TOKEN_ARRAYS

ID = np.dtype(np.int32)  # of a token
OF_ANSWERS = ("sampled", "behaviour_log_probs", "policy_log_probs")  # arrays that each answer has


def exchanged(work: Work, moved: Plan) -> dict[str, int] | None:
    """Compute the bytes that each side receives from the other in a step.

    None for a colocated job. weights: on all ranks that generate. experiences: on all ranks that train or score, see
    `experience_bytes`. scores: between ranks that train and ranks that only score, if there are any.
    """
    if not work.infer.first_rank:
        return None
    takers = len(work.trains) + len(work.scorers)
    found = {"weights": sum(moved.received.values()), "experiences": experience_bytes(work) * takers}
    return {**found, "scores": score_bytes(work)} if work.scorers else found


def score_bytes(work: Work) -> int:
    """Compute the bytes that a step's scores take.

    These are the values of each token from all that score, and the returns to a critic, for answers of the greatest
    length.
    """
    roles = [ROLES[name] for name in work.models if name in ROLES and ROLES[name].apart]
    given = len(work.trains) * sum(np.dtype(TOKEN_ARRAYS[role.scoring.array].dtype).itemsize for role in roles)
    taken = any(role.training for role in roles) * len(work.scorers) * np.dtype(TOKEN_ARRAYS["returns"].dtype).itemsize
    rollout = work.config.rollout
    tokens = work.config.data.prompts_per_step * rollout.num_generations * rollout.max_new_tokens
    return tokens * (given + taken)


def experience_bytes(work: Work) -> int:
    """Compute the bytes of a step's prompts and answers, all of the greatest lengths.

    Each rank that trains receives all of them. It does not count rewards, the rows' texts, and the message's own form.
    """
    config = work.config
    sampling = config.dynamic_sampling
    prompts = config.data.prompts_per_step
    if sampling.enabled:
        prompts = (sampling.prompts_per_round or prompts) * sampling.max_rounds
    names = [*OF_ANSWERS, *arrays_beside(work.roles, work.yamls)]
    names += ["turn_rewards"] if config.rollout.environment else []
    token = ID.itemsize + sum(np.dtype(TOKEN_ARRAYS[name].dtype).itemsize for name in names)
    routing = 0
    if config.rollout.records_routing:
        form = RoutingForm.of(work.model)
        routing = form.width * np.dtype(form.dtype).itemsize
    answers = config.rollout.num_generations * config.rollout.max_new_tokens * (token + routing)
    prompt = work.lengths.prompt * ID.itemsize + (work.lengths.prompt - 1) * routing
    return prompts * (prompt + answers + _picture_bytes(work))


def _picture_bytes(work: Work) -> int:
    """Compute the bytes of the pixels of a prompt's pictures."""
    if work.model.vision is None:
        return 0
    side = work.model.vision.patch_size
    return sum(rows * columns * side**2 * CHANNELS for _, rows, columns in work.lengths.pictures.grids)
