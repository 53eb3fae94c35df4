// The user's metrics, one strip each, on the step axis of the heat map below them.

import { type AxisMode, smoothed } from "./axes.ts";
import { Chart, type Series } from "./chart.ts";
import { token } from "./colours.ts";
import type { Columns } from "./columns.ts";
import { h } from "./dom.ts";
import { count, many } from "./format.ts";
import { ask, type Other } from "./overlay.ts";
import { aborted, type Params, type Source } from "./source.ts";
import { type Rows, Table } from "./table.ts";
import type { Span } from "./view.ts";

const HEIGHT = 72;
const AT_FIRST = 2;

export interface MetricsOptions {
  hover(step: number): void;
  zoom(span: Span | null): void;
  choose(names: string[]): void;
}

export class Metrics {
  readonly element = h("div", { class: "metrics" });
  readonly table = new Table("metrics by step", () => this.rows());
  private charts = new Map<string, Chart>();
  private data: Columns | null = null;
  private chosen: string[] = [];
  private span: Span = { from: 0, to: 1 };
  private gutter = 120;
  private key = "";
  private asked = new AbortController();
  private others: Other[] = [];
  private look_: { mode: AxisMode; smooth: number; run: string } = { mode: "robust", smooth: 0, run: "" };

  constructor(
    private readonly source: Source,
    private readonly options: MetricsOptions,
  ) {}

  /** The chips that say which metrics are shown. */
  chips(names: readonly string[], chosen: string | undefined): HTMLElement {
    this.chosen =
      chosen === undefined ? names.slice(0, AT_FIRST) : chosen.split(",").filter((name) => names.includes(name));
    this.element.style.minHeight = `${this.chosen.length * (HEIGHT + 2)}px`; // so that nothing jumps when they come
    const buttons = names.map((name) =>
      h(
        "button",
        {
          type: "button",
          class: "small",
          "aria-pressed": String(this.chosen.includes(name)),
          onclick: () => this.toggle(name, names),
        },
        name,
      ),
    );
    return h(
      "div",
      { class: "chips", role: "group", "aria-label": "Metrics shown" },
      names.length ? h("span", { class: "quiet" }, "metrics") : null,
      buttons,
    );
  }

  /** Ask for a span of steps, unless it is here: `version` tells whether the run has grown. */
  async load(params: Params, version: string, others: readonly string[] = []): Promise<void> {
    const key = JSON.stringify([params, version, others]);
    if (key === this.key) return;
    this.key = key;
    this.asked.abort();
    this.asked = new AbortController();
    try {
      const { signal } = this.asked;
      const { phase: _, ...plain } = params;
      const coming = ask(this.source, others, "/api/metrics", plain, signal);
      coming.catch(() => undefined); // said by the run's own answer, which is waited for first
      this.data = await this.source.columns("/api/metrics", params, signal);
      this.draw();
      this.others = await coming;
      this.draw();
    } catch (error) {
      if (!aborted(error)) this.element.replaceChildren(h("p", { class: "quiet" }, String((error as Error).message)));
    }
  }

  /** How curves are drawn. */
  style(mode: AxisMode, smooth: number, run: string): void {
    this.look_ = { mode, smooth, run };
  }

  look(span: Span): void {
    this.span = span;
    for (const chart of this.charts.values()) chart.look(span);
  }

  point(step: number): void {
    for (const chart of this.charts.values()) chart.point(step);
  }

  align(gutter: number): void {
    this.gutter = gutter;
    this.element.style.setProperty("--gutter", `${gutter}px`);
    for (const chart of this.charts.values()) chart.gutter = gutter;
  }

  resize(): void {
    for (const chart of this.charts.values()) chart.resize();
  }

  repaint(): void {
    this.draw();
  }

  close(): void {
    this.asked.abort();
    for (const chart of this.charts.values()) chart.close();
  }

  draw(): void {
    const data = this.data;
    if (!data) return;
    const names = data.header["names"] as string[];
    for (const [name, chart] of this.charts) if (!this.chosen.includes(name)) (chart.close(), this.charts.delete(name));
    const shown = this.chosen.filter((name) => names.includes(name));
    const charts = shown.map((name) => this.chart(name));
    this.element.replaceChildren(...charts.map((chart) => chart.element));
    const steps = Float64Array.from(data.get("step"), (step) => step + 0.5); // the middle of a cell
    const bad = (data.header["nonfinite"] ?? {}) as Record<string, { first: number; count: number }>;
    shown.forEach(
      (name, i) =>
        (charts[i]!.remark = bad[name]
          ? `NaN or Inf from step ${count(bad[name].first)}, ${many(bad[name].count, "step")}`
          : ""),
    );
    shown.forEach((name, i) => {
      const at = names.indexOf(name);
      charts[i]!.mode = this.look_.mode;
      charts[i]!.show(steps, [...this.series(data, at, name), ...this.overlaid(name)], this.span, data.find(`m${at}.bad`));
    });
    this.table.refresh();
  }

  private series(data: Columns, i: number, name: string): Series[] {
    const [mean, low, high] = ["mean", "min", "max"].map((part) => data.find(`m${i}.${part}`));
    const { smooth, run } = this.look_;
    const label = this.others.length ? run : name;
    const line = { name: label, values: smoothed(mean ?? [], smooth), colour: token("series") };
    const faint = { name: "as given", values: mean ?? [], colour: `${token("series")}55`, width: 1, quiet: true };
    if (smooth > 0) return [faint, line];
    if (!low || !high) return [line];
    const edge = { colour: "transparent", quiet: true, width: 0, points: false };
    return [
      { name: "high", values: high, fillTo: "low", fill: token("band-3"), ...edge },
      { name: "low", values: low, ...edge },
      line,
    ];
  }

  private overlaid(name: string): Series[] {
    return this.others.flatMap((other): Series[] => {
      const at = ((other.data.header["names"] ?? []) as string[]).indexOf(name);
      const values = other.data.find(`m${at}.mean`);
      const x = Float64Array.from(other.data.get("step"), (step) => step + 0.5);
      return values ? [{ name: other.name, values: smoothed(values, this.look_.smooth), colour: other.colour, x }] : [];
    });
  }

  private chart(name: string): Chart {
    const { hover, zoom } = this.options;
    let chart = this.charts.get(name);
    if (!chart)
      this.charts.set(
        name,
        (chart = new Chart({
          label: name,
          height: HEIGHT,
          gutter: this.gutter,
          right: 0,
          axis: false,
          inside: true,
          hover,
          zoom,
        })),
      );
    return chart;
  }

  private toggle(name: string, names: readonly string[]): void {
    const on = this.chosen.includes(name) ? this.chosen.filter((one) => one !== name) : [...this.chosen, name];
    this.options.choose(names.filter((one) => on.includes(one)));
  }

  private rows(): Rows {
    const data = this.data;
    if (!data) return { head: ["step"], rows: [] };
    const names = data.header["names"] as string[];
    const rows = Array.from(data.get("step"), (step, at) => [
      step,
      ...names.map((_, i) => data.find(`m${i}.mean`)?.[at] ?? null),
    ]);
    return { head: ["step", ...names], rows };
  }
}
