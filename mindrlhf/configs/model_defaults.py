"""Model YAMLs without a file: shape from the checkpoint, layout from the flags."""

from collections.abc import Mapping, Sequence
from typing import Literal

from mindrlhf.backend.devices import DEVICES
from mindrlhf.configs.base import DeviceTarget
from mindrlhf.configs.layers import merge
from mindrlhf.configs.model_settings import GROUP, SAMPLING_KEYS
from mindrlhf.configs.model_yaml import ModelYaml, load_model_yaml, typed_model_yaml
from mindrlhf.configs.yaml_file import Layer

LayoutName = Literal["train", "infer"]

# Layout -> keys of model_config in its YAML that the other role does not take from there.
OF_ONE_ROLE: Mapping[LayoutName, Sequence[str]] = {
    "train": (*SAMPLING_KEYS, "pet_config"),
    "infer": ("param_init_type",),
}


def default_model_yaml(
    role: LayoutName, device: DeviceTarget, workers: int = 1, tensor_parallel: int = 1, overrides: Sequence[str] = ()
) -> ModelYaml:
    """Build the model YAML of a role that has no file.

    It does not set the shape, so the checkpoint's shape holds.

    device: `CPU` or `Ascend`. workers: processes of the job; those beyond the tensor and pipeline ranks are
    data-parallel. tensor_parallel: the default of `parallel_config.model_parallel`. overrides: as `load_model_yaml`.
    Raises UserError.
    """
    values = {
        "model": {"model_config": DEVICES[device].default_dtypes.get(role, {}) if device in DEVICES else {}},
        "parallel_config": {"model_parallel": tensor_parallel},
        "context": {"device_target": device},
    }
    path = f"defaults of --sft_path_{role}"
    yaml = typed_model_yaml(merge([Layer(values, {(): path})], overrides), path)
    return with_all_workers(yaml, workers)


def model_yaml_of_other_role(
    role: LayoutName,
    other: ModelYaml,
    theirs: Sequence[str] = (),
    overrides: Sequence[str] = (),
    workers: int | None = None,
) -> ModelYaml:
    """Read a role's model YAML from the file of the other role.

    Model and device are the file's, the layout is the role's own: the same tensor-parallel ranks, and all other ranks
    data-parallel. A finetune YAML's sampling, and a predict YAML's dtype of weights, are not taken.

    other: the file, as read for the other role with the overrides `theirs`. overrides: of this role. workers: ranks of
    this role, by default as many as the other's. Raises UserError.
    """
    own = [f"parallel_config={{model_parallel: {other.parallel.model_parallel}}}", "recompute_config={}"]
    own += [f"{GROUP}.{key}=null" for key in OF_ONE_ROLE["infer" if role == "train" else "train"]]
    yaml = load_model_yaml(other.path, [*theirs, *own, *overrides])
    return with_all_workers(yaml, workers or other.parallel.workers)


def with_all_workers(yaml: ModelYaml, workers: int) -> ModelYaml:
    """Make all other ranks data-parallel, unless the YAML says how many are."""
    parallel = yaml.parallel
    split = parallel.model_parallel * parallel.pipeline_stage
    rest = {"data_parallel": max(1, workers // split)}
    if parallel.pipeline_stage > 1:
        rest["micro_batch_num"] = 2 * parallel.pipeline_stage
    missing = {key: value for key, value in rest.items() if key not in parallel.model_fields_set}
    return yaml.model_copy(update={"parallel": parallel.model_copy(update=missing)})


def open_model_yaml(
    role: LayoutName,
    path: str | None,
    device: DeviceTarget,
    workers: int,
    tensor_parallel: int = 1,
    overrides: Sequence[str] = (),
) -> ModelYaml:
    """Read the model YAML of a role, or build it as `default_model_yaml`."""
    if path is not None:
        yaml = load_model_yaml(path, overrides)
        return with_all_workers(yaml, workers) if yaml.takes_all_ranks else yaml
    return default_model_yaml(role, device, workers, tensor_parallel, overrides)
