"""Qwen2.5-VL: Qwen2's layers behind a vision tower, with positions of three numbers."""

from mindrlhf.models.families.family import Chat, Family
from mindrlhf.models.families.qwen2 import CHATML
from mindrlhf.models.vision.rows import in_memory, model_rows

FAMILY = Family(
    name="qwen2_5_vl",
    title="Qwen2.5-VL",
    hf_class="Qwen2_5_VL",
    hf_head="ConditionalGeneration",
    chat=Chat(
        name="qwen_vl",
        before=CHATML.before,
        between=CHATML.between,
        after=CHATML.after,
        system="You are a helpful assistant.",
        image="<|vision_start|><|image_pad|><|vision_end|>",
    ),
    end_tokens=("<|im_end|>",),
    end_of_text="<|endoftext|>",
    attention_bias=True,
    sees=True,
    hf_defaults={"rms_norm_eps": 1e-5},
    hf_settings={"use_sliding_window": False},
    model_rows=model_rows,
    in_memory=in_memory,
)
