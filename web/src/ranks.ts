// Ranks beside each other: how far each is from the middle of all, step by step, so that one that differs is seen at once.

import { token } from "./colours.ts";
import type { Columns } from "./columns.ts";
import { h, sized } from "./dom.ts";
import { count, number, share } from "./format.ts";
import { binOf } from "./bins.ts";
import { paint } from "./paint.ts";
import { clamp, scale } from "./scales.ts";
import { aborted, type Params, type Source } from "./source.ts";
import type { Span } from "./view.ts";

const ROOM = 96; // pixels for all ranks
const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif";

export class RankStrip {
  readonly element: HTMLElement;
  private readonly canvas = h("canvas", {});
  private readonly note = h("p", { class: "rank-note" });
  private readonly tip = h("div", { class: "tip", hidden: true });
  private data: Columns | null = null;
  private key = "";
  private span: Span = { from: 0, to: 1 };
  private gutter = 120;
  private asked = new AbortController();
  private readonly unsize: () => void;

  constructor(
    private readonly source: Source,
    private readonly choose: (rank: number) => void,
  ) {
    this.element = h("div", { class: "ranks", role: "img", hidden: true }, this.canvas, this.note, this.tip);
    this.canvas.addEventListener("pointermove", (event) => this.moved(event));
    this.canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    this.canvas.addEventListener("click", (event) => this.choose(this.ranks()[this.rowAt(event.offsetY)] ?? 0));
    this.unsize = sized(this.element, () => this.draw());
  }

  async load(params: Params, version: string, several: boolean): Promise<void> {
    const key = JSON.stringify([params, version]);
    if (!several || !this.source.live || key === this.key) return;
    this.key = key;
    this.asked.abort();
    this.asked = new AbortController();
    try {
      this.data = await this.source.columns("/api/ranks", params, this.asked.signal);
      this.element.hidden = false;
      this.tell();
      this.draw();
    } catch (error) {
      if (!aborted(error)) this.element.hidden = true;
    }
  }

  look(span: Span, gutter: number): void {
    this.span = span;
    this.gutter = gutter;
    this.draw();
  }

  draw(): void {
    const { data } = this;
    const width = this.element.clientWidth;
    if (!data || !width) return;
    const ranks = this.ranks();
    const row = this.row();
    const height = Math.ceil(row * ranks.length);
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    const pen = this.canvas.getContext("2d")!;
    this.cells(pen, row, ratio);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.names(pen, row);
  }

  close(): void {
    this.asked.abort();
    this.unsize();
  }

  private ranks(): number[] {
    return (this.data?.header["ranks"] ?? []) as number[];
  }

  private row(): number {
    return clamp(ROOM / Math.max(1, this.ranks().length), 1, 15);
  }

  private rowAt(y: number): number {
    return clamp(Math.floor(y / this.row()), 0, this.ranks().length - 1);
  }

  private cells(pen: CanvasRenderingContext2D, row: number, ratio: number): void {
    const values = this.data!.get("value");
    const bins = this.data!.get("step").length - 1;
    const wide = Math.max(1, Math.round((this.canvas.clientWidth - this.gutter) * ratio));
    const image = new ImageData(wide, this.canvas.height);
    const finite = Array.from(values).filter((value) => Number.isFinite(value) && value > 0);
    const colours = scale("linear", [0, Math.max(...finite, 1e-9)]);
    const line = (at: number) => ({
      values,
      bad: this.data!.get("bad"),
      start: at * bins,
      edges: this.data!.get("step"),
    });
    const area = { width: wide, height: this.canvas.height, ...this.span };
    paint(image, area, { first: 0, last: this.ranks().length }, (at) => at * row * ratio, line, colours);
    pen.putImageData(image, Math.round(this.gutter * ratio), 0);
  }

  private names(pen: CanvasRenderingContext2D, row: number): void {
    pen.font = FONT;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    const ranks = this.ranks();
    const odd = this.odd();
    ranks.forEach((rank, i) => {
      if (row < 12 && i !== odd && !(odd < 0 && i === Math.floor(ranks.length / 2))) return;
      pen.fillStyle = token(i === odd ? "error" : "text");
      const all = row < 12 && i !== odd;
      pen.fillText(all ? `ranks ${ranks[0]}–${ranks[ranks.length - 1]}` : `rank ${rank}`, this.gutter - 11, (i + 0.5) * row);
    });
  }

  private odd(): number {
    const found = this.data?.header["outlier"];
    return typeof found === "number" ? found : -1;
  }

  private tell(): void {
    const odd = this.odd();
    const usual = "how far each rank is from the middle of all; bright is far";
    const rank = this.ranks()[odd];
    this.note.textContent = odd < 0 ? `Ranks: ${usual}` : `Rank ${rank} differs: ${usual}`;
    this.note.classList.toggle("wrong", odd >= 0);
    this.element.setAttribute("aria-label", this.note.textContent);
  }

  private moved(event: PointerEvent): void {
    const at = this.rowAt(event.offsetY);
    const wide = this.canvas.clientWidth - this.gutter;
    const step = this.span.from + ((event.offsetX - this.gutter) / wide) * (this.span.to - this.span.from);
    const edges = this.data!.get("step");
    const bin = binOf(edges, step);
    const value = this.data!.get("value")[at * (edges.length - 1) + bin]!;
    this.tip.hidden = bin < 0 || event.offsetX < this.gutter;
    const far = value === Infinity ? "nothing is finite" : `${value < 10 ? share(value) : `${number(value, 3)} times`} from the middle`;
    this.tip.replaceChildren(h("b", {}, `rank ${this.ranks()[at]}`), h("div", {}, `step ${count(edges[bin])}: ${far}`));
    const left = event.offsetX > this.canvas.clientWidth / 2 ? event.offsetX - this.tip.offsetWidth - 12 : event.offsetX + 12;
    this.tip.style.transform = `translate(${Math.round(Math.max(0, left))}px, ${event.offsetY + 12}px)`;
  }
}
