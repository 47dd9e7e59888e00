// Draws the charts of a report from the data in the page. Everything that was logged is shown as text, never as HTML.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const state = { axis: "step", smoothing: 0, log: false };
  const drawn = [];

  // Returns the value at x of a line through points with ascending xs.
  function at(xs, ys, x) {
    let low = 0, high = xs.length - 1;
    if (high < 0) return null;
    if (x <= xs[0]) return ys[0];
    if (x >= xs[high]) return ys[high];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= x) low = middle; else high = middle;
    }
    return ys[low] + (ys[high] - ys[low]) * (x - xs[low]) / (xs[high] - xs[low]);
  }

  function shownX(run, x) {
    const map = state.axis === "step" ? null : data.runs[run][state.axis];
    return map ? at(map[0], map[1], x) : x;
  }

  // Returns ascending xs, and the columns without the points whose x does not ascend, as several steps may share a time.
  function ascending(xs, columns) {
    const kept = [];
    xs.forEach((x, i) => { if (x !== null && (!kept.length || x > xs[kept[kept.length - 1]])) kept.push(i); });
    return [kept.map((i) => xs[i]), ...columns.map((column) => kept.map((i) => column[i]))];
  }

  // An exponential average whose first values are not drawn to 0.
  function smooth(ys) {
    let sum = 0, weight = 0;
    return ys.map((y) => {
      sum = sum * state.smoothing + y * (1 - state.smoothing);
      weight = weight * state.smoothing + (1 - state.smoothing);
      return sum / weight;
    });
  }

  const positive = (ys) => (state.log ? ys.map((y) => (y > 0 ? y : null)) : ys);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const short = (value) => (value == null ? "–" : Number(value.toPrecision(5)).toString());

  function duration(seconds) {
    if (seconds < 120) return `${short(seconds)} s`;
    return seconds < 7200 ? `${short(seconds / 60)} min` : `${short(seconds / 3600)} h`;
  }

  function columnsOf(chart) {
    const tables = [], series = [{}], bands = [];
    for (const curve of chart.series) {
      const xs = data.xs[curve.x].map((x) => shownX(curve.run, x));
      const mean = curve.mean || curve.low;
      const first = series.length;
      series.push({ label: curve.label, stroke: curve.color, width: 1.6, dash: curve.dash, spanGaps: true,
        value: (_, value) => short(value) });
      if (curve.high) {
        const edge = { stroke: curve.color + "77", width: 1, spanGaps: true, points: { show: false }, class: "edge" };
        series.push({ ...edge }, { ...edge });
        bands.push({ series: [first + 2, first + 1], fill: curve.color + "33" });
        tables.push(ascending(xs, [positive(smooth(mean)), positive(curve.low), positive(curve.high)]));
      } else {
        if (state.smoothing > 0) {
          series.push({ stroke: curve.color + "44", width: 1, spanGaps: true, points: { show: false }, class: "edge" });
          tables.push(ascending(xs, [positive(smooth(mean)), positive(mean)]));
        } else tables.push(ascending(xs, [positive(mean)]));
      }
      // Several pieces may cover the same steps, so each is a series of its own.
      for (const [xs, ys] of curve.undone || []) {
        series.push({ label: `${curve.label} (undone)`, stroke: curve.color + "77", width: 1, dash: [2, 3], spanGaps: true,
          points: { show: false }, class: "edge" });
        tables.push(ascending(xs.map((x) => shownX(curve.run, x)), [positive(ys)]));
      }
    }
    return { columns: uPlot.join(tables), series, bands };
  }

  // Draws a line where a run was resumed or rolled back.
  function drawMarks(chart) {
    return (plot) => {
      const { ctx, bbox } = plot;
      ctx.save();
      for (const run of new Set(chart.series.map((curve) => curve.run))) {
        for (const [x, text] of data.runs[run].marks) {
          const left = Math.round(plot.valToPos(shownX(run, x), "x", true));
          if (left < bbox.left || left > bbox.left + bbox.width) continue;
          ctx.strokeStyle = ctx.fillStyle = css("--mark");
          ctx.setLineDash(text === "resumed" ? [5, 4] : [1, 3]);
          ctx.beginPath();
          ctx.moveTo(left, bbox.top);
          ctx.lineTo(left, bbox.top + bbox.height);
          ctx.stroke();
          ctx.textAlign = "left";
          ctx.font = `${10 * devicePixelRatio}px sans-serif`;
          ctx.fillText(text, left + 3 * devicePixelRatio, bbox.top + 11 * devicePixelRatio);
        }
      }
      ctx.restore();
    };
  }

  function draw(place, chart) {
    const { columns, series, bands } = columnsOf(chart);
    const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") } };
    const label = state.axis === "time" ? (_, ticks) => ticks.map(duration) : (_, ticks) => ticks.map(short);
    series[0] = { label: state.axis, value: (_, x) => (x == null ? "–" : state.axis === "time" ? duration(x) : short(x)) };
    const options = {
      width: place.clientWidth, height: 240, series, bands, cursor: { sync: { key: "report" }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { distr: state.log ? 3 : 1 } }, legend: { live: true },
      axes: [{ ...axis, values: label }, { ...axis, size: 62, values: (_, ticks) => ticks.map((y) => (y == null ? "" : short(y))) }],
      hooks: { draw: [drawMarks(chart)] },
    };
    const shown = columns[0].length === 1 ? columns.map((column) => [...column]) : columns;
    return new uPlot(options, shown, place);
  }

  function redraw() {
    for (const entry of drawn) {
      if (entry.plot) entry.plot.destroy();
      entry.plot = entry.isSeen ? draw(entry.place, entry.chart) : null;
    }
  }

  document.documentElement.classList.add("interactive");
  // Charts are drawn as they come into view: a page of hundreds opens as quickly as one of two.
  const watcher = new IntersectionObserver((seen) => {
    for (const { target, isIntersecting } of seen) {
      const entry = drawn.find((one) => one.place === target);
      if (!isIntersecting || entry.isSeen) continue;
      entry.isSeen = true;
      entry.plot = draw(entry.place, entry.chart);
    }
  }, { rootMargin: "300px" });
  document.querySelectorAll("[data-chart]").forEach((place) => {
    drawn.push({ place, chart: data.charts[Number(place.dataset.chart)], plot: null, isSeen: false });
    watcher.observe(place);
  });
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    drawn.forEach(({ plot, place }) => plot && plot.setSize({ width: place.clientWidth, height: 240 }));
  });
  dark.addEventListener("change", redraw);

  const on = (id, event, change) => {
    const part = document.getElementById(id);
    if (part) part.addEventListener(event, () => { change(part); redraw(); });
  };
  on("axis", "change", (part) => { state.axis = part.value; });
  on("log", "change", (part) => { state.log = part.checked; });
  on("smoothing", "input", (part) => { state.smoothing = Number(part.value); });
})();
