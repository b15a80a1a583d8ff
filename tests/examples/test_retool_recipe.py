"""The recipe retool.yaml: its reward and prompts, and all of it in small (slow)."""

import shutil

import jobs
import pytest
from workers import ROOT

from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.data.parquet import read_parquet, write_parquet
from mindrlhf.data.tasks import calculator
from mindrlhf.data.tokenizer import Tokenizer, train_tokenizer
from mindrlhf.data.tool_formats import load_tool_format
from mindrlhf.rewards.registry import resolve

RECIPES = ROOT / "examples" / "recipes"
CALL = "<code>print(6 * 7)</code>"


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        (r"It is \boxed{42}.", 1.0),
        (rf"{CALL} So it is \boxed{{42}}.", 1.0),
        (r"It is \boxed{41}.", -1.0),
        (rf"{CALL}{CALL} It is \boxed{{41}}.", -0.8),
        (rf"{CALL * 7} It is \boxed{{41}}.", -0.6),
        ("<code><interpreter>42</interpreter>", -1.0),  # what it only pretends is no call
    ],
)
def test_calls_make_wrong_answers_less_wrong(said, reward):
    function = resolve(f"{RECIPES}/retool_reward.py:retool")
    assert function("What is 6 * 7?", said, {"ground_truth": "42"}) == pytest.approx(reward)


def test_each_counted_call_ends_a_turn(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_grpo_config(str(RECIPES / "retool.yaml"))
    assert load_tool_format(config.rollout.tool_format).stop_strings == ("</code>",)
    assert [function.name for function in config.reward.functions] == ["examples/recipes/retool_reward.py:retool"]


KINDS = "demonstrations have `messages`, problems have `prompt`."
BEFORE, AFTER = "Compute with Python between the tags.\n\n*user question:*\n", "\n\nBox the last number."
SOLVED = (
    "<code>\n```python\nprint({})\n```\n</code>\n<interpreter>\n{}\n</interpreter>\n<answer>\n\\boxed{{{}}}\n</answer>"
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with demonstrations in ReTool's columns, problems in DAPO's, and a tokenizer."""
    folder = tmp_path_factory.mktemp("retool")
    demonstrated, asked = [], []
    for row in calculator.generate(2200, seed=0, max_number=99):
        expression, value = row["answer"].partition(" ####")[0].split(" = ")
        user = {"role": "user", "content": f"{BEFORE}{row['question']}{AFTER}"}
        assistant = {"role": "assistant", "content": SOLVED.format(expression, value, value)}
        demonstrated.append({"messages": [user, assistant]})
        prompt = [{"role": "user", "content": f"Solve it.\n\n{row['question']}\n\nThe last line is Answer: N."}]
        asked.append({"data_source": "math_dapo", "prompt": prompt, "reward_model": {"ground_truth": value}})
    write_parquet(folder / "train_2000.parquet", demonstrated[:2000])
    write_parquet(folder / "dapo.parquet", asked[2000:] * 2)
    train_tokenizer([message["content"] for row in demonstrated for message in row["messages"]], 512).save(folder)
    command = [folder / "train_2000.parquet", folder / "dapo.parquet", folder / "problems.parquet"]
    done = jobs.start(command, script=RECIPES / "retool_prompts.py")
    assert done.returncode == 0, done.stderr
    assert "200 problems" in done.stdout
    return folder


def test_problems_are_asked_as_the_demonstrations_are(files, tmp_path):
    contents = [row["prompt"][0]["content"] for row in read_parquet(files / "problems.parquet")]
    asked = [row["prompt"][0]["content"] for row in read_parquet(files / "dapo.parquet")]
    for content, other in zip(contents, asked[:200], strict=True):
        assert content == f"{BEFORE}{other.split(chr(10))[2]}{AFTER}"
    write_parquet(tmp_path / "other.parquet", [{"messages": [{"role": "user", "content": text}]} for text in "ab"])
    command = [tmp_path / "other.parquet", files / "dapo.parquet", tmp_path / "out.parquet"]
    done = jobs.start(command, script=RECIPES / "retool_prompts.py")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "do not begin alike" in done.stderr
    done = jobs.start([*command[1::-1], command[2]], script=RECIPES / "retool_prompts.py")
    assert (done.returncode, done.stderr) == (2, f"{command[1]}, row 0: has no messages; {KINDS}\n")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_recipe_in_small(files, tmp_path, monkeypatch):
    """A cold start on demonstrations as they are published, then DAPO with Python: the quick start's model."""
    monkeypatch.chdir(ROOT)
    for role, name in (("train", "finetune"), ("infer", "predict")):
        shutil.copy(ROOT / "model_configs" / "qwen_grpo" / f"{name}_qwen2_tiny.yaml", files / f"{role}.yaml")
    problems, task = files / "problems.mindrecord", jobs.Task(files)
    named = ("--tokenizer_path", files, "--dataset_type", "verl", "--system_prompt", "")
    assert jobs.call(["data", "--file_path", files / "problems.parquet", "--output_path", problems, *named]) == 0
    settings = ("data.tool_format=retool", "data.pairs_per_step=32", "trainer.total_steps=400", "optimizer.lr=2e-3")
    demonstrations = files / "train_2000.parquet"
    assert jobs.call(task.sft(tmp_path / "sft", *settings, mind_dataset_dir=demonstrations)) == 0
    small = ("data.prompts_per_step=8", "rollout.max_new_tokens=128", "reward.overlong_buffer=32")
    named = {"grpo_config": RECIPES / "retool.yaml", "load_sft_checkpoint_infer": tmp_path / "sft" / "ckpt" / "hf"}
    arguments = task.train(tmp_path, mind_dataset_dir=problems, **named)
    recipe = [part for part in arguments if not str(part).startswith("reward.functions=")]
    assert jobs.call([*recipe, *small]) == 0
    run = jobs.Run(tmp_path)
    assert (run.column("tools/call_frequency") > 0.9).all()
    assert (run.column("tools/failure_frequency") < 0.2).all()
    assert (run.column("critic/score/mean") > -0.9).all()
    assert (run.column("rollout_corr/log_prob_diff/max") < 1e-4).all()
    spoken = [one for _, step in run.rollouts for e in step for one in e.group.rollouts if not one.sampled.all()]
    tokenizer = Tokenizer.from_path(files)
    for one in spoken:
        heard = tokenizer.decode(one.response_ids[~one.sampled].tolist())
        assert heard.startswith("\n<interpreter>\n")
