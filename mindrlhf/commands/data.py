"""`mindrlhf data`: problems to a MindRecord of prompts, or to verl's parquet."""

import argparse
from pathlib import Path

from mindrlhf.checkpoint.tokenizer import open_tokenizer
from mindrlhf.commands.model_flags import add_template_variables
from mindrlhf.commands.train import add_model_arguments
from mindrlhf.data.convert_problems import convert, convert_to_verl
from mindrlhf.data.parquet import PARQUET
from mindrlhf.data.tasks import TASKS
from mindrlhf.data.templates import NAMES
from mindrlhf.data.truncation import TRUNCATIONS
from mindrlhf.environments.pool import tool_schemas
from mindrlhf.errors import UserError
from mindrlhf.files.text import some
from mindrlhf.hub.datasets import dataset_files
from mindrlhf.hub.names import is_id


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    problems = "problems: JSONL files, JSON arrays, parquet files, or folders of JSONL files"
    add("--file_path", nargs="+", help=problems)
    hub = "id of a dataset on Hugging Face's hub (ModelScope's with MODELSCOPE=1), openai/gsm8k; or its folder"
    add("--dataset", metavar="OWNER/NAME", help=hub)
    add("--split", default="train", help="of --dataset (default train)")
    add("--subset", help="of --dataset, where it has several (default: default, main, or the only one)")
    written = (
        "MindRecord (with its .db), or a folder for it; a name that ends in .parquet: verl's columns, no tokenizer"
    )
    add("--output_path", required=True, help=written)
    add_model_arguments(parser)
    add("--dataset_type", help=f"task of the rows: {', '.join(TASKS)} (default: by the first row, else gsm8k)")
    fields = "other keys than the task's: question=problem ground_truth=solution.final; the task `fields` takes any"
    add("--fields", nargs="+", default=(), metavar="KEY=THEIRS", help=fields)
    default = "(default: the tokenizer's own chat template, or the chat of its model family)"
    add("--template", help=f"{', '.join(NAMES)}, or a jinja2 file {default}")
    add("--system_prompt", help='system prompt in place of the template\'s own; "" for none')
    add_template_variables(parser)
    add("--tools", nargs="+", default=(), help="tools that prompts list, as in rollout.tools")
    add("--environment", help="environment whose tools prompts list, as in rollout.environment")
    add("--max_prompt_length", type=int, default=512, help="longest prompt in tokens (default 512)")
    add("--seq_length", type=int, help="tokens of prompt, answer and end token (default: what the longest row needs)")
    longer = "for longer prompts: stop, cut the beginning, cut the end, or drop the row (default error)"
    add("--truncation", choices=TRUNCATIONS, default="error", help=longer)
    add("--pad_token_id", type=int, help="padding id (default: the tokenizer's)")


def run(args: argparse.Namespace) -> None:
    """Convert and print the summary."""
    if bool(args.file_path) == bool(args.dataset):
        raise UserError("which problems: give either --file_path with their files, or --dataset with a dataset's id.")
    files = args.file_path or _of_hub(args)
    if args.output_path.endswith(PARQUET):
        named = {"task": args.dataset_type, "fields": args.fields, "split": Path(args.output_path).stem}
        count = convert_to_verl(files, args.output_path, **named)
        print(f"{args.output_path}: {count} rows in verl's columns")
        return
    output = Path(args.output_path)
    if args.output_path.endswith("/") or output.is_dir():
        stem = Path(args.file_path[0]).resolve().stem if args.file_path else f"{Path(args.dataset).name}_{args.split}"
        output /= f"{stem}.mindrecord"
    if args.tokenizer_path and (args.vocab_path or args.merges_file_path):
        raise UserError("which tokenizer: give --vocab_path and --merges_file_path, or --tokenizer_path alone.")
    same = ("template", "system_prompt", "max_prompt_length", "seq_length", "truncation", "pad_token_id", "fields")
    named = {name: getattr(args, name) for name in same}
    named |= {"tools": tool_schemas(args.environment, args.tools), "variables": args.chat_template_kwargs}
    print(convert(files, output, open_tokenizer(args, None), task=args.dataset_type, **named))


def _of_hub(args: argparse.Namespace) -> list[Path]:
    """Find the files of --dataset, and name them."""
    if not (is_id(args.dataset) or Path(args.dataset).is_dir()):
        raise UserError(f"--dataset {args.dataset}: is no id like openai/gsm8k; name files with --file_path.")
    files = dataset_files(args.dataset, args.split, args.subset)
    print(f"{args.dataset}: {some([f'{file.parent.name}/{file.name}' for file in files], 4)}", flush=True)
    return files
