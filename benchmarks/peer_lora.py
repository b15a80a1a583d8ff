"""Runs the peer's script with adapters: TRL's GRPOTrainer gets a `peft_config`, and nothing else changes.

ENV/bin/python benchmarks/peer_lora.py peer_grpo_bench.py --lora-rank 16 --load DIR ...

It needs the peer's environment with `peft`. All linear modules but the head get adapters, with alpha twice the rank, as
`grpo_step.py --lora-rank` gives them. The reference of the KL term is the same model with its adapters off. All flags
but --lora-rank are the script's own. The script has to use `trl.GRPOTrainer` under that name in a function `main`.
"""

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


def arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Parse (own arguments, arguments of the script)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("script", type=Path, help="the peer's benchmark")
    parser.add_argument("--lora-rank", type=int, required=True)
    return parser.parse_known_args(argv)


def main() -> None:
    args, rest = arguments()
    script = loaded(args.script, rest)
    script.GRPOTrainer = with_adapters(script.GRPOTrainer, args.lora_rank)
    script.main()


def loaded(path: Path, flags: Sequence[str]) -> ModuleType:
    """Load the peer's script with its own flags, before any import of torch: it sets threads by the environment."""
    sys.argv = [str(path), *flags]
    os.execve = restarting(os.execve)
    spec = importlib.util.spec_from_file_location("peer_script", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def restarting(execve):
    """Wrap `os.execve` for a script that restarts itself with other environment variables: restart this file."""
    return lambda program, _, environment: execve(program, sys.orig_argv, environment)


def with_adapters(trainer: type, rank: int) -> type:
    """Derive a trainer with adapters of all linear modules.

    It ends the process if other parameters than the adapters' train, or if there is a reference model.
    """
    import peft
    import torch

    class AdapterTrainer(trainer):
        def __init__(self, *args, model, **more):
            head = model.get_output_embeddings()
            linear = [each for each in model.modules() if isinstance(each, torch.nn.Linear) and each is not head]
            expected = sum(rank * (each.in_features + each.out_features) for each in linear)
            config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
            super().__init__(*args, model=model, peft_config=config, **more)
            trained = {name: each.numel() for name, each in self.model.named_parameters() if each.requires_grad}
            others = [name for name in trained if ".lora_A." not in name and ".lora_B." not in name]
            if others or sum(trained.values()) != expected:
                sys.exit(f"peer_lora: {sum(trained.values())} parameters train, not {expected} of adapters: {others}")
            if getattr(self, "ref_model", None) is not None:
                sys.exit("peer_lora: the trainer has a reference model, and adapters off are to be the reference")
            total = sum(each.numel() for each in self.model.parameters())
            print(f"{expected:,} of {total:,} parameters train, in {len(linear)} adapters of rank {rank}", flush=True)

    return AdapterTrainer


if __name__ == "__main__":
    main()
