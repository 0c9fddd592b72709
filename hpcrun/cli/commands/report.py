"""Write one HTML file about many runs, which opens without a network.

RUN is a run directory, a folder of them, a name in --runs-dir, or a file of
`hpcrun aggregate` (default: all runs in --runs-dir). The page compares groups
of runs, and has curves, parameters, slow nodes and failures. Tables sort and
filter, figures zoom, and the address keeps what you see.

  hpcrun report runs/sweep-7 -o report.html
  hpcrun report results.h5 --metric accuracy
  hpcrun report runs/sweep-7 --serve
"""

import argparse
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrun.cli.arguments import add_comparison, add_runs_dir, keys, require_moment, runs_dir
from hpcrun.errors import UserError
from hpcrun.printing import say

if TYPE_CHECKING:
    from hpcrun.results.report.content import ReportRequest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="run directories, folders, names, or one .h5 file"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="the file to write (default: report.html)",
    )
    parser.add_argument(
        "--serve", action="store_true", help="serve the page on this host while the runs train"
    )
    parser.add_argument(
        "--port", type=int, metavar="PORT", help="the port of --serve (default: any free port)"
    )
    parser.add_argument("--title", metavar="TEXT", help="title of the page")
    add_comparison(parser)
    add_runs_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the report, or serve it."""
    from hpcrun.results import require

    require_moment(arguments.at)
    require("report", "jinja2", "plotly", "scipy")
    from hpcrun.results.report.content import ReportRequest
    from hpcrun.results.report.page import require_place, write_report
    from hpcrun.results.report.runs import open_results

    request = ReportRequest(
        title=arguments.title,
        metric=arguments.metric,
        goal=arguments.goal,
        at=arguments.at,
        by=keys(arguments.by),
        seed_key=arguments.seed_key,
    )
    if arguments.serve:
        return _serve(arguments, request)
    if arguments.port is not None:
        raise UserError("--port: is an option of --serve; add --serve, or omit --port")
    output = arguments.output or Path("report.html")
    require_place(output)
    begin = time.monotonic()
    with open_results(arguments.runs, runs_dir(arguments)) as store:
        words = write_report(store, request, output)
    say(f"{output}: {words} ({time.monotonic() - begin:.0f} s)")
    return 0


def _serve(arguments: argparse.Namespace, request: "ReportRequest") -> int:
    """Serve the page until Ctrl-C, SIGTERM or the end of the ssh session."""
    from hpcrun.results.report.content import Content, collect
    from hpcrun.results.report.runs import open_results, temporary_folder
    from hpcrun.results.report.server import ReportServer

    if arguments.output is not None:
        raise UserError("--serve: writes no file; omit -o")
    port = arguments.port or 0
    if not 0 <= port < 65536:
        raise UserError(f"--port {port}: should be 1 to 65535")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    with temporary_folder() as folder:

        def read() -> Content:
            with open_results(arguments.runs, runs_dir(arguments), Path(folder)) as store:
                return collect(store, request)

        try:
            with ReportServer(read, port) as server:
                say(server.url)
                if line := server.forward_line():
                    say("on your computer, before you open the address:", f"  {line}")
                say("Ctrl-C ends it")
                server.serve_forever()
        except KeyboardInterrupt:
            say("ended")
    return 0
