"""What a trainer is given, and the order of a run's end: with steps in place of a real run."""

import os
import signal

import pytest

from mindrlhf import GRPOConfig, GRPOTrainer, SFTTrainer, UserError
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.run.report import StepRecord

ROWS = [{"prompt": f"{number} + 1 =", "ground_truth": str(number + 1)} for number in range(8)]


class Steps(GRPOTrainer):
    """Steps of no job; notes what came in. interrupt: the step in which the process gets SIGINT."""

    interrupt = None
    threw = None

    def _check(self, flags):
        return flags

    def _run(self, job, signals):
        try:
            for step in (1, 2, 3):
                if step == self.interrupt:
                    os.kill(os.getpid(), signal.SIGINT)
                    while not signals.wanted:
                        pass
                    return False
                yield StepRecord(step, 3, {"actor/loss": float(step)})
        except BaseException as error:
            self.threw = error
            raise
        return False


@pytest.fixture
def make(model, tmp_path):
    def of(kind=GRPOTrainer, **arguments):
        given = {"args": GRPOConfig(tmp_path, max_steps=3), "reward_funcs": "gsm8k", "train_dataset": ROWS}
        return kind(model, **given | arguments)

    return of


class Failing:
    def on_step_end(self, args, state, control, **others):
        raise ZeroDivisionError("a callback's")


def test_an_error_of_a_callback_ends_the_run(make):
    """It reaches the steps, which under msrun end the other processes."""
    trainer = make(Steps, callbacks=[Failing])
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert isinstance(trainer.threw, ZeroDivisionError)


@pytest.fixture
def interruptible():
    """SIGINT as in a program in the foreground: one that a script starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_stops_the_run_and_the_program(make, interruptible):
    trainer = make(Steps)
    trainer.interrupt = 2
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert (trainer.state.global_step, trainer.threw) == (1, None)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    trainer.interrupt = None
    assert trainer.train().training_loss == 3.0


def test_the_steps_are_one_at_a_time(make):
    trainer = make(Steps)
    iterator = trainer.train_iter()
    next(iterator)
    with pytest.raises(UserError, match="under way"):
        next(trainer.train_iter())
    iterator.close()
    assert isinstance(trainer.threw, GeneratorExit)
    assert len(list(trainer.train_iter())) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reward_funcs": [object()]}, "reward_funcs: object is no reward function"),
        ({"reward_funcs": ["gsm8k"], "args": GRPOConfig(reward_weights=[1, 2])}, "reward_weights has 2 numbers for 1"),
        ({"train_dataset": {"train": ROWS}}, r"has splits \('train'\)"),
        ({"train_dataset": 3}, "train_dataset: is int"),
        ({"rollout_func": print}, "rollout_func is given"),
        ({"tools": [print]}, r"tools: print is an object of this program.*tools\.py:print"),
        ({"tools": [lambda: 1]}, r"tools: lambda is an object of this program"),
        ({"environment_factory": type("A.B", (), {})}, r"environment_factory: A.B is an object of this program"),
        ({"processing_class": 3}, "processing_class: is int"),
        ({"peft_config": {"r": 4, "use_dora": True}}, "use_dora is True"),
        ({"args": GRPOConfig(per_device_train_batch_size=3)}, "num_generations 8 does not divide"),
    ],
)
def test_refused(make, arguments, message):
    with pytest.raises(UserError, match=message):
        make(**arguments)


def test_a_model_in_memory_is_refused():
    with pytest.raises(UserError, match="models are read from disk"):
        SFTTrainer(object())


def test_what_needs_a_training_first(make):
    trainer = make()
    with pytest.raises(UserError, match="call train first"):
        trainer.save_model()
    with pytest.raises(UserError, match="give the trainer an eval_dataset"):
        trainer.evaluate()


def test_adapters_are_settings(make):
    """With PEFT's defaults, which are others than ours."""
    flags = make(peft_config={"r": 4, "lora_alpha": 8, "target_modules": {"q_proj", "o_proj"}})._flags()
    lora = flags.settings.values["lora"]
    assert (lora["rank"], lora["alpha"], lora["target_modules"]) == (4, 8, ("o_proj", "q_proj"))
    assert make(peft_config={})._flags().settings.values["lora"]["target_modules"] == ("q_proj", "v_proj")


def test_functions_of_one_name_are_told_apart(make):
    functions = [lambda completions, **columns: [0.0] * len(completions) for _ in range(2)]
    trainer = make(reward_funcs=functions, args=GRPOConfig(reward_weights=[1, 0.5]))
    assert trainer._flags().settings.values["reward"]["functions"] == [
        {"name": "python:lambda", "weight": 1.0},
        {"name": "python:lambda_2", "weight": 0.5},
    ]
    assert list(trainer._objects().functions.values()) == functions


def test_keys_without_effect_are_told(make, capsys):
    make(args=GRPOConfig(bf16=True, fp16=False))
    assert capsys.readouterr().out.startswith("GRPOConfig: without effect here: bf16, fp16 (the model YAML")


def test_a_tokenizer_of_transformers(make, model):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(model)
    trainer = make(processing_class=theirs)
    ours = Tokenizer.from_path(trainer._flags().tokenizer_path)
    text = "Ada has 7 books. 3 + 4 ="
    assert ours.encode(text) == theirs.encode(text) == Tokenizer.from_path(model).encode(text)
