// @ts-check
// Curves, drawn by uPlot; the script is fetched when the first curve is shown.

/** @type {Promise<any> | null} */
let loading = null;

/** @returns {Promise<any>} */
function loadPlot() {
  if (!loading) {
    loading = new Promise((resolve, reject) => {
      const style = document.createElement("link");
      style.rel = "stylesheet";
      style.href = new URL("./vendor/uplot/uPlot.min.css", import.meta.url).href;
      document.head.append(style);
      import("./plot_loader.js").then((module) => module.load()).then(resolve, reject);
    });
  }
  return loading;
}

/**
 * @typedef {object} ChartSeries
 * @property {string} label
 * @property {string} colour the name of a custom property of the style sheet
 * @property {boolean} [dashed]
 * @property {(value: number) => string} [format]
 */

/** One chart: an element for a template, and `show` for its data. */
export class Chart {
  /**
   * @param {{series: ChartSeries[], label: string, xLabel: string, format?: (value: number) => string,
   *   height?: number, xFormat?: (value: number) => string}} options
   */
  constructor(options) {
    this.options = options;
    this.element = document.createElement("div");
    this.element.className = "chart";
    this.element.setAttribute("role", "img");
    this.element.setAttribute("aria-label", options.label);
    /** @type {any} */
    this.plot = null;
    /** @type {(number | null)[][]} */
    this.data = [];
    this.numPoints = 0;
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.element);
    this.onTheme = () => this.rebuild();
    addEventListener("theme", this.onTheme);
  }

  /** @param {(number | null)[][]} data the values of x, then of each series */
  show(data) {
    this.data = data;
    this.numPoints = data.length ? data[0].length : 0;
    this.element.dataset.points = String(this.numPoints);
    if (this.plot) this.plot.setData(data);
    else this.rebuild();
  }

  stop() {
    this.observer.disconnect();
    removeEventListener("theme", this.onTheme);
    if (this.plot) this.plot.destroy();
    this.plot = null;
  }

  resize() {
    const width = this.element.clientWidth;
    if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: this.height() });
    else if (!this.plot && width) this.rebuild();
  }

  height() {
    return this.options.height || 180;
  }

  async rebuild() {
    if (!this.data.length) return;
    const uPlot = await loadPlot();
    const width = this.element.clientWidth;
    if (!width) return;
    if (this.plot) this.plot.destroy();
    const style = getComputedStyle(document.documentElement);
    const colour = (/** @type {string} */ name) => style.getPropertyValue(name).trim();
    const axis = { stroke: colour("--text-soft"), grid: { stroke: colour("--line"), width: 1 },
      ticks: { stroke: colour("--line"), width: 1 } };
    const format = this.options.format || ((/** @type {number} */ v) => String(v));
    this.plot = new uPlot(
      {
        width,
        height: this.height(),
        scales: { x: { time: false } },
        axes: [
          { ...axis, label: this.options.xLabel, labelSize: 18,
            ...(this.options.xFormat ? { values: (/** @type {any} */ _, /** @type {number[]} */ v) =>
              v.map(this.options.xFormat) } : {}) },
          { ...axis, size: 72, values: (/** @type {any} */ _, /** @type {number[]} */ v) => v.map(format) },
        ],
        series: [
          { label: this.options.xLabel },
          ...this.options.series.map((each) => ({
            label: each.label, stroke: colour(each.colour), width: 1.5, spanGaps: true, points: { show: false },
            dash: each.dashed ? [6, 4] : undefined,
            value: (/** @type {any} */ _, /** @type {number | null} */ v) => (v === null || v === undefined ? "–" : (each.format || format)(v)),
          })),
        ],
      },
      this.data,
      this.element,
    );
  }
}
