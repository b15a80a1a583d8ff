"""A Qwen2.5-VL-shaped model of random weights with prompts that show images, for the job `vision`."""

import base64
import io
import json
import random
import tempfile
from pathlib import Path

import numpy as np
from work import PROMPTS_FILE, problem

from mindrlhf import cli
from mindrlhf.checkpoint.hf import CONFIG_FILE
from mindrlhf.configs.images import PREPROCESSOR_FILE
from mindrlhf.data.tokenizer import train_tokenizer
from mindrlhf.errors import UserError

PATCH, SIDE = 14, 224  # pixels: 256 patches, 64 tokens
PROMPTS = 256

CONFIG = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 704,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "vision_config": {
        "depth": 8,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [3, 7],
        "out_hidden_size": 256,
        "hidden_act": "silu",
    },
}
PROCESSOR = {
    "min_pixels": SIDE * SIDE,
    "max_pixels": SIDE * SIDE,
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
}


def write_model(folder: Path, seed: int = 0) -> None:
    """Write the model, its tokenizer, and prompts with an image each. Raises UserError."""
    problems = [problem(random.Random(i)) for i in range(2000)]
    texts = [f"{question}\n#### {answer}" for question, answer in problems]
    with tempfile.TemporaryDirectory() as shape:
        Path(shape, CONFIG_FILE).write_text(json.dumps(CONFIG))
        Path(shape, PREPROCESSOR_FILE).write_text(json.dumps(PROCESSOR))
        train_tokenizer(texts, CONFIG["vocab_size"], images=True).save(shape)
        argv = ("initialize", "--config", shape, "--tokenizer_path", shape, "--output", str(folder))
        if cli.main([*argv, "--seed", str(seed)]):
            raise UserError(f"{folder}: the model could not be written")
    rng = np.random.default_rng(seed)
    rows = (
        {
            "prompt": [{"role": "user", "content": f"<image>{question}"}],
            "images": [_image(rng)],
            "answer": answer,
            "ground_truth": answer,
        }
        for question, answer in problems[:PROMPTS]
    )
    (folder / PROMPTS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))


def _image(rng: np.random.Generator) -> str:
    """Draw a picture of coloured fields; returns a PNG file in base64."""
    from PIL import Image

    fields = rng.integers(0, 256, (7, 7, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(np.kron(fields, np.ones((SIDE // 7, SIDE // 7, 1), np.uint8))).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
