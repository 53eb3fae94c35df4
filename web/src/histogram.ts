// The histogram over steps as a picture: a row for each bucket, the most negative at the bottom, the zero in the middle.

import { nearestBin } from "./bins.ts";
import { fill, h } from "./dom.ts";
import type { Columns } from "./columns.ts";
import { count, number, share } from "./format.ts";
import { Heatmap, type Point } from "./heatmap.ts";
import { legend } from "./legend.ts";
import { Ridges } from "./ridges.ts";
import { type Scale, scale } from "./scales.ts";
import { type Rows, Table } from "./table.ts";
import type { Span } from "./view.ts";

const WIDE = 12; // columns of a table that can still be read
const EXPLAINED =
  "Each row is a bucket of values. Buckets are logarithmic: they grow with the size of the values, at most an eighth of a " +
  "power of two each, so that small and large values are told apart alike; negative values are below, positive above, and " +
  "the row 0 holds exact zeros. Colour is the share of elements, on a logarithmic scale.";

export class Histogram {
  readonly element: HTMLElement;
  private readonly heat: Heatmap;
  private readonly key = h("div");
  private readonly table = new Table(
    "histogram by bucket and step",
    () => this.rows(WIDE),
    () => this.rows(Infinity),
  );
  private readonly ridges: Ridges;
  private readonly body = h("div", {});
  private data: Columns | null = null;
  private as = "buckets";
  private shares: Float32Array[] = []; // by row, the greatest bucket first
  private edges: ArrayLike<number> = [];
  private steps: Float64Array = new Float64Array();

  constructor(gutter: number, label: string, zoom: (span: Span) => void, hover: (step: number) => void) {
    this.ridges = new Ridges(gutter, label);
    this.heat = new Heatmap({
      label: `Histogram of ${label} over steps: a row for each bucket of values`,
      read: (point) => this.read(point),
      view: zoom,
      hover: (point) => hover(point ? point.step : NaN),
      least: 1,
      gutter: () => gutter,
    });
    this.element = h(
      "div",
      {},
      h(
        "div",
        { class: "chart-readout" },
        h("span", { class: "chart-title" }, "Histogram over steps"),
        this.toggle("buckets", "log buckets"),
        this.toggle("ridges", "ridgelines, linear"),
        this.heat.pngButton(`Histogram of ${label}`),
      ),
      this.body,
      this.table.element,
    );
  }

  private toggle(as: string, text: string): HTMLElement {
    const press = () => {
      this.as = as;
      for (const one of this.element.querySelectorAll<HTMLElement>("[data-as]"))
        one.setAttribute("aria-pressed", String(one.dataset["as"] === as));
      this.arrange();
    };
    const on = String(as === this.as);
    return h("button", { type: "button", class: "small", "data-as": as, "aria-pressed": on, onclick: press }, text);
  }

  private arrange(): void {
    const explained = h("details", { class: "more" }, h("summary", {}, "How to read it"), h("p", { class: "quiet" }, EXPLAINED));
    if (this.as === "buckets") fill(this.body, this.heat.element, this.key, explained);
    else fill(this.body, this.ridges.element, h("p", { class: "quiet" }, "Densities at evenly spread steps, all on one scale; violet where NaN or Inf stand beside."));
    if (this.as === "ridges" && this.data) this.ridges.show(this.data);
  }

  show(data: Columns, span: Span): void {
    this.data = data;
    const { values, shape } = data.column("hist");
    const [bins = 0, buckets = 0] = shape;
    this.edges = data.get("edges");
    this.steps = Float64Array.from([...data.get("step"), span.to]);
    this.shares = Array.from({ length: buckets }, (_, row) =>
      Float32Array.from({ length: bins }, (_, bin) => values[bin * buckets + buckets - 1 - row]!),
    );
    const colours = this.scale();
    const bad = this.nothingFinite(data, bins);
    const line = (row: number) => ({ values: this.shares[row]!, bad, start: 0, edges: this.steps });
    const named = this.shares.findIndex((_, row) => this.name(row) === "0");
    this.heat.show({ rows: buckets, named, name: (row) => this.name(row), line, scale: colours, all: span });
    this.heat.look(span);
    this.table.refresh();
    fill(this.key, legend(colours, "share of elements", bad.includes(1)));
    if (!this.body.firstChild || this.as === "ridges") this.arrange();
  }

  /** Bins in which nothing was finite: they have no shares, and are not shown as if all were 0. */
  private nothingFinite(data: Columns, bins: number): Uint8Array {
    const counts = data.find("nonfinite");
    return Uint8Array.from({ length: bins }, (_, bin) =>
      (counts?.[bin] ?? 0) > 0 && this.shares.every((row) => !(row[bin]! > 0)) ? 1 : 0,
    );
  }

  point(step: number): void {
    this.heat.point(step);
  }

  close(): void {
    this.heat.close();
    this.ridges.close();
  }

  private scale(): Scale {
    const all = this.shares.flatMap((row) => [...row].filter((value) => value > 0)).sort((a, b) => a - b);
    return scale(
      "log",
      all.length ? [Math.max(all[Math.floor(all.length * 0.02)]!, 1e-6), all[all.length - 1]!] : null,
    );
  }

  /** The bucket of a row: from, to. */
  private bounds(row: number): [number, number] {
    const at = this.shares.length - 1 - row;
    return [this.edges[at] ?? NaN, this.edges[at + 1] ?? NaN];
  }

  private name(row: number): string {
    const [low, high] = this.bounds(row);
    return low <= 0 && high >= 0 ? "0" : number(low < 0 ? low : high, 2);
  }

  /** A row a bucket, by a few of the steps. */
  private rows(wide: number): Rows {
    const bins = this.steps.length - 1;
    const every = Math.max(1, Math.ceil(bins / wide));
    const shown = Array.from({ length: bins }, (_, bin) => bin).filter((bin) => bin % every === 0);
    const rows = this.shares.map((row, i) => [...this.bounds(i), ...shown.map((bin) => row[bin] ?? null)]);
    return { head: ["from", "to", ...shown.map((bin) => `step ${count(this.steps[bin])}`)], rows };
  }

  private read(point: Point): string[] {
    const [low, high] = this.bounds(point.row);
    const bin = nearestBin(this.steps, point.step);
    return [
      `${number(low, 3)} … ${number(high, 3)}`,
      `step ${count(this.steps[bin])}: ${share(this.shares[point.row]?.[bin])} of elements`,
    ];
  }
}
