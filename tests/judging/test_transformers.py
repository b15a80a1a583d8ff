"""Scores that transformers and PEFT compute, from folders that they wrote."""

import numpy as np
import pytest
from scoring_models import FAMILIES, TEMPLATE, scoring_config, write_scoring_model
from torch_python import run_with_torch

from mindrlhf.configs.grpo import RewardSettings
from mindrlhf.rewards.batches import Sample
from mindrlhf.rewards.runner import RewardRunner

TALKS = [("What is 2 + 2?", answer) for answer in ("4", "The answer is 4.", "no", "yes " * 40)]

CLASSIFIER = """
import json, sys, torch, transformers
given = json.load(sys.stdin)
torch.manual_seed(0)
tokenizer = transformers.AutoTokenizer.from_pretrained(given["folder"])
tokenizer.chat_template = given["template"]
open_model = transformers.AutoModelForSequenceClassification.from_pretrained
model = open_model(given["folder"], num_labels=1, dtype=torch.float32)
if given["adapter"]:
    import peft
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"])
    model = peft.get_peft_model(model, config)
for name, parameter in model.named_parameters():
    if ".lora_B." in name or "score" in name:
        torch.nn.init.normal_(parameter, std=0.2)
model.save_pretrained(given["out"])
tokenizer.save_pretrained(given["out"])
talks = [[{"role": "user", "content": asked}, {"role": "assistant", "content": said}] for asked, said in given["talks"]]
texts = [tokenizer.apply_chat_template(talk, tokenize=False) for talk in talks]
batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
model.config.pad_token_id = tokenizer.pad_token_id
model.eval()
with torch.no_grad():
    print(json.dumps(model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0].tolist()))
"""


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_give_the_same_scores(tmp_path, family, adapter):
    write_scoring_model(tmp_path / "own", scoring_config(family, value_head=not adapter))
    request = {"folder": str(tmp_path / "own"), "out": str(tmp_path / "theirs"), "talks": TALKS}
    theirs = run_with_torch(CLASSIFIER, request | {"adapter": adapter, "template": TEMPLATE})
    with RewardRunner(RewardSettings(functions=[{"name": "model", "path": str(tmp_path / "theirs")}])) as runner:
        table = runner.score([Sample(asked, said, {"question": asked}) for asked, said in TALKS])
    np.testing.assert_allclose(table.by_function["model"], theirs, rtol=0, atol=1e-4)
    assert np.ptp(theirs) > 0.1
