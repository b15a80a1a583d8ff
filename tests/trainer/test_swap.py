"""A job with swap on gives the bits of one without, on one process and on different layouts."""

import jobs
import pytest

SETTINGS = (
    "algorithm.beta=0.1",
    "algorithm.reference_sync_steps=2",
    "algorithm.num_iterations=2",
    "optimizer.lr=1e-3",
    "train.length_bucket=48",
    "trainer.total_steps=3",
    *jobs.ONE_LAYER,
)
ADAPTERS = ("lora.rank=4", "lora.reference=start")
LAYOUTS = (
    "train_yaml.parallel_config.model_parallel=2",
    "infer_yaml.parallel_config.data_parallel=2",
)


def train(task, folder, workers: int, *settings: str) -> jobs.Run:
    arguments = task.train(folder, *SETTINGS, *settings)
    if workers == 1:
        assert jobs.call(arguments) == 0
    else:
        jobs.train_apart(arguments, workers)
    return jobs.Run(folder)


@pytest.mark.parametrize(
    ("workers", "settings"),
    [
        (1, ()),
        pytest.param(1, ADAPTERS, marks=pytest.mark.slow),
        pytest.param(1, ("optimizer.state=int8",), marks=pytest.mark.slow),
        pytest.param(2, LAYOUTS, marks=[pytest.mark.slow, pytest.mark.msrun]),
        pytest.param(2, (*LAYOUTS, *ADAPTERS), marks=[pytest.mark.slow, pytest.mark.msrun]),
    ],
)
def test_swap_changes_nothing_but_memory(task, tmp_path, workers, settings):
    plain = train(task, tmp_path / "plain", workers, *settings)
    swapped = train(task, tmp_path / "swapped", workers, *settings, "memory.swap=True")
    assert swapped.responses == plain.responses
    assert {name: w.tobytes() for name, w in swapped.weights.items()} == {
        name: w.tobytes() for name, w in plain.weights.items()
    }
    if "lora.rank=4" in settings:  # the base is written once, and such adapters are less than a page
        assert not swapped.column("swap/out_gb")[1:].any()
        assert swapped.column("swap/in_gb")[1:].any()
    else:
        assert (swapped.column("swap/out_gb")[1:] > 0).all()
    held = {phase: swapped.column(f"swap/resident_gb/{phase}")[-1] for phase in ("gen", "ref", "update_actor")}
    assert held["ref"] < min(held["gen"], held["update_actor"])
    assert not list((tmp_path / "swapped" / "swap").iterdir())
