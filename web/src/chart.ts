// Series over steps, drawn by uPlot: lines, bands between two of them, a crosshair that other charts share.

import uPlot from "uplot";
import { type AxisMode, axisScale } from "./axes.ts";
import { NONFINITE, token } from "./colours.ts";
import { h } from "./dom.ts";
import { count, number } from "./format.ts";
import { aligned, drawn, plain, positive, type Series } from "./lines.ts";
import { pngButton } from "./save.ts";
import { type Span, stepsOf } from "./view.ts";

export type { Series };

export interface ChartOptions {
  label: string;
  height: number;
  gutter?: number;
  right?: number;
  axis?: boolean;
  inside?: boolean; // the readout stands in the gutter
  range?: [number, number];
  log?: boolean;
  xName?: (x: number) => string;
  xTicks?: (from: number, to: number, wanted: number) => number[];
  hover?: (x: number) => void;
  zoom?: (span: Span | null) => void;
  format?: (value: number) => string;
}

const TICKS = 7;
// A logarithmic axis of many powers of ten: uPlot would label none of them where they lie close.
const POWERS: Partial<uPlot.Axis> = {
  incrs: (_, __, low, high) => [(high - low) / TICKS], // else it finds none for many powers, and draws no axis
  splits: (_, __, low, high) => powers(low, high),
  filter: (_, ticks) => ticks,
};

/** Values at which a logarithmic axis is labelled: 1, 2 and 5 of each power of ten, powers, or some powers. */
export function powers(low: number, high: number): number[] {
  const [from, to] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const every = Math.max(1, Math.ceil((to - from) / TICKS));
  const found: number[] = [];
  for (let at = from; at <= to; at += every)
    for (const times of to - from > 2 ? [1] : [1, 2, 5]) found.push(times * 10 ** at);
  return found.filter((tick) => tick >= low && tick <= high);
}

export class Chart {
  readonly element: HTMLElement;
  private plot: uPlot | null = null;
  private x: number[] = [];
  private columns: (number | null | undefined)[][] = [];
  private bad: { x: ArrayLike<number>; count: ArrayLike<number> } | null = null;
  private series: Series[] = [];
  private span: Span = { from: 0, to: 1 };
  private readonly holder = h("div", { class: "chart-plot" });
  private readonly readout = h("div", { class: "chart-readout" });
  private looks = "";
  remark = ""; // said beside the values, loudly
  mode: AxisMode = "robust";
  private readonly save: HTMLElement;
  private quiet = false; // while another chart moves this one's cursor

  constructor(private readonly options: ChartOptions) {
    this.element = h(
      "figure",
      { class: options.inside ? "chart inside" : "chart", "aria-label": options.label },
      this.readout,
      this.holder,
    );
    this.holder.setAttribute("role", "img");
    this.holder.setAttribute("aria-label", options.label);
    this.save = pngButton(options.label, () => [...this.holder.querySelectorAll("canvas")]);
    this.holder.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
  }

  /** `bad` counts what was not finite at each x: it is drawn as such, and never as a value. */
  show(x: ArrayLike<number>, series: Series[], span: Span, bad: ArrayLike<number> | null = null): void {
    ({ x: this.x, columns: this.columns } = aligned(x, series, this.options.log ? positive : plain));
    this.bad = bad && { x: Array.from(x), count: bad };
    this.series = series;
    this.span = span;
    const look = JSON.stringify([token("series"), this.mode, series.map(({ values: _, x: __, ...rest }) => rest)]);
    if (this.plot && look === this.looks && this.mode !== "symlog") this.renew();
    else this.build();
    this.looks = look;
  }

  /** Other numbers in the same lines. */
  private renew(): void {
    this.plot!.setData(this.data());
    this.read(null);
  }

  private data(): uPlot.AlignedData {
    return [this.x, ...this.columns] as uPlot.AlignedData;
  }

  /** Another span of the same series. */
  look(span: Span): void {
    this.span = span;
    this.plot?.setScale("x", { min: span.from, max: span.to });
    this.read(null);
  }

  set gutter(width: number) {
    if (this.options.gutter === width) return;
    this.options.gutter = width;
    this.build();
  }

  set height(height: number) {
    this.options.height = height;
    this.plot?.setSize({ width: this.holder.clientWidth, height });
  }

  /** Put the crosshair at a step; NaN takes it away. */
  point(step: number): void {
    if (!this.plot) return;
    this.quiet = true;
    const left = Number.isNaN(step) ? -10 : this.plot.valToPos(step, "x");
    this.plot.setCursor({ left, top: left < 0 ? -10 : 5 });
    this.quiet = false;
  }

  resize(): void {
    const width = this.holder.clientWidth;
    if (width > 0 && this.plot && this.plot.width !== width) this.plot.setSize({ width, height: this.options.height });
    else if (!this.plot) this.build();
  }

  build(): void {
    this.plot?.destroy();
    this.plot = null;
    const width = this.holder.clientWidth;
    if (!width || !this.series.length) return;
    this.plot = new uPlot(this.settings(width), this.data(), this.holder);
    this.read(null);
  }

  close(): void {
    this.plot?.destroy();
  }

  private settings(width: number): uPlot.Options {
    const { height, gutter = 64, right = 8, log = false, axis = true } = this.options;
    const font = "12px system-ui, sans-serif";
    const line = { stroke: token("quiet"), font, grid: { stroke: token("grid"), width: 1 }, ticks: { show: false } };
    const bottom = axis ? { size: 26 } : { show: false };
    return {
      width,
      height,
      padding: [6, right, axis ? 0 : 4, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: Boolean(this.options.zoom), y: false, setScale: false }, points: { size: 6 } },
      scales: {
        x: { time: false, range: () => [this.span.from, this.span.to] },
        y: log ? { distr: 3 } : this.options.range ? { range: this.options.range } : axisScale(this.mode, () => this.seen()),
      },
      axes: [
        {
          ...line,
          ...bottom,
          splits: (_, __, from, to) => this.ticksOf(from, to),
          values: (_, ticks) => ticks.map((tick) => this.nameOf(tick)),
        },
        { ...line, size: gutter, space: 22, ...(log ? POWERS : {}), values: (_, ticks) => this.labels(ticks) },
      ],
      series: [{}, ...this.series.map((one) => drawn(one))],
      bands: this.bands(),
      hooks: {
        setCursor: [() => this.moved()],
        setSelect: [(plot) => this.selected(plot)],
        draw: [(plot) => this.mark(plot)],
      },
    };
  }

  /** The finite values in sight. */
  private seen(): number[] {
    const inside = this.x.map((x) => x >= this.span.from && x <= this.span.to);
    return this.columns.flatMap((column) =>
      column.filter((value, i): value is number => inside[i]! && value !== null && value !== undefined),
    );
  }

  /** What is not finite, as bars over the whole height; and what lies beyond the axis, as triangles at its edge. */
  private mark(plot: uPlot): void {
    const { left, top, width, height } = plot.bbox;
    const pen = plot.ctx;
    pen.save();
    pen.beginPath();
    pen.rect(left, top, width, height);
    pen.clip();
    pen.fillStyle = NONFINITE;
    const places = Array.from(this.bad?.x ?? [], (step) => plot.valToPos(step, "x", true));
    Array.from(this.bad?.count ?? []).forEach((count, i) => {
      if (!(count > 0)) return;
      const [from, to] = around(places, i);
      pen.globalAlpha = 0.16;
      pen.fillRect(from, top, to - from, height);
      pen.globalAlpha = 1;
      pen.fillRect(from, top + height - 5, to - from, 5);
    });
    this.series.forEach((one, at) => one.quiet || this.beyond(plot, this.columns[at]!, one.colour ?? token("series")));
    pen.restore();
  }

  private beyond(plot: uPlot, column: (number | null | undefined)[], colour: string): void {
    const { min, max } = plot.scales["y"]!;
    if (min === undefined || min === null || max === undefined || max === null) return;
    const { top, height } = plot.bbox;
    plot.ctx.fillStyle = colour;
    column.forEach((value, i) => {
      if (value === null || value === undefined || (value <= max && value >= min)) return;
      const x = plot.valToPos(this.x[i]!, "x", true);
      const [tip, base] = value > max ? [top + 1, top + 8] : [top + height - 1, top + height - 8];
      plot.ctx.beginPath();
      plot.ctx.moveTo(x, tip);
      plot.ctx.lineTo(x - 4, base);
      plot.ctx.lineTo(x + 4, base);
      plot.ctx.fill();
    });
  }

  private bands(): uPlot.Band[] {
    return this.series.flatMap((one, i) => {
      const other = this.series.findIndex((candidate) => candidate.name === one.fillTo);
      return other < 0 ? [] : [{ series: [i + 1, other + 1] as [number, number], fill: one.fill ?? token("wash") }];
    });
  }

  private ticksOf(from: number, to: number): number[] {
    const wanted = Math.max(2, this.holder.clientWidth / 120);
    if (this.options.xTicks) return this.options.xTicks(from, to, wanted);
    const size = Math.max(1, (to - from) / wanted);
    const power = 10 ** Math.floor(Math.log10(size));
    const step = [1, 2, 5, 10].map((times) => times * power).find((each) => each >= size) ?? size;
    const found: number[] = [];
    for (let at = Math.ceil(from / step) * step; at < to; at += step) found.push(at);
    return found;
  }

  private nameOf(x: number): string {
    return this.options.xName ? this.options.xName(x) : count(Math.floor(x));
  }

  /** The names of ticks, with as many digits as tell them apart: 31.98, 32.02. */
  private labels(ticks: readonly (number | null)[]): string[] {
    const format = this.options.format;
    const named = (digits: number) => ticks.map((tick) => (tick === null ? "" : format ? format(tick) : number(tick, digits)));
    const apart = (names: string[]) => new Set(names.filter(Boolean)).size === names.filter(Boolean).length;
    for (let digits = 3; digits < 8; digits++) if (apart(named(digits))) return named(digits);
    return named(8);
  }

  private moved(): void {
    const at = this.plot?.cursor.idx ?? null;
    this.read(at);
    const left = this.plot?.cursor.left ?? -10;
    if (!this.quiet) this.options.hover?.(left < 0 ? NaN : this.plot!.posToVal(left, "x"));
  }

  /** The values under the crosshair; where it is away, the last ones. */
  private read(at: number | null): void {
    const i = at ?? this.last();
    const told = this.series.filter((one) => !one.quiet);
    const where =
      at === null
        ? []
        : [
            h(
              "span",
              { class: "quiet" },
              this.options.xName ? this.nameOf(this.x[i]!) : `step ${this.nameOf(this.x[i]!)}`,
            ),
          ];
    const values = told.map((one) => this.told(one, this.valueAt(one, i), told.length > 1));
    this.readout.replaceChildren(
      h("span", { class: "chart-title" }, this.options.label),
      ...values,
      ...where,
      ...(this.remark ? [h("span", { class: "wrong" }, this.remark)] : []),
      this.save,
    );
  }

  /** The value of a line at a place, or the last before it where lines stand at places of their own. */
  private valueAt(one: Series, at: number): number {
    const column = this.columns[this.series.indexOf(one)] ?? [];
    let i = at;
    while (i > 0 && column[i] === undefined) i--;
    return column[i] ?? NaN;
  }

  /** The last point in sight. */
  private last(): number {
    let i = this.x.length - 1;
    while (i > 0 && this.x[i]! > this.span.to) i--;
    return i;
  }

  private told(one: Series, value: number, named: boolean): HTMLElement {
    const swatch = h("i", { class: "swatch line", style: `background: ${one.colour ?? token("series")}` });
    return h("span", {}, named ? [swatch, `${one.name} `] : null, h("b", {}, this.labels([value])[0]!));
  }

  private selected(plot: uPlot): void {
    const { left, width } = plot.select;
    if (width < 5) return;
    const span = stepsOf(plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.options.zoom?.(span);
  }

  private wheel(event: WheelEvent): void {
    if (!this.options.zoom || !this.plot || !event.ctrlKey) return;
    event.preventDefault();
    const about = this.plot.posToVal(event.offsetX, "x");
    const factor = event.deltaY > 0 ? 1.25 : 0.8;
    const { from, to } = this.span;
    this.options.zoom({ from: about - (about - from) * factor, to: about + (to - about) * factor });
  }
}

/** Where the bar of one of several places begins and ends: half-way to its neighbours, so that bars leave no slits. */
function around(places: readonly number[], i: number): [number, number] {
  const here = places[i]!;
  const before = places[i - 1] ?? 2 * here - (places[i + 1] ?? here + 4);
  const after = places[i + 1] ?? 2 * here - before;
  const from = Math.round((before + here) / 2);
  return [from, Math.max(from + 2, Math.round((here + after) / 2))];
}
