"use strict";
// The figures of the page, drawn by plotly from the groups of page.js.

const observer = new IntersectionObserver(
  seen => seen.filter(one => one.isIntersecting).forEach(one => draw(one.target)), { rootMargin: "300px" });
const LAYOUT = {
  autosize: true, margin: { l: 56, r: 12, t: 8, b: 44 }, showlegend: false, hovermode: "closest",
  paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: "system-ui, sans-serif", size: 12 },
};
const CONFIG = {
  responsive: true, displaylogo: false,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "sendChartToCloud", "zoomIn2d", "zoomOut2d", "autoScale2d"],
};

/** Make or renew a figure; it is drawn when it comes into sight. `make` returns traces, layout and note. */
function figure(id, box, heading, make) {
  let made = byId(`figure-${id}`);
  if (!made) {
    const plot = element("div", { className: "plot", role: "img" });
    plot.setAttribute("aria-labelledby", `caption-${id}`);
    const details = element("details", {}, element("summary", {}, "Data of this figure"), element("div", { className: "box", tabIndex: 0 }));
    made = element("figure", { id: `figure-${id}` },
      element("figcaption", { id: `caption-${id}` }), element("div", { className: "scroll" }, plot), details);
    details.addEventListener("toggle", () => showData(made));
    byId(box).append(made);
    observer.observe(made);
  }
  Object.assign(made, { make, heading, dirty: true });
  const { top, bottom } = made.getBoundingClientRect();
  if (top < innerHeight + 300 && bottom > -300) draw(made);
}

function draw(made) {
  if (!made.dirty) return;
  made.dirty = false;
  const { traces, layout, note = "" } = made.make(), id = made.id.slice(7), plot = made.querySelector(".plot");
  made.querySelector("figcaption").replaceChildren(element("b", {}, `${made.heading}. `), note);
  const xaxis = { automargin: true, exponentformat: "SI", ...layout.xaxis };
  const yaxis = { automargin: true, exponentformat: "SI", ...layout.yaxis };
  const zoom = state.get(`zoom-${id}`)?.split(",").map(Number) ?? [];
  if (zoom.length === 4 && zoom.every(Number.isFinite)) [xaxis.range, yaxis.range] = [zoom.slice(0, 2), zoom.slice(2)];
  plot.style.height = `${layout.height ?? 300}px`;
  Plotly.react(plot, traces, { ...LAYOUT, ...layout, xaxis, yaxis }, { ...CONFIG, displayModeBar: id === "parallel" ? false : "hover", toImageButtonOptions: { format: "svg", filename: id } });
  if (!made.listens) listen(made, plot, id);
  showData(made);
}

function listen(made, plot, id) {
  made.listens = true;
  plot.on("plotly_relayout", changed => {
    const names = Object.keys(changed), { xaxis, yaxis } = plot.layout;
    if (names.some(name => name.endsWith("autorange"))) keep(`zoom-${id}`, null);
    else if (names.some(name => name.includes("range"))) keep(`zoom-${id}`, [...xaxis.range, ...yaxis.range].map(end => +end.toPrecision(6)).join(","));
  });
  if (id === "parallel") plot.on("plotly_restyle", () => keepBrush(plot));
  if (id !== "curve") return;
  const labelOf = event => event.data[event.curveNumber].meta;
  // False: plotly hides nothing itself.
  plot.on("plotly_legendclick", event => { toggle(labelOf(event)); return false; });
  plot.on("plotly_legenddoubleclick", event => {
    hide(groups.map(group => group.label).filter(label => label !== labelOf(event)));
    return false;
  });
}

/** Show the ends of each line, or each point of a trace without lines, as a table. */
function showData(made) {
  const details = made.querySelector("details"), rows = [];
  if (!details.open || made.dirty) return;
  for (const trace of made.querySelector(".plot").data ?? []) {
    if (trace.hoverinfo === "skip") continue;
    if (trace.type === "parcoords") {
      trace.dimensions.forEach(one => one.values.slice(0, 1000).forEach((value, at) => {
        const tick = one.tickvals?.indexOf(value) ?? -1;
        rows.push([[decoded(trace.ids[at]), "", "th"], [decoded(one.label), "", "td"], [tick < 0 ? number(value) : decoded(one.ticktext[tick]), "", "td"], ["", "", "td"]]);
      }));
      continue;
    }
    trace.x.forEach((x, at) => {
      const inside = trace.mode === "lines" && trace.y[at - 1] != null && trace.y[at + 1] != null;
      if (trace.y[at] === null || inside || rows.length >= 1000) return;
      const cells = [trace.text?.[at] ?? trace.name, x, trace.y[at], trace.hovertext?.[at] ?? ""];
      rows.push(cells.map((cell, column) => [typeof cell === "number" ? number(cell) : decoded(cell), "", column ? "td" : "th"]));
    });
  }
  const table = element("table", {}, ...tableParts("Points; of a line the first and the last", ["name", "x", "y", "what"], rows));
  details.lastChild.replaceChildren(table);
}

/** Return the points [x, y] of a run, smoothed. */
function points(run, name, x, smooth) {
  const found = run.tracks.flatMap(track => (track.x[x] && track.y[name] || []).map((y, at) => [track.x[x][at], y]));
  const known = found.filter(point => point[0] !== null && point[1] !== null).sort((a, b) => a[0] - b[0]);
  let mean = 0;
  return smooth ? known.map(([at, y], count) => {
    mean = mean * smooth + y * (1 - smooth);
    return [at, mean / (1 - smooth ** (count + 1))];
  }) : known;
}

/** Return x and the summary of curves there, over the x that all of them have. */
function band(curves) {
  const left = most(curves.map(one => one[0][0])), right = least(curves.map(one => one.at(-1)[0]));
  const all = [...new Set(curves.flat().map(point => point[0]))].filter(x => x >= left && x <= right).sort((a, b) => a - b);
  const places = curves.map(() => 0);
  return all.filter((_, at) => at % Math.ceil(all.length / 400) === 0 || at === all.length - 1).map(x => [x, summary(curves.map((curve, which) => {
    while (places[which] + 1 < curve.length && curve[places[which] + 1][0] <= x) places[which]++;
    const [a, b] = curve.slice(places[which], places[which] + 2);
    return !b || a[0] === x ? a[1] : a[1] + (b[1] - a[1]) * (x - a[0]) / (b[0] - a[0]);
  }))]);
}

/** Return the curves of a metric; the large figure has a legend, and bands of more groups. */
function curveFigure(name, large) {
  const x = data.x.includes(state.get("x")) ? state.get("x") : data.x[0], smooth = +(state.get("smooth") ?? 0);
  const each = state.get("lines") === "runs", shownGroups = visible(), bands = large || shownGroups.length <= 3 ? 6 : 0;
  const drawn = shownGroups.map((group, at) => {
    const curves = group.runs.map(run => ({ run, line: points(run, name, x, smooth) })).filter(one => one.line.length);
    return { group, band: at < bands, counted: curves.filter(one => one.run.counts), others: curves.filter(one => !one.run.counts) };
  });
  const values = drawn.flatMap(one => [...one.counted, ...one.others]).flatMap(one => one.line.map(point => point[1]));
  const positive = values.filter(value => value > 0), low = least(positive), high = most(positive);
  const log = state.get("y") === "log" || (!state.get("y") && positive.length === values.length && high > 30 * low);
  const traces = [];
  // The best group is drawn last, on top.
  for (const { group, band: banded, counted, others } of drawn.reverse()) {
    const trace = (rows, width, dash, more = {}) => traces.push({
      x: rows.map(row => row[0]), y: rows.map(row => log && !(row[1] > 0) ? null : row[1]), text: rows.map(row => row[2]),
      type: "scatter", mode: rows.length === 1 ? "markers" : "lines", name: plain(group.label), meta: group.label,
      line: { color: group.color, width, dash }, marker: { color: group.color }, showlegend: group.color !== GRAY,
      hovertemplate: "<b>%{text}</b><br>%{x}: %{y:.5~g}<extra></extra>", ...more,
    });
    // A gap separates two runs.
    const rows = curves => curves.flatMap(({ run, line }, at) =>
      [...(at ? [[null, null, ""]] : []), ...line.map(point => [...point, plain(`${run.name}  ${group.label}`)])]);
    if (others.length) trace(rows(others), 1, "dash", { opacity: 0.6, showlegend: false });
    const middle = each || counted.length < 2 ? [] : band(counted.map(one => one.line));
    if (!middle.length) {
      if (counted.length) trace(rows(counted), each ? 1.2 : 2, group.dash);
      continue;
    }
    if (banded) {
      // A logarithmic axis cannot show the end of an interval at or below zero: the band ends below the lowest value.
      const lower = middle.map(([at, { mean, half }]) => [at, log ? Math.max(mean - half, low / 1.3) : mean - half]);
      const outline = [...middle.map(([at, { mean, half }]) => [at, mean + half]), ...lower.reverse()];
      trace(outline, 0, "solid", { fill: "toself", fillcolor: `${group.color}2b`, hoverinfo: "skip", hovertemplate: null, showlegend: false });
    }
    trace(middle.map(([at, { mean }]) => [at, mean, plain(`${group.label}, mean of ${counted.length}`)]), 2, group.dash);
  }
  const lost = values.length - positive.length, without = shownGroups.flatMap(group => group.runs).filter(run => run.tracks.some(track => track.y[name] && !track.x[x]));
  const note = [log && "Logarithmic.", log && lost && `${lost} values at or below 0 are not on this axis.`,
    without.length && `${without.length} runs have no ${x}.`, !traces.length && "No visible run has values."].filter(Boolean).join(" ");
  const yaxis = { title: { text: plain(words(name)) }, type: log ? "log" : "linear", exponentformat: log ? "power" : "SI" };
  if (log && positive.length) yaxis.range = [Math.log10(low) - 0.1, Math.log10(high) + 0.1];
  const legend = { orientation: "h", traceorder: "reversed", y: -0.16, yanchor: "top", x: 0, xanchor: "left" };
  const size = large ? { height: 400 + 20 * Math.min(shownGroups.length, 18), showlegend: true, legend } : {};
  return { traces, note, layout: { ...size, xaxis: { title: { text: plain(words(x)) } }, yaxis } };
}

/** Return the values of a key or metric for some runs, and the axis that fits the values. */
function axisOf(name, runs) {
  const values = runs.map(run => data.keys.includes(name) ? run.keys[name] : run.values[name]);
  const known = values.filter(value => value !== null), numeric = known.every(value => typeof value === "number");
  const log = numeric && least(known) > 0 && most(known) >= (data.keys.includes(name) ? 10 : 30) * least(known);
  const axis = { title: { text: plain(words(name)) }, type: log ? "log" : numeric ? "linear" : "category", exponentformat: "power" };
  return { values: numeric ? values : values.map(value => plain(shown(value))), numeric, log, axis };
}

function scatterFigure() {
  const x = [...data.keys, ...data.metrics].includes(state.get("sx")) ? state.get("sx") : data.keys[0];
  const y = data.metrics.includes(state.get("sy")) ? state.get("sy") : metric(), runs = visible().flatMap(group => group.runs);
  const traces = visible().map(group => ({
    x: axisOf(x, group.runs).values, y: axisOf(y, group.runs).values, type: "scatter", mode: "markers",
    text: group.runs.map(run => plain(`${run.name}  ${group.label}${run.counts ? "" : ` (${run.state})`}`)),
    marker: { color: group.color, size: 9, symbol: group.runs.map(run => run.counts ? "circle" : "x-open") },
    hovertemplate: "<b>%{text}</b><br>%{x}: %{y:.5~g}<extra></extra>",
  }));
  const layout = { xaxis: axisOf(x, runs).axis, yaxis: axisOf(y, runs).axis };
  return { traces, note: "Each point is a run; a cross does not count.", layout };
}

const parallelNames = () => [...data.pair.filter(key => key !== "seed").slice(0, 8), metric()];

/** The selection of the address, or none if somebody has edited the address. */
function savedBrush() {
  try { return JSON.parse(state.get("brush") ?? "{}") ?? {}; } catch { return {}; }
}

function parallelFigure() {
  const runs = visible().flatMap(group => group.counted.map(one => one.run)), brush = savedBrush();
  const dimensions = parallelNames().map(name => {
    const { values, numeric, log, axis } = axisOf(name, runs), different = [...new Set(values)], title = axis.title.text;
    const made = { label: title.length > 24 ? `…${title.slice(-23)}` : title, constraintrange: brush[name] };
    if (!numeric) return { ...made, values: values.map(value => different.indexOf(value)), tickvals: different.map((_, at) => at), ticktext: different };
    const scaled = log ? values.map(Math.log10) : values;
    if (different.length > 12 && !log) return { ...made, values: scaled };
    const ticks = different.sort((a, b) => a - b).filter((_, at) => at % Math.ceil(different.length / 12) === 0);
    return { ...made, values: scaled, tickvals: log ? ticks.map(Math.log10) : ticks, ticktext: ticks.map(value => String(+value.toPrecision(3))) };
  });
  const limited = dimensions.filter(one => one.constraintrange), within = ([low, high], value) => value >= low && value <= high;
  const ranges = one => Array.isArray(one.constraintrange[0]) ? one.constraintrange : [one.constraintrange];
  const chosen = runs.filter((_, at) => limited.every(one => ranges(one).some(range => within(range, one.values[at])))).map(run => run.name);
  const note = limited.length ? ` Selected: ${chosen.length} of ${runs.length}: ${some(chosen, 12)}.` : "";
  // Orange is best, in both themes.
  const ends = data.lower[metric()] ? [COLORS[1], COLORS[5]] : [COLORS[5], COLORS[1]];
  const line = { color: dimensions.at(-1).values, colorscale: [[0, ends[0]], [1, ends[1]]] };
  const trace = { type: "parcoords", ids: runs.map(run => run.name), dimensions, line, unselected: { line: { opacity: 0.1 } } };
  const layout = { margin: { l: 60, r: 60, t: 44, b: 20 } };
  return { traces: runs.length ? [trace] : [], note: `Each line is a run that counts, the best orange. Drag along an axis to select runs.${note}`, layout };
}

function keepBrush(plot) {
  const ranges = (plot.data[0]?.dimensions ?? []).map((one, at) => [parallelNames()[at], one.constraintrange]).filter(one => one[1]);
  keep("brush", ranges.length ? JSON.stringify(Object.fromEntries(ranges)) : null);
  byId("caption-parallel").lastChild.textContent = parallelFigure().note;
}

function redraw() {
  if (data.metric) {
    // The curve of a swept learning rate repeats the groups.
    const swept = data.pair.map(key => key.split(/[.-]/).pop());
    figure("curve", "curve-figures", `${words(metric())} over ${words(state.get("x") || data.x[0])}`, () => curveFigure(metric(), true));
    data.metrics.filter(name => name !== metric() && !swept.includes(name)).forEach((name, at) =>
      figure(`curve-${at}`, "curve-figures", words(name), () => curveFigure(name, false)));
    if (byId("parameter-figures")) {
      figure("scatter", "parameter-figures", "Scatter", scatterFigure);
      figure("parallel", "parameter-figures", "Parallel coordinates", parallelFigure);
    }
  }
}
