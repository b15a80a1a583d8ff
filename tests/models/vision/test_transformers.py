"""A model that sees and its adapters as transformers and PEFT load them: the same prompts, pixels and greedy tokens."""

import jobs
import numpy as np
import pytest
from seeing_task import COLOURS, make_seeing_task
from torch_python import run_with_torch, torch_python

from mindrlhf.configs.grpo import SamplingSettings
from mindrlhf.rollout.generator import Generator
from mindrlhf.run.picture_prompts import PictureForm, PicturePrompts

ASKED = [("Which colour?", ["red"]), ("Which colours?", ["blue", "green"]), ("Is it red?", ["green"])]
NEW = 24

PROGRAM = """
import json, sys, torch, transformers
from PIL import Image
given = json.load(sys.stdin)
folder = given["folder"]
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
pixels = transformers.Qwen2VLImageProcessor.from_pretrained(folder)
model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
if given["adapter"]:
    import peft
    model = peft.PeftModel.from_pretrained(model, given["adapter"])
model.eval()
inner = pixels.merge_size ** 2
vision = [tokenizer.convert_tokens_to_ids(name) for name in given["special"]]
out = []
for question, files in given["asked"]:
    shown = pixels(images=[Image.open(file) for file in files], return_tensors="pt")
    content = [{"type": "image"} for _ in files] + [{"type": "text", "text": question}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    whole = ""
    for part, grid in zip(text.split("<|image_pad|>"), [*shown["image_grid_thw"], None]):
        whole += part + ("" if grid is None else "<|image_pad|>" * (int(grid.prod()) // inner))
    ids = tokenizer(whole, return_tensors="pt", add_special_tokens=False)
    made = model.generate(
        **ids,
        **shown,
        max_new_tokens=given["new"],
        do_sample=False,
        suppress_tokens=vision,
        return_dict_in_generate=True,
        output_logits=True,
        mm_token_type_ids=(ids["input_ids"] == vision[2]).long(),
    )
    drawn = made.sequences[0, ids["input_ids"].shape[1] :]
    logits = torch.stack(made.logits)[:, 0].float()
    logits[:, vision] = -torch.inf
    log_probs = torch.log_softmax(logits, -1)[torch.arange(len(drawn)), drawn]
    out.append([ids["input_ids"][0].tolist(), drawn.tolist(), log_probs.tolist()])
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    torch_python()
    return make_seeing_task(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def adapted(seeing, tmp_path_factory):
    """A run with adapters of the text, the tower and the merger."""
    folder = tmp_path_factory.mktemp("adapted")
    flags = ("--load_sft_checkpoint_train", seeing.model, "--mind_dataset_dir", seeing.rows)
    settings = ("data.pairs_per_step=6", "optimizer.lr=1e-2", "trainer.total_steps=3", "lora.rank=2", "lora.alpha=4")
    modules = "lora.target_modules=[q_proj, o_proj, down_proj, qkv, merger.mlp.0]"
    assert jobs.call(["sft", *flags, "--save_ckpt_dir", folder / "ckpt", *settings, modules]) == 0
    return folder / "ckpt"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["base", "exported", "adapter"])
def test_transformers_draw_the_same_tokens(seeing, adapted, form):
    """After the same ids of prompts; log-probs of tokens to 1e-4. An adapter's are those of what it is merged to."""
    folder = adapted / "hf" if form == "exported" else seeing.model
    images = seeing.model.parent / "images"
    asked = [(question, [str(images / f"rows_{name}_1.png") for name in names]) for question, names in ASKED]
    assert {name for _, names in ASKED for name in names} == set(COLOURS)
    adapter = str(adapted / "hf_adapter") if form == "adapter" else ""
    special = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    request = {"folder": str(folder), "adapter": adapter, "asked": asked, "new": NEW, "special": special}
    theirs = run_with_torch(PROGRAM, request)

    model = str(folder if form != "adapter" else adapted / "hf_adapter")
    generator = Generator(model, SamplingSettings(max_new_tokens=NEW, temperature=0.0))
    reader = PicturePrompts(generator.tokenizer, generator.model.vision, "prompts", PictureForm())
    messages = [[{"role": "user", "content": question}] for question, _ in asked]
    prompts = reader.of_given(messages, [files for _, files in asked])
    groups = generator.generate(prompts)
    for group, (prompt, drawn, log_probs) in zip(groups, theirs, strict=True):
        (rollout,) = group.rollouts
        assert group.prompt.token_ids.tolist() == prompt
        assert rollout.response_ids.tolist() == drawn
        np.testing.assert_allclose(rollout.row("policy_log_probs"), log_probs, rtol=0, atol=1e-4)
    assert len({tuple(drawn) for _, drawn, _ in theirs}) > 1
