"""Trains a small network with the flags and calls of the task for DDP and FSDP (document 002)."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import hpcrun

SIZE, LONG = 32, 6
"""Samples of the data set, and passes over it."""


class Net(nn.Module):
    """Two layers; like the model of the document, it returns its outputs and the loss."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x, y):
        outputs = self.outer(self.inner(x).tanh()).squeeze(1)
        return outputs, (outputs - y).square().mean()


def read_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dataset_name", default="wikitext")
    parser.add_argument("--distributed", action="store_true", help="start as ranks of a launcher")
    parser.add_argument("--use_ddp", action="store_true")
    parser.add_argument("--use_fsdp", action="store_true")
    parser.add_argument("--batch_size", type=int, default=SIZE, help="samples of one rank")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--grad_clip", type=float, default=1.0, help="0: no clipping")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--stop_after", type=int, help="steps after which this start ends")
    return parser.parse_args()


def read_data(name):
    """Return inputs and targets, which depend on the name only: the tests download nothing."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    inputs = torch.randn(SIZE, 8, generator=generator)
    return inputs, inputs.sum(1)


def unwrapped(model):
    return model.module if hasattr(model, "module") else model


def save(path, model, optimizer, scaler, step):
    """Write a file from the main process only; the other ranks wait for it."""
    if hpcrun.is_main_process():
        state = {
            "model_state_dict": unwrapped(model).state_dict(),
            "optimizer_state_dict": optimizer.state_dict(),
            "scaler_state_dict": scaler.state_dict(),
            "step": step,
        }
        torch.save(state, path)
    if dist.is_initialized():
        dist.barrier()


def load(path, model, optimizer, scaler):
    """Read the file on every rank; return the step."""
    state = torch.load(path, map_location={"cuda:0": f"cuda:{hpcrun.get_rank()}"})
    unwrapped(model).load_state_dict(state["model_state_dict"])
    optimizer.load_state_dict(state["optimizer_state_dict"])
    scaler.load_state_dict(state["scaler_state_dict"])
    return state["step"]


def main():
    args = read_arguments()
    rank, world_size, local_rank = hpcrun.setup_distributed()
    device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
    print(f"rank {rank} of {world_size} on {device}", flush=True)
    torch.manual_seed(0)
    model = Net().to(device)
    # The wrapper comes before the compiler.
    if args.use_ddp:
        model = hpcrun.wrap_model_ddp(model, local_rank)
    elif args.use_fsdp:
        model = hpcrun.wrap_model_fsdp(model)
    call = torch.compile(model, backend="eager") if args.compile else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, enabled=args.dtype == "float16")
    autocast = torch.autocast(
        device.type, dtype=getattr(torch, args.dtype), enabled=args.dtype != "float32"
    )
    resumes = args.checkpoint is not None and args.checkpoint.exists()
    start = load(args.checkpoint, model, optimizer, scaler) if resumes else 0

    inputs, targets = (part.to(device) for part in read_data(args.dataset_name))
    every = args.gradient_accumulation_steps
    indices = [*hpcrun.DistributedSampler(SIZE, args.batch_size).get_indices()]
    batches = [
        indices[first : first + args.batch_size]
        for first in range(0, len(indices), args.batch_size)
    ]
    accumulated = 0.0
    for step in range(start, args.stop_after or LONG * every):
        batch = batches[step % len(batches)]
        with autocast:
            _, loss = call(inputs[batch], targets[batch])
        loss = loss / every
        accumulated += loss.item()
        scaler.scale(loss).backward()
        if (step + 1) % every == 0:
            if args.grad_clip > 0:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if hpcrun.is_main_process():
                print(f"step {step}: loss {accumulated:.4f}", flush=True)
            accumulated = 0.0
    if args.checkpoint is not None:
        save(args.checkpoint, model, optimizer, scaler, step + 1)

    with torch.no_grad():
        _, final = model(inputs, targets)
    if hpcrun.is_main_process():
        print(f"effective batch {args.batch_size * every * hpcrun.get_world_size()}")
        print(f"final loss {final.item():.6f}", flush=True)
    hpcrun.cleanup_distributed()


if __name__ == "__main__":
    main()
