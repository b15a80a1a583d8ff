"""A GRPO trainer from a checked job: data, weights, graphs, rewards, writers."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from mindrlhf import backend
from mindrlhf.algorithms.advantages import ADVANTAGES, TOKEN_LEVEL
from mindrlhf.algorithms.aggregation import MODES
from mindrlhf.algorithms.names import unknown_name
from mindrlhf.algorithms.registry import POLICY_LOSSES, PolicyLoss, policy_loss
from mindrlhf.backend.collectives import Collectives
from mindrlhf.backend.launch import World
from mindrlhf.configs.grpo import AlgorithmSettings, GRPOConfig
from mindrlhf.configs.validate import check_lengths
from mindrlhf.data.mindrecord import read_prompts
from mindrlhf.data.rollout_record import read_rollout_record
from mindrlhf.data.stream import PromptStream
from mindrlhf.errors import UserError
from mindrlhf.metrics.progress import Progress
from mindrlhf.metrics.run_writers import open_writers
from mindrlhf.metrics.timer import Timers
from mindrlhf.models.transformer import Decoder
from mindrlhf.parallel.side import Side
from mindrlhf.rewards.runner import RewardRunner
from mindrlhf.rollout.engine import Engine
from mindrlhf.trainer.batch_table import batch_table
from mindrlhf.trainer.build import Job
from mindrlhf.trainer.grpo import GRPOTrainer
from mindrlhf.trainer.model import open_updater, published_weights, save_model
from mindrlhf.trainer.report import StepReport
from mindrlhf.trainer.roles import Weights, check_token_ids, stop_ids
from mindrlhf.training.batch import round_up
from mindrlhf.training.graphs import PolicyLogProbs
from mindrlhf.training.objective import policy_objective
from mindrlhf.training.scoring import Scorer
from mindrlhf.types import Experience, Prompt


def assemble(
    job: Job, world: World, stack: ExitStack
) -> tuple[GRPOTrainer, list[tuple[int, list[Experience]]], Callable[[], None]]:
    """The trainer, the recorded steps to replay (empty when it generates), and what saves the trained model.

    What has to be closed at the end goes on `stack`.
    """
    config = job.config
    check_names(config.algorithm)
    recorded = read_rollout_record(job.args.replay) if job.args.replay else []
    prompts = [] if job.args.replay else read_prompts(job.args.mind_dataset_dir, job.tokenizer)
    longest = check_prompts(job, prompts or [e.group.prompt for _, step in recorded for e in step])
    check_recorded(job, recorded)
    total = len(recorded) or total_steps(config, len(prompts))

    collectives = Collectives(world)
    training, generating = (Side(yaml, job.model, collectives) for yaml in (job.train, job.infer))
    if prompts and world.rank == 0:
        print(batch_table(config, training.data_parallel.size, generating.data_parallel.size, longest), flush=True)
    scores = bool(prompts) and generating.first_of_replica
    rewards = stack.enter_context(RewardRunner(config.reward)) if scores else None

    kernels = backend.kernels(job.train.context.device_target)
    bucket = config.train.length_bucket
    positions = round_up(longest, bucket) + round_up(config.rollout.max_new_tokens, bucket)
    policy = Weights(job.policy_path, job.model, config.seed).parameters(training.partition)
    decoder = training.decoder(policy, kernels, positions)

    def scorer(of: Decoder) -> Scorer:
        return Scorer(PolicyLogProbs(of, config.rollout.temperature), config.train, training.pipeline)

    reference = None
    if config.algorithm.beta > 0:
        frozen = Weights(job.reference_path, job.model, config.seed).parameters(training.partition)
        reference = scorer(training.decoder(frozen, kernels, positions))
    engine, publish = None, None
    if prompts:
        answering, publish = published_weights(policy, training, generating, config.rollout.verify_weights)
        engine = open_engine(job, generating.decoder(answering, kernels, positions), longest, generating)

    loss = bound_loss(config.algorithm)
    on_policy = config.algorithm.single_update
    kl = {"kl": config.algorithm.kl_estimator, "beta": config.algorithm.beta} if config.algorithm.beta else {}
    objective = policy_objective(loss, on_policy=on_policy, **kl)
    head = PolicyLogProbs(decoder, config.rollout.temperature)
    updater = open_updater(config.optimizer, config.train, head, objective, policy, training)

    timers = Timers()
    # Last, because it cuts what an earlier run wrote: what is wrong with the input has been found by now.
    report = open_report(job, collectives, training, timers, total, len(prompts))
    stack.callback(report.close)
    trainer = GRPOTrainer(
        config=config,
        aggregation=loss.aggregation or config.algorithm.aggregation,
        stream=PromptStream(prompts, config.data.prompts_per_step, config.data.shuffle, config.seed)
        if prompts
        else None,
        engine=engine,
        rewards=rewards,
        decode=lambda ids: job.tokenizer.decode(list(ids), skip_special_tokens=True),
        reference=reference,
        old=None if on_policy else scorer(decoder),
        updater=updater,
        publish=publish,
        generating=generating.data_parallel,
        training=training.data_parallel,
        gather=lambda own: [e for part in collectives.all_gather_object(own) for e in part],
        report=report,
        timers=timers,
        progress=Progress(config.trainer.progress and world.rank == 0),
        total_steps=total,
    )
    return (
        trainer,
        recorded,
        partial(save_model, job.args.save_ckpt_dir, policy, training, job.tokenizer, "trained"),
    )


def check_names(algorithm: AlgorithmSettings) -> None:
    """Names that are looked up only when the first rollouts are there; the others are needed to build the graphs."""
    if algorithm.advantage not in ADVANTAGES:
        raise unknown_name("advantage", algorithm.advantage, ADVANTAGES)
    if algorithm.aggregation not in MODES:
        raise unknown_name("aggregation", algorithm.aggregation, MODES)
    if algorithm.advantage in TOKEN_LEVEL:
        raise UserError(f"algorithm.advantage {algorithm.advantage} is not available in training yet; use grpo.")
    if algorithm.policy_loss in POLICY_LOSSES and POLICY_LOSSES[algorithm.policy_loss].select:
        raise UserError(f"algorithm.policy_loss {algorithm.policy_loss} is not available in training yet; use clip.")


def check_recorded(job: Job, recorded: list[tuple[int, list[Experience]]]) -> None:
    """A replay's rollouts fit this run: steps that divide, and responses that the model can take."""
    unit = job.train.parallel.data_parallel * job.config.algorithm.updates_per_iteration
    limit = job.config.rollout.max_new_tokens
    for step, experiences in recorded:
        if len(experiences) % unit:
            raise UserError(
                f"{job.args.replay}: step {step} has {len(experiences)} prompts, which data_parallel x "
                f"updates_per_iteration {unit} does not divide; replay it with the settings of the run that "
                "recorded it."
            )
        responses = [rollout.response_ids for experience in experiences for rollout in experience.group.rollouts]
        longest, largest = (max(int(measure(ids)) for ids in responses) for measure in (len, max))
        if longest > limit:
            raise UserError(
                f"{job.args.replay}: step {step} has a response of {longest} tokens, and rollout.max_new_tokens is "
                f"{limit}; set it to {longest} or more."
            )
        if largest >= job.model.vocab_size:
            raise UserError(
                f"{job.args.replay}: step {step} has token id {largest}, and the model's vocab_size is "
                f"{job.model.vocab_size}; replay it with the model that it was recorded with."
            )


def check_prompts(job: Job, prompts: list[Prompt]) -> int:
    """Checks the dataset against tokenizer and model; returns the longest prompt in tokens."""
    largest = max(int(prompt.token_ids.max()) for prompt in prompts)
    check_token_ids(job.tokenizer, job.model, largest, str(job.args.replay or job.args.mind_dataset_dir))
    longest = max(len(prompt.token_ids) for prompt in prompts)
    for yaml in (job.train, job.infer):
        check_lengths(job.config, yaml, job.model, longest)
    return longest


def total_steps(config: GRPOConfig, rows: int) -> int:
    """Steps of the run: as set, or as many as the epochs give."""
    if config.trainer.total_steps:
        return config.trainer.total_steps
    steps = config.trainer.epochs * rows // config.data.prompts_per_step
    if not steps:
        raise UserError(
            f"data.prompts_per_step is {config.data.prompts_per_step} and the dataset has {rows} rows, which is no "
            f"whole step; set it to {rows} or fewer, or set trainer.total_steps."
        )
    return steps


def bound_loss(algorithm: AlgorithmSettings) -> PolicyLoss:
    """The policy loss with those of the common options that it has; the others keep the loss's own defaults."""
    return policy_loss(algorithm.policy_loss, algorithm.loss_options())


def open_engine(job: Job, decoder: Decoder, longest: int, generating: Side) -> Engine:
    """The generation engine of this rank, with no more slots than there are responses to a step."""
    rollout = job.config.rollout
    responses = job.config.data.prompts_per_step // generating.data_parallel.size * rollout.num_generations
    return Engine(
        job.model,
        decoder,
        rollout,
        slots=min(rollout.max_slots, responses),
        max_prompt=longest,
        stop_ids=stop_ids(job.tokenizer, job.model),
        seed=job.config.seed,
        length_bucket=job.config.train.length_bucket,
        decode_text=job.tokenizer.decode,
    )


def open_report(
    job: Job, collectives: Collectives, training: Side, timers: Timers, total: int, rows: int
) -> StepReport:
    """Metrics of every rank, written by rank 0 to `metrics.jsonl`, the console and TensorBoard."""
    config, output = job.config, Path(job.output)
    writers = None
    if collectives.world.rank == 0:
        names = ["console", "jsonl", *(["tensorboard"] if config.trainer.tensorboard else [])]
        writers = open_writers(output, names, total, settings=config.model_dump(mode="json"))
    return StepReport(
        collectives,
        training,
        timers,
        writers,
        decode=job.tokenizer.decode,
        rollout_folder=output / "rollouts" if config.trainer.save_rollouts else None,
        data_file=job.args.save_data_file,
        rows_per_epoch=rows or None,
    )
