"""Methods and attributes of transformers' trainers that programs use around a training."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from mindrlhf.api.callbacks import TrainerState
from mindrlhf.api.config import Config
from mindrlhf.api.objects import TokenizerFolder
from mindrlhf.backend.process.launch import is_first_process, started_workers
from mindrlhf.checkpoint.hf import CARD_FILE
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_file, make_folder
from mindrlhf.files.json import finite, read_json, write_json
from mindrlhf.files.text import aligned
from mindrlhf.hub.upload import upload_model

ALL_RESULTS = "all_results.json"
FRONT = "---\n"  # around the facts at the top of a card


class ModelFolder(str):
    """Path of a trainer's model, with methods that programs call on TRL's model object.

    save: function that writes the trained model to a folder.
    """

    save: Callable[[str | Path], None]

    def __new__(cls, path: str, save: Callable[[str | Path], None]) -> "ModelFolder":
        made = super().__new__(cls, path)
        made.save = save
        return made

    def save_pretrained(self, save_directory: str | Path, **_: Any) -> None:
        """Write the trained model, as the trainer's `save_model`."""
        self.save(save_directory)

    def __getattr__(self, name: str) -> Any:
        found = f"trainer.model is a path here ({self!s}), without {name}"
        raise AttributeError(f"{found}; load the folder of save_model with transformers for a module of PyTorch.")


@dataclass(frozen=True)
class Accelerator:
    """Numbers of the processes, under accelerate's names."""

    process_index: int
    num_processes: int
    is_main_process: bool

    @property
    def is_local_main_process(self) -> bool:
        return self.is_main_process

    def print(self, *values: Any, **others: Any) -> None:
        """Print in the first process."""
        if self.is_main_process:
            print(*values, **others)

    def unwrap_model(self, model: Any, **_: Any) -> Any:
        """Return the model, which nothing wraps."""
        return model

    def wait_for_everyone(self) -> None:
        """Wait for nobody: one process only. Raises UserError for several."""
        if self.num_processes > 1:
            raise UserError("accelerator.wait_for_everyone: processes meet within a training only; leave it out.")

    def __getattr__(self, name: str) -> Any:
        found = f"trainer.accelerator has no {name} here, because MindSpore trains and not PyTorch"
        raise AttributeError(f"{found}; it has print, unwrap_model, is_main_process, process_index and num_processes.")


class AfterTraining:
    """Part of a trainer: what TRL's programs call after `train`."""

    args: Config
    model: ModelFolder | None
    output: Path
    state: TrainerState
    _trained: str | None
    _processing_class: Any
    save_model: Callable[[str | Path | None], None]

    @property
    def accelerator(self) -> Accelerator:
        """Numbers of the processes."""
        return Accelerator(int(os.environ.get("RANK_ID", 0)), started_workers(), is_first_process())

    @property
    def processing_class(self) -> Any:
        """The tokenizer that the trainer was given, or the path of its model's."""
        path = self._processing_class or self.args.flag("tokenizer_path") or self.model
        return TokenizerFolder(path) if isinstance(path, str | Path) else path

    tokenizer = processing_class

    def is_world_process_zero(self) -> bool:
        """Tell whether this is the first process."""
        return is_first_process()

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print metrics in the first process, under the name of their split."""
        if is_first_process():
            values = {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in metrics.items()}
            rows = [(f"  {name}", values[name]) for name in sorted(values)]
            print(f"{split} metrics:\n{aligned(rows)}" if rows else f"{split} metrics: none", flush=True)

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write metrics to `<split>_results.json` in the output folder.

        combined: also add them to `all_results.json` there.
        """
        if not is_first_process():
            return
        whole = self.output / ALL_RESULTS
        _write(self.output / f"{split}_results.json", metrics)
        if combined:
            _write(whole, (read_json(whole) if whole.is_file() else {}) | dict(metrics))

    def save_state(self) -> None:
        """Write `trainer_state.json` to the output folder: steps, epochs and what was logged.

        Checkpoints hold the state of the run itself.
        """
        if is_first_process():
            _write(self.output / "trainer_state.json", asdict(self.state))

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | Sequence[str] | None = None,
        tags: str | Sequence[str] | None = None,
    ) -> None:
        """Write the trained model's card to the output folder.

        The arguments are added to its facts. UserError before a training.
        """
        if is_first_process():
            card = self._card()
            with atomic_file(self.output / CARD_FILE) as temporary:
                temporary.write_text(with_facts(card, model_name, dataset_name, tags), encoding="utf-8")

    def _card(self) -> str:
        """Read the trained model's card, which a checkpoint gets when it is exported."""
        if self._trained and (file := Path(self._trained) / CARD_FILE).is_file():
            return file.read_text(encoding="utf-8")
        with TemporaryDirectory() as folder:
            self.save_model(folder)
            return (Path(folder) / CARD_FILE).read_text(encoding="utf-8")

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        *,
        model_name: str | None = None,
        dataset_name: str | Sequence[str] | None = None,
        tags: str | Sequence[str] | None = None,
    ) -> str | None:
        """Upload the trained model, adapters merged, to Hugging Face's hub; returns its address.

        Its name is `hub_model_id` of the configuration, or the output folder's; `hub_token`, `hub_private_repo` and
        `hub_revision` count too. blocking: the upload is always finished on return. Other arguments: as in
        `create_model_card`. None in other processes than the first. Raises UserError before a training, offline, and
        for what the hub refuses.
        """
        if not is_first_process():
            return None
        with TemporaryDirectory() as folder:
            self.save_model(folder)
            facts = with_facts(self._card(), model_name, dataset_name, tags)
            (Path(folder) / CARD_FILE).write_text(facts, encoding="utf-8")
            return upload_model(
                Path(folder),
                self.args.hub_model_id or self.output.resolve().name,
                message=commit_message,
                private=self.args.hub_private_repo,
                token=token or self.args.hub_token,
                revision=revision or self.args.hub_revision,
            )


def _write(path: Path, content: Mapping[str, Any]) -> None:
    make_folder(path.parent)
    with atomic_file(path) as temporary:
        write_json(temporary, finite(content))


def with_facts(
    card: str, name: str | None, datasets: str | Sequence[str] | None, tags: str | Sequence[str] | None
) -> str:
    """Add a name, datasets and tags to a card's facts."""
    empty, facts, text = card.split(FRONT, 2)
    values = yaml.safe_load(facts)
    values |= {"model_name": name} if name else {}
    values |= {"datasets": _listed(datasets)} if datasets else {}
    values["tags"] = [*values["tags"], *(tag for tag in _listed(tags) if tag not in values["tags"])]
    return FRONT.join((empty, yaml.safe_dump(values, sort_keys=False, allow_unicode=True), text))


def _listed(values: str | Sequence[str] | None) -> list[str]:
    return [values] if isinstance(values, str) else list(values or ())
