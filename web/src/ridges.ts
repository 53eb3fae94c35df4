// The histogram over steps as ridgelines: one density curve for each of a few steps, over a linear axis of values.

import { NONFINITE, token } from "./colours.ts";
import type { Columns } from "./columns.ts";
import { h, sized } from "./dom.ts";
import { count, number } from "./format.ts";
import { pngButton } from "./save.ts";
import { ticks } from "./scales.ts";

const MOST = 24; // curves
const CELLS = 160; // of the linear axis
const GAP = 15; // pixels between two curves
const RISE = 46; // of the highest
const AXIS = 24;
const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif";

export class Ridges {
  readonly element: HTMLElement;
  private readonly canvas = h("canvas", {});
  private data: Columns | null = null;
  private readonly unsize: () => void;

  constructor(
    private readonly gutter: number,
    label: string,
  ) {
    const save = pngButton(`Ridgelines of ${label}`, () => [this.canvas]);
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", `Ridgelines: densities of ${label} at a few steps`);
    this.element = h("div", { class: "ridges" }, this.canvas, save);
    this.unsize = sized(this.element, () => this.draw());
  }

  show(data: Columns): void {
    this.data = data;
    this.draw();
  }

  close(): void {
    this.unsize();
  }

  draw(): void {
    const { data } = this;
    const width = this.element.clientWidth;
    if (!data || !width) return;
    const chosen = this.chosen(data);
    const height = RISE + GAP * chosen.length + AXIS;
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    const pen = this.canvas.getContext("2d")!;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = FONT;
    const [low, high] = reach(data, chosen);
    const curves = chosen.map((bin) => density(data, bin, low, high));
    const top = Math.max(1e-12, ...curves.map((curve) => peak(curve)));
    const wide = width - this.gutter - 8;
    this.axis(pen, low, high, wide, height);
    curves.forEach((curve, i) => this.curve(pen, curve, top, wide, RISE + GAP * (i + 0.7), data.get("step")[chosen[i]!]!, this.bad(chosen[i]!)));
  }

  /** Evenly spread steps that have a histogram, the first and the last among them. */
  private chosen(data: Columns): number[] {
    const { values, shape } = data.column("hist");
    const [bins = 0, buckets = 0] = shape;
    const there = Array.from({ length: bins }, (_, bin) => bin).filter((bin) => !Number.isNaN(values[bin * buckets]));
    if (there.length <= MOST) return there;
    return Array.from({ length: MOST }, (_, i) => there[Math.round((i * (there.length - 1)) / (MOST - 1))]!);
  }

  private bad(bin: number): boolean {
    return (this.data!.find("nonfinite")?.[bin] ?? 0) > 0;
  }

  private curve(
    pen: CanvasRenderingContext2D,
    curve: Float64Array,
    top: number,
    wide: number,
    base: number,
    step: number,
    bad: boolean,
  ): void {
    const x = (i: number) => this.gutter + (i / (curve.length - 1)) * wide;
    const y = (value: number) => base - Math.min(1.15, value / top) * RISE;
    pen.beginPath();
    pen.moveTo(x(0), base);
    curve.forEach((value, i) => pen.lineTo(x(i), y(value)));
    pen.lineTo(x(curve.length - 1), base);
    pen.fillStyle = token("ground");
    pen.globalAlpha = 0.82;
    pen.fill();
    pen.globalAlpha = 1;
    pen.fillStyle = bad ? `${NONFINITE}40` : token("band-1");
    pen.fill();
    pen.strokeStyle = bad ? NONFINITE : token("series");
    pen.lineWidth = 1;
    pen.stroke();
    pen.fillStyle = token("quiet");
    pen.textAlign = "right";
    pen.textBaseline = "alphabetic";
    pen.fillText(`step ${count(step)}`, this.gutter - 8, base, this.gutter - 10);
  }

  private axis(pen: CanvasRenderingContext2D, low: number, high: number, wide: number, height: number): void {
    pen.textAlign = "center";
    pen.textBaseline = "top";
    for (const tick of ticks(low, high, Math.max(2, wide / 90))) {
      const x = this.gutter + ((tick - low) / (high - low)) * wide;
      pen.fillStyle = token("grid");
      pen.fillRect(Math.round(x), 4, 1, height - AXIS - 2);
      pen.fillStyle = token("quiet");
      pen.fillText(number(tick, 3), Math.min(Math.max(x, this.gutter + 14), this.gutter + wide - 8), height - AXIS + 6);
    }
  }
}

/** Where the curves lie: the middle 98 hundredths of all of them. */
function reach(data: Columns, chosen: number[]): [number, number] {
  const pick = (name: string) => chosen.map((bin) => data.find(name)?.[bin] ?? NaN).filter(Number.isFinite).sort((a, b) => a - b);
  const [lows, highs] = [pick("q01"), pick("q99")];
  const low = lows[Math.floor(lows.length * 0.1)] ?? -1;
  const high = highs[Math.ceil(highs.length * 0.9) - 1] ?? 1;
  const room = (high - low) * 0.15 || Math.abs(high) * 0.1 || 1;
  return [low - room, high + room];
}

/** Shares of buckets spread evenly over the linear cells they cover. */
function density(data: Columns, bin: number, low: number, high: number): Float64Array {
  const { values, shape } = data.column("hist");
  const buckets = shape[1] ?? 0;
  const edges = data.get("edges");
  const out = new Float64Array(CELLS);
  const cell = (high - low) / CELLS;
  for (let at = 0; at < buckets; at++) {
    const mass = values[bin * buckets + at]!;
    if (!(mass > 0)) continue;
    const [from, to] = [edges[at]!, Math.max(edges[at + 1]!, edges[at]! + cell)];
    for (let i = Math.max(0, Math.floor((from - low) / cell)); i < CELLS && low + i * cell < to; i++) {
      const inside = Math.min(to, low + (i + 1) * cell) - Math.max(from, low + i * cell);
      if (inside > 0) out[i] = out[i]! + (mass * inside) / (to - from);
    }
  }
  return out;
}

/** The height that all but the two highest cells stay below: exact zeros alone do not flatten the rest. */
function peak(curve: Float64Array): number {
  return [...curve].sort((a, b) => b - a)[2] || Math.max(...curve);
}
