"""Package `mindrlhf`: what it needs, and the `mindrlhf` command.

Ranges, so that it installs alongside other packages. The lowest versions were tried; an upper bound has its reason
alongside. `constraints.txt` has the exact versions that the tests pass with; `scripts/setup.sh` installs those.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

REQUIRES = [
    "mindspore>=2.9,<2.11",  # the operators and private functions that it calls change with its minor versions
    "numpy>=1.26,<2",  # MindSpore 2.9's operators are compiled for NumPy 1 and fail at their first use with NumPy 2
    "protobuf<8",  # MindSpore ships classes of an old protobuf compiler; 7 still reads them, a later one may not
    "huggingface_hub>=0.34,<3",  # models and datasets by id
    "tokenizers>=0.22",
    "math-verify>=0.9,<0.10",  # rewards change when its parser does
    "sympy>=1.13",  # what math-verify computes with, and the math reward limits
    "sentencepiece>=0.2",  # `tokenizer.model` files
    "gguf>=0.17,<0.20",  # blocks and types of GGUF files; its writer's methods have changed between minor versions
    "pydantic>=2.11,<3",  # settings
    "PyYAML>=6.0.1",
    "regex>=2024.11",  # patterns of adapters, with a limit of time
    "orjson>=3.10",  # metrics and responses as lines of JSON
    "jinja2>=3.1.3",  # chat templates, the report's page
    "psutil>=5.9",  # memory, and the processes that msrun started
    "rich>=13.9",  # progress bars and tables
    "tensorboardX>=2.6.2",
    "crc32c>=2.4",  # without it tensorboardX sums every byte in Python, milliseconds of each step
    "matplotlib>=3.9",  # curves
    "pillow>=10.3",  # decodes image files; earlier ones have known holes. The resize, whose bits change, is our own
    "pyarrow>=16,<26",  # parquet files; 26 needs NumPy 2, without saying so to pip
    "pandas>=2.2,<3.1",  # never imported here: 3.1, which `datasets` brings, needs NumPy 2 and would break beside us
]

DOCS = [
    "mkdocs-material>=9.6",  # the site of docs/
    "mkdocs>=1.6,<2",  # the theme is made for 1.x
    "jieba>=0.42",  # finds the words of the Chinese page for the site's search
    "pymdown-extensions>=10",  # fenced code
]

TESTS = [
    *DOCS,
    "pytest>=8",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "hypothesis>=6.100",
    "ruff>=0.12",
    "scikit-learn>=1.3",  # its handwritten digits, as in the extra below
]

ORACLE = ["mindformers==1.9.0"]  # the independent model and configuration in tests; the package never imports it

setup(
    name="mindrlhf",
    version=re.search(r'__version__ = "(.+?)"', (HERE / "mindrlhf" / "version.py").read_text())[1],
    description="GRPO training for language models on MindSpore",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    author="The developers of mindrlhf",
    keywords=["GRPO", "RLHF", "MindSpore", "Ascend", "Qwen", "reinforcement learning"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=[*find_packages(include=["mindrlhf", "mindrlhf.*"]), "mindrlhf.examples", "mindrlhf.model_configs"],
    # They are alongside the package in a checkout, and inside of it once installed: mindrlhf/files/shipped.py.
    package_dir={"mindrlhf.examples": "examples", "mindrlhf.model_configs": "model_configs"},
    package_data={
        "mindrlhf": ["py.typed"],
        "mindrlhf.acceptance": ["answers/*.json", "page/*"],
        "mindrlhf.algorithms": ["options.yaml"],
        "mindrlhf.backend.native": ["*.cpp", "*.h"],
        "mindrlhf.checkpoint": ["peft_config.yaml", "model_card.md.jinja"],
        "mindrlhf.configs": ["*.yaml", "*/*.yaml"],
        "mindrlhf.environments.ready": ["shop.sql", "words.txt"],
        "mindrlhf.migration": ["*/*.yaml"],
        "mindrlhf.metrics": ["hints.yaml", "plot.mplstyle"],
        "mindrlhf.data.tasks": ["*.yaml"],
        "mindrlhf.report": ["page/*.*", "page/script/*"],
        "mindrlhf.examples": ["*/*"],
        "mindrlhf.model_configs": ["*/*.yaml", "*/*/*.json"],
    },
    python_requires=">=3.10,<3.13",
    install_requires=REQUIRES,
    extras_require={
        "dev": [*TESTS, *ORACLE],
        "tests": TESTS,  # without MindFormers, alongside a MindSpore that it does not know
        "docs": DOCS,
        "trackers": ["wandb", "swanlab", "mlflow>=3", "trackio"],
        # Alongside a program for TRL: rows as `datasets.Dataset`, `LoraConfig`, tokenizers as `processing_class`.
        "trl": ["trl>=1.0", "datasets>=4", "peft>=0.17", "transformers>=4.57"],
        "mindformers": ORACLE,  # its model as a second opinion in `mindrlhf acceptance`
        "digits": ["scikit-learn>=1.3"],  # `mindrlhf synthesize --task digits`
        "ray": ["ray>=2.40,<3"],  # `mindrlhf launch --with ray`
        "types": ["mypy>=2.4,<2.5"],  # another version finds other mistakes
    },
    entry_points={"console_scripts": ["mindrlhf = mindrlhf.cli:run"]},
)
