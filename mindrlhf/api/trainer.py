"""Base of trainers: a job's steps with callbacks, and the trained model."""

import argparse
import shutil
import signal
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from mindrlhf.api.after_training import AfterTraining, ModelFolder
from mindrlhf.api.answering import Answering
from mindrlhf.api.callbacks import Callbacks, TrainerState
from mindrlhf.api.config import Config, Resolved
from mindrlhf.api.objects import adapter_settings, model_path, number_of_rows, rows_of, tokenizer_path
from mindrlhf.backend.process.launch import is_first_process
from mindrlhf.configs.job_yamls import read_train_yaml, split_overrides
from mindrlhf.configs.layers import merge
from mindrlhf.configs.loading import load_settings
from mindrlhf.configs.run import HELD_OUT as MEASURED
from mindrlhf.configs.yaml_file import Layer
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_files
from mindrlhf.files.naming import ADAPTER_FOLDER, MODEL_FOLDER, step_files
from mindrlhf.files.standard_streams import guard_streams
from mindrlhf.job import Job, Objects
from mindrlhf.migration.other_names import answer
from mindrlhf.migration.trl.names import with_trl_names
from mindrlhf.migration.trl.translation import RunSizes, nested
from mindrlhf.run.stop_signals import StopSignals
from mindrlhf.trainer.start import Steps
from mindrlhf.user_functions import loading

if TYPE_CHECKING:
    from mindrlhf.metrics.plot import Curves
    from mindrlhf.rollout import generator
    from mindrlhf.run.report import StepRecord

TRAIN, HELD_OUT = "train_dataset", "eval_dataset"
Resume = str | Path | bool | None


class TrainOutput(NamedTuple):
    """Result of a training. metrics: metrics of the last step."""

    global_step: int
    training_loss: float
    metrics: Mapping[str, float]


class Trainer(Answering, AfterTraining, ABC):
    """Base class of trainers.

    args: the configuration. state: state of the last training. model: path or id of the initial weights; None for
    random ones. Raises `UserError` for a wrong argument, here or when it is used.
    """

    loss: ClassVar[str]  # metric

    def __init__(
        self,
        model: Any,
        args: Config,
        train_dataset: Any,
        eval_dataset: Any,
        processing_class: Any,
        callbacks: Iterable[Any] | None,
        peft_config: Any,
    ):
        if file := loading():
            found = f"{file}: makes a trainer when it is imported, as processes of its tools and environments do"
            raise UserError(f'{found}; put that below `if __name__ == "__main__":`.')
        self._path = model_path(model, type(self).__name__)
        self.model = None if self._path is None else ModelFolder(self._path, self.save_model)
        self.args = args
        self.state = TrainerState()
        self.output = Path(args.output_dir or f"out/{Path(self._path or 'model').name}")
        self.state.is_world_process_zero = is_first_process()
        self._temporary = TemporaryDirectory(prefix="mindrlhf-")
        self._tokenizer = tokenizer_path(processing_class, self._temporary.name)
        self._processing_class = self._tokenizer if isinstance(processing_class, Tokenizer) else processing_class
        self._datasets = {TRAIN: rows_of(train_dataset, TRAIN), HELD_OUT: rows_of(eval_dataset, HELD_OUT)}
        self._rows = number_of_rows(self._datasets[TRAIN])
        self._given = adapter_settings(peft_config) | self._arguments()
        self._trained: str | None = None
        self._busy = False
        self._generator: tuple[Any, generator.Generator] | None = None
        self._flags()  # raises for a mistake
        self._tell_needless()
        others = {"model": self.model, "processing_class": processing_class}
        self._callbacks = Callbacks(callbacks or (), args, self.state, **others)
        self._callbacks("on_init_end")

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints and the trained model."""
        return self.args.flag("save_ckpt_dir") or self.output / "ckpt"

    def add_callback(self, callback: Any) -> None:
        """Add a callback; a class is instantiated."""
        self._callbacks.add(callback)

    def train(self, resume_from_checkpoint: Resume = None) -> TrainOutput:
        """Train to the end; the model is then in `checkpoints`, and `save_model` copies it.

        resume_from_checkpoint: True continues from the output folder's newest checkpoint, a path from the checkpoint
        there. The first SIGINT (Ctrl-C), SIGTERM or SIGHUP saves the run's state and raises KeyboardInterrupt or
        SystemExit.
        """
        last = deque(self.train_iter(resume_from_checkpoint), maxlen=1)
        logged = [logs for logs in self.state.log_history if self.loss in logs]  # by a finished run that was resumed
        metrics = next(iter([*last, *reversed(logged)]), {})
        return TrainOutput(self.state.global_step, metrics.get(self.loss, float("nan")), metrics)

    def train_iter(self, resume_from_checkpoint: Resume = None) -> Iterator[dict[str, float]]:
        """Train as `train`, and yield each step's metrics.

        The metrics have TRL's names and ours. An iterator that is closed before its end saves the run's state.
        """
        resumed = {True: "auto", False: None, None: None}
        resume = resumed[resume_from_checkpoint] if resume_from_checkpoint in resumed else str(resume_from_checkpoint)
        if resume is None and step_files(self.checkpoints, ""):
            right = "go on from them with train(resume_from_checkpoint=True), or set another output_dir"
            raise UserError(f"{self.checkpoints}: holds checkpoints of an earlier run; {right}.")
        signals = StopSignals()
        guard_streams(lasting=True)
        self._trained = None
        self._remember(resume is not None)
        self._callbacks.control.should_training_stop = False
        self._callbacks("on_train_begin")
        finished = yield from self._told(self._steps(signals, self._flags(resume)), signals)
        self._find_trained(finished)
        if finished and self.args.push_to_hub:
            self.push_to_hub()
        self._callbacks("on_train_end")
        if signals.received is not None:
            raise KeyboardInterrupt if signals.received == signal.SIGINT else SystemExit(0)

    def evaluate(self) -> dict[str, float]:
        """Measure on held-out data; returns its metrics under TRL's names and ours.

        It measures the trained model, or the initial one before a training. `eval_reward` is the mean reward,
        `eval_loss` the loss of answers.
        """
        if self._datasets[HELD_OUT] is None:
            raise UserError("evaluate: there is no held-out data; give the trainer an eval_dataset.")
        signals = StopSignals()
        with listening(signals):
            records = list(self._steps(signals, self._flags(validate_only=True)))
        if signals.received is not None:
            raise KeyboardInterrupt
        measured = measured_of(records[0].metrics)
        self._callbacks("on_evaluate", metrics=measured)
        return measured

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the trained model as a Hugging Face folder.

        output_dir: by default the output folder. Adapters are merged into the model. UserError before a training.
        """
        if self._trained is None:
            raise UserError("save_model: nothing is trained yet; call train first.")
        if not is_first_process():
            return
        target = Path(output_dir or self.output)
        source = Path(self._trained)
        if source != self.checkpoints:
            with atomic_files(target) as stage:
                shutil.copytree(source, stage, dirs_exist_ok=True)
            return
        from mindrlhf.commands import export

        parser = argparse.ArgumentParser()
        merge = ["--merge"] if self.args.settings().lora.enabled else []
        export.add_arguments(parser)
        export.run(parser.parse_args(["--checkpoint", str(source), "--output", str(target), *merge]))

    def plot(self, title: str | None = None) -> "Curves":
        """Draw the curves of the last training, which a notebook shows."""
        from mindrlhf.metrics.plot import draw_runs
        from mindrlhf.metrics.writers import METRICS_FILE

        return draw_runs([self.output / METRICS_FILE], title=title)

    def _arguments(self) -> dict[str, Any]:
        """Turn arguments of this kind of trainer into settings, dotted."""
        return {}

    @abstractmethod
    def _check(self, flags: Any) -> Job:
        """Check flags and settings into a job."""

    @abstractmethod
    def _run(self, job: Job, signals: StopSignals) -> Steps:
        """Run a job, which signals may ask to stop."""

    def _objects(self) -> Objects:
        return Objects({name: rows for name, rows in self._datasets.items() if not isinstance(rows, str | None)})

    def _resolve(self) -> Resolved:
        """Turn the configuration into flags and settings, now that rows and devices are known."""
        known: Any = self.args.flags(**self.args.resolve(RunSizes()).flags)
        yaml = read_train_yaml(known, self._path, split_overrides(known.overrides))
        return self.args.resolve(RunSizes(yaml.parallel.data_parallel, self._rows))

    def _flags(self, resume: str | None = None, validate_only: bool = False) -> Any:
        """Make the flags of a run, or of a measurement alone."""
        resolved = self._resolve()
        given = dict(self._given)
        settings = merge((resolved.settings, Layer(nested(given), {(): type(self).__name__})))
        file = resolved.flags.get(self.args.file_flag)
        config: Any = load_settings(self.args.kind, file, given=settings, other_names=answer)
        measures = validate_only or config.trainer.test_freq or config.trainer.val_before_train
        if measures and self._datasets[HELD_OUT] is not None:
            given["data.val_dataset"] = self._source(HELD_OUT)
        if validate_only:
            given |= {"trainer.val_only": True, "trainer.resume_mode": "disable"}
        own = {
            "load_sft_checkpoint_train": (self._trained or self._path) if validate_only else self._path,
            "mind_dataset_dir": self._source(TRAIN) or (self._source(HELD_OUT) if validate_only else None),
            "output_dir": self.output / "evaluation" if validate_only else self.output,
            "save_ckpt_dir": self.checkpoints,
            "tokenizer_path": self._tokenizer or resolved.flags.get("tokenizer_path"),
            "resume_training": resume,
            "settings": merge((resolved.settings, Layer(nested(given), {(): type(self).__name__}))),
        }
        return self.args.flags(**(dict(resolved.flags) | own))

    def _source(self, name: str) -> str | None:
        """Name a dataset for flags and settings: its path, or its key in `_objects`."""
        dataset = self._datasets[name]
        return dataset if dataset is None or isinstance(dataset, str) else name

    def _tell_needless(self) -> None:
        """Print TRL's keys that have no effect here."""
        by_reason: dict[str, list[str]] = {}
        for key, reason in self._resolve().needless.items():
            by_reason.setdefault(reason, []).append(key)
        if by_reason:
            shown = "; ".join(f"{', '.join(keys)} ({reason})" for reason, keys in by_reason.items())
            self._tell(f"without effect here: {shown}")

    def _tell(self, text: str) -> None:
        """Print a note on the configuration in the first process."""
        if is_first_process():
            print(f"{type(self.args).__name__}: {text}", flush=True)

    def _steps(self, signals: StopSignals, flags: Any) -> Steps:
        """Check the job and run it; one at a time."""
        if self._busy:
            raise UserError("a training is under way; wait for its end, or close its iterator.")
        self._busy = True
        try:
            return (yield from self._run(self._check(flags), signals))
        finally:
            self._busy = False

    def _told(self, steps: Steps, signals: StopSignals) -> Generator[dict[str, float], None, bool]:
        """Report each step to callbacks and yield its metrics; returns the result of `steps`.

        During a step or a callback a signal is a request to stop; between them it has its usual effect.
        """
        begins = True
        every = self.args.settings().trainer.log_every
        try:
            while True:
                with listening(signals):
                    if begins:
                        self._callbacks("on_step_begin")
                    record = next(steps)
                    logs = self._seen(record, every)
                    if self._callbacks.control.should_training_stop:
                        signals.ask("a callback has asked for it")
                    begins = 0 < record.step < record.total and not signals.wanted
                yield logs
        except StopIteration as end:
            return end.value
        except GeneratorExit:
            with listening(signals):
                steps.close()
            self._find_trained(False)
            raise
        except BaseException as error:
            with listening(signals):
                steps.throw(error)
            raise

    def _seen(self, record: "StepRecord", every: int) -> dict[str, float]:
        """Report a step to callbacks; every: steps from one log to the next."""
        state = self.state
        logs = self._named({"step": record.step, **record.metrics})
        state.max_steps = record.total
        state.epoch = record.metrics.get("training/epoch", state.epoch)
        if record.step > 0:
            state.global_step = record.step
            if self.loss in logs:  # a resumed run repeats the steps after its checkpoint
                state.log_history[:] = [one for one in state.log_history if one["step"] < record.step]
            self._callbacks("on_step_end", metrics=logs)
            if record.step % every == 0 or record.step == record.total:
                state.log_history.append(logs)
                self._callbacks("on_log", logs=logs)
        if measured := measured_of(record.metrics):
            state.log_history.append({"step": record.step, **measured})
            self._callbacks("on_evaluate", metrics=measured)
        if record.checkpoint:
            self._callbacks("on_save")
        return logs

    def _remember(self, resumes: bool) -> None:
        """Set the state to what earlier starts of the run logged."""
        from mindrlhf.metrics.writers import METRICS_FILE, read_metrics

        file = self.output / METRICS_FILE
        every = self.args.settings().trainer.log_every
        state = self.state
        rows = [self._named(row) for row in read_metrics(file)] if resumes and file.is_file() else []
        state.log_history.clear()
        for logs in rows:
            if logs["step"] > 0 and (logs["step"] % every == 0 or logs is rows[-1]):
                state.log_history.append(logs)
            if measured := measured_of(logs):
                state.log_history.append({"step": logs["step"], **measured})
        state.global_step = int(rows[-1]["step"]) if rows else 0
        state.epoch = rows[-1].get("epoch", 0.0) if rows else 0.0

    def _named(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Add TRL's names to metrics."""
        named = with_trl_names(metrics)
        return named | ({"loss": named[self.loss]} if self.loss in named else {})

    def _find_trained(self, finished: bool) -> None:
        """Find the weights that a training has left, if any."""
        folder = self.checkpoints
        if finished:
            whole = (folder / name for name in (MODEL_FOLDER, ADAPTER_FOLDER))
            self._trained = next(str(path) for path in whole if path.is_dir())
        elif step_files(folder, ""):
            self._trained = str(folder)


def listening(signals: StopSignals) -> AbstractContextManager[Any]:
    """Enter signals in the main thread; Python lets no other thread handle them."""
    return signals if threading.current_thread() is threading.main_thread() else nullcontext()


def measured_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Select the metrics of held-out data, with TRL's names."""
    return with_trl_names({name: value for name, value in metrics.items() if name.startswith(MEASURED)})
