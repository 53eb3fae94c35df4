// One site over steps: quantile bands, the histogram as a picture, the statistics with their envelopes.

import { type AxisMode, smoothed } from "./axes.ts";
import { Chart, type ChartOptions, type Series } from "./chart.ts";
import { token } from "./colours.ts";
import type { Columns } from "./columns.ts";
import { fill, h } from "./dom.ts";
import { count, number, share } from "./format.ts";
import { Histogram } from "./histogram.ts";
import type { Other } from "./overlay.ts";
import { failed, loading } from "./states.ts";
import { type Rows, Table } from "./table.ts";
import type { Span } from "./view.ts";

const GUTTER = 84;
const EDGE = { colour: "transparent", width: 0, points: false, quiet: true };
const TABLED = [
  "mean",
  "std",
  "min",
  "max",
  "l2",
  "zeros",
  "nonfinite",
  "q01",
  "q05",
  "q25",
  "q50",
  "q75",
  "q95",
  "q99",
];

export interface PanelOptions {
  title: string;
  zoom(span: Span | null): void;
  hover(step: number, from: Panel): void;
}

export class Panel {
  readonly element: HTMLElement;
  private readonly body = h("div", { class: "panel" }, loading("the site"));
  private readonly charts: Record<"bands" | "values" | "spread" | "norm" | "zeros", Chart>;
  private readonly histogram: Histogram;
  private readonly table: Table;
  private data: Columns | null = null;
  private span: Span = { from: 0, to: 1 };
  private others: Other[] = [];
  private look: { mode: AxisMode; smooth: number; run: string } = { mode: "robust", smooth: 0, run: "" };

  constructor(private readonly options: PanelOptions) {
    const chart = (label: string, height: number, more: Partial<ChartOptions> = {}): Chart => {
      const made: Chart = new Chart({
        label,
        height,
        gutter: GUTTER,
        right: 0,
        zoom: options.zoom,
        hover: (step) => this.moved(step, made),
        ...more,
      });
      return made;
    };
    this.charts = {
      bands: chart("Quantiles", 190),
      values: chart("Mean within min and max", 150),
      spread: chart("Standard deviation", 120),
      norm: chart("L2 norm", 110),
      zeros: chart("Zeros, share", 100, { format: share, range: [0, 1] }),
    };
    this.histogram = new Histogram(
      GUTTER,
      options.title,
      (span) => options.zoom(span),
      (step) => this.moved(step, this.histogram),
    );
    this.table = new Table(`statistics of ${options.title} by step`, () => this.rows());
    this.element = h("section", { class: "panel" }, h("h2", {}, options.title), this.body);
  }

  style(mode: AxisMode, smooth: number, run: string): void {
    this.look = { mode, smooth, run };
  }

  /** Lines of other runs, in the same charts. */
  overlay(others: Other[]): void {
    this.others = others;
    this.draw();
  }

  show(data: Columns, span: Span): void {
    this.data = data;
    this.span = span;
    const { bands, values, spread, norm, zeros } = this.charts;
    const shown = data.has("q50") ? [bands, values, spread, norm, zeros] : [values, spread, norm, zeros];
    const picture = data.has("hist")
      ? [this.histogram.element]
      : [h("p", { class: "quiet" }, "No histogram was kept here; keep one with tt.histogram().")];
    const [first, ...rest] = shown.map((chart) => chart.element);
    fill(
      this.body,
      data.has("q50") ? [first!, ...picture, ...rest] : [...picture, first!, ...rest],
      this.bad(data),
      thinned(data),
      this.table.element,
    );
    this.draw();
  }

  fail(error: unknown): void {
    fill(this.body, failed(error));
  }

  /** The crosshair, in all charts but the one that it comes from. */
  point(step: number, from?: Chart | Histogram): void {
    for (const chart of [...Object.values(this.charts), this.histogram]) if (chart !== from) chart.point(step);
  }

  private moved(step: number, from: Chart | Histogram): void {
    this.point(step, from);
    this.options.hover(step, this);
  }

  resize(): void {
    for (const chart of Object.values(this.charts)) chart.resize();
  }

  draw(): void {
    const { data, span } = this;
    if (!data) return;
    const steps = middles(data);
    const bad = data.find("nonfinite");
    const put = (chart: Chart, series: Series[], name: string) => {
      chart.mode = this.look.mode;
      chart.show(steps, [...series, ...this.overlaid(name)], span, bad);
    };
    if (data.has("q50")) put(this.charts.bands, bands(data), "q50");
    put(this.charts.values, this.line(data, "mean", "max", "min"), "mean");
    put(this.charts.spread, this.line(data, "std", "std.high", "std.low"), "std");
    put(this.charts.norm, this.line(data, "l2", "l2.high", "l2.low"), "l2");
    put(this.charts.zeros, this.line(data, "zeros", "", ""), "zeros");
    if (data.has("hist")) this.histogram.show(data, span);
    this.table.refresh();
  }

  /** A line within its bounds; smoothed, with the line as it is behind it. */
  private line(data: Columns, name: string, high: string, low: string): Series[] {
    const series = envelope(data, name, high, low);
    const own = series[series.length - 1]!;
    if (this.others.length) own.name = this.look.run;
    if (!this.look.smooth) return series;
    const faint = { ...own, name: "as recorded", colour: `${token("series")}55`, width: 1, quiet: true };
    return [...series.slice(0, -1), faint, { ...own, values: smoothed(own.values, this.look.smooth) }];
  }

  private overlaid(name: string): Series[] {
    return this.others.flatMap((other): Series[] => {
      const values = other.data.find(name);
      if (!values) return [];
      return [{ name: other.name, values: smoothed(values, this.look.smooth), colour: other.colour, x: middles(other.data) }];
    });
  }

  close(): void {
    for (const chart of Object.values(this.charts)) chart.close();
    this.histogram.close();
  }

  /** What is not finite stands in words: a line would hide it. */
  private bad(data: Columns): HTMLElement | null {
    const counts = data.find("nonfinite");
    const steps = data.get("step");
    const first = counts ? counts.findIndex((value) => value > 0) : -1;
    if (first < 0) return null;
    const total = Array.from(counts!).reduce((sum, value) => sum + (value || 0), 0);
    return h(
      "p",
      { class: "finding error" },
      `${number(total)} elements are NaN or Inf, from step ${number(steps[first]!)} on.`,
    );
  }

  private rows(): Rows {
    const { data } = this;
    if (!data) return { head: ["step"], rows: [] };
    const names = TABLED.filter((name) => data.has(name));
    return {
      head: ["step", ...names],
      rows: Array.from(data.get("step"), (step, at) => [step, ...names.map((name) => data.get(name)[at] ?? null)]),
    };
  }
}

/** Where not every step was read, that is said: what was left out may hold anything. */
function thinned(data: Columns): HTMLElement | null {
  const steps = Number(data.header["steps_every"] ?? 1);
  const histograms = data.has("hist") ? Number(data.header["every"] ?? 1) : 1;
  if (steps > 1) return h("p", { class: "quiet" }, `This report carries one of ${count(steps)} steps of this site.`);
  if (histograms === 1) return null;
  return h("p", { class: "quiet" }, `Histogram and quantiles are of one of ${count(histograms)} steps.`);
}

/** Steps as charts have them: in the middle of their cells. */
function middles(data: Columns): Float64Array {
  return Float64Array.from(data.get("step"), (step) => step + 0.5);
}

function bands(data: Columns): Series[] {
  const pair = (low: string, high: string, fill: string): Series[] => [
    { name: high, values: data.get(high), fillTo: low, fill: token(fill), ...EDGE },
    { name: low, values: data.get(low), ...EDGE },
  ];
  const line = { name: "median", values: data.get("q50"), colour: token("series"), width: 2 };
  const told = ["q01", "q99"].map((name) => ({
    name: name === "q01" ? "1 %" : "99 %",
    values: data.get(name),
    colour: token("quiet"),
    width: 0.5,
  }));
  return [
    ...pair("q01", "q99", "band-1"),
    ...pair("q05", "q95", "band-2"),
    ...pair("q25", "q75", "band-3"),
    ...told,
    line,
  ];
}

/** A line, and where they are known the bounds about it. */
function envelope(data: Columns, name: string, high: string, low: string): Series[] {
  const line: Series = { name, values: data.get(name), colour: token("series") };
  if (!data.has(high) || !data.has(low)) return [line];
  const told = (text: string, column: string): Series => ({
    name: text,
    values: data.get(column),
    colour: token("quiet"),
    width: 0.5,
    points: false,
  });
  const upper = { ...told("high", high), fillTo: "low", fill: token("band-2") };
  return [upper, told("low", low), line];
}
