"""Lint: the rules are complete, each kind of error is found, and correct settings get no finding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcrun.network.nccl.lint import NcclFinding, lint
from hpcrun.network.nccl.rules import rules, settings_of
from hpcrun.network.nccl.values import number

GUIDES: list[dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "guides.yaml").read_text(encoding="utf-8")
)
KINDS = {"system", "debugging", "internal", "removed", "renamed"}


def found(nccl: str | None = None, **env: str) -> list[NcclFinding]:
    """Return the findings about these variables."""
    return lint(settings_of(env, "test"), nccl)


def names(findings: list[NcclFinding], level: str) -> set[str]:
    """Return the names of the findings of one level."""
    return {finding.setting.name for finding in findings if finding.level == level}


def one(level: str, nccl: str | None = None, **env: str) -> str:
    """Return the message of the only finding of ``level``."""
    (finding,) = [finding for finding in found(nccl, **env) if finding.level == level]
    return finding.message


def test_the_rules_name_every_documented_variable_and_every_source() -> None:
    variables = rules().variables
    documented = [v for v in variables.values() if v.library == "nccl" and v.source == "env"]
    assert len(documented) >= 113
    current = [v for v in variables.values() if v.library == "nccl" and v.until is None]
    assert len(current) >= 233
    for variable in variables.values():
        assert variable.kind in KINDS, variable.name
        assert variable.source in rules().sources, variable.name
        assert all(remark.source in rules().sources for remark in variable.remarks)
    for rule in rules().combinations:
        assert rule.source in rules().sources
        assert rule.about.endswith("*") or rule.about in variables
        assert all(name in variables for name in rule.when)


def test_no_default_of_the_rules_is_a_wrong_value() -> None:
    for variable in rules().variables.values():
        if variable.default is not None and variable.kind != "removed":
            assert not names(found(**{variable.name: variable.default}), "error"), variable.name


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: str(guide["guide"]))
def test_what_is_wrong_in_public_guides(guide: dict[str, Any]) -> None:
    findings = found(**guide["env"])
    assert names(findings, "error") == set(guide["errors"])
    assert names(findings, "warning") >= set(guide["warnings"]) - set(guide["errors"])
    assert names(findings, "warning") <= set(guide["warnings"]) | set(guide["errors"])


def test_what_needs_no_setting_has_no_finding() -> None:
    assert found(PATH="/bin", HOME="/root", CUDA_VISIBLE_DEVICES="0", SLURM_JOB_ID="1") == []
    assert found(NCCL_SOCKET_IFNAME="=eth0", GLOO_SOCKET_IFNAME="eth0", NCCL_DEBUG="WARN") == []
    assert found(NCCL_IB_HCA="=mlx5_0,mlx5_1", NCCL_CROSS_NIC="1") == []
    assert found(NCCL_HOME="/opt/nccl", NCCL_VERSION="2.21.5", NCCL_TESTS_DIR="x") == []


def test_a_name_that_no_program_reads() -> None:
    assert one("error", NCCL_TIMEOUT="1800").endswith("use init_process_group(timeout=...)")
    assert "did you mean NCCL_SOCKET_IFNAME?" in one("error", NCCL_SOCKET_IFNAMES="=eth0")
    assert "did you mean TORCH_NCCL_BLOCKING_WAIT?" in one("error", TORCH_NCCL_BLOCK_WAIT="0")
    assert one("error", GLOO_IFNAME="eth0").endswith("use GLOO_SOCKET_IFNAME")
    assert "init_process_group(" in one("error", TORCH_DISTRIBUTED_TIMEOUT="60")
    assert "did you mean GLOO_SOCKET_IFNAME?" in one("warning", GLOO_SOCKET_IFNAM="eth0")
    assert "did you mean FI_PROVIDER?" in one("warning", FI_PROVIDERS="efa")
    # libfabric and Google's plugin read these.
    assert found(FI_CXI_DEFAULT_RX_SIZE="512", NCCL_FASTRAK_IFNAME="eth1") == []
    assert one("warning", NCCL_MY_PLUGINS_OWN="1") == "neither NCCL nor PyTorch reads this name"


def test_versions_decide_what_is_gone_or_not_there_yet() -> None:
    assert one("error", NCCL_IB_CUDA_SUPPORT="1") == "removed in NCCL 2.4; use NCCL_NET_GDR_LEVEL"
    assert not names(found("2.3.7", NCCL_IB_CUDA_SUPPORT="1"), "error")
    assert one("warning", "2.20.5", NCCL_RAS_ENABLE="0") == (
        "NCCL 2.20.5 does not read this name; NCCL 2.24 does"
    )
    assert "use NCCL_MAX_CTAS" in one("warning", NCCL_MAX_NCHANNELS="8")
    assert not names(found("2.16.5", NCCL_MAX_NCHANNELS="8"), "warning")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("NCCL_IB_TIMEOUT", "50", "1 to 31"),
        ("NCCL_IB_RETRY_CNT", "10", "0 to 7"),
        ("NCCL_P2P_DISABLE", "true", "0 or 1"),
        ("NCCL_P2P_LEVEL", "PXH", "LOC, NVL, PIX, PXB, PHB or SYS"),
        ("NCCL_ALGO", "rings", "known are ring"),
        ("NCCL_ALGO", "allreduce:^tree;broadcast:fast", "'fast'"),
        ("NCCL_SOCKET_NTHREADS", "four", "whole number"),
        ("NCCL_BUFFSIZE", "4M", "whole number, not 4M; NCCL reads 4"),
        ("NCCL_LL128_BUFFSIZE", "1e6", "NCCL reads 1"),
        ("NCCL_P2P_NVL_CHUNKSIZE", "0.5", "NCCL reads 0"),
        ("NCCL_P2P_DISABLE", "true", "NCCL reads 0"),
        ("NCCL_SOCKET_NTHREADS", "four", "reads 0, because it does not begin with a digit"),
        ("NCCL_SOCKET_NTHREADS", "17 threads", "reads 17"),
        ("NCCL_UCX_DISABLE", "yes", "NCCL reads 0"),
        ("OFI_NCCL_CQ_SIZE", "12k", "whole number"),
        ("GLOO_SOCKET_IFNAME", "^lo", "full names"),
        ("GLOO_SOCKET_IFNAME", "=eth0", "full names"),
        ("TP_SOCKET_IFNAME", "eth*", "'*': gloo takes full names"),
        ("NCCL_SOCKET_IFNAME", "eth*", "write eth"),
        ("NCCL_IB_HCA", "mlx5_[0-3]", "no patterns; write mlx5_"),
        ("NCCL_IB_HCA", "mlx5_{0..3}", "no patterns"),
        ("NCCL_IB_HCA", "mlx5_0 ", "has a space"),
        ("NCCL_IB_HCA", "^mlx5_0,^mlx5_1", "only at the begin"),
        ("NCCL_ALGO", "Ring ", "a blank at its begin or end"),
        ("NCCL_P2P_LEVEL", " NVL", "write NVL"),
        (
            "NCCL_SOCKET_IFNAME",
            "=eth0, eth1",
            "has a space, which counts as part of a name; write =eth0,eth1",
        ),
        ("NCCL_SOCKET_FAMILY", "ipv4", "AF_INET or AF_INET6"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "4", "0 to 3"),
        ("NCCL_DEBUG_SUBSYS", "INIT,NETS", "'NETS'; known are INIT, COLL"),
        ("NCCL_DEBUG_SUBSYS", "^GRAPHS", "'GRAPHS'"),
        ("NCCL_DEBUG_TIMESTAMP_LEVELS", "ERROR", "'ERROR'; known are VERSION"),
        ("NCCL_P2P_LEVEL", "nvl", "NCCL does not ignore the case"),
        ("NCCL_P2P_LEVEL", "NVLINK", "LOC, NVL"),
        ("NCCL_NET_GDR_LEVEL", "phb", "NCCL does not ignore the case"),
        ("NCCL_SOCKET_FAMILY", "af_inet", "NCCL does not ignore the case"),
        ("NCCL_ALGO", "ring, tree", "' tree'"),
        ("NCCL_ALGO", "sendrecv:ring", "before a colon"),
        ("NCCL_ALGO", "ring;tree", "only the first part"),
        ("NCCL_PROTO", "Simple,LL129", "'LL129'; known are LL"),
        ("NCCL_CTA_POLICY", "FAST", "DEFAULT, EFFICIENCY or ZERO"),
        ("NCCL_NETDEVS_POLICY", "MAX:0", "AUTO, ALL or MAX:N"),
        ("NCCL_LAUNCH_MODE", "SERIAL", "PARALLEL or GROUP"),
        ("NCCL_NTHREADS", "100", "64, 128, 256 or 512"),
        ("NCCL_P2P_NET_CHUNKSIZE", "128K", "whole number"),
        ("NCCL_IB_DISABLE", "yes", "0 or 1"),
        ("NCCL_IB_DISABLE", "2", "0 or 1"),
        ("NCCL_IB_SL", "16", "-1 to 15"),
        ("NCCL_CROSS_NIC", "3", "0 to 2"),
        ("NCCL_NVLS_ENABLE", "on", "whole number"),
        ("TORCH_DISTRIBUTED_DEBUG", "TRACE", "OFF, INFO or DETAIL"),
        ("TORCH_NCCL_BLOCKING_WAIT", "on", "0 or 1"),
    ],
)
def test_values_out_of_range(name: str, value: str, words: str) -> None:
    assert words in one("error", **{name: value})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("NCCL_DEBUG", "VERSION version WARN warn Info INFO TRACE ABORT"),
        ("NCCL_DEBUG_SUBSYS", "ALL init,net ^GRAPH,TUNING INIT, INIT,,ENV ALLOC_HOST,DESTROY"),
        ("NCCL_DEBUG_TIMESTAMP_LEVELS", "ALL WARN,INFO ^trace"),
        ("NCCL_P2P_LEVEL", "LOC NVL PIX PXB PHB SYS 0 2 5"),
        ("NCCL_NET_GDR_LEVEL", "LOC PIX PXB PHB SYS 3 5"),
        (
            "NCCL_ALGO",
            "Ring ring,TREE ^NVLS tree;allreduce:^ring allreduce:ring;Broadcast:Ring ring,",
        ),
        ("NCCL_PROTO", "Simple LL,LL128 ^LL128 ll simple;AllReduce:LL"),
        ("NCCL_CTA_POLICY", "0 1 2 default EFFICIENCY|ZERO"),
        ("NCCL_NETDEVS_POLICY", "auto ALL MAX:2 max:16"),
        ("NCCL_SOCKET_FAMILY", "AF_INET AF_INET6"),
        ("NCCL_LAUNCH_MODE", "GROUP parallel"),
        ("NCCL_CHECK_MODE", "DEFAULT debug_local"),
        ("NCCL_NTHREADS", "64 512"),
        ("NCCL_IB_DISABLE", "0 1 0x1"),
        ("NCCL_IB_SL", "-1 0 15"),
        ("TORCH_DISTRIBUTED_DEBUG", "OFF detail"),
        ("TORCH_NCCL_BLOCKING_WAIT", "0 1 true False y"),
    ],
)
def test_valid_values_are_no_errors(name: str, values: str) -> None:
    for value in values.split():
        assert not names(found(**{name: value}), "error"), value


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("NCCL_DEBUG", "ERROR", "should be VERSION, WARN, INFO, TRACE or ABORT, not ERROR"),
        ("NCCL_DEBUG", "debug", "prints nothing; WARN prints the errors"),
        ("NCCL_DEBUG", "1", "WARN prints the errors"),
        ("NCCL_DEBUG", "WARN ", "before 2.30"),
        ("NCCL_IB_TIMEOUT", "22s", "NCCL reads 22"),
        ("NCCL_SOCKET_RETRY_SLEEP_MSEC", "100ms", "NCCL reads 100"),
    ],
)
def test_a_wrong_value_that_changes_nothing_is_a_warning(name: str, value: str, words: str) -> None:
    assert words in one("warning", **{name: value})
    assert not names(found(**{name: value}), "error")


@pytest.mark.parametrize(
    ("env", "about", "words"),
    [
        ({"MIN_CTAS": "32", "MAX_CTAS": "8"}, "NCCL_MIN_CTAS", "above NCCL_MAX_CTAS=8"),
        ({"MIN_NCHANNELS": "32", "MAX_NCHANNELS": "4"}, "NCCL_MIN_NCHANNELS", "NCHANNELS=4"),
        ({"MIN_NRINGS": "8", "MAX_NCHANNELS": "4"}, "NCCL_MIN_NRINGS", "NCHANNELS=4"),
        ({"MIN_P2P_NCHANNELS": "0x10", "MAX_P2P_NCHANNELS": "8"}, "NCCL_MIN_P2P_NCHANNELS", "=8"),
        ({"MIN_CTAS": "4", "MAX_CTAS": "4"}, None, ""),
    ],
)
def test_a_least_value_above_the_largest(env: dict[str, str], about: str, words: str) -> None:
    errors = [
        finding
        for finding in found(**{f"NCCL_{name}": value for name, value in env.items()})
        if finding.level == "error"
    ]
    assert [finding.setting.name for finding in errors] == ([about] if about else [])
    assert all(words in finding.message for finding in errors)


@pytest.mark.parametrize(
    ("threads", "sockets", "wrong"), [(16, 8, 1), (8, 9, 1), (16, 4, 0), (4, 4, 0)]
)
def test_more_sockets_than_nccl_takes(threads: int, sockets: int, wrong: int) -> None:
    env = {"NCCL_SOCKET_NTHREADS": str(threads), "NCCL_NSOCKS_PERTHREAD": str(sockets)}
    findings = [one for one in found(**env) if "more than 64 sockets" in one.message]
    assert len(findings) == wrong


def test_names_in_lower_case_are_read_by_no_library() -> None:
    assert "write NCCL_DEBUG" in one("error", nccl_debug="INFO")
    assert "write GLOO_SOCKET_IFNAME" in one("error", Gloo_Socket_Ifname="eth0")
    assert found(http_proxy="x", debug="1") == []


def test_variables_of_plug_ins_are_known() -> None:
    assert found(NCCL_IBEXT_DISABLE="1", NCCL_PLUGIN_P2P="ucx", NCCL_UCX_TLS="all") == []
    assert found(NCCL_INSPECTOR_ENABLE="1", NCCL_PROFILE_COLL_POOL_SIZE="8") == []
    assert found(OFI_NCCL_MR_CACHE_DISABLE="true", OFI_NCCL_TUNER_TYPE="Region") == []


def test_the_variables_for_a_timeout_get_their_remedy() -> None:
    assert "init_process_group(timeout=...)" in one("error", NCCL_TIMEOUT="3600")
    assert "use TORCH_NCCL_BLOCKING_WAIT" in one("warning", NCCL_BLOCKING_WAIT="1")


def test_numbers_are_read_as_nccl_reads_them() -> None:
    assert [number(text) for text in ("8", " 8", "0x10", "-1", "010", "08", "8k", "")] == [
        *(8, 8, 16, -1, 8, None, None, None)
    ]


def test_prefixes_that_match_more_than_they_say() -> None:
    assert "mlx5_10 to mlx5_19; write =mlx5_0,mlx5_1" in one("warning", NCCL_IB_HCA="mlx5_0,mlx5_1")
    assert "write ^=mlx5_1" in one("warning", NCCL_IB_HCA="^mlx5_1")
    assert "mlx5_1 also" in one("warning", NCCL_IB_HCA="mlx5_1:1,mlx5_4:1")
    for safe in ("mlx5", "=mlx5_1", "^=mlx5_1", "mlx5_0", "mlx5_4,mlx5_7"):
        assert found(NCCL_IB_HCA=safe) == []


@pytest.mark.parametrize(
    ("env", "about", "words"),
    [
        ({"NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "=mlx5_0"}, "NCCL_IB_HCA", "switches InfiniBand"),
        (
            {"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "NVL"},
            "NCCL_P2P_LEVEL",
            "level does nothing",
        ),
        ({"NCCL_ALGO": "NVLS,Ring", "NCCL_NVLS_ENABLE": "0"}, "NCCL_ALGO", "requests NVLS"),
        ({"NCCL_NET": "IB", "NCCL_IB_DISABLE": "1"}, "NCCL_NET", "fails to start"),
        (
            {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"},
            "TORCH_NCCL_BLOCKING_WAIT",
            "ignores",
        ),
        (
            {"RCCL_MSCCL_ENABLE": "0", "RCCL_MSCCL_FORCE_ENABLE": "1"},
            "RCCL_MSCCL_FORCE_ENABLE",
            "off",
        ),
    ],
)
def test_settings_that_cancel_each_other(env: dict[str, str], about: str, words: str) -> None:
    (finding,) = [finding for finding in found(**env) if finding.level == "error"]
    assert finding.setting.name == about
    assert words in finding.message
    for name in env:
        alone = {key: value for key, value in env.items() if key != name}
        assert not names(found(**alone), "error"), "each setting is right by itself"


def test_two_ways_to_the_socket_network_agree() -> None:
    assert not names(found(NCCL_NET="Socket", NCCL_IB_DISABLE="1"), "error")
    assert names(found(NCCL_NET="Socket", NCCL_IB_HCA="mlx5"), "error") == {"NCCL_IB_HCA"}


def test_an_excluded_algorithm_is_not_asked_for() -> None:
    assert not names(found(NCCL_ALGO="^NVLS", NCCL_NVLS_ENABLE="0"), "error")


def test_a_log_file_that_all_processes_share() -> None:
    assert "add %p and %h" in one("warning", NCCL_DEBUG_FILE="nccl.log", NCCL_DEBUG="WARN")
    assert found(NCCL_DEBUG_FILE="nccl.%h.%p", NCCL_DEBUG="WARN") == []


def test_the_last_setting_of_a_name_counts() -> None:
    first = settings_of({"NCCL_IB_TIMEOUT": "50"}, "first")
    second = settings_of({"NCCL_IB_TIMEOUT": "22"}, "second")
    assert lint(first + second, None) == []
    # A command has its own variables: no later line replaces them.
    own = [replace(setting, of_command=True) for setting in first]
    assert [one.setting.where for one in lint(own + second, None)] == ["first"]
