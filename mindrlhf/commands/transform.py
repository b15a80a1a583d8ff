"""`mindrlhf transform`: weights in any layout to any other, between files."""

import argparse
from pathlib import Path
from typing import get_args

from mindrlhf.checkpoint.adapted import with_adapters
from mindrlhf.checkpoint.hf import CONFIG_FILE, read_hf_config
from mindrlhf.checkpoint.local import local_models
from mindrlhf.checkpoint.peft import is_adapter
from mindrlhf.checkpoint.resume import is_checkpoint, newest
from mindrlhf.checkpoint.transform import FileFormat, write_full, write_hf, write_ranks
from mindrlhf.checkpoint.weight_source import WeightSource, open_full, open_sharded, rank_folders
from mindrlhf.checkpoint.weights import Weights, hf_folder, merged_source
from mindrlhf.commands.arguments import BOOLEAN
from mindrlhf.configs.lora import LoraSettings
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_yaml import ModelYaml, load_model_yaml
from mindrlhf.configs.validate import check_same_model
from mindrlhf.errors import UserError
from mindrlhf.files.shipped import names_yaml
from mindrlhf.metrics.progress import Progress
from mindrlhf.models.parameters import parameter_table
from mindrlhf.parallel.layout import Layout, full_layout, yaml_layout
from mindrlhf.reshard.strategy import Strategy, parameters_only, read_strategy

FILE_SUFFIXES = (".safetensors", ".ckpt")

_LAYOUT_HELP = "a model YAML, a MindSpore strategy file, or a folder of them"

Wish = ModelYaml | Strategy | None  # a user's description of a layout; None is uncut


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    source = "folder with rank_R folders, or a training checkpoint; uncut: HF folder or weight file"
    add("--src_checkpoint", type=Path, required=True, help=source)
    add("--dst_checkpoint", type=Path, help="new folder for rank_R folders; uncut: HF folder, .safetensors or .ckpt")
    add("--dst_checkpoint_dir", type=Path, help="as --dst_checkpoint, and an uncut checkpoint goes to rank_0 too")
    add(
        "--src_strategy",
        type=Path,
        help=f"layout of the source: {_LAYOUT_HELP} (default: uncut, or a checkpoint's own)",
    )
    add("--dst_strategy", type=Path, help=f"layout to write: {_LAYOUT_HELP} (default: uncut)")
    add("--prefix", default="checkpoint_", help="rank R's file is rank_R/<prefix>R.<format> (default: %(default)s)")
    add("--output_format", choices=get_args(FileFormat), help="of rank files (default: the source's)")
    add("--transform_process_num", type=int, default=1, help="processes that write, each a rank's file at a time")
    add("--transform_by_rank", **BOOLEAN, default=False, help="only the file of --rank_id")
    add("--rank_id", type=int, default=0, help="with --transform_by_rank: whose file to write")
    add("--world_size", type=int, help="how many ranks the layout to write must have (default: not checked)")


def run(args: argparse.Namespace) -> None:
    """Read the source, check it against the layouts, then write."""
    args = local_models(args)
    target = _target(args)
    uncut = args.dst_strategy is None and args.dst_checkpoint_dir is None
    origin, goal = _read_wish(args.src_strategy), _read_wish(args.dst_strategy)
    model = _model(args.src_checkpoint, origin, goal)
    weights = _chosen(_open(args.src_checkpoint, origin, model), model, goal)
    layout = _layout(goal, model, weights)
    _check_flags(args, layout, uncut)
    whole_model = uncut and target.suffix not in FILE_SUFFIXES
    if whole_model and (model is None or model.adapter):
        folder = f"{target}: a Hugging Face folder"
        other = "or give a file name that ends in .safetensors or .ckpt"
        if model is None:
            raise UserError(f"{folder} needs the model's configuration; name a model YAML, {other}.")
        raise UserError(f"{folder} has no adapters, and the YAML names some; remove them, {other}.")
    only = args.rank_id if args.transform_by_rank else None
    of_ranks = "uncut" if uncut else f"{layout.size} ranks" if only is None else f"rank {only}"
    count = len(layout.placements) if uncut else layout.size if only is None else 1
    with Progress()("transform", count, "tensors" if uncut else "files") as advance:
        if whole_model:
            write_hf(weights, model, target, advance)
        elif uncut:
            write_full(weights, target, advance)
        else:
            write_ranks(
                weights,
                layout,
                target,
                prefix=args.prefix,
                file_format=args.output_format or _file_format(weights),
                advance=advance,
                processes=args.transform_process_num,
                only_rank=only,
            )
    dtypes = ", ".join(sorted(set(weights.dtypes.values())))
    print(f"{target}: {of_ranks}, {len(layout.placements)} parameters, {dtypes}")


def _target(args: argparse.Namespace) -> Path:
    """Choose the place to write, outside of the source."""
    named = {path for path in (args.dst_checkpoint, args.dst_checkpoint_dir) if path is not None}
    if len(named) != 1:
        raise UserError("give either --dst_checkpoint or --dst_checkpoint_dir, the place to write to.")
    target = named.pop()
    if args.src_checkpoint.resolve() in target.resolve().parents:
        raise UserError(f"{target}: lies inside of the source {args.src_checkpoint}; give a place outside of it.")
    if target.suffix in FILE_SUFFIXES and (args.dst_strategy or args.dst_checkpoint_dir):
        raise UserError(f"{target}: a checkpoint of ranks is a folder; leave out the ending {target.suffix}.")
    return target


def _read_wish(path: Path | None) -> Wish:
    if path is None:
        return None
    return load_model_yaml(path) if names_yaml(path) else read_strategy(path)


def _model(source: Path, origin: Wish, goal: Wish) -> ModelConfig | None:
    """Read the model of the YAMLs and the weights' `config.json`, or None.

    It has the adapters that one of the YAMLs names.
    """
    trained = hf_folder(source) if _is_trained(source) else None
    config_file = (trained or (source if source.is_dir() else source.parent)) / CONFIG_FILE
    hf = read_hf_config(config_file.parent, seeing=True) if config_file.is_file() else None
    yamls = [wish for wish in (origin, goal) if isinstance(wish, ModelYaml)]
    models = [yaml.architecture(hf, str(config_file)) for yaml in yamls]
    if len(yamls) == 2:
        check_same_model(*yamls, *models)
    adapters = [LoraSettings(**yaml.adapter_defaults().get("lora", {})) for yaml in yamls]
    found = [with_adapters(model, lora, None) for model, lora in zip(models, adapters, strict=True)]
    return max(found, key=lambda model: model.adapter is not None, default=hf)


def _is_trained(source: Path) -> bool:
    """Test for an adapter or a training checkpoint, which contains its own layout."""
    checkpoint = source.exists() and is_checkpoint(source) and not (source / CONFIG_FILE).is_file()
    return checkpoint or is_adapter(source)


def _open_trained(source: Path, model: ModelConfig | None) -> WeightSource:
    """Open a training checkpoint; adapters are merged into their base."""
    if model is None:
        raise UserError(f"{source}: has no {CONFIG_FILE} of its model; name the model's YAML with --src_strategy.")
    weights = Weights(str(source), model, 0)
    if weights.split()[1] is None:
        return newest(source).weights()
    if model.adapter is not None:
        raise UserError(
            f"{source}: its adapters are merged into the weights here, and the model YAML names some; use one without "
            "pet_config or lora_config."
        )
    return merged_source(weights)


def _open(source: Path, origin: Wish, model: ModelConfig | None) -> WeightSource:
    """Open the source in its own layout, or the one that the user names."""
    if _is_trained(source):
        return _open_trained(source, model)
    ranks = len(rank_folders(source))
    if origin is None and ranks > 1:
        raise UserError(f"{source}: holds the parts of {ranks} ranks; name the layout of these with --src_strategy.")
    layout = yaml_layout(origin, model) if isinstance(origin, ModelYaml) else origin
    if layout is None or (not ranks and layout.size == 1):
        return open_full(source, model)
    return open_sharded(source, layout)


def _chosen(weights: WeightSource, model: ModelConfig | None, goal: Wish) -> WeightSource:
    """Select the model's parameters; without a model, also the goal's optimizer state."""
    shapes = weights.shapes
    if model is None:
        kept = parameters_only(shapes) | (goal.shardings.keys() if isinstance(goal, Strategy) else shapes.keys())
        return weights.only([name for name in shapes if name in kept])
    table = parameter_table(model)
    for spec in table:
        if shapes.get(spec.name) != spec.shape:
            state = f"holds it in {list(shapes[spec.name])}" if spec.name in shapes else "lacks it"
            raise UserError(
                f"{weights.path}: the model's {spec.name} has shape {list(spec.shape)}, and the checkpoint {state}; "
                "give the weights and the configuration of one model."
            )
    return weights.only([spec.name for spec in table])


def _layout(goal: Wish, model: ModelConfig | None, weights: WeightSource) -> Layout:
    """Compute the layout to write."""
    if isinstance(goal, ModelYaml):
        return yaml_layout(goal, model)
    return full_layout(weights.shapes) if goal is None else goal.layout(weights.shapes, str(weights.path))


def _check_flags(args: argparse.Namespace, layout: Layout, uncut: bool) -> None:
    """Check that flags about ranks and processes fit the output."""
    ranks = layout.size
    if args.world_size not in (None, ranks):
        found = f"--world_size is {args.world_size}, and the layout to write ({args.dst_strategy or 'uncut'})"
        raise UserError(f"{found} has {ranks} ranks; set it to {ranks} or leave it out.")
    if args.transform_process_num < 1:
        raise UserError(f"--transform_process_num is {args.transform_process_num}; set it to 1 or more.")
    if args.rank_id and not args.transform_by_rank:
        found = f"--rank_id is {args.rank_id}, which needs --transform_by_rank True"
        raise UserError(f"{found}; add that or leave it out.")
    if not 0 <= args.rank_id < ranks:
        raise UserError(f"--rank_id is {args.rank_id}, and the layout to write has the ranks 0 to {ranks - 1}.")
    if uncut and (args.output_format or args.transform_by_rank or args.transform_process_num > 1):
        found = "--output_format, --transform_by_rank and --transform_process_num are about the files of ranks"
        raise UserError(f"{found}, and one uncut checkpoint is to be written; leave them out or give --dst_strategy.")


def _file_format(weights: WeightSource) -> FileFormat:
    """Return the format of the source's files."""
    return "ckpt" if any(file.suffix == ".ckpt" for file in weights.files) else "safetensors"
