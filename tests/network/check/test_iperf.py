"""iperf3's answers, as iperf 3.12 printed them: its exit code is 0 in all of these cases."""

from __future__ import annotations

import pytest

from hpcrun.network.check import agent as iperf

_FAILED = """{
	"start":	{
		"connected":	[],
		"version":	"iperf 3.12",
		"system_info":	"Linux host 6.1.0 #1 SMP PREEMPT_DYNAMIC x86_64"
	},
	"intervals":	[],
	"end":	{
	},
	"error":	"%s"
}
"""
_SUCCEEDED = """{
	"start":	{"version":	"iperf 3.12"},
	"intervals":	[],
	"end":	{
		"sum_sent":	{
			"start":	0,
			"end":	1.022435,
			"seconds":	1.022435,
			"bytes":	137625600,
			"bits_per_second":	1076845765.2564712,
			"retransmits":	7,
			"sender":	true
		},
		"sum_received":	{
			"start":	0,
			"end":	1.072307,
			"seconds":	1.072307,
			"bytes":	131072000,
			"bits_per_second":	977869210.9629053,
			"sender":	true
		}
	}
}
"""


def test_the_rate_is_what_arrived() -> None:
    answer = iperf.parse(_SUCCEEDED)
    assert answer["rate"] == pytest.approx(977869210.96)
    assert answer["lost"] == pytest.approx(7 / (137625600 / 1448))


@pytest.mark.parametrize(
    "words",
    [
        "unable to connect to server: Connection refused",
        "the server is busy running a test. try again later",
    ],
)
def test_the_error_key_shows_a_failure_that_the_exit_code_hides(words: str) -> None:
    assert iperf.parse(_FAILED % words) == {"error": words}


@pytest.mark.parametrize("text", ["", "iperf3: error - unable to bind", '{"end": {}}'])
def test_what_is_no_answer_is_an_error(text: str) -> None:
    assert iperf.parse(text)["error"]


def test_the_commands_name_port_time_streams_and_direction() -> None:
    there = iperf.client_command("10.0.0.1", 5300, 1.5, 4, reverse=False)
    assert there[:6] == ["iperf3", "-c", "10.0.0.1", "-p", "5300", "-J"]
    assert there[there.index("-t") + 1 :][:3] == ["2", "-P", "4"]
    assert iperf.client_command("10.0.0.1", 5300, 1.5, 4, reverse=True) == [*there, "-R"]
    assert iperf.server_command(5300) == ["iperf3", "-s", "-1", "-p", "5300"]
