"""The page of `hpcrun report` in a real Chromium, by clicks."""

import base64
import json
import math
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scipy import stats
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from hpcrun.cli.main import guarded
from hpcrun.results.report.content import Content, ReportRequest, collect
from hpcrun.results.report.runs import open_results
from hpcrun.results.report.server import ReportServer

from .conftest import write_run

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="Debian's chromium and chromium-driver are not installed"
)
EVIL = '</script><b>x</b><img src=x onerror="document.title=1">'
RATES, WIDTHS, SEEDS = (0.001, 0.003, 0.01), (64, 128), range(4)


@pytest.fixture(scope="module")
def chromium() -> Iterator[webdriver.Chrome]:
    """One browser for all tests of this file."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for word in (
        "headless=new",
        "no-sandbox",
        "disable-dev-shm-usage",
        "enable-unsafe-swiftshader",
    ):
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(str(DRIVER)))
    driver.set_page_load_timeout(120)
    yield driver
    driver.quit()


@pytest.fixture
def browser(chromium: webdriver.Chrome) -> Iterator[webdriver.Chrome]:
    """A browser of 1,400 pixels; an error of a script fails the test."""
    show(chromium, 1400)
    yield chromium
    errors = [line["message"] for line in chromium.get_log("browser") if line["level"] == "SEVERE"]
    assert errors == []


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of the report of 24 runs; two failed."""
    folder = tmp_path_factory.mktemp("page")
    for rate in RATES:
        for width in WIDTHS:
            for seed in SEEDS:
                level = result(rate, width, seed)
                failed = (rate, seed) == (0.001, 3)
                write_run(
                    folder / "runs",
                    f"lr{rate}-w{width}-s{seed}",
                    seed=seed,
                    state="failed" if failed else "finished",
                    reason="out of memory" if failed else "",
                    losses=[level * 8 / number for number in range(1, 9)],
                    config={"train": {"lr": rate}, "model": {"width": width}},
                )
    return made(folder)


def made(folder: Path, *options: str) -> str:
    """Write the report of the runs below ``folder`` and return its address."""
    path = folder / "report.html"
    assert guarded(["report", str(folder / "runs"), "-o", str(path), *options]) == 0
    return path.as_uri()


def result(rate: float, width: int, seed: int) -> float:
    """Return the last loss of a run of the page."""
    return 1 + abs(math.log10(rate / 0.003)) / 4 + 8 / width + 0.01 * math.sin(seed + 100 * rate)


def show(browser: webdriver.Chrome, width: int, theme: str = "light") -> None:
    """Set the width of the window and the theme."""
    shape = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", shape)
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def visit(browser: webdriver.Chrome, address: str) -> None:
    """Load a page again, also if only its fragment differs from the page before."""
    browser.get("about:blank")
    browser.get(address)


def until(browser: webdriver.Chrome, true: Callable[[], Any]) -> Any:
    """Wait until ``true()`` is true, and return its value."""
    return WebDriverWait(browser, 60).until(lambda _: true())


def field(browser: webdriver.Chrome, name: str, value: str = "") -> Any:
    """Return a control; ``value`` chooses one of several boxes."""
    extra = f"[value='{value}']" if value else ""
    return browser.find_element(By.CSS_SELECTOR, f"[name='{name}']{extra}")


def rows(browser: webdriver.Chrome, table: str) -> list[list[str]]:
    """Return the visible rows of a table."""
    script = (
        "return [...document.getElementById(arguments[0]).tBodies[0].rows].filter(r => !r.hidden)"
    )
    cells = browser.execute_script(
        f"{script}.map(r => [...r.cells].map(c => c.textContent))", table
    )
    assert isinstance(cells, list)
    return cells


def traces(browser: webdriver.Chrome, figure: str = "curve") -> list[dict[str, Any]]:
    """Return the drawn lines of a figure, without bands."""
    script = "return document.querySelector(arguments[0]).data?.filter(t => t.hoverinfo !== 'skip')"
    found: list[dict[str, Any]] = until(
        browser, lambda: browser.execute_script(script, f"#figure-{figure} .plot")
    )
    return found


def scroll_to(browser: webdriver.Chrome, selector: str) -> Any:
    """Bring a part of the page into sight."""
    found = browser.find_element(By.CSS_SELECTOR, selector)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", found)
    return found


def test_one_click_names_the_best_rate_and_its_seeds(browser: webdriver.Chrome, page: str) -> None:
    visit(browser, page)
    field(browser, "by", "model.width").click()
    best = {
        rate: {(w, s): result(rate, w, s) for w in WIDTHS for s in SEEDS if (rate, s) != (0.001, 3)}
        for rate in RATES
    }
    changes = [value - best[0.003][pair] for pair, value in best[0.001].items()]
    half = stats.t.ppf(0.975, len(changes) - 1) * stats.sem(changes)
    mean = sum(changes) / len(changes)
    line = browser.find_element(By.ID, "best").text
    assert line.startswith("Best: train.lr=0.003, mean ")
    assert "(8 runs, seeds 0, 1, 2, 3)" in line
    assert f"{mean:.4g} better than train.lr=0.001" in line
    assert f"95% interval {mean - half:.4g} … {mean + half:.4g} over 6 pairs" in line
    table = rows(browser, "groups")
    assert [row[2] for row in table] == ["train.lr=0.003", "train.lr=0.001", "train.lr=0.01"]
    assert [row[3:5] for row in table] == [["8", "0"], ["6", "2"], ["8", "0"]]
    mean, error = sum(best[0.01].values()) / 8, stats.sem([*best[0.01].values()])
    low, high = (float(end) for end in table[2][6].split(" … "))
    assert (low, high) == pytest.approx(stats.t.interval(0.95, 7, mean, error), rel=1e-3)
    assert len(traces(browser)) == 4  # The failed runs are dashed.


def test_statistics_of_the_page_equal_scipy(browser: webdriver.Chrome, page: str) -> None:
    visit(browser, page)
    for df in (1, 1.5, 2, 3.7, 10, 199.5, 2000):
        found = browser.execute_script("return quantile(arguments[0])", df)
        assert found == pytest.approx(stats.t.ppf(0.975, df), rel=1e-5), df
    first, second = [1.0, 2.0, 4.0], [2.0, 3.5, 5.0, 9.0]
    script = (
        "const side = (name, values) => ({...summary(values),"
        " counted: values.map((value, at) => ({value, pair: name + at}))});"
        "return difference(side('a', arguments[0]), side('b', arguments[1]))"
    )
    welch = browser.execute_script(script, first, second)
    wanted = stats.ttest_ind(second, first, equal_var=False).confidence_interval()
    ends = welch["mean"] - welch["half"], welch["mean"] + welch["half"]
    assert ends == pytest.approx((wanted.low, wanted.high), rel=1e-6)
    assert welch["over"] == "all runs"


def test_tables_sort_and_filter(browser: webdriver.Chrome, page: str) -> None:
    visit(browser, page)
    head = scroll_to(browser, "#runs-table th:nth-child(6)")
    assert head.text == "loss"
    head.find_element(By.TAG_NAME, "button").click()
    losses = [float(row[5]) for row in rows(browser, "runs-table")]
    assert losses == sorted(losses)
    assert head.get_attribute("aria-sort") == "ascending"
    head.find_element(By.TAG_NAME, "button").click()
    assert [float(row[5]) for row in rows(browser, "runs-table")] == losses[::-1]
    scroll_to(browser, "[name=runs]").send_keys("train.lr>=0.003 finished w64")
    kept = rows(browser, "runs-table")
    assert len(kept) == 8
    assert all(row[0].startswith(("lr0.003-w64", "lr0.01-w64")) for row in kept)
    assert [row[3] for row in rows(browser, "groups")] == ["4", "4"]
    assert len(rows(browser, "failures-table")) == 1
    browser.find_element(By.CSS_SELECTOR, "[name=runs]").send_keys(" trian.lr>1")
    assert (
        browser.find_element(By.ID, "unknown").text == "The table of runs has no column trian.lr."
    )


def test_curves_zoom_hover_smooth_and_change_their_x(browser: webdriver.Chrome, page: str) -> None:
    visit(browser, page)
    before = traces(browser)
    plot = scroll_to(browser, "#figure-curve .nsewdrag")
    middle = browser.execute_script(
        "const {xaxis, yaxis} = document.querySelector('#figure-curve .plot')._fullLayout;"
        "return [xaxis.d2p(arguments[0]) - xaxis._length / 2, yaxis.d2p(arguments[1]) - yaxis._length / 2]",
        before[0]["x"][3], before[0]["y"][3],
    )  # fmt: skip
    ActionChains(browser).move_to_element_with_offset(plot, *map(round, middle)).perform()
    text = until(browser, lambda: browser.find_elements(By.CSS_SELECTOR, ".hoverlayer .hovertext"))
    assert "train.lr=" in text[0].text
    ActionChains(browser).click_and_hold(plot).move_by_offset(200, 120).release().perform()
    until(browser, lambda: "zoom-curve" in browser.current_url)
    Select(field(browser, "lines")).select_by_value("runs")
    assert "zoom-curve" not in browser.current_url
    assert "lr0.003-w64-s1" in " ".join(name for one in traces(browser) for name in one["text"])
    for axis in ("samples", "time"):
        Select(field(browser, "x")).select_by_value(axis)
    assert traces(browser)[0]["x"][:2] == pytest.approx([0, 1 / 3600], abs=1e-6)
    Select(field(browser, "lines")).select_by_value("")
    Select(field(browser, "x")).select_by_value("step")
    assert traces(browser) == before
    field(browser, "smooth").send_keys(Keys.ARROW_RIGHT * 25)
    ends = [(one["y"][0], one["y"][-1]) for one in traces(browser)]
    assert all(
        first == pytest.approx(old["y"][0]) and last > old["y"][-1]
        for (first, last), old in zip(ends, before, strict=True)
    )


def test_a_legend_entry_hides_a_group_in_all_figures(browser: webdriver.Chrome, page: str) -> None:
    visit(browser, page)
    shown = len(traces(browser))
    entry = scroll_to(browser, "#figure-curve .legendtoggle")
    ActionChains(browser).move_to_element(entry).click().perform()
    until(browser, lambda: "hide=" in browser.current_url)
    assert len(traces(browser)) == shown - 1
    scroll_to(browser, "#figure-scatter")
    assert len(traces(browser, "scatter")) == 5
    box = scroll_to(browser, "#groups input:not(:checked)")
    box.click()
    assert "hide=" not in browser.current_url
    assert len(traces(browser)) == shown


def test_the_address_restores_what_was_seen(browser: webdriver.Chrome, page: str) -> None:
    visit(browser, page)
    field(browser, "by", "train.lr").click()
    Select(field(browser, "x")).select_by_value("samples")
    Select(field(browser, "y")).select_by_value("log")
    Select(field(browser, "sx")).select_by_value("seed")
    field(browser, "runs").send_keys("seed<2")
    scroll_to(browser, "#groups th:nth-child(6) button").click()
    scroll_to(browser, "#figure-parallel")
    until(browser, lambda: browser.find_elements(By.CSS_SELECTOR, "#figure-parallel .axis-title"))
    browser.execute_script(
        "return Plotly.restyle(document.querySelector('#figure-parallel .plot'),"
        " {'dimensions[0].constraintrange': [[0.002, 0.02]]})"
    )
    script = (
        "return ['groups', 'best', 'runs-table', 'controls', 'curve-controls', 'caption-parallel']"
        ".map(id => byId(id).textContent + [...byId(id).querySelectorAll('input, select')]"
        ".map(one => one.value + one.checked))"
    )
    seen, lines, address = browser.execute_script(script), traces(browser), browser.current_url
    assert {"by=", "x=samples", "y=log", "sx=seed", "sort-groups=5", "brush="} <= {
        word
        for word in ("by=", "x=samples", "y=log", "sx=seed", "sort-groups=5", "brush=")
        if word in address
    }
    visit(browser, address)
    scroll_to(browser, "#figure-parallel")
    until(browser, lambda: browser.execute_script("return !byId('figure-parallel').dirty"))
    assert browser.execute_script(script) == seen
    assert traces(browser) == lines


def test_log_axes_survive_zero_and_huge_values(browser: webdriver.Chrome, tmp_path: Path) -> None:
    values = {
        0: [1e30, 1.0, 0.0, -1.0, 0.5, 0.4, 0.3, 1e-4],
        1: [5.0, 1.0, 0.1, 0.01, 2, 1, 1, 1e-4],
    }
    for seed, losses in values.items():
        write_run(tmp_path / "runs", f"s{seed}", seed=seed, losses=losses)
    write_run(tmp_path / "runs", "diverged", seed=3, losses=[1.0, 1e308, 1e308, None, None])
    visit(browser, made(tmp_path))
    for lines in ("", "runs"):
        for axis in ("log", "linear"):
            Select(field(browser, "lines")).select_by_value(lines)
            Select(field(browser, "y")).select_by_value(axis)
            labels = browser.find_elements(By.CSS_SELECTOR, "#figure-curve .ytick text")
            assert len(labels) >= 2, (lines, axis)
    Select(field(browser, "y")).select_by_value("log")
    Select(field(browser, "lines")).select_by_value("")
    band = "document.querySelector('#figure-curve .plot').data.find(t => t.fill).y"
    # The interval of the mean of 1e30 and 5 reaches below zero.
    assert 0 < browser.execute_script(f"return Math.min(...{band})") < 1e-3
    caption = browser.find_element(By.ID, "caption-curve").text
    assert "2 values at or below 0 are not on this axis." in caption


def test_foreign_texts_stay_texts(browser: webdriver.Chrome, tmp_path: Path) -> None:
    for seed, words in enumerate((EVIL, "<b>bold</b> %{y} $x$", "plain")):
        config = {"command": ["python", "x.py", "--tag", words]}
        write_run(tmp_path / "runs", f"r{seed} &lt;{seed}>", seed=seed, config=config, reason=EVIL)
    visit(browser, made(tmp_path, "--title", EVIL))
    assert browser.title == EVIL
    groups = [row[2] for row in rows(browser, "groups")]
    assert sorted(groups) == sorted([f"--tag={EVIL}", "--tag=<b>bold</b> %{y} $x$", "--tag=plain"])
    legend = [one.text for one in browser.find_elements(By.CSS_SELECTOR, ".legendtext")]
    assert "--tag=<b>bold</b> %{y} $x$" in legend
    scroll_to(browser, "#figure-scatter")
    assert {one["type"] for one in traces(browser, "scatter")} == {"scatter"}
    assert (
        browser.find_elements(
            By.CSS_SELECTOR, "main b:not(figcaption b), main img, #figure-curve a"
        )
        == []
    )


@pytest.mark.parametrize(("width", "theme"), [(390, "dark"), (1920, "light")])
def test_the_page_fits_its_window(
    browser: webdriver.Chrome, page: str, width: int, theme: str
) -> None:
    show(browser, width, theme)
    visit(browser, page)
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    ink = "return getComputedStyle(document.querySelector('#figure-curve .xtick text')).fill"
    scroll_to(browser, "#figure-curve")
    traces(browser)
    assert (browser.execute_script(ink) == "rgb(228, 231, 235)") == (theme == "dark")


def test_parallel_coordinates_have_the_right_to_compile_shaders(
    browser: webdriver.Chrome, page: str
) -> None:
    visit(browser, page)
    # Scripts of the driver have this right themselves, so none of them may draw the figure.
    ActionChains(browser).scroll_by_amount(0, 2500).pause(1).scroll_by_amount(0, 300).perform()
    until(browser, lambda: browser.find_elements(By.CSS_SELECTOR, "#figure-parallel canvas"))
    assert "WebGL" not in browser.find_element(By.ID, "figure-parallel").text


def test_the_printed_page_has_all_figures(browser: webdriver.Chrome, page: str) -> None:
    visit(browser, page)
    pdf = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {})["data"])
    assert pdf.startswith(b"%PDF")
    assert browser.execute_script(
        "return [...document.querySelectorAll('figure')].every(f => !f.dirty)"
    )


def test_each_figure_has_its_data_as_a_table(browser: webdriver.Chrome, page: str) -> None:
    visit(browser, page)
    for name in ("curve", "scatter"):
        scroll_to(browser, f"#figure-{name}")
        traces(browser, name)
        scroll_to(browser, f"#figure-{name} summary").click()
        cells = until(
            browser,
            lambda name=name: browser.find_elements(
                By.CSS_SELECTOR, f"#figure-{name} tbody th[scope=row]"
            ),
        )
        assert len(cells) >= 4, name
    assert json.loads(browser.execute_script("return byId('data').textContent"))["metric"] == "loss"


def test_a_served_page_keeps_its_state_while_runs_train(
    browser: webdriver.Chrome, tmp_path: Path
) -> None:
    runs, kept = tmp_path / "runs", tmp_path / "kept"
    kept.mkdir()
    for seed in (0, 1):
        write_run(runs, f"r{seed}", seed=seed, config={"train": {"lr": 0.1 * (seed + 1)}})

    def read() -> Content:
        with open_results([str(runs)], runs, kept) as store:
            return collect(store, ReportRequest())

    with ReportServer(read, pause=0.0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        visit(browser, server.url)
        Select(field(browser, "x")).select_by_value("samples")
        browser.find_element(By.TAG_NAME, "h1").click()
        write_run(runs, "new", seed=2, config={"train": {"lr": 0.1}})
        browser.execute_script("document.activeElement.blur(); poll()")
        until(browser, lambda: len(rows(browser, "runs-table")) == 3)
        assert browser.find_element(By.ID, "live").text == "Live."
        assert field(browser, "x").get_attribute("value") == "samples"
        server.shutdown()
    thread.join()
    browser.execute_script("poll()")
    until(browser, lambda: "Not live" in browser.find_element(By.ID, "live").text)
    # The refused connection of the ended server is no defect.
    browser.get_log("browser")
