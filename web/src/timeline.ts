// What happened besides tensors, on the step axis of the heat map: learning rate, phases, checkpoints, notes, errors.

import { token } from "./colours.ts";
import { h, sized } from "./dom.ts";
import { count, number } from "./format.ts";
import { aborted, type Source } from "./source.ts";
import { type Rows, Table } from "./table.ts";
import type { RunInfo, TimelineAnswer, TimelineMark } from "./types.ts";
import type { Span } from "./view.ts";

const RATE = 30; // height of a lane
const MARKS = 18;
const PHASES = 9;
const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif";
const COLOURS: Record<string, string> = { exception: "error", failed: "error", rate: "series-2", checkpoint: "good" };

interface Lane {
  name: string;
  top: number;
  height: number;
  draw(pen: CanvasRenderingContext2D, lane: Lane): void;
}

export class Timeline {
  readonly element: HTMLElement;
  readonly table = new Table("events by step", () => this.rows());
  private readonly canvas = h("canvas", { class: "timeline-canvas" });
  private readonly tip = h("div", { class: "tip", hidden: true });
  private answer: TimelineAnswer | null = null;
  private span: Span = { from: 0, to: 1 };
  private gutter = 120;
  private version = "";
  private line = NaN;
  private readonly unsize: () => void;

  constructor(
    private readonly source: Source,
    private readonly changed: () => void,
  ) {
    this.element = h("div", { class: "timeline", role: "img", hidden: true }, this.canvas, this.tip);
    this.canvas.addEventListener("pointermove", (event) => this.moved(event.offsetX));
    this.canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    this.unsize = sized(this.element, () => this.draw());
  }

  async load(run: RunInfo): Promise<void> {
    if (this.version === String(run.version)) return;
    this.version = String(run.version);
    try {
      this.answer = await this.source.json<TimelineAnswer>("/api/timeline", { run: run.id });
      this.element.hidden = !this.lanes().length;
      this.element.setAttribute("aria-label", this.said());
      this.changed();
    } catch (error) {
      if (!aborted(error)) this.element.hidden = true; // an older report has none
    }
  }

  get any(): boolean {
    return !this.element.hidden;
  }

  look(span: Span, gutter: number): void {
    this.span = span;
    this.gutter = gutter;
    this.draw();
  }

  /** A step that another chart points at. */
  point(step: number): void {
    this.line = step;
    this.draw();
  }

  close(): void {
    this.unsize();
  }

  draw(): void {
    const lanes = this.lanes();
    const width = this.element.clientWidth;
    const last = lanes[lanes.length - 1];
    if (!last || !width) return;
    const height = last.top + last.height + 3;
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d")!;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    lanes.forEach((lane) => this.lane(pen, lane));
    if (this.line >= this.span.from && this.line <= this.span.to) {
      pen.fillStyle = token("quiet");
      pen.fillRect(Math.round(this.x(this.line)), 0, 1, height);
    }
  }

  private lane(pen: CanvasRenderingContext2D, lane: Lane): void {
    pen.font = FONT;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    pen.fillStyle = token("quiet");
    pen.fillText(lane.name, this.gutter - 11, lane.top + lane.height / 2, this.gutter - 16);
    pen.save();
    pen.beginPath();
    pen.rect(this.gutter, lane.top - 1, this.canvas.clientWidth - this.gutter, lane.height + 2);
    pen.clip();
    lane.draw(pen, lane);
    pen.restore();
  }

  private lanes(): Lane[] {
    const { answer } = this;
    if (!answer) return [];
    const lanes: Lane[] = [];
    const add = (name: string, height: number, draw: Lane["draw"]) => {
      const before = lanes[lanes.length - 1];
      lanes.push({ name, top: before ? before.top + before.height + 4 : 2, height, draw });
    };
    if (answer.rate.steps.length) add("learning rate", RATE, (pen, lane) => this.rate(pen, lane));
    if (answer.phases.length) add("phase", PHASES, (pen, lane) => this.phases(pen, lane));
    if (answer.marks.length) add("events", MARKS, (pen, lane) => this.marks(pen, lane));
    return lanes;
  }

  /** A line in steps; logarithmic where the rate spans more than a hundredfold. */
  private rate(pen: CanvasRenderingContext2D, lane: Lane): void {
    const { steps, values } = this.answer!.rate;
    const positive = values.filter((value) => value > 0);
    const [low, high] = [Math.min(...positive), Math.max(...positive)];
    const log = high / low > 100;
    const place = (value: number) => {
      if (!(value > 0)) return 0;
      const share = log ? Math.log(value / low) / Math.log(high / low) : value / (high || 1);
      return (log ? 0.1 : 0) + (log ? 0.9 : 1) * share;
    };
    const y = (value: number) => lane.top + lane.height - 2 - place(value) * (lane.height - 4);
    pen.strokeStyle = token("series-2");
    pen.lineWidth = 1.5;
    pen.beginPath();
    steps.forEach((step, i) => {
      if (i) pen.lineTo(this.x(step), y(values[i - 1]!));
      pen.lineTo(this.x(step), y(values[i]!));
    });
    pen.lineTo(this.x(this.span.to), y(values[values.length - 1]!));
    pen.stroke();
    this.rateText(pen, lane, log);
  }

  private rateText(pen: CanvasRenderingContext2D, lane: Lane, log: boolean): void {
    const { steps, values } = this.answer!.rate;
    const seen = values.filter((_, i) => steps[i]! < this.span.to && (steps[i + 1] ?? Infinity) > this.span.from);
    if (!seen.length) return;
    const [low, high] = [Math.min(...seen), Math.max(...seen)];
    const text = low === high ? number(high, 3) : `${number(low, 3)} … ${number(high, 3)}${log ? " (log)" : ""}`;
    pen.textAlign = "right";
    const wide = pen.measureText(text).width;
    const right = this.canvas.clientWidth - 6;
    pen.fillStyle = token("ground");
    pen.globalAlpha = 0.85;
    pen.fillRect(right - wide - 4, lane.top + lane.height / 2 - 8, wide + 8, 16);
    pen.globalAlpha = 1;
    pen.fillStyle = token("text");
    pen.fillText(text, right, lane.top + lane.height / 2);
  }

  private phases(pen: CanvasRenderingContext2D, lane: Lane): void {
    const colours: Record<string, string> = { train: token("band-2"), eval: token("series-2") };
    for (const { phase, from, to } of this.answer!.phases) {
      pen.fillStyle = colours[phase] ?? token("series-3");
      pen.fillRect(this.x(from), lane.top, Math.max(1, this.x(to + 1) - this.x(from)), lane.height);
    }
  }

  /** Errors are bars over the lane's whole height, epochs ticks, all else diamonds. */
  private marks(pen: CanvasRenderingContext2D, lane: Lane): void {
    const middle = lane.top + lane.height / 2;
    for (const mark of this.answer!.marks) {
      const x = this.x(mark.step + 0.5);
      pen.fillStyle = token(COLOURS[mark.kind] ?? (mark.kind === "epoch" ? "quiet" : "accent"));
      if (mark.kind === "epoch") pen.fillRect(Math.round(x), middle - 3, 1, 6);
      else if (mark.kind === "exception") pen.fillRect(Math.min(x, this.canvas.clientWidth - 5) - 1, lane.top, 4, lane.height);
      else diamond(pen, x, middle, 5);
    }
  }

  private x(step: number): number {
    const { from, to } = this.span;
    return this.gutter + ((step - from) / (to - from)) * (this.canvas.clientWidth - this.gutter);
  }

  private moved(x: number): void {
    const near = (this.answer?.marks ?? []).filter((mark) => Math.abs(this.x(mark.step + 0.5) - x) < 7);
    const step = this.span.from + ((x - this.gutter) / (this.canvas.clientWidth - this.gutter)) * (this.span.to - this.span.from);
    const lines = x < this.gutter ? [] : [...this.rateAt(step), ...near.slice(0, 6).map(told)];
    this.tip.hidden = !lines.length;
    this.tip.replaceChildren(...lines.map((line) => h("div", {}, line)));
    const left = x > this.canvas.clientWidth / 2 ? x - this.tip.offsetWidth - 12 : x + 12;
    this.tip.style.transform = `translate(${Math.round(Math.max(0, left))}px, ${this.canvas.clientHeight}px)`;
  }

  private rateAt(step: number): string[] {
    const { steps, values } = this.answer!.rate;
    let at = steps.length - 1;
    while (at > 0 && steps[at]! > step) at--;
    return at >= 0 && steps[at]! <= step ? [`step ${count(Math.floor(step))}: learning rate ${number(values[at]!, 4)}`] : [];
  }

  private said(): string {
    const marks = this.answer!.marks.filter((mark) => mark.kind !== "epoch");
    const rest = marks.length > 12 ? `; and ${marks.length - 12} more` : "";
    return `Time line of events: ${marks.slice(0, 12).map(told).join("; ") || "learning rate and phases"}${rest}`;
  }

  private rows(): Rows {
    const marks = this.answer?.marks ?? [];
    return { head: ["step", "kind", "what", "code"], rows: marks.map((m) => [m.step, m.kind, m.text, m.code]) };
  }
}

function told(mark: TimelineMark): string {
  const rank = mark.rank ? `, rank ${mark.rank}` : "";
  return `step ${count(mark.step)}: ${mark.text}${rank}${mark.code ? ` (${mark.code})` : ""}`;
}

function diamond(pen: CanvasRenderingContext2D, x: number, y: number, size: number): void {
  pen.beginPath();
  pen.moveTo(x, y - size);
  pen.lineTo(x + size, y);
  pen.lineTo(x, y + size);
  pen.lineTo(x - size, y);
  pen.fill();
}
