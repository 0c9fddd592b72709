#!/usr/bin/env python3
"""Compare `hpcrun estimate` with published trainings: tokens per second and GPU, and memory.

    tools/bench/estimate_published.py [--only NAME]

Sources, on GitHub: pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (Llama 3.1 8B, H100 with
96 GB limited to 500 W) and docs/performance.md of 2024 (A100); allenai/OLMo-core, README.md of 2025 and
src/scripts/train/OLMo-7B.py; NVIDIA/dgxc-benchmarking, llama3.1/README_8b.md (NeMo 24.09, bf16; two GPUs
share a sample, which is not so here); foundation-model-stack/fms-fsdp, README.md; mosaicml/llm-foundry,
scripts/train/benchmarking/README.md (MPT; here a gated MLP with as many parameters stands for its MLP). Their
kernels and compilers are not those of hpcrun. Megatron-LM's table has tensor and pipeline parallelism, and
newer tables of NeMo have fp8: hpcrun has neither, so they cannot be compared.
"""

import argparse
import contextlib
import io
import json
import tempfile
from pathlib import Path

import numpy as np

from hpcrun.cli.main import main as hpcrun
from hpcrun.estimate.result import RESERVE_GIB

ROOT = Path(__file__).resolve().parents[2]
MPT = (
    "model.kv_heads=null model.mlp_width=null model.vocabulary=50368 model.tied=true model.context=2048 "
    "model.document_end=null train.compile=false train.activation_checkpointing=none"
)
MPT_1B = f"{MPT} model.layers=24 model.heads=16 model.width=2048 train.micro_batch=14"
MPT_7B = f"{MPT} model.layers=32 model.heads=32 model.width=4096 train.micro_batch=6"
MPT_13B = f"{MPT} model.layers=40 model.heads=40 model.width=5120 train.micro_batch=2"
LLAMA_2 = "model.kv_heads=null model.context=4096 model.document_end=null train.activation_checkpointing=none"
LLAMA_2_7B = f"{LLAMA_2} model.mlp_width=11008 model.vocabulary=32000"
LLAMA_2_13B = f"{LLAMA_2} model.layers=40 model.heads=40 model.width=5120 model.mlp_width=13824"
EAGER, HYBRID = "train.compile=false", "fsdp.shard=hybrid"
OLMO_7B = f"{LLAMA_2_7B} model.vocabulary=100352"
NEMO_8B = "train.micro_batch=1 train.activation_checkpointing=none model.document_end=null"
# Name, GPU, nodes of eight GPUs, micro-batches, overrides of configs/llama-8b.yaml, tokens/s of a GPU, GiB.
PUBLISHED = [
    ("torchtitan 8B, eager", "h100", 1, 1, EAGER, 5762, 82.4),
    ("torchtitan 8B, compiled", "h100", 1, 1, "", 6667, 77.0),
    ("torchtitan 8B, eager", "h100", 16, 1, EAGER, 5605, 67.0),
    ("torchtitan 8B, compiled", "h100", 16, 1, "", 6514, 62.0),
    ("torchtitan 8B", "a100-80", 8, 1, f"{EAGER} train.micro_batch=1", 2973, None),
    (
        "torchtitan 13B",
        "a100-80",
        8,
        1,
        f"{EAGER} {LLAMA_2_13B} model.vocabulary=32000",
        2162,
        None,
    ),
    ("OLMo-core 7B", "h100", 1, 64, OLMO_7B, 10000, None),
    ("NeMo 8B", "h100", 1, 16, NEMO_8B, 10153, None),
    ("fms-fsdp 7B", "a100-80", 16, 1, f"{EAGER} {LLAMA_2_7B} {HYBRID}", 3760, None),
    ("llm-foundry 7B", "h100", 1, 1, MPT_7B, 10643, None),
    ("llm-foundry 1B", "h100", 1, 1, MPT_1B, 45455, None),
    ("llm-foundry 13B", "h100", 8, 1, MPT_13B, 4800, None),
    ("llm-foundry 7B", "a100-80", 1, 2, MPT_7B, 4641, None),
    ("llm-foundry 1B", "a100-80", 1, 4, MPT_1B, 20513, None),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="part of the names of the trainings to compare")
    given = parser.parse_args()
    print("| training | GPUs | tokens/s | estimate | off by | GiB | estimate | off by |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokens.bin"
        np.zeros(10**6, "<u4").tofile(file)
        for name, gpu, nodes, micro_batches, more, rate, memory in PUBLISHED:
            if given.only not in name:
                continue
            words = [*more.split(), f"data.tokens=[{file}]", "data.validation_tokens=[]"]
            micro = next((w.split("=")[1] for w in words if w.startswith("train.micro")), "2")
            words += [
                f"train.batch_size={8 * nodes * micro_batches * int(micro)}",
                "train.deterministic=false",
                "fsdp.reshard_after_forward=true",
            ]
            command = ["estimate", "-c", str(ROOT / "configs" / "llama-8b.yaml"), "--json"]
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
                hpcrun([*command, "--gpu", gpu, "--nodes", str(nodes), "--gpus", "8", *words])
            found = json.loads(said.getvalue())
            own = found["time"]["samples"] / found["time"]["seconds"] * found["units"]
            line = f"| {name} | {8 * nodes} {gpu} | {rate:,} | {own:,.0f} | {own / rate - 1:+.0%} |"
            if memory:
                # torchtitan reports the reserved memory, without CUDA's context.
                gib = found["needed"] / 2**30 - RESERVE_GIB
                line += f" {memory} | {gib:.1f} | {gib / memory - 1:+.0%} |"
            else:
                line += " | | |"
            print(line, flush=True)


if __name__ == "__main__":
    main()
