// A heat map one can walk in: rows that scroll, steps that zoom, a cell under the mouse and one under the keyboard.

import { drawAxis, drawCells, drawOverlay, type Box, type Look } from "./heatdraw.ts";
import { framed, h, sized } from "./dom.ts";
import { Gestures } from "./gestures.ts";
import type { Line } from "./paint.ts";
import { pngButton } from "./save.ts";
import { clamp, type Scale } from "./scales.ts";
import type { Branch } from "./tree.ts";
import { type Ground, type Point, walked } from "./walk.ts";
import { type Span, stepsOf, within, zoomed } from "./view.ts";

export type { Point };

export interface Model {
  rows: number;
  name(row: number): string;
  line(row: number): Line | null;
  mark?(row: number): string; // a colour beside the name, for what was found there
  branch?(row: number): Branch | null; // the module a row is, or lies in
  named?: number; // a row whose name always stands there
  scale: Scale;
  all: Span;
  spot?: Point | null; // marked for good: where two runs part
}

export interface Handlers {
  label: string;
  /** What is said of a cell: lines of text, the first of them the row's name. */
  read(point: Point): string[];
  open?(point: Point): void;
  toggle?(row: number): void; // open or close the module of a row
  view?(span: Span): void;
  rows?(first: number, last: number): void;
  hover?(point: Point | null): void;
  cursor?(point: Point): void;
  least?: number; // height of a row
  most?: number;
  gutter?: (width: number) => number;
}

const AXIS = 24;
export const BRANCH = 18; // pixels at the left in which a click opens or closes a module

export class Heatmap {
  readonly element: HTMLElement;
  span: Span = { from: 0, to: 1 };
  cursor: Point | null = null;
  private hovered: Point | null = null;
  private mouse: [number, number] | null = null; // where it rests on the map
  private rows = 0;
  private told: [Point, number, number] | null = null; // what the tip says, and where
  private line = NaN; // a step to mark, told by another chart
  private box: Box = { width: 0, height: 0, gutter: 0, row: 3, top: 0 };
  private model: Model | null = null;
  private readonly base = h("canvas", { class: "heat-base" });
  private readonly over = h("canvas", { class: "heat-over" });
  private readonly axis = h("canvas", { class: "heat-axis", "aria-hidden": "true" });
  private readonly spacer = h("div", { class: "heat-spacer" });
  private readonly scroller: HTMLElement;
  private readonly tip = h("div", { class: "tip", hidden: true });
  private readonly said = h("div", { class: "unseen", "aria-live": "polite" });
  private readonly gestures: Gestures;
  private readonly unsize: () => void;
  private readonly cells = framed(() => this.paint());
  private readonly overlay = framed(() => this.paintOver());

  constructor(private readonly on: Handlers) {
    const stage = h("div", { class: "heat-stage" }, this.base, this.over);
    this.scroller = h(
      "div",
      { class: "heat-scroll", tabindex: 0, role: "application", "aria-label": on.label },
      stage,
      this.spacer,
    );
    this.element = h("div", { class: "heat" }, this.scroller, this.axis, this.tip, this.said);
    this.unsize = sized(this.element, () => {
      this.measure();
      this.paint(); // at once: the frame that is about to be shown would be empty
      this.paintOver();
    });
    this.gestures = new Gestures(this.over, {
      moved: (x, y) => this.moved(x, y),
      left: () => this.leave(),
      clicked: (x, y) => this.clicked(x, y),
      brushed: ({ from, to }) => this.turn(stepsOf(this.stepAt(from), this.stepAt(to))),
      reset: () => this.model && this.turn(this.model.all),
    });
    this.listen();
  }

  show(model: Model): void {
    this.model = model;
    this.span = within(this.span, model.all);
    if (this.cursor && this.cursor.row >= model.rows) this.cursor = null;
    if (this.rows !== model.rows) this.leave();
    this.rows = model.rows;
    if (this.told && !this.tip.hidden) this.tell(...this.told); // what was not known yet may be now
    this.measure();
  }

  look(span: Span): void {
    this.span = span;
    this.redraw();
  }

  /** Mark a step that another chart points at; NaN takes the mark away. */
  point(step: number): void {
    this.line = step;
    this.overlay();
  }

  select(point: Point | null): void {
    this.cursor = point;
    if (point) this.reveal(point.row);
    this.overlay();
  }

  reveal(row: number): void {
    const { row: height, height: seen } = this.box;
    const top = row * height;
    if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
    else if (top + height > this.scroller.scrollTop + seen) this.scroller.scrollTop = top + height - seen;
    this.box.top = this.scroller.scrollTop; // the scroll event comes a frame later
  }

  get gutter(): number {
    return this.box.gutter;
  }

  get width(): number {
    return Math.max(1, this.box.width - this.box.gutter);
  }

  redraw(): void {
    this.cells();
    this.overlay();
  }

  close(): void {
    this.gestures.close();
    this.unsize();
  }

  key(event: KeyboardEvent): boolean {
    const { model, cursor, span } = this;
    if (!model || !model.rows || event.ctrlKey || event.metaKey || event.altKey) return false;
    const next = walked(event, this.ground(model));
    if (next) this.goTo(next);
    else if (event.key === "Enter" && cursor) this.on.open?.(cursor);
    else if ("+-=".includes(event.key))
      this.zoom(cursor?.step ?? (span.from + span.to) / 2, event.key === "-" ? 2 : 0.5);
    else if (event.key === "0") this.turn(model.all);
    else if (event.key === "o" && cursor && model.branch?.(cursor.row)) this.on.toggle?.(cursor.row);
    else return false;
    return true;
  }

  private ground(model: Model): Ground {
    const { row, top, height } = this.box;
    const page = Math.max(1, Math.floor(height / row) - 1);
    const edges = (at: number) => model.line(at)?.edges;
    return { cursor: this.cursor, first: Math.floor(top / row), page, rows: model.rows, span: this.span, edges };
  }

  private goTo(point: Point): void {
    if (point.step < this.span.from || point.step >= this.span.to) this.pan(point.step);
    this.select(point);
    this.said.textContent = this.on.read(point).join(", ");
    this.on.cursor?.(point);
    this.on.hover?.({ ...point, step: point.step + 0.5 }); // other charts have a step's point in its middle
    this.hovered = null;
    this.mouse = null; // what the keyboard chose is told until the mouse moves again
    this.tellCursor(point);
  }

  private pan(step: number): void {
    const size = this.span.to - this.span.from;
    this.turn({ from: step - size / 2, to: step + size / 2 });
  }

  private zoom(about: number, factor: number): void {
    this.turn(zoomed(this.span, about, factor, this.model!.all));
  }

  /** Look elsewhere, and say so. */
  private turn(span: Span): void {
    this.look(this.model ? within(span, this.model.all) : span);
    this.on.view?.(this.span);
  }

  private listen(): void {
    this.element.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.scroller.addEventListener("scroll", () => this.scrolled());
    this.scroller.addEventListener("keydown", (event) => {
      if (!this.key(event)) return;
      event.preventDefault();
      event.stopPropagation();
    });
  }

  private moved(x: number, y: number): void {
    this.mouse = [x, y];
    const point = this.at(x, y);
    this.hovered = point;
    this.on.hover?.(point);
    this.tell(this.gestures.brush ? null : point, x, y);
    this.overlay();
  }

  private clicked(x: number, y: number): void {
    const point = this.at(x, y);
    if (!point) return;
    const branch = this.model?.branch?.(point.row);
    const tree = branch && (x < BRANCH || (branch.folded && x < this.box.gutter));
    if (tree) this.on.toggle?.(point.row);
    else this.on.open?.(point);
  }

  private leave(): void {
    this.mouse = null;
    this.hovered = null;
    this.tip.hidden = true;
    this.on.hover?.(null);
    this.overlay();
  }

  /** The wheel zooms in steps; where rows overflow it scrolls them, and zooms with Ctrl or over the axis. */
  private wheel(event: WheelEvent): void {
    const scrolls = this.scroller.scrollHeight > this.scroller.clientHeight + 1 && event.target !== this.axis;
    if (!this.model || (scrolls && !event.ctrlKey)) return;
    event.preventDefault();
    this.zoom(this.stepAt(event.offsetX), event.deltaY > 0 ? 1.25 : 0.8);
  }

  private scrolled(): void {
    this.box.top = this.scroller.scrollTop;
    if (this.mouse) this.moved(...this.mouse); // another row lies under it now
    else if (this.cursor && !this.tip.hidden && this.inSight(this.cursor.row)) this.tellCursor(this.cursor);
    else this.tip.hidden = true;
    this.redraw();
  }

  private at(x: number, y: number): Point | null {
    const row = Math.floor((y + this.box.top) / this.box.row);
    if (!this.model || row < 0 || row >= this.model.rows) return null;
    return { row, step: clamp(this.stepAt(x), this.span.from, this.span.to - 1e-6) };
  }

  private stepAt(x: number): number {
    return this.span.from + clamp((x - this.box.gutter) / this.width) * (this.span.to - this.span.from);
  }

  private xOf(step: number): number {
    return this.box.gutter + ((step - this.span.from) / (this.span.to - this.span.from)) * this.width;
  }

  private yOf(row: number): number {
    return row * this.box.row - this.box.top;
  }

  private inSight(row: number): boolean {
    return this.yOf(row) > -1 && this.yOf(row + 1) < this.box.height + 1; // scrolling rounds to whole pixels
  }

  private tellCursor(point: Point): void {
    this.tell(point, this.xOf(point.step), this.yOf(point.row) + this.box.row);
  }

  private tell(point: Point | null, x: number, y: number): void {
    this.tip.hidden = !point;
    this.told = point && [point, x, y];
    if (!point) return;
    const [name = "", ...lines] = this.on.read(point);
    this.tip.replaceChildren(h("b", {}, name), ...lines.map((line) => h("div", {}, line)));
    const left = x > this.box.width - 320 ? x - this.tip.offsetWidth - 14 : x + 14;
    const top = clamp(y + 14, 0, Math.max(0, this.element.clientHeight - this.tip.offsetHeight));
    this.tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
  }

  /** Fit the map into the room there is now. */
  measure(): void {
    const rows = this.model?.rows ?? 0;
    const most = this.on.most ?? 36;
    this.element.style.maxHeight = rows ? `${rows * most + AXIS}px` : "";
    this.element.style.minHeight = `${Math.min(220, rows * most + AXIS)}px`;
    const room = Math.max(0, this.element.clientHeight - AXIS);
    const row = rows ? clamp(room / rows, this.on.least ?? 3, most) : 12;
    const height = Math.min(room, Math.ceil(rows * row));
    this.scroller.style.height = `${height}px`;
    const width = this.scroller.clientWidth;
    const gutter = this.on.gutter?.(width) ?? Math.round(clamp(width * 0.24, 120, 340));
    this.box = { width, height, gutter, row, top: this.scroller.scrollTop };
    this.spacer.style.height = `${Math.round(rows * row)}px`;
    for (const canvas of [this.base, this.over]) fit(canvas, width, height);
    fit(this.axis, width, AXIS);
    Object.assign(this.element.dataset, { gutter: String(gutter), rows: String(rows), row: String(row) }); // for whoever tests the page
    this.redraw();
  }

  private paint(): void {
    const { model, box } = this;
    if (!model || box.width < 2 || box.height < 2) return;
    const first = clamp(Math.floor(box.top / box.row), 0, model.rows);
    const last = clamp(Math.ceil((box.top + box.height) / box.row), 0, model.rows);
    this.on.rows?.(first, last);
    drawCells(this.base, this.looks(), model, { first, last });
    drawAxis(this.axis, this.looks());
    this.element.dataset["drawn"] = String(
      Array.from({ length: last - first }, (_, i) => first + i).filter((row) => model.line(row)).length,
    );
  }

  /** A button that keeps the map as a picture. */
  pngButton(title: string): HTMLElement {
    return pngButton(title, () => [this.base, this.axis]);
  }

  private paintOver(): void {
    const step = this.hovered?.step ?? this.line;
    const over = { step, row: this.hovered?.row ?? -1, cursor: this.cursor, brush: this.gestures.brush };
    if (this.model) drawOverlay(this.over, this.looks(), { ...over, model: this.model });
  }

  private looks(): Look {
    return { box: this.box, span: this.span };
  }
}

function fit(canvas: HTMLCanvasElement, width: number, height: number): void {
  const ratio = devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
}
