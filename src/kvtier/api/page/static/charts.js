// Lines over time, drawn by uPlot (uplot-license.txt). A chart has a sentence beside it for those who do not see it.

import { make } from "./dom.js";

const HEIGHT = 180;
const LEAST_SPAN_S = 60;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim() || "gray";
}

export class Chart {
  // `series` are {label, kind, isDashed}; `format` makes a label from a value; with `isStacked` each line is stacked on those before.
  constructor(title, { format, isStacked = false, x = "time", formatX = null }) {
    this.place = make("div", { class: "plot", role: "img", "aria-label": title });
    this.note = make("p", { class: "quiet" }, "");
    this.element = make("figure", {}, make("figcaption", {}, title), this.place, this.note);
    this.options = { format, isStacked, x, formatX };
    this.plot = null;
    this.names = "";
    this.data = null;
    this.watch = new ResizeObserver(() => this.resize());
    this.watch.observe(this.place);
    this.dark = matchMedia("(prefers-color-scheme: dark)");
    this.recolour = () => this.redraw();
    this.dark.addEventListener("change", this.recolour);
  }

  // `columns` are the values of x, then those of each of `series`.
  set(series, columns, sentence) {
    this.note.textContent = sentence;
    this.place.setAttribute("aria-label", sentence);
    const data = this.options.isStacked ? stacked(columns) : columns;
    const names = series.map((one) => one.label).join("\n");
    this.series = series;
    this.data = data;
    if (this.plot !== null && names === this.names) {
      this.plot.setData(data);
      return;
    }
    this.names = names;
    this.redraw();
  }

  // Shows nothing but a sentence.
  clear(sentence) {
    this.note.textContent = sentence;
    this.place.setAttribute("aria-label", sentence);
    if (this.plot !== null) this.plot.destroy();
    this.plot = this.data = null;
    this.names = "";
  }

  redraw() {
    if (this.data === null) return;
    if (this.plot !== null) this.plot.destroy();
    const { format, isStacked, x, formatX } = this.options;
    const axis = { stroke: colour("quiet"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false } };
    const lines = this.series.map(({ label, kind, isDashed }) => ({
      label,
      stroke: colour(kind),
      fill: isStacked ? colour(kind) : undefined,
      width: 2,
      dash: isDashed ? [4, 4] : undefined,
      points: { show: false },
      value: (_, value) => (value === null || value === undefined ? "–" : format(value)),
    }));
    // Stacked lines are drawn from the highest to the lowest.
    const order = isStacked ? [...lines.keys()].reverse() : [...lines.keys()];
    this.order = order;
    this.plot = new uPlot(
      {
        width: Math.max(200, this.place.clientWidth),
        height: HEIGHT,
        scales: { x: x === "time" ? { time: true, range: timeRange } : { time: false }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.05 : 1] } },
        axes: [
          { ...axis, values: formatX ? (_, ticks) => ticks.map(formatX) : undefined },
          { ...axis, size: 70, values: (_, ticks) => ticks.map(format) },
        ],
        legend: { show: true, live: !isStacked, markers: { dash: (plot, place) => (plot.series[place].dash ? "dashed" : "solid") } },
        cursor: { y: false },
        series: [{ value: formatX ? (_, value) => (value === null ? "–" : formatX(value)) : undefined },
          ...order.map((place) => lines[place])],
      },
      this.inOrder(this.data),
      this.place,
    );
    const set = this.plot.setData.bind(this.plot);
    this.plot.setData = (data) => set(this.inOrder(data));
  }

  inOrder(data) {
    return [data[0], ...this.order.map((place) => data[place + 1])];
  }

  resize() {
    if (this.plot !== null) this.plot.setSize({ width: Math.max(200, this.place.clientWidth), height: HEIGHT });
  }

  close() {
    this.watch.disconnect();
    this.dark.removeEventListener("change", this.recolour);
    if (this.plot !== null) this.plot.destroy();
  }
}

// At least a minute: of a chart that has just begun, the labels would be fractions of a second.
function timeRange(_, first, last) {
  return [last === null ? first : Math.min(first, last - LEAST_SPAN_S), last];
}

function stacked(columns) {
  const [x, ...series] = columns;
  const sums = x.map(() => 0);
  return [x, ...series.map((values) => values.map((value, place) => (value === null ? null : (sums[place] += value))))];
}
