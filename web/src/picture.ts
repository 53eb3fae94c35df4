// A matrix as an image: drag a rectangle to look closer, double click to see all of it, hover to read a value.

import type { Columns } from "./columns.ts";
import { fill, h } from "./dom.ts";
import { count, number } from "./format.ts";
import { legend } from "./legend.ts";
import { colourOf } from "./paint.ts";
import { scale } from "./scales.ts";

const WIDEST = 620;
const STRIP = 48; // height of a vector's image
const ALL: Part = { x: 0, y: 0, wide: 0, high: 0 };

interface Part {
  x: number;
  y: number;
  wide: number;
  high: number;
}

type Ask = (x: string, y: string) => Promise<Columns>;

export class Picture {
  readonly element: HTMLElement;
  private readonly canvas = h("canvas", { tabindex: 0, role: "img", style: "cursor: crosshair" });
  private readonly said = h("div", { class: "chart-readout", "aria-live": "polite" });
  private readonly key = h("div");
  private data: Columns | null = null;
  private part: Part = ALL;
  private reach = 1;
  private from: { x: number; y: number } | null = null;
  private ask: Ask = () => Promise.reject(new Error("nothing is shown"));

  constructor() {
    this.element = h("div", { class: "tensor" }, this.said, this.canvas, this.key);
    this.canvas.addEventListener("pointermove", (event) => this.read(event));
    this.canvas.addEventListener("pointerdown", (event) => (this.from = this.cell(event)));
    this.canvas.addEventListener("pointerup", (event) => void this.release(event));
    this.canvas.addEventListener("dblclick", () => void this.look(ALL));
  }

  show(data: Columns, ask: Ask): void {
    const [high = 1, wide = 1] = full(data);
    this.part = { x: 0, y: 0, wide, high };
    this.ask = ask;
    this.reach = Picture.reach(data);
    this.draw(data);
  }

  repaint(): void {
    if (this.data) this.draw(this.data);
  }

  /** The greatest finite magnitude. */
  static reach(data: Columns): number {
    let reach = 0;
    for (const name of ["value", "low", "high"]) {
      for (const value of data.find(name) ?? []) if (Number.isFinite(value)) reach = Math.max(reach, Math.abs(value));
    }
    return reach || 1;
  }

  static small(data: Columns, reach: number, size: number): HTMLCanvasElement {
    const canvas = h("canvas", { role: "img", "aria-label": "One map" });
    painted(canvas, data, reach);
    canvas.style.width = `${size}px`;
    canvas.style.height = `${Math.max(6, Math.round((size * canvas.height) / canvas.width))}px`;
    return canvas;
  }

  static key(reach: number): HTMLElement {
    return legend(scale("linear", [-reach, reach]), "value", true, false);
  }

  private draw(data: Columns): void {
    this.data = data;
    painted(this.canvas, data, this.reach);
    const { width, height } = this.canvas;
    const times = Math.max(1, Math.min(Math.floor(WIDEST / width), Math.floor(420 / height), 24));
    this.canvas.style.width = `${width * times}px`;
    this.canvas.style.height = `${height === 1 ? STRIP : height * times}px`;
    this.canvas.setAttribute("aria-label", `Values of ${this.part.high} by ${this.part.wide} elements`);
    fill(this.key, Picture.key(this.reach), h("p", { class: "quiet" }, this.note()));
    fill(this.said, h("span", { class: "quiet" }, "Drag a rectangle to look closer, double click for all."));
  }

  private note(): string {
    const [high = 1, wide = 1] = this.data!.column("value").shape;
    const { x, y, wide: across, high: down } = this.part;
    const shrunk =
      across > wide || down > high
        ? `; each pixel stands for ${count(Math.ceil(across / wide))} × ${count(Math.ceil(down / high))} elements, the extreme one shown`
        : "";
    return `columns ${count(x)}–${count(x + across - 1)}, rows ${count(y)}–${count(y + down - 1)}${shrunk}`;
  }

  private cell(event: PointerEvent): { x: number; y: number } {
    const { clientWidth, clientHeight } = this.canvas;
    const { x, y, wide, high } = this.part;
    return {
      x: x + Math.min(wide - 1, Math.floor((event.offsetX / clientWidth) * wide)),
      y: y + Math.min(high - 1, Math.floor((event.offsetY / clientHeight) * high)),
    };
  }

  private read(event: PointerEvent): void {
    const [high = 1, wide = 1] = this.data!.column("value").shape;
    const { x, y } = this.cell(event);
    const at =
      Math.floor(((y - this.part.y) / this.part.high) * high) * wide +
      Math.floor(((x - this.part.x) / this.part.wide) * wide);
    const pick = (name: string) => this.data!.find(name)?.[at];
    const bounds = pick("low") === undefined ? "" : ` (${number(pick("low"))} … ${number(pick("high"))})`;
    const value = pick("value");
    fill(
      this.said,
      h(
        "span",
        {},
        `row ${count(y)}, column ${count(x)}: `,
        h("b", {}, value !== undefined && Number.isNaN(value) ? "NaN" : number(value)),
        bounds,
      ),
    );
  }

  private async release(event: PointerEvent): Promise<void> {
    const [from, to] = [this.from, this.cell(event)];
    this.from = null;
    if (!from || (Math.abs(from.x - to.x) < 2 && Math.abs(from.y - to.y) < 2)) return;
    const [x, y] = [Math.min(from.x, to.x), Math.min(from.y, to.y)];
    await this.look({ x, y, wide: Math.abs(from.x - to.x) + 1, high: Math.abs(from.y - to.y) + 1 });
  }

  private async look(part: Part): Promise<void> {
    const data =
      part === ALL
        ? await this.ask("", "")
        : await this.ask(`${part.x}:${part.x + part.wide}`, `${part.y}:${part.y + part.high}`);
    const [high = 1, wide = 1] = full(data);
    this.part = part === ALL ? { x: 0, y: 0, wide, high } : part;
    this.draw(data);
  }
}

/** The size of the whole matrix, of which the image may be a smaller one. */
function full(data: Columns): number[] {
  const shape = (data.header["shape"] ?? data.column("value").shape) as number[];
  return shape.length >= 2 ? shape.slice(-2) : [1, shape[0] ?? 1];
}

/** Where several elements share a pixel the one farther from zero is shown. What is not a number is loud. */
function painted(canvas: HTMLCanvasElement, data: Columns, reach: number): void {
  const { values, shape } = data.column("value");
  const [high = 1, wide = 1] = shape;
  const [low, top] = [data.find("low"), data.find("high")];
  const colours = scale("linear", [-reach, reach]);
  const image = new ImageData(Math.max(1, wide), Math.max(1, high));
  const pixels = new Uint32Array(image.data.buffer);
  for (let at = 0; at < pixels.length && at < values.length; at++) {
    const value = low && top ? (Math.abs(low[at]!) > Math.abs(top[at]!) ? low[at]! : top[at]!) : values[at]!;
    pixels[at] = colourOf(value, Number.isNaN(value) ? 1 : 0, colours);
  }
  [canvas.width, canvas.height] = [image.width, image.height];
  canvas.getContext("2d")!.putImageData(image, 0, 0);
}
