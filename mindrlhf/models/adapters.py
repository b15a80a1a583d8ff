"""Description of what trains, printed at the start of a run."""

from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.sft import SFTSettings
from mindrlhf.models.parameters import parameter_count, trained_count

FASTER = 10  # best learning rate of adapters, relative to training all weights (docs/lora.md)


def trained_lines(model: ModelConfig, config: GRPOSettings | SFTSettings) -> dict[str, str]:
    """Describe the parameters that train, by title; {} if all do."""
    trained = trained_count(model)
    every = parameter_count(model)
    text = f"{trained:,} of {every:,} parameters train ({trained / every:.2%})"
    if model.adapter:
        return {"adapters": _of_adapters(text, model, config)}
    return {"frozen": f"{' and '.join(model.frozen)}; {text}"} if model.frozen else {}


def _of_adapters(text: str, model: ModelConfig, config: GRPOSettings | SFTSettings) -> str:
    """Add dropout, and too low a learning rate."""
    rate = config.optimizer.lr
    if model.dropout:
        text += f"; updates drop {model.dropout:.1%} of their inputs, in composed layers, slower than fused ones"
    usual = FASTER * type(config)().optimizer.lr
    if rate >= usual:
        return text
    return (
        f"{text}; LOW LEARNING RATE: optimizer.lr is {rate:g}, and adapters want about {FASTER} times that of training "
        f"all weights, {usual:g} for example"
    )
