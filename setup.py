"""Package `mindrlhf`: what it needs, and the `mindrlhf` command.

Versions are exact: these are the ones that the tests have passed with. A reason stands beside a pin where another
version is known to fail; the rest may be raised together with a run of the tests.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

REQUIRES = [
    "mindspore==2.9.0",  # 2.10.0 has no MindFormers that installs beside it, and MindFormers is the oracle in tests
    "numpy==1.26.4",  # MindSpore 2.9's operators are compiled for NumPy 1 and fail at their first use with NumPy 2
    "safetensors==0.7.0",  # MindSpore brings it in; 0.8.0 silently writes wrong shards of non-contiguous arrays
    "protobuf<8",  # MindSpore ships classes of an old protobuf compiler; 7 still reads them, a later one may not
    "tokenizers==0.22.2",  # transformers 4.57.1, which MindFormers 1.9.0 wants, takes 0.22 and nothing newer
    "math-verify==0.9.0",  # rewards change when its parser does
    "sympy>=1.13",  # what math-verify computes with, and the math reward limits; MindSpore and it choose the version
    "sentencepiece==0.2.3",  # `tokenizer.model` files
    "pydantic==2.14.3",  # settings
    "PyYAML==6.0.3",
    "orjson==3.11.5",  # metrics and responses as lines of JSON
    "jinja2==3.1.6",  # chat templates, the report's page
    "psutil==7.2.2",  # memory, and the processes that msrun started
    "rich==15.0.0",  # progress bars and tables
    "tensorboardX==2.6.5",
    "crc32c==2.9.post0",  # without it tensorboardX sums every byte in Python, milliseconds of each step
    "matplotlib==3.11.2",  # curves
    "pyarrow==19.0.0",  # verl's files
]

DOCS = [
    "mkdocs-material==9.8.1",  # the site of docs/
    "mkdocs==1.6.1",  # the theme takes any 1.x
    "pymdown-extensions==13.1",  # fenced code
]

DEV = [
    *DOCS,
    "pytest==9.2.0",
    "pytest-timeout==2.4.0",
    "pytest-xdist==3.8.0",
    "hypothesis==6.170.15",
    "ruff==0.17.5",  # another version formats differently
    "mindformers==1.9.0",  # the independent model and configuration in tests; the package never imports it
]

setup(
    name="mindrlhf",
    version=re.search(r'__version__ = "(.+?)"', (HERE / "mindrlhf" / "__init__.py").read_text())[1],
    description="GRPO training for language models on MindSpore",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["mindrlhf", "mindrlhf.*"]),
    package_data={
        "mindrlhf.algorithms": ["options.yaml"],
        "mindrlhf.backend.native": ["kernels.cpp", "*.h"],
        "mindrlhf.checkpoint": ["peft_config.yaml", "model_card.md.jinja"],
        "mindrlhf.configs": ["*.yaml", "*/*.yaml"],
        "mindrlhf.environments.ready": ["shop.sql", "words.txt"],
        "mindrlhf.metrics": ["hints.yaml", "plot.mplstyle"],
        "mindrlhf.data.tasks": ["*.yaml"],
        "mindrlhf.metrics.report": ["page/*"],
    },
    python_requires="==3.11.*",
    install_requires=REQUIRES,
    extras_require={"dev": DEV, "docs": DOCS},
    entry_points={"console_scripts": ["mindrlhf = mindrlhf.cli:main"]},
)
