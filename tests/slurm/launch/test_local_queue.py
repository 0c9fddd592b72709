"""The queue of the local cluster gives each job separate GPUs, for any number that the jobs ask for."""

import subprocess
from pathlib import Path

import pytest

from hpcrun.errors import LaunchError
from hpcrun.slurm.local.job_files import ENDED, JobRequest, QueueLimits, read_status, release
from hpcrun.slurm.local.submission import start_queue
from tests.slurm.launch import test_local_cluster as local_cluster
from tests.support import jobs

# Takes its GPUs by making a folder for each; a GPU that is taken already is a clash.
JOB = """
for gpu in ${CUDA_VISIBLE_DEVICES//,/ }; do mkdir "$0/gpu-$gpu" || echo "$gpu" >> "$0/clashes"; done
echo "$CUDA_VISIBLE_DEVICES" >> "$0/seen"
sleep 0.5
for gpu in ${CUDA_VISIBLE_DEVICES//,/ }; do rmdir "$0/gpu-$gpu"; done
"""


def request(folder: Path, number: int, gpus: int) -> JobRequest:
    place = folder / str(number)
    place.mkdir()
    return local_cluster.request(
        job_id=str(number),
        folder=str(place),
        command=["bash", "-c", JOB, str(folder)],
        nodes=1,
        tasks_per_node=1,
        devices=[str(number) for number in range(gpus)],
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


def test_jobs_whose_submission_ends_before_their_record_never_begin(tmp_path: Path) -> None:
    requests = [request(tmp_path, number, 0) for number in range(2)]
    begin = start_queue(tmp_path, requests, QueueLimits(2))
    found = [read_status(Path(one.folder)) for one in requests]
    assert [status.state for status in found if status] == ["PENDING", "PENDING"]
    # As the kernel does when the submitter ends.
    begin.args[0].stdin.close()  # type: ignore[attr-defined]
    jobs.wait_for(lambda: ended(requests))
    assert not (tmp_path / "seen").exists()


def test_a_process_that_has_ended_cannot_begin() -> None:
    process = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    process.wait()
    with pytest.raises(LaunchError, match="has ended"):
        release(process)
