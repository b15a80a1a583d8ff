"""Supervised fine-tuning on GRPO's machinery: groups of one response, trained on -log p."""

import argparse
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from mindrlhf.algorithms.aggregation import batch_totals, token_weights
from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.compile.graph import compile_seconds
from mindrlhf.backend.process.launch import World
from mindrlhf.checkpoint.model_card import describe
from mindrlhf.checkpoint.open import Weights, check_token_ids
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.configs.sft import SFTConfig
from mindrlhf.data.demonstrations import read_demonstrations
from mindrlhf.data.stream import PromptStream
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.files.naming import MODEL_FOLDER
from mindrlhf.metrics import performance
from mindrlhf.metrics.metric_set import MetricSet, reduce
from mindrlhf.metrics.timer import STEP, Timers
from mindrlhf.metrics.writers import open_writers
from mindrlhf.models.adapters import adapter_line
from mindrlhf.roles.part import ModelPart
from mindrlhf.shapes import longest_position
from mindrlhf.training.batch import SequenceGroup
from mindrlhf.training.graphs import PolicyLogProbs
from mindrlhf.training.objective import NEGATIVE_LOG_LIKELIHOOD
from mindrlhf.training.optimizer import learning_rate


def fit(
    args: argparse.Namespace,
    config: SFTConfig,
    yaml: ModelYaml,
    model: ModelConfig,
    tokenizer: Tokenizer,
    output: Path,
    world: World,
) -> None:
    """Minimise the token-mean cross-entropy on demonstrated answers; write the model."""
    rows = read_demonstrations(args.mind_dataset_dir, tokenizer, config.data.tool_format, config.data.max_length)
    groups = [SequenceGroup(t.prompt_ids, (t.response_ids,), (t.sampled,), (row,)) for row, t in enumerate(rows)]
    largest = max(int(max(g.prompt_ids.max(), g.responses[0].max())) for g in groups)
    check_token_ids(tokenizer, model, largest, str(args.mind_dataset_dir))
    total = config.trainer.total_steps or max(1, config.trainer.epochs * len(groups) // config.data.pairs_per_step)
    bucket = config.train.length_bucket
    longest = [max(len(part(g)) for g in groups) for part in (lambda g: g.prompt_ids, lambda g: g.responses[0])]

    part = ModelPart(yaml, model, Collectives(world), longest_position(*longest, bucket))
    part.what, data_parallel = "fine-tuned model", part.data_parallel
    first = Weights(args.load_sft_checkpoint_train, model, config.seed, config.lora.adapter_path)
    part.load(first.reader(part.partition))
    head = PolicyLogProbs(part.decoder_for_updates(), temperature=1.0)
    updater = part.open_updater(head, NEGATIVE_LOG_LIKELIHOOD, config.optimizer, config.train, seed=config.seed)
    stream = PromptStream(groups, config.data.pairs_per_step, config.data.shuffle, config.seed)
    timers = Timers(compile_seconds)
    with ExitStack() as stack:
        writers = None
        if world.rank == 0:
            if model.adapter:
                print(f"adapters: {adapter_line(model, config)}", flush=True)
            shown = config.model_dump(mode="json")
            writers = stack.enter_context(open_writers(output, config.trainer, total, settings=shown))
        for step in range(1, total + 1):
            with timers(STEP), timers("update_actor"):
                batch = data_parallel.share(stream.next())
                masks = [np.stack(group.sampled) for group in batch]
                totals = data_parallel.sum(batch_totals([mask.sum() for mask in masks]))
                weights = [token_weights(mask, "token-mean", totals) for mask in masks]
                update = updater(batch, learning_rate(config.optimizer, step - 1, total), weights=weights)
            metrics, seconds = MetricSet(), timers.collect()
            responses = sum(mask.size for mask in masks)
            tokens = responses + sum(len(group.prompt_ids) for group in batch)
            metrics.add("train/loss", update.loss, 1.0 / data_parallel.size)
            metrics.add("actor/grad_norm", update.result.grad_norm)
            metrics.add("actor/lr", update.result.learning_rate)
            metrics.add_total("actor/skipped_updates", update.result.failed / data_parallel.size)
            performance.add_performance(metrics, seconds, responses, tokens, data_parallel.size)
            performance.add_training(metrics, step, stream.position / len(groups))
            values = reduce(metrics, data_parallel.gather).results()
            if writers:
                writers.write(step, values)
    directory = args.save_ckpt_dir / MODEL_FOLDER
    method = f"supervised fine-tuning on answers; {total} steps of {config.data.pairs_per_step} pairs"
    card = describe(first.path, method, args.mind_dataset_dir, f"{len(groups)} pairs", (), config).measured(values)
    part.save_hf(directory, tokenizer, first, str(card), config.lora)
