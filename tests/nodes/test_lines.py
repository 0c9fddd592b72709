"""The lines of the helpers of nodes: what is no message is passed over, and a stranger's line is short."""

import socket

import pytest

from hpcrun.nodes.lines import Connection, decode, encode, helpers_command


@pytest.mark.parametrize("line", ["a warning", "[1]", "3", "", "[" * 100_000, b"\xff\xfe"])
def test_a_line_that_is_no_message_is_passed_over(line: str | bytes) -> None:
    assert decode(line) is None


def test_messages_arrive_in_order_and_in_pieces() -> None:
    near, far = socket.socketpair()
    with near, far:
        data = encode({"do": "one"}) + b"noise\n" + encode({"do": "two"})
        receiver = Connection(far)
        near.sendall(data[:-3])
        assert receiver.receive() == [{"do": "one"}]
        near.sendall(data[-3:])
        assert receiver.receive() == [{"do": "two"}]
        near.close()
        assert receiver.receive() is None


def test_a_long_line_of_a_stranger_breaks_the_connection() -> None:
    near, far = socket.socketpair()
    with near, far:
        near.sendall(b"x" * 100)
        receiver = Connection(far, most=64)
        assert receiver.receive() == []
        with pytest.raises(OSError, match="too long"):
            receiver.receive()


def test_each_node_gets_one_helper_that_outlives_the_others() -> None:
    command = helpers_command(["a1", "a2"], "hpcrun-check", ["python", "x"], ["--mpi=none"])
    assert command[0] == "srun"
    assert command[-3:] == ["--mpi=none", "python", "x"]
    assert {"--no-kill", "--wait=0", "--overlap", "--job-name=hpcrun-check"} <= set(command)
    assert command[command.index("--ntasks") + 1] == "2"
    assert command[command.index("--nodelist") + 1] == "a1,a2"
