"""Generation engines of a job: for its rollouts, and for held-out problems."""

from mindrlhf.checkpoint.open import stop_ids
from mindrlhf.configs.grpo import SamplingSettings
from mindrlhf.job import Job
from mindrlhf.models.decoder import Decoder
from mindrlhf.rollout.engine import Engine
from mindrlhf.shapes import slot_count


def open_engine(
    job: Job, decoder: Decoder, sampling: SamplingSettings, responses: int, longest: int, seed: int
) -> Engine:
    """Open an engine of this rank with at most `responses` slots.

    longest: tokens of the longest prompt.
    """
    return Engine(
        job.model,
        decoder,
        sampling,
        slots=slot_count(job.config.rollout.max_slots, responses),
        max_prompt=longest,
        stop_ids=stop_ids(job.tokenizer, job.model),
        seed=seed,
        length_bucket=job.config.train.length_bucket,
        decode_text=job.tokenizer.decode,
    )
