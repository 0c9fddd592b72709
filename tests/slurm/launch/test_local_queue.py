"""The queue of the local cluster gives each job separate GPUs, for any number that the jobs ask for."""

from pathlib import Path

from hpcrun.slurm.local.job_files import ENDED, JobRequest, QueueLimits, read_status
from hpcrun.slurm.local.submission import start_queue
from tests import jobs

# Takes its GPUs by making a folder for each; a GPU that is taken already is a clash.
JOB = """
for gpu in ${CUDA_VISIBLE_DEVICES//,/ }; do mkdir "$0/gpu-$gpu" || echo "$gpu" >> "$0/clashes"; done
echo "$CUDA_VISIBLE_DEVICES" >> "$0/seen"
sleep 0.5
for gpu in ${CUDA_VISIBLE_DEVICES//,/ }; do rmdir "$0/gpu-$gpu"; done
"""


# Ends once another job runs at the same time.
MEETS = """
touch "$0/met-$SLURM_JOB_ID"
until [ "$(ls "$0" | grep -c met-)" -ge 2 ]; do sleep 0.05; done
"""


def request(folder: Path, number: int, gpus: int, script: str = JOB) -> JobRequest:
    place = folder / str(number)
    place.mkdir()
    return JobRequest(
        job_id=str(number),
        folder=str(place),
        command=["bash", "-c", script, str(folder)],
        nodes=1,
        tasks_per_node=1,
        cpus_per_task=None,
        devices=[str(number) for number in range(gpus)],
        time_limit=None,
        signal_lead=90.0,
        grace=5.0,
        requeue_delay=1.0,
        setup=[],
        env={},
        after=[],
    )


def ended(requests: list[JobRequest]) -> bool:
    found = [read_status(Path(one.folder)) for one in requests]
    return all(status is not None and status.state in ENDED for status in found)


def test_jobs_with_different_gpu_counts_share_no_gpu(tmp_path: Path) -> None:
    requests = [request(tmp_path, number, gpus) for number, gpus in enumerate((1, 2, 1, 1))]
    start_queue(tmp_path, requests, QueueLimits(len(requests), ["a", "b"]))()
    jobs.wait_for(lambda: ended(requests))
    seen = (tmp_path / "seen").read_text().split()
    assert sorted(map(len, seen)) == [1, 1, 1, 3]
    assert {gpu for word in seen for gpu in word.split(",")} == {"a", "b"}
    assert not (tmp_path / "clashes").exists()
