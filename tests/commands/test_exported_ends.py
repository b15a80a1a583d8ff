"""An exported model ends its answers where generation here ended them: end-of-turn tokens travel with it."""

import json
from itertools import combinations

import jobs
import numpy as np
import pytest
from small_model import SmallModel
from training_states import save, stores

from mindrlhf.backend.process.launch import launch
from mindrlhf.checkpoint.hf import read_hf_config, save_hf
from mindrlhf.checkpoint.training_state import ShardGroup, TrainingState
from mindrlhf.configs.grpo import SamplingSettings
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.model_roles import RoleModel
from mindrlhf.models.parameters import parameter_table
from mindrlhf.parallel.layout import model_layout
from mindrlhf.parallel.mesh import Mesh
from mindrlhf.rollout.generator import Generator
from mindrlhf.run.run import hf_files
from mindrlhf.types import Prompt

NEW = 16  # tokens of an answer, at most
FAMILIES = {
    "qwen2": {"family": "qwen2", "attention_bias": True, "tie_word_embeddings": True},
    "llama": {"family": "llama", "attention_bias": False, "tie_word_embeddings": False},
}


def prompts(vocab_size: int) -> list[Prompt]:
    rng = np.random.default_rng(3)
    lengths = (3, 9, 5, 7, 4, 11, 6, 8)
    return [Prompt(i, rng.integers(10, vocab_size, length, np.int32)) for i, length in enumerate(lengths)]


def answers(model, config) -> list[tuple[list[int], str]]:
    """(token ids, why it ended) of each prompt's greedy answer."""
    launch("CPU")
    groups = Generator(str(model), SamplingSettings(max_new_tokens=NEW, temperature=0.0)).generate(
        prompts(config.vocab_size)
    )
    return [(group.rollouts[0].response_ids.tolist(), group.rollouts[0].finish_reason) for group in groups]


def oracle(small: SmallModel, stops) -> list[list[int]]:
    """Token ids of each prompt's greedy answer in float64 NumPy, to the first of `stops`."""
    found = []
    for prompt in prompts(small.config.vocab_size):
        sequence, ids = prompt.token_ids.tolist(), []
        while len(ids) < NEW and not (ids and ids[-1] in stops):
            ids.append(int(small.logits(sequence + ids)[-1].argmax()))
        found.append(ids)
    return found


def cut(ids: list[int], ends: tuple[int, ...]) -> list[int]:
    return next((ids[: place + 1] for place, token in enumerate(ids) if token in ends), ids)


def choose_ends(whole: list[list[int]]) -> tuple[int, int]:
    """Two tokens that each end an answer after its first token, while another answer goes on to its full length."""
    for ends in combinations(sorted({token for ids in whole for token in ids[1:]}), 2):
        shorter = [cut(ids, ends) for ids in whole]
        last = {ids[-1] for ids in shorter if 1 < len(ids) < NEW}
        if last == set(ends) and any(ids[-1] not in ends for ids in shorter):
            return ends
    raise AssertionError("no two tokens end some answers and leave others")


@pytest.fixture(scope="module", params=FAMILIES)
def exported(request, task, tmp_path_factory):
    """(folder, configuration, what was generated from the checkpoint, the two end tokens).

    `config.json` of the first weights names no end token, `generation_config.json` names two.
    """
    folder, tokenizer = tmp_path_factory.mktemp(request.param), Tokenizer.from_path(task.folder)
    small = SmallModel.random(seed=5, vocab_size=tokenizer.size, **FAMILIES[request.param])
    config, source = small.config, folder / "source"
    save_hf(source, config, ((spec, small.arrays[spec.name]) for spec in parameter_table(config)), tokenizer=tokenizer)
    ends = choose_ends(oracle(small, ()))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, "pad_token_id": 0}))
    assert json.loads((source / "config.json").read_text()).get("eos_token_id") is None

    model = read_hf_config(source)
    files = {f"hf/{name}": content for name, content in hf_files(RoleModel(str(source), model), tokenizer, {}).items()}
    layout = model_layout(model, Mesh())
    save(stores(folder / "ckpt"), [TrainingState(1, {"model": ShardGroup(layout, small.arrays)}, {}, {}, files)])
    assert jobs.call(["export", "--checkpoint", folder / "ckpt" / "latest", "--output", folder / "hf"]) == 0
    return folder / "hf", SmallModel(model, small.arrays), answers(folder / "ckpt" / "latest", config), ends


def test_answers_end_by_each_token_and_by_length(exported):
    """Otherwise the tests below see less than they say."""
    _, _, generated, ends = exported
    assert {ids[-1] for ids, reason in generated if reason == "eos"} == set(ends)
    assert {reason for _, reason in generated} == {"eos", "length"}


def test_greedy_answers_of_the_oracle_end_there(exported):
    """float64 NumPy, with the end tokens as transformers reads them in the exported folder."""
    transformers = pytest.importorskip("transformers")
    folder, small, generated, _ = exported
    stops = transformers.GenerationConfig.from_pretrained(folder).eos_token_id
    assert oracle(small, stops) == [ids for ids, _ in generated]


def test_generate_of_transformers_ends_there(exported):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder, small, generated, _ = exported
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
    for prompt, (ids, _) in zip(prompts(small.config.vocab_size), generated, strict=True):
        given = torch.from_numpy(prompt.token_ids.astype(np.int64))[None]
        answer = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=NEW, do_sample=False)
        assert answer[0, given.shape[1] :].tolist() == ids
