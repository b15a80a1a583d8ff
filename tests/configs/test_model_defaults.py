"""Model YAMLs of a job that is given none: defaults, the ranks' division, and overrides."""

import pytest

from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_defaults import default_model_yaml, open_model_yaml
from mindrlhf.errors import UserError

HF = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, eos_token_ids=(5,)
)


def axes(yaml) -> tuple[int, int, int]:
    parallel = yaml.parallel
    return parallel.data_parallel, parallel.model_parallel, parallel.pipeline_stage


def test_all_processes_are_data_parallel_and_the_shape_is_the_checkpoints():
    yaml = default_model_yaml("train", "CPU", workers=6)
    assert axes(yaml) == (6, 1, 1)
    assert yaml.architecture(HF) == HF
    assert yaml.unused == ()
    assert yaml.without_effect(generating=False) == []


@pytest.mark.parametrize(
    ("workers", "given", "wanted"),
    [
        (8, {"model_parallel": 2}, (4, 2, 1)),
        (8, {"model_parallel": 2, "pipeline_stage": 2}, (2, 2, 2)),
        (1, {"model_parallel": 2, "data_parallel": 3}, (3, 2, 1)),
        (1, {"model_parallel": 4}, (1, 4, 1)),  # too many: the check of the layout says so
    ],
)
def test_the_processes_that_are_left_are_data_parallel(workers, given, wanted):
    overrides = [f"parallel_config.{key}={value}" for key, value in given.items()]
    yaml = default_model_yaml("train", "CPU", workers, overrides=overrides)
    assert axes(yaml) == wanted
    assert yaml.parallel.micro_batch_num >= yaml.parallel.pipeline_stage


def test_an_override_goes_before_the_argument():
    assert axes(default_model_yaml("infer", "CPU", 8, tensor_parallel=4)) == (2, 4, 1)
    over = ["parallel_config.model_parallel=2"]
    assert axes(default_model_yaml("infer", "CPU", 8, tensor_parallel=4, overrides=over)) == (4, 2, 1)


def test_numbers_are_float32_on_cpu_and_bfloat16_on_ascend():
    def dtypes(*place: str) -> tuple[str, str]:
        model = default_model_yaml(*place).model
        return model.compute_dtype, model.param_init_type

    assert dtypes("train", "CPU") == dtypes("infer", "CPU") == ("float32", "float32")
    assert dtypes("train", "Ascend") == ("bfloat16", "float32")
    assert dtypes("infer", "Ascend") == ("bfloat16", "bfloat16")


def test_a_mistake_names_the_missing_yaml():
    with pytest.raises(UserError, match=r"^command line: unknown key parallel_config\.tensor"):
        default_model_yaml("train", "CPU", overrides=["parallel_config.tensor=2"])
    with pytest.raises(UserError, match=r"^defaults of --sft_path_infer: context\.device_target is 'GPU'"):
        default_model_yaml("infer", "GPU")


def test_a_file_goes_before_the_defaults(tmp_path):
    file = tmp_path / "train.yaml"
    file.write_text("parallel_config: {data_parallel: 3}\n")
    assert axes(open_model_yaml("train", str(file), "CPU", 8, 2)) == (3, 1, 1)
    assert open_model_yaml("train", None, "CPU", 8, 2) == default_model_yaml("train", "CPU", 8, 2)
