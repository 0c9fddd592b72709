"""Jobs with a range of nodes: the request to Slurm, the local cluster, and refused options."""

import pytest

from hpcrun.config import Config, Job, override_layer, resolve
from hpcrun.errors import LaunchError
from hpcrun.run.directory import RunDirectory
from hpcrun.slurm.launch.batch_script import sbatch_lines
from hpcrun.slurm.launch.planned import choose_executor
from hpcrun.slurm.launch.raw_script import not_in_the_script, raw_command


def lines(tmp_path, **values):
    return sbatch_lines(tmp_path / "run", Job.model_validate(values))


def test_sbatch_gets_a_range_without_a_number_of_tasks(tmp_path):
    found = lines(tmp_path, nodes="2-4", gpus=8, cpus_per_task=6)
    assert {"#SBATCH --nodes=2-4", "#SBATCH --mincpus=48", "#SBATCH --cpus-per-task=6"} <= {*found}
    assert not [line for line in found if "ntasks" in line]
    launched = lines(tmp_path, nodes="2-4", gpus=8, cpus_per_task=6, launcher="torchrun")
    assert "#SBATCH --mincpus=48" in launched
    assert "#SBATCH --mincpus=2" in lines(tmp_path, nodes="2-4", gpus=2, cpu=True)
    assert "#SBATCH --ntasks-per-node=8" in lines(tmp_path, nodes="4-4", gpus=8)


@pytest.mark.parametrize(
    "option",
    [
        *("sbatch_args=[--nodelist=n1]", "sbatch_args=[-wn1]", "sbatch_args=[--ntasks=4]"),
        *(
            "sbatch_args=[-N2]",
            "srun_args=[-n4]",
            "srun_args=[--relative=1]",
            "srun_args=[--nodes=2]",
        ),
    ],
)
@pytest.mark.parametrize("executor", ["slurm", "local"])
def test_an_option_that_fixes_the_nodes_refuses_a_range(option, executor):
    config = resolve(
        [override_layer([f"job.{option}", "job.nodes=2-4", f"job.executor={executor}"])]
    )
    with pytest.raises(LaunchError, match=r"fixes what job.nodes=2-4 leaves to each start; remove"):
        choose_executor(config)


def test_other_options_leave_a_range_alone():
    options = ["job.sbatch_args=[--switches=1, --comment=nodes]", "job.srun_args=[--label]"]
    config = resolve([override_layer([*options, "job.nodes=2-4", "job.executor=slurm"])])
    assert choose_executor(config) == "slurm"


def test_a_script_by_hand_starts_the_largest_number(tmp_path):
    config = Config(job=Job(nodes="2-4", gpus=2, cpu=True))
    line = raw_command(RunDirectory(tmp_path / "a"), config)
    # Its srun takes the number of tasks from sbatch.
    assert " --nodes=4 --ntasks-per-node=2 " in line
    assert not_in_the_script(config) == ["job.nodes=2-4: train.sbatch starts on 4 nodes"]
