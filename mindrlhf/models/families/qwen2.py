"""Qwen2 and Qwen2.5: biases on the query, key and value projections."""

from mindrlhf.models.families.family import Chat, Family, Vocabulary

CHATML = Chat(
    name="qwen",
    before="<|im_start|>",
    between="\n",
    after="<|im_end|>\n",
    system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
)
# The `pre_tokenizer` and the added tokens of Qwen2.5's published tokenizer.json; each digit is a token.
VOCABULARY = Vocabulary(
    split=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)"
    r"|\s+",
    gguf=("qwen2", "stablelm2"),
    control=(
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
        *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>"),
        *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
    ),
    markup=(
        *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
        *("<|repo_name|>", "<|file_sep|>"),
    ),
    config={"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
)
FAMILY = Family(
    name="qwen2",
    title="Qwen2, Qwen2.5",
    hf_class="Qwen2",
    chat=CHATML,
    end_tokens=("<|im_end|>",),
    end_of_text="<|endoftext|>",
    attention_bias=True,
    hf_settings={"use_sliding_window": False},
    mindformers="Qwen2Config",
    as_llama=True,
    vocabulary=VOCABULARY,
    gguf="qwen2",
)
