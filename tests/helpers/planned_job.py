"""A small model and its jobs on some ranks, for the memory plan."""

from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_yaml import ModelSettings, ModelYaml, ParallelSettings
from mindrlhf.configs.placement import layout_beside
from mindrlhf.flags import TrainFlags
from mindrlhf.memory.pictures import Lengths
from mindrlhf.memory.work import Work
from mindrlhf.model_roles import BESIDE, SCORE
from mindrlhf.trainer.check import read_roles

MODEL = ModelConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=4,
    tie_word_embeddings=False,
)
SMALL = ("data.prompts_per_step=16", "rollout.num_generations=4", "rollout.max_new_tokens=16")


def work(train=None, infer=None, settings=(), model=MODEL, lengths=None, first_rank=0, score=None) -> Work:
    """A job on the CPU with these parallel settings; first_rank: of generation. score: of ranks that only score."""
    yamls = {}
    for name, given in (("train", train or {}), ("infer", infer or {}), (SCORE, score)):
        if given is None:
            continue
        parallel = ParallelSettings(**{"micro_batch_num": given.get("pipeline_stage", 1), **given})
        first = yamls["infer"].ranks.stop if name == SCORE else first_rank * (name == "infer")
        own = {"path": name, "first_rank": first, "model": ModelSettings(), "parallel": parallel}
        yamls[name] = ModelYaml(**own, context={"device_target": "CPU"})
    config = load_grpo_config(None, [*SMALL, *settings])
    if config.trainer.scoring_ranks == "infer":
        yamls[BESIDE] = layout_beside(yamls["train"], yamls["infer"], None)
    return Work.of(config, read_roles(TrainFlags(), config, model), yamls, lengths or Lengths(20))
