"""Names of the folders that a run writes. Imports nothing that starts threads."""

from pathlib import Path

DEFAULT_FOLDER = Path("out/ckpt")  # of --save_ckpt_dir
MODEL_FOLDER = "hf"  # of --save_ckpt_dir: the trained model
CRITIC_FOLDER = "critic"  # of --save_ckpt_dir: PPO's trained critic
ROLLOUTS, VALIDATION = "rollouts", "validation"  # of the output folder: JSONL files by step
