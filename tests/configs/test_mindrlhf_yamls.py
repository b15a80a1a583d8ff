"""What MindRLHF's GRPO tutorial gives: its two layouts, and its pair of 7B YAMLs, with their keys and values."""

import pytest

from mindrlhf.configs.model_yaml import load_model_yaml
from mindrlhf.trainer.start import list_unused

TRAIN = """
seed: 42
output_dir: './output'
load_checkpoint: ''
auto_trans_ckpt: False
only_save_strategy: False
resume_training: False
run_mode: 'finetune'
trainer: {type: CausalLanguageModelingTrainer, model_name: 'qwen2_7b'}
do_eval: False
eval_step_interval: -1
eval_epoch_interval: 50
runner_config: {epochs: 5, batch_size: 1, sink_mode: True, sink_size: 1}
runner_wrapper:
  type: MFTrainOneStepCell
  scale_sense: {type: DynamicLossScaleUpdateCell, loss_scale_value: 4096, scale_factor: 2, scale_window: 1000}
  use_clip_grad: True
optimizer: {type: AdamW, betas: [0.9, 0.95], eps: 1.e-8, learning_rate: 1.e-6, weight_decay: 0.01}
lr_schedule: {type: CosineWithWarmUpLR, learning_rate: 1.e-6, warmup_ratio: 0.01, total_steps: -1}
train_dataset: &train_dataset
  data_loader: {type: MindDataset, dataset_dir: "", shuffle: True}
  input_columns: ["input_ids", "target_ids", "attention_mask"]
  num_parallel_workers: 8
train_dataset_task: {type: CausalLanguageModelDataset, dataset_config: *train_dataset}
use_parallel: True
parallel:
  parallel_mode: 1
  gradients_mean: False
  enable_alltoall: False
  full_batch: True
  search_mode: "sharding_propagation"
  enable_parallel_optimizer: True
  strategy_ckpt_save_file: "./ckpt_strategy.ckpt"
  parallel_optimizer_config: {gradient_accumulation_shard: False, parallel_optimizer_threshold: 64}
parallel_config:
  data_parallel: 1
  model_parallel: 4
  pipeline_stage: 2
  use_seq_parallel: True
  micro_batch_num: 4
  vocab_emb_dp: False
  gradient_aggregation_group: 4
micro_batch_interleave_num: 2
recompute_config:
  {recompute: True, select_recompute: False, parallel_optimizer_comm_recompute: False, mp_comm_recompute: True,
   recompute_slice_activation: False}
callbacks: [{type: MFLossMonitor}, {type: ObsMonitor}]
context:
  mode: 0
  device_target: "Ascend"
  max_call_depth: 10000
  max_device_memory: "55GB"
  save_graphs: False
  save_graphs_path: "./graph"
  device_id: 0
  jit_config: {jit_level: "O1"}
  memory_optimize_level: "O0"
  ascend_config: {precision_mode: "must_keep_origin_dtype"}
model:
  model_config:
    type: LlamaConfig
    batch_size: 1
    seq_length: 8192
    hidden_size: 3584
    num_layers: 28
    num_heads: 28
    n_kv_heads: 4
    vocab_size: 152064
    intermediate_size: 18944
    qkv_has_bias: True
    rms_norm_eps: 1.0e-6
    theta: 1000000.0
    max_position_embedding: 131072
    emb_dropout_prob: 0.0
    eos_token_id: 151643
    pad_token_id: 151643
    compute_dtype: "bfloat16"
    layernorm_compute_type: "float32"
    softmax_compute_type: "float16"
    rotary_dtype: "float16"
    param_init_type: "float32"
    use_past: False
    extend_method: "None"
    use_flash_attention: True
    fine_grain_interleave: 1
    qkv_concat: False
    block_size: 32
    num_blocks: 128
    offset: 0
    checkpoint_name_or_path: ""
    repetition_penalty: 1
    max_decode_length: 512
    top_k: 0
    top_p: 0.8
    do_sample: False
    compute_in_2d: True
    rotary_pct: 1.0
    rotary_emb_base: 1000000
    kv_channels: 128
  arch: {type: LlamaForCausalLM}
processor: {return_tensors: ms, type: Qwen2Processor}
metric: {type: PerplexityMetric}
eval_callbacks: [{type: ObsMonitor}]
auto_tune: False
filepath_prefix: './autotune_32k'
profile: False
layer_scale: False
layer_decay: 0.65
remote_save_url: "Please input obs url on AICC platform."
"""
INFER = """
run_mode: 'predict'
model:
  model_config:
    type: LlamaConfig
    batch_size: 1
    seq_length: 8192
    hidden_size: 3584
    num_layers: 28
    num_heads: 28
    n_kv_heads: 4
    vocab_size: 152064
    intermediate_size: 18944
    max_position_embeddings: 32768
    qkv_has_bias: True
    rms_norm_eps: 1.0e-6
    theta: 1000000.0
    emb_dropout_prob: 0.0
    eos_token_id: [151645,151643]
    pad_token_id: 151643
    bos_token_id: 151643
    compute_dtype: "bfloat16"
    layernorm_compute_type: "float32"
    softmax_compute_type: "float16"
    rotary_dtype: "bfloat16"
    param_init_type: "float32"
    use_past: True
    use_flash_attention: True
    block_size: 32
    num_blocks: 1024
    use_past_shard: False
    offset: 0
    checkpoint_name_or_path: ""
    repetition_penalty: 1.0
    max_decode_length: 2048
    min_decode_length: 2
    temperature: 1.2
    top_k: 50
    top_p: 1.0
    do_sample: True
    is_dynamic: True
    qkv_concat: False
    auto_map: {AutoTokenizer: [qwen2_tokenizer.Qwen2Tokenizer, null]}
  arch: {type: LlamaForCausalLM}
processor:
  return_tensors: ms
  tokenizer: {model_max_length: 32768, vocab_file: "/path/vocab.json", type: Qwen2Tokenizer}
"""
# The `parallel_config` of the tutorial's text, where the hint stands inside of the group.
LAYOUTS = {
    "train": (
        "{data_parallel: 1, model_parallel: 4, pipeline_stage: 2, use_seq_parallel: True, micro_batch_num: 2, "
        "vocab_emb_dp: False, gradient_aggregation_group: 4, micro_batch_interleave_num: 2}"
    ),
    "infer": (
        "{data_parallel: 2, model_parallel: 4, pipeline_stage: 1, micro_batch_num: 1, vocab_emb_dp: False, "
        "gradient_aggregation_group: 4, micro_batch_interleave_num: 1}"
    ),
}


@pytest.mark.parametrize("role", LAYOUTS)
def test_the_layouts_of_the_tutorial_load(tmp_path, capsys, role):
    path = tmp_path / f"{role}.yaml"
    path.write_text(f"run_mode: predict\nparallel_config: {LAYOUTS[role]}\n")
    loaded = load_model_yaml(path)
    assert loaded.parallel.workers == 8
    list_unused(loaded, generating=role == "infer")
    told = capsys.readouterr().out
    assert told.count("micro_batch_interleave_num") == 1
    assert "\n  parallel_config: micro_batch_interleave_num" in told


def test_keys_without_effect_are_listed_by_group(tmp_path, capsys):
    """Keys that have a place of their own here are told with it; no line is longer than a terminal."""
    path = tmp_path / "train.yaml"
    others = "".join(f"profile_{number}: True\n" for number in range(40))
    fields = "model: {model_config: {use_past: True, block_size: 16, top_k: 3}}\n"
    given = "optimizer: {type: AdamW}\nlr_schedule: {learning_rate: 1.0e-6}\nload_checkpoint: x\n"
    path.write_text(f"{fields}{given}recompute_config: {{recompute: [7, 7], mp_comm_recompute: True}}\n{others}")
    list_unused(load_model_yaml(path))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0] == f"{path}: not used here:"
    for line in (
        "  model.model_config: use_past, block_size, top_k",
        "  set by optimizer.*: optimizer, lr_schedule",
        "  set by --load_sft_checkpoint_train: load_checkpoint",
        "  recompute_config: mp_comm_recompute",
    ):
        assert line in lines
    assert sum(line.count("profile_") for line in lines) == 40


def test_the_pair_of_7b_loads(tmp_path, capsys):
    (tmp_path / "train.yaml").write_text(TRAIN)
    (tmp_path / "infer.yaml").write_text(INFER)
    train, infer = (load_model_yaml(tmp_path / f"{role}.yaml") for role in ("train", "infer"))
    layout = train.parallel
    assert (layout.data_parallel, layout.model_parallel, layout.pipeline_stage, layout.micro_batch_num) == (1, 4, 2, 4)
    model = train.architecture()
    assert (model.family, model.num_layers, model.num_kv_heads, model.vocab_size) == ("qwen2", 28, 4, 152064)
    assert infer.architecture().eos_token_ids == (151645, 151643)
    assert infer.sampling_defaults()["rollout"]["temperature"] == 1.2
    list_unused(train)
    assert capsys.readouterr().out.count("micro_batch_interleave_num") == 1
