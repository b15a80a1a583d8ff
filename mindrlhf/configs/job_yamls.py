"""Reading of a job's model YAMLs, by flags and overrides."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from mindrlhf.backend import default_device
from mindrlhf.backend.process.launch import started_workers
from mindrlhf.configs.model_defaults import LayoutName, model_yaml_of_other_role, open_model_yaml
from mindrlhf.configs.model_settings import GROUP
from mindrlhf.configs.model_yaml import ModelYaml, load_model_yaml
from mindrlhf.configs.placement import Division
from mindrlhf.errors import UserError
from mindrlhf.flags import LayoutFlags, TrainFlags

NOTHING: Mapping[str, Sequence[str]] = MappingProxyType({})

# Role -> flag -> the key of its model YAML that the flag sets.
YAML_FLAGS = {
    "train": {
        "device_target": "context.device_target",
        "data_parallel": "parallel_config.data_parallel",
        "tensor_parallel": "parallel_config.model_parallel",
        "pipeline_parallel": "parallel_config.pipeline_stage",
        "sequence_parallel": "parallel_config.use_seq_parallel",
    },
    "infer": {
        "device_target": "context.device_target",
        "infer_tensor_parallel": "parallel_config.model_parallel",
    },
}


def read_model_yamls(
    flags: TrainFlags, overrides: Mapping[str, Sequence[str]], beneath: Mapping[str, Sequence[str]] = NOTHING
) -> tuple[ModelYaml, ModelYaml]:
    """Read the two model YAMLs, or build them from flags.

    One file serves both roles. beneath: overrides that flags override. Raises UserError.
    """
    given = {role: [*beneath.get(f"{role}_yaml", ()), *_given(flags, role, overrides)] for role in YAML_FLAGS}
    division = Division.of(flags)
    if flags.sft_path_infer and not flags.sft_path_train:
        infer = load_model_yaml(flags.sft_path_infer, given["infer"])
        train = model_yaml_of_other_role("train", infer, given["infer"], given["train"], division.trainers)
        return division.fitted(_with_dtype(train), _with_dtype(infer))
    checkpoint = flags.load_sft_checkpoint_train or flags.load_sft_checkpoint_infer
    train = read_train_yaml(flags, checkpoint, overrides, beneath, division.trainers)
    if flags.sft_path_train and not flags.sft_path_infer:
        infer = model_yaml_of_other_role("infer", train, given["train"], given["infer"], division.generators)
    else:
        place = train.context.device_target, division.generators or train.parallel.workers
        tensor = train.parallel.model_parallel
        infer = open_model_yaml("infer", flags.sft_path_infer, *place, tensor, overrides=given["infer"])
    return division.fitted(train, _with_dtype(infer))


def read_train_yaml(
    flags: LayoutFlags,
    checkpoint: str | None,
    overrides: Mapping[str, Sequence[str]],
    beneath: Mapping[str, Sequence[str]] = NOTHING,
    workers: int | None = None,
) -> ModelYaml:
    """Read the training graph's model YAML, or build it from flags.

    checkpoint: gives the model's shape if there is no YAML. beneath: overrides that flags override. workers: ranks that
    train, by default all that were started. Raises UserError.
    """
    if flags.sft_path_train is None and checkpoint is None:
        right = "name a folder or a hub's id with --load_sft_checkpoint_train, or a YAML with --sft_path_train"
        raise UserError(f"no model is given; {right}.")
    device = flags.device_target or default_device()
    given = [*beneath.get("train_yaml", ()), *_given(flags, "train", overrides)]
    workers = workers or started_workers()
    return _with_dtype(open_model_yaml("train", flags.sft_path_train, device, workers, overrides=given))


def _with_dtype(yaml: ModelYaml) -> ModelYaml:
    """Choose a YAML's dtype of matrix products for this device. Raises UserError."""
    try:
        dtype = yaml.context.device.product_dtype(yaml.model.compute_dtype)
    except UserError as error:
        raise UserError(f"{yaml.path}: {GROUP}.compute_dtype is {yaml.model.compute_dtype}, and {error}.") from None
    return yaml.model_copy(update={"model": yaml.model.model_copy(update={"compute_dtype": dtype})})


def _given(flags: LayoutFlags, role: LayoutName, overrides: Mapping[str, Sequence[str]]) -> list[str]:
    """List the overrides of a model YAML: from flags, then given ones."""
    values = {key: getattr(flags, flag) for flag, key in YAML_FLAGS[role].items()}
    return [*(f"{key}={value}" for key, value in values.items() if value is not None), *overrides[f"{role}_yaml"]]


def split_overrides(
    overrides: Sequence[str], yamls: Sequence[str] = ("train_yaml", "infer_yaml", "score_yaml")
) -> dict[str, list[str]]:
    """Split overrides by prefix: `train_yaml.` and so on, or none for the run's settings."""
    split: dict[str, list[str]] = {name: [] for name in ("", *yamls)}
    for override in overrides:
        prefix, _, rest = override.partition(".")
        if prefix in yamls:
            split[prefix].append(rest)
        else:
            split[""].append(override)
    return split
