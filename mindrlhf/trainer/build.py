"""A GRPO trainer from a checked job: data, weights, graphs, rewards, writers."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mindrlhf import backend
from mindrlhf.algorithms.losses import PolicyLoss
from mindrlhf.algorithms.rollout_correction import importance_weights
from mindrlhf.backend.ceiling import matmul_ceiling
from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.compile.graph import kept_graphs
from mindrlhf.backend.compile.graph_cache import GRAPHS, GraphCache
from mindrlhf.backend.process.launch import World
from mindrlhf.checkpoint.hf import companion_files, generation_defaults
from mindrlhf.checkpoint.model_card import card_of_run
from mindrlhf.checkpoint.open import Weights, check_token_ids, checkpoint_reader, hf_folder, stopping_config
from mindrlhf.checkpoint.resume import Checkpoint
from mindrlhf.checkpoint.training_state import WEIGHTS
from mindrlhf.configs.grpo import GRPOConfig
from mindrlhf.configs.validate import check_lengths
from mindrlhf.data.mindrecord import read_prompts
from mindrlhf.data.stream import PromptStream
from mindrlhf.errors import UserError
from mindrlhf.evaluation.validation import open_validation, read_validation, validation_positions
from mindrlhf.files.naming import CRITIC_FOLDER, MODEL_FOLDER, ROLLOUTS_FOLDER
from mindrlhf.files.settings_file import write_settings
from mindrlhf.files.user_cache import user_cache
from mindrlhf.job import Job
from mindrlhf.memory.batch_table import batch_table
from mindrlhf.memory.residency import Residency
from mindrlhf.metrics.flops import Utilization
from mindrlhf.metrics.progress import Progress
from mindrlhf.metrics.run_writers import open_writers
from mindrlhf.metrics.timer import Timers
from mindrlhf.models.decoder import Decoder
from mindrlhf.models.initialize import build_parameters
from mindrlhf.phases import REFERENCE
from mindrlhf.records.formats import read_record
from mindrlhf.records.writer import RecordParts, ResponseWriter
from mindrlhf.rewards.runner import RewardRunner
from mindrlhf.roles.critic import open_critic
from mindrlhf.roles.memory_roles import add_roles, open_residency
from mindrlhf.roles.part import Side
from mindrlhf.roles.policy import PolicyUpdates
from mindrlhf.roles.reference import Reference
from mindrlhf.roles.weights import Parameters, open_updater, published_weights, save_model
from mindrlhf.rollout.engine import Engine
from mindrlhf.rollout.open_engine import open_engine
from mindrlhf.rollout.scored import Rollouts
from mindrlhf.run.checkpointer import Keeper, arrays_of, open_store, present
from mindrlhf.run.identity import check_identity, find_checkpoint, run_identity
from mindrlhf.run.outputs import clean_outputs, forget_after
from mindrlhf.run.step_report import StepReport
from mindrlhf.run.stop import Agreement
from mindrlhf.run.stop_signals import StopSignals
from mindrlhf.shapes import longest_position, round_responses
from mindrlhf.trainer.advantages import StepAdvantages
from mindrlhf.trainer.dynamic_sampling import StepSampling
from mindrlhf.trainer.grpo import GRPOTrainer
from mindrlhf.trainer.kl_term import KLTerm
from mindrlhf.trainer.preflight import preflight
from mindrlhf.training.graphs import PolicyLogProbs
from mindrlhf.training.objective import Objective, policy_objective
from mindrlhf.training.scoring import Scorer
from mindrlhf.types import Experience, Prompt

_log = logging.getLogger(__name__)

NOT_COMPILED = ("data", "reward", "optimizer", "trainer")  # groups of settings


def assemble(
    job: Job, world: World, stack: ExitStack, signals: StopSignals
) -> tuple[GRPOTrainer, list[tuple[int, list[Experience]]], Callable[[], None]]:
    """The trainer, the recorded steps to replay (empty when it generates), and what saves the trained model.

    What has to be closed at the end goes on `stack`. signals: what may ask the run to stop.
    """
    config, algorithm = job.config, job.config.algorithm
    recorded = read_record(job.args.replay) if job.args.replay else []
    prompts = [] if job.args.replay else read_prompts(job.args.mind_dataset_dir, job.tokenizer)
    trained_on = prompts or [e.group.prompt for _, step in recorded for e in step]
    recorded = recorded[: config.trainer.total_steps]
    longest = check_prompts(job, trained_on)
    check_recorded(job, recorded)
    total = len(recorded) or total_steps(config, len(prompts))
    problems = read_validation(job) if prompts else []
    loss = algorithm.loss()

    collectives = Collectives(world)
    clean_outputs(collectives, job.output, job.args.save_ckpt_dir, job.args.save_data_file)
    checkpoint, run = find_checkpoint(job, collectives), run_identity(job, trained_on)
    if checkpoint:
        check_identity(checkpoint, run, world.rank)
    training, generating = (Side(yaml, job.model, collectives) for yaml in (job.train, job.infer))
    if prompts and world.rank == 0:
        print(batch_table(config, training.data_parallel.size, generating.data_parallel.size, longest), flush=True)
    scores = bool(prompts) and generating.first_of_replica
    rewards = stack.enter_context(RewardRunner(config.reward)) if scores else None
    if rewards:
        rewards.check_ground_truths(prompts, job.args.mind_dataset_dir)
    preflight(job, collectives, prompts, rewards)
    if job.args.enable_compile_cache:
        cache = stack.enter_context(kept_graphs(open_graph_cache(job, world)))
        if cache and world.rank == 0:
            stack.callback(lambda: print(cache, flush=True))

    kernels = backend.kernels(job.train.context.device_target)
    bucket = config.train.length_bucket
    positions = longest_position(longest, config.rollout.max_new_tokens, bucket)
    positions = max(positions, validation_positions(job, problems))
    residency = open_residency(job)
    timers, progress = Timers(on_phase=residency.enter), Progress(config.trainer.progress and world.rank == 0)

    def scorer(of: Decoder) -> Scorer:
        return Scorer(PolicyLogProbs(of, config.rollout.temperature), config.train, training.pipeline)

    frozen = None
    if algorithm.beta > 0:
        frozen = Weights(job.reference_path, job.model, config.seed).parameters(training.partition)
        residency.add(REFERENCE, frozen.values())
    policy = open_policy(job, training, checkpoint)
    decoder = training.decoder(policy, kernels, positions)

    reference = kl = None
    if frozen:
        frozen_scorer = scorer(training.decoder(frozen, kernels, positions))
        every, share = algorithm.reference_sync_steps, algorithm.reference_sync_share
        reference, kl = (
            Reference(frozen_scorer, frozen, policy, every, share),
            KLTerm(algorithm, training.data_parallel),
        )

    objective = open_objective(config, loss)
    head = PolicyLogProbs(decoder, config.rollout.temperature, entropy_gradient=algorithm.entropy_coef > 0)
    updater = open_updater(config.optimizer, config.train, head, objective, policy, training, config.memory.swap)
    critic = open_critic(job, collectives, kernels, positions, checkpoint) if algorithm.uses_critic else None

    publish, engines, validation, answering = None, (), None, {}
    if prompts:
        answering, publish = published_weights(policy, training, generating, config.rollout.verify_weights)
        answerer = generating.decoder(answering, kernels, positions)
        engines = open_engines(job, answerer, longest, generating)
        validation = open_validation(job, answerer, problems, generating, collectives, total, stack)
    judge = validation.evaluator.engine if validation else None
    add_roles(residency, policy, answering, updater, engines, judge, critic)

    stream = sampling = None
    if prompts:
        stream = PromptStream(prompts, config.data.prompts_per_step, config.data.shuffle, config.seed)
        sampling = StepSampling(config)
    updates = PolicyUpdates(config, updater, loss, training.data_parallel, kl)
    store, card = open_store(job, collectives), card_of_run(job, trained_on, total)
    optimizers = present(optimizer=updater.optimizer, critic=critic and critic.optimizer)
    keeper = Keeper(
        config.trainer,
        total,
        store,
        Agreement(signals, collectives.all_reduce_max, world.size == 1, config.trainer.max_host_memory_gb),
        arrays_of(training, policy, updater.optimizer, critic, frozen if algorithm.reference_sync_steps else None),
        optimizers | present(updates=updates, stream=stream, kl=kl),
        present(surplus=sampling),
        run,
        hf_files(job, str(card)) if world.rank == 0 else {},
        lambda: timers("save_checkpoint"),
        lambda: report.settle(),
    )
    if checkpoint:
        with timers("load_checkpoint"):
            keeper.restore(checkpoint, world.rank)
    # Last, because it cuts what an earlier run wrote: what is wrong with the input has been found by now.
    done = keeper.first_step - 1
    report = open_report(job, collectives, training, timers, residency, total, len(prompts), longest, done)
    stack.callback(report.close)

    rollouts = None
    if prompts:
        rollouts = Rollouts(
            config.rollout,
            *engines,
            rewards,
            decode=lambda ids: job.tokenizer.decode(list(ids), skip_special_tokens=True),
            on_scored=report.add_reward_troubles,
            on_progress=keeper.within_phase,
            timers=timers,
            progress=progress,
        )
    trainer = GRPOTrainer(
        config=config,
        stream=stream,
        rollouts=rollouts,
        sampling=sampling,
        reference=reference,
        old=scorer(decoder) if algorithm.scores_old_policy else None,
        critic=critic,
        advantages=StepAdvantages(config, training.data_parallel, kl),
        policy=updates,
        kl=kl,
        publish=publish,
        generating=generating.data_parallel,
        training=training.data_parallel,
        gather=lambda own: [e for part in collectives.all_gather_object(own) for e in part],
        report=report,
        timers=timers,
        progress=progress,
        total_steps=total,
        keeper=keeper,
        validation=validation,
    )

    def save() -> None:
        folder, told = job.args.save_ckpt_dir, str(card.measured(report.last))
        try:
            with timers("export"):
                where = folder / MODEL_FOLDER
                save_model(where, policy, training, job.tokenizer, "trained model", job.policy_path, told)
                if critic:
                    save_model(folder / CRITIC_FOLDER, critic.parameters, critic.side, job.tokenizer, "trained critic")
        except UserError as error:
            raise store.with_advice(error) from None

    return trainer, recorded, save


def open_graph_cache(job: Job, world: World) -> GraphCache | None:
    """This user's compiled graphs, of jobs of this size; None where there is no folder for them."""
    try:
        return GraphCache(user_cache() / GRAPHS, world.rank, f"{world} {graph_settings(job)}")
    except OSError as error:
        _log.warning("--enable_compile_cache: compiled graphs are not kept (%s)", error)
        return None


def graph_settings(job: Job) -> dict[str, Any]:
    """Select the settings that are compiled into graphs.

    Prompts, rewards, rates and the length of a run are not, so that it may go on with others.
    """
    described = job.described()
    described["grpo"] = {group: own for group, own in described["grpo"].items() if group not in NOT_COMPILED}
    for yaml in ("train_yaml", "infer_yaml"):
        del described[yaml]["path"]
    del described["flags"]
    return described


def hf_files(job: Job, card: str) -> dict[str, bytes]:
    """What a checkpoint holds of a Hugging Face folder: everything but the weights."""
    generation = generation_defaults(job.policy_path and hf_folder(job.policy_path))
    return companion_files(stopping_config(job.tokenizer, job.model), job.tokenizer, generation, card)


def open_policy(job: Job, training: Side, checkpoint: Checkpoint | None) -> Parameters:
    """This rank's part of the weights to train: of the checkpoint that the run goes on from, or the first ones."""
    if checkpoint is None:
        return Weights(job.policy_path, job.model, job.config.seed).parameters(training.partition)
    read = checkpoint_reader(checkpoint, WEIGHTS, job.model, training.partition)
    return build_parameters(training.partition.specs, read)


def open_objective(config: GRPOConfig, loss: PolicyLoss) -> Objective:
    """What the policy's updates minimise."""
    algorithm, correction = config.algorithm, config.rollout_correction
    in_loss = algorithm.beta > 0 and not algorithm.kl_in_reward
    corrects = correction.level is not None
    return policy_objective(
        loss,
        # Groups that are carried over from the step before were drawn by another policy than the one being updated.
        on_policy=algorithm.single_update and not config.dynamic_sampling.enabled,
        kl=algorithm.kl_estimator if in_loss else None,
        beta=algorithm.beta if algorithm.kl_target is None else None,
        correction=importance_weights(**correction.model_dump()) if corrects else None,
        entropy_coef=algorithm.entropy_coef,
    )


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


def open_engines(job: Job, decoder: Decoder, longest: int, generating: Side) -> tuple[Engine, Engine | None]:
    """What answers this rank's prompts, and what answers them greedily where the advantage needs that.

    No more slots than there are responses to a round.
    """
    config = job.config
    responses, greedy_responses = round_responses(config, generating.data_parallel.size)
    greedy = config.rollout.model_copy(update={"temperature": 0.0})
    return (
        open_engine(job, decoder, config.rollout, responses, longest, config.seed),
        open_engine(job, decoder, greedy, greedy_responses, longest, config.seed) if greedy_responses else None,
    )


def open_report(
    job: Job,
    collectives: Collectives,
    training: Side,
    timers: Timers,
    residency: Residency,
    total: int,
    rows: int,
    longest: int,
    steps_done: int,
) -> StepReport:
    """Metrics of every rank, written by rank 0 to where `trainer.loggers` says; the run's settings beside them.

    steps_done: what was written of later steps is forgotten; 0 begins anew.
    """
    config, output, file = job.config, Path(job.output), job.args.save_data_file
    ceiling = matmul_ceiling(collectives.world.device_target, job.train.model.compute_dtype)
    utilization = Utilization(job.model, ceiling, config.algorithm.num_iterations)
    writers = responses = None
    records = file is not None and not config.trainer.val_only
    folder = output / ROLLOUTS_FOLDER if config.trainer.save_rollouts else None
    if collectives.world.rank == 0:
        tracking = config.trainer.model_copy(update={"loggers": ("console",)} if config.trainer.val_only else {})
        start = steps_done + 1 if steps_done else 0
        writers = open_writers(output, tracking, total, start, settings=config.model_dump(mode="json"))
        recorded = RecordParts(file, steps_done) if records else None
        if not config.trainer.val_only:
            write_settings(output, job.described())
            if steps_done:
                forget_after(output, steps_done)
        if recorded and recorded.missing:
            print(f"{file}: the rollouts of steps 1 to {recorded.missing[-1]} are not beside it and are left out")
        responses = ResponseWriter(folder, recorded, job.tokenizer.decode) if folder or recorded else None
    return StepReport(
        collectives,
        training,
        timers,
        residency,
        writers,
        keeps=records or folder is not None,
        responses=responses,
        rows_per_epoch=rows or None,
        longest_prompt=longest,
        utilization=utilization,
        corrects=config.rollout_correction.level is not None,
    )
