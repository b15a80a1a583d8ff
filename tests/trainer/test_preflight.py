"""What a job stands on, part by part; the whole block is seen in the runs of `test_grpo_runs.py`."""

import shutil
import threading

import numpy as np
import pytest

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.comm.tcp import Channels, SocketPeers
from mindrlhf.backend.process.launch import World
from mindrlhf.backend.process.wait_for_ranks import roll_call
from mindrlhf.configs.grpo import RewardSettings
from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.configs.lora import Adapter
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.errors import UserError
from mindrlhf.flags import TrainFlags
from mindrlhf.memory.estimate import rank_plan
from mindrlhf.memory.pictures import Lengths
from mindrlhf.memory.work import Work
from mindrlhf.metrics.trackers import check_installed
from mindrlhf.models.parameters import parameter_count, trained_count
from mindrlhf.rewards.runner import RewardRunner
from mindrlhf.trainer import preflight
from mindrlhf.trainer.check import read_roles
from mindrlhf.trainer.preflight import RankResources, block, check_writable, devices, disk_line, disk_needs, try_reward
from mindrlhf.types import Prompt

MODEL = ModelConfig(
    vocab_size=50, hidden_size=24, intermediate_size=40, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=6
)


class Mailboxes:
    """Peers of threads; who is in `silent` never sends."""

    def __init__(self, size, silent=()):
        self.boxes = {(a, b): [] for a in range(size) for b in range(size)}
        self.news, self.silent = threading.Condition(), silent

    def of(self, rank):
        def send(array, to):
            with self.news:
                if rank not in self.silent:
                    self.boxes[rank, to].append(array.copy())
                self.news.notify_all()

        def receive(into, source):
            with self.news:
                self.news.wait_for(lambda: self.boxes[source, rank], timeout=1)
                into[:] = self.boxes[source, rank].pop(0) if self.boxes[source, rank] else 0

        peers = SocketPeers({})
        peers.send = send
        peers.receive = receive
        return Collectives(World(rank, 4, "CPU", channels=Channels(messages=peers, gathers=peers, sums=peers)))


def call(mailboxes, limit_s):
    """Each rank's seconds, and what each was given up with."""
    seconds, troubles = {}, {}

    def one(rank):
        seconds[rank] = roll_call(mailboxes.of(rank), lambda error: troubles.setdefault(rank, str(error)), limit_s)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seconds, troubles


def test_every_rank_answers():
    seconds, troubles = call(Mailboxes(4), limit_s=5)
    assert sorted(seconds) == [0, 1, 2, 3]
    assert not troubles


def test_the_missing_rank_is_named():
    _, troubles = call(Mailboxes(4, silent=(2,)), limit_s=0.3)
    assert troubles[0].startswith("rank 2 of 4 did not answer rank 0 within 0.3 s")


def test_one_process_calls_nobody():
    assert roll_call(Collectives(World(0, 1, "CPU")), pytest.fail, limit_s=5) == 0.0


def test_memory_that_will_not_do_is_said_before_the_run():
    yaml = ModelYaml(path="model.yaml", context={"device_target": "CPU"})
    config = load_grpo_config(None, [])
    work = Work.of(config, read_roles(TrainFlags(), config, MODEL), {"train": yaml, "infer": yaml}, Lengths(20))
    peak = rank_plan(work, 0).peak
    here = RankResources("a", 2, frozenset({0, 1}), 4 * peak, 1e9)
    assert "NOT ENOUGH" not in preflight.memory_line(work, [here] * 4)
    short = preflight.memory_line(work, [here] * 5)
    assert "planned at most for a process, in " in short
    assert "NOT ENOUGH, " in short
    device = ModelYaml(path="model.yaml", context={"device_target": "Ascend", "max_device_memory": "0.001GB"})
    on_device = Work.of(config, work.roles, {"train": device, "infer": device}, Lengths(20))
    assert "NOT ENOUGH, 1.0 MiB are there" in preflight.memory_line(on_device, [here])


def test_disk(tmp_path, monkeypatch):
    def needs(*settings: str, model=MODEL) -> tuple[int, int]:
        config = load_grpo_config(None, settings)
        return disk_needs(config, read_roles(TrainFlags(), config, model))

    weights = 4 * parameter_count(MODEL)
    assert needs() == (weights, weights)
    saving = ["trainer.save_freq=10", "trainer.save_max_ckpt_num=2"]
    assert needs(*saving) == (4 * weights, weights + 9 * weights)
    assert 1.5 * weights < needs(*saving, "optimizer.state=int8")[0] - weights < 2 * weights
    adapted = MODEL.model_copy(update={"adapter": Adapter(2, 4)})
    trained, every = 4 * trained_count(adapted), 4 * parameter_count(adapted)
    assert trained < every / 8
    assert needs(*saving, model=adapted) == (every + 3 * trained, every + 9 * trained)
    assert needs("algorithm.advantage=gae")[0] == weights + 4 * parameter_count(MODEL.as_critic())
    usage = shutil.disk_usage(tmp_path)._replace(free=4 * weights)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage)
    assert "NOT ENOUGH" not in disk_line(tmp_path, weights, 4 * weights)
    assert "NOT ENOUGH for all of them; lower trainer.save_max_ckpt_num" in disk_line(
        tmp_path, weights, 4 * weights + 1
    )
    with pytest.raises(UserError, match="free some space, or give --save_ckpt_dir another disk"):
        disk_line(tmp_path, 4 * weights + 1, 10 * weights)


def test_a_folder_that_cannot_be_written(tmp_path):
    check_writable(tmp_path)
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    with pytest.raises(UserError, match="cannot be written to"):
        check_writable(tmp_path / "none")


def test_devices_by_host():
    ranks = [
        RankResources("a", 2, frozenset({0, 1}), 8 << 30, 1e11),
        RankResources("a", 2, frozenset({2, 3}), 7 << 30, 1e11),
        RankResources("b", 4, frozenset(range(6)), 16 << 30, 3e11),
    ]
    assert devices("CPU", ranks, "float32") == (
        "CPU, a: 2 x 2 threads, 7.0 GiB of memory free, 200 GFLOP/s of float32 products; "
        "b: 1 x 4 threads (OMP_NUM_THREADS leaves 2 of 6 cores idle), "
        "16.0 GiB of memory free, 300 GFLOP/s of float32 products"
    )
    assert block({"a": "1", "bcd": "2"}) == "preflight:\n  a    1\n  bcd  2"


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    file = tmp_path_factory.mktemp("rewards") / "rewards.py"
    file.write_text(
        "def right(prompt, completion, fields):\n    return completion == fields['ground_truth']\n"
        "def picky(prompt, completion, fields):\n    return 1 / len(completion)\n"
        "def broken(prompt, completion, fields):\n    return fields['no such field']\n"
    )
    return file


def runner(functions, *names):
    return RewardRunner(RewardSettings(functions=[{"name": f"{functions}:{name}"} for name in names]))


class Codec:
    """A tokenizer whose texts are the lists of their tokens."""

    def decode(self, ids):
        return str(ids)

    def encode(self, text):
        return [len(text)]


def test_rewards_are_tried_on_one_row(functions, caplog):
    prompt = Prompt(0, np.array([1, 2], np.int32), {"ground_truth": "72"})
    with runner(functions, "right", "picky") as rewards:
        line = try_reward(rewards, prompt, Codec(), 256)
    assert "right 1, 0, 0 (" in line
    assert "picky 0.5, 0.0588, failed (" in line, "one that fails for some answers is let through"
    assert "picky failed in the preflight" in caplog.text
    with (
        runner(functions, "right", "broken") as rewards,
        pytest.raises(UserError, match=r"broken fails on the first row of the data, whatever the answer \(.*no such"),
    ):
        try_reward(rewards, prompt, Codec(), 256)


def test_the_overlong_punishment_is_tried_with_the_limit_of_the_run():
    prompt = Prompt(0, np.array([1, 2], np.int32), {"ground_truth": "72"})
    with RewardRunner(RewardSettings(overlong_factor=1.0, overlong_buffer=64)) as rewards:
        assert "soft_overlong 0, 0, 0 (" in try_reward(rewards, prompt, Codec(), 256)


def test_trackers_are_looked_for(monkeypatch):
    check_installed(("console", "jsonl"))
    monkeypatch.setitem(__import__("sys").modules, "swanlab", None)
    with pytest.raises(UserError, match=r"trainer\.loggers has 'swanlab', which is not installed"):
        check_installed(("console", "swanlab"))
