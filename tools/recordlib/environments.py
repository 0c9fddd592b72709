"""The environment variables of a batch script, of the tasks of its steps, and of a salloc shell."""

from __future__ import annotations

from .site import Site

# A task writes its variables to a file named after its step and rank.
TASK = "bash -c 'env >$0.$SLURM_PROCID'"


def record(site: Site) -> None:
    """Record one process of each kind of launch, on a cluster without earlier jobs."""
    # The tests know the ids of the two jobs that follow.
    site.submit("first", "--wrap", "true")
    finish(site, "first", {})
    batch(site)
    array(site)
    bound(site)
    done = site.slurm.run(["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2", "env"])
    site.keep_environment("salloc", done.stdout)


def batch(site: Site) -> None:
    """Record a job of three nodes: its script, an uneven step, and a step on two nodes."""
    site.submit(
        "train",
        *("--nodes=3", "--ntasks=8", "--ntasks-per-node=4", "--gpus-per-node=4"),
        script=f"""#!/bin/bash
env >batch-shell
srun {TASK} uneven-step
srun --nodes=2 --ntasks=2 --ntasks-per-node=1 {TASK} small-step
""",
    )
    finish(site, "train", {"batch-shell": "batch-shell", "uneven-step": "uneven-step.6"})
    keep(site, {"small-step": "small-step.1"})


def array(site: Site) -> None:
    """Record a task of an array with a GPU for each task."""
    script = f"#!/bin/bash\nsrun {TASK} gpus-per-task.$SLURM_ARRAY_TASK_ID\n"
    shape = ("--array=1-2", "--ntasks=2", "--gpus-per-task=1", "--output=/dev/null")
    site.jobs["array-of-gpus"] = job = site.slurm.sbatch(*shape, "--job-name=train", script=script)
    for task in ("1", "2"):
        site.slurm.wait_state(f"{job}_{task}", "COMPLETED")
    del site.jobs["array-of-gpus"]
    keep(site, {"gpus-per-task": "gpus-per-task.1.1"})


def bound(site: Site) -> None:
    """Record steps that bind GPUs to tasks, share one GPU, and share all GPUs."""
    site.submit(
        "bound",
        *("--nodes=1", "--ntasks=4", "--gpus-per-node=4"),
        script=f"""#!/bin/bash
srun --gpus=1 {TASK} one-gpu-step
srun --gpu-bind=map_gpu:0,1,2,3 {TASK} map-gpu
srun --ntasks=2 --cpus-per-task=2 {TASK} shared
""",
    )
    names = ("one-gpu-step", "map-gpu", "shared")
    finish(site, "bound", {name: f"{name}.1" for name in names})


def finish(site: Site, scene: str, files: dict[str, str]) -> None:
    """Wait for the job and record what its processes wrote; raises AssertionError if it failed."""
    site.wait(scene, "COMPLETED", "FAILED")
    if site.slurm.state(site.jobs[scene]) == "FAILED":
        raise AssertionError((site.slurm.shared / f"{scene}.txt").read_text())
    keep(site, files)
    # These jobs are not recorded themselves.
    del site.jobs[scene]


def keep(site: Site, files: dict[str, str]) -> None:
    """Record the variables in these files of the job user."""
    for name, file in files.items():
        site.keep_environment(name, (site.slurm.shared / file).read_text())
