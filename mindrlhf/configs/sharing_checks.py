"""Check of weights that data-parallel ranks share (`optimizer_level: level3`)."""

from mindrlhf.configs.model_yaml import OPTIMIZER_LEVEL, ModelYaml
from mindrlhf.errors import UserError


def check_shared_weights(yaml: ModelYaml, dropout: float, routing_replay: str = "off") -> None:
    """Check that layers can be computed one by one; raises UserError.

    dropout: rate of the adapters. routing_replay: `rollout.routing_replay`.
    """
    if not yaml.parallel.shards_weights:
        return
    stages = yaml.parallel.pipeline_stage
    obstacles = (
        (stages > 1, "parallel_config.pipeline_stage", stages, "stages keep their weights", "1"),
        (dropout > 0, "lora.dropout", dropout, "layers of one graph would have one mask", "0"),
        (
            routing_replay != "off",
            "rollout.routing_replay",
            routing_replay,
            "layers of one graph have one place",
            "off",
        ),
    )
    for present, key, value, why, right in obstacles:
        if present:
            found = f"{yaml.path}: {OPTIMIZER_LEVEL} is level3, and {key} is {value}, where {why}"
            raise UserError(f"{found}; set the level to level1, or {key} to {right}.")
