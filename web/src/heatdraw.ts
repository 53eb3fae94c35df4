// How a heat map looks: cells, names, the axis of steps, and what moves over them.

import { nearestBin } from "./bins.ts";
import { dark, token } from "./colours.ts";
import { count, shortened } from "./format.ts";
import type { Model, Point } from "./heatmap.ts";
import { paint } from "./paint.ts";
import { stepTicks } from "./scales.ts";
import type { Span } from "./view.ts";

export interface Box {
  width: number;
  height: number;
  gutter: number; // room for names
  row: number; // height of a row
  top: number; // how far it is scrolled
}

export interface Look {
  box: Box;
  span: Span;
}

export interface Over {
  step: number;
  row: number;
  cursor: Point | null;
  brush: { from: number; to: number } | null;
  model: Model;
}

const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif";
const LETTER = 6.4;

export function drawCells(
  canvas: HTMLCanvasElement,
  { box, span }: Look,
  model: Model,
  rows: { first: number; last: number },
): void {
  const pen = begin(canvas);
  hatch(pen, box, Math.min(box.height, model.rows * box.row - box.top));
  const ratio = devicePixelRatio || 1;
  const width = Math.round((box.width - box.gutter) * ratio);
  const height = canvas.height;
  if (width > 0 && model.rows > 0) {
    const image = new ImageData(width, height);
    const top = (row: number) => (row * box.row - box.top) * ratio;
    paint(image, { width, height, ...span }, rows, top, (row) => model.line(row), model.scale);
    layer(image, pen, box.gutter * ratio);
    gaps(pen, box, rows);
  }
  names(pen, box, model, rows);
}

/** Put over what is there, transparent where transparent; putImageData would punch holes into the hatching. */
function layer(image: ImageData, pen: CanvasRenderingContext2D, x: number): void {
  const sheet = new OffscreenCanvas(image.width, image.height);
  sheet.getContext("2d")!.putImageData(image, 0, 0);
  pen.save();
  pen.setTransform(1, 0, 0, 1, 0, 0);
  pen.drawImage(sheet, Math.round(x), 0);
  pen.restore();
}

/** Where nothing was recorded the ground shows: hatched, so that it is never taken for a value. */
function hatch(pen: CanvasRenderingContext2D, box: Box, bottom: number): void {
  pen.save();
  pen.beginPath();
  pen.rect(box.gutter, 0, box.width - box.gutter, bottom);
  pen.clip();
  pen.strokeStyle = dark() ? "#2b2f35" : "#e3e3df";
  pen.lineWidth = 1;
  pen.beginPath();
  for (let x = box.gutter - box.height; x < box.width; x += 7) {
    pen.moveTo(x, box.height);
    pen.lineTo(x + box.height, 0);
  }
  pen.stroke();
  pen.restore();
}

/** A hair's breadth of ground between rows that are high enough. */
function gaps(pen: CanvasRenderingContext2D, box: Box, rows: { first: number; last: number }): void {
  if (box.row < 8) return;
  pen.fillStyle = token("ground");
  for (let row = rows.first + 1; row <= rows.last; row++)
    pen.fillRect(box.gutter, Math.round(row * box.row - box.top) - 1, box.width - box.gutter, 1);
}

function names(pen: CanvasRenderingContext2D, box: Box, model: Model, rows: { first: number; last: number }): void {
  const every = Math.max(1, Math.ceil(14 / box.row));
  const letters = Math.floor((box.gutter - 22 - (model.branch ? 14 : 0)) / LETTER);
  pen.font = FONT;
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  const ink = token("text");
  for (let row = rows.first; row < rows.last; row++) {
    const middle = (row + 0.5) * box.row - box.top;
    const mark = model.mark?.(row);
    if (mark) dot(pen, mark, box.gutter - 6, middle, box.row);
    if (model.branch) branches(pen, box, model, row);
    const crowded = middle < 7 || middle > box.height - 6 || Math.abs(row - (model.named ?? -1e9)) * box.row < 13;
    if (row !== model.named && (row % every || crowded)) continue;
    pen.fillStyle = ink;
    pen.fillText(
      shortened(model.name(row), letters),
      box.gutter - 11,
      Math.min(middle, box.height - 6),
      box.gutter - 20,
    );
  }
}

/** A triangle where a module begins or is collapsed, and a line along what lies in it. */
function branches(pen: CanvasRenderingContext2D, box: Box, model: Model, row: number): void {
  const here = model.branch!(row);
  if (!here) return;
  const top = row * box.row - box.top;
  const begins = here.folded || row === 0 || model.branch!(row - 1)?.module !== here.module;
  const ends = row === model.rows - 1 || model.branch!(row + 1)?.module !== here.module;
  if (begins && ends && !here.folded) return; // a row alone has nothing to collapse
  pen.fillStyle = token("line");
  if (!here.folded) pen.fillRect(8, top + (begins ? box.row / 2 : 0), 1, ends && !begins ? box.row / 2 : begins ? box.row / 2 : box.row);
  if (!begins) return;
  pen.fillStyle = token("quiet");
  const middle = top + box.row / 2;
  pen.beginPath();
  if (here.folded) triangle(pen, [5, middle - 4], [5, middle + 4], [12, middle]);
  else triangle(pen, [4, middle - 3], [13, middle - 3], [8.5, middle + 4]);
  pen.fill();
}

function triangle(pen: CanvasRenderingContext2D, ...corners: [number, number][]): void {
  corners.forEach(([x, y], i) => (i ? pen.lineTo(x, y) : pen.moveTo(x, y)));
}

function dot(pen: CanvasRenderingContext2D, colour: string, x: number, middle: number, height: number): void {
  pen.fillStyle = colour;
  pen.fillRect(x, middle - Math.max(2, height - 2) / 2, 4, Math.max(2, height - 2));
}

export function drawAxis(canvas: HTMLCanvasElement, { box, span }: Look): void {
  const pen = begin(canvas);
  pen.font = FONT;
  pen.textAlign = "center";
  pen.textBaseline = "top";
  const place = placed({ box, span });
  for (const step of stepTicks(span.from, span.to, (box.width - box.gutter) / 110)) {
    if (step >= span.to) continue;
    pen.fillStyle = token("line");
    pen.fillRect(Math.round(place(step)), 0, 1, 5);
    pen.fillStyle = token("quiet");
    pen.fillText(count(step), Math.max(place(step), box.gutter + 8), 7);
  }
  pen.fillStyle = token("quiet");
  pen.textAlign = "right";
  pen.fillText("step", box.gutter - 8, 7);
}

export function drawOverlay(canvas: HTMLCanvasElement, look: Look, over: Over): void {
  const { box, span } = look;
  const pen = begin(canvas);
  const place = placed(look);
  if (over.brush) wash(pen, over.brush.from, over.brush.to, box.height);
  if (over.step >= span.from && over.step <= span.to) hair(pen, place(over.step), box.height);
  if (over.row >= 0) nameOf(pen, look, over);
  if (over.model.spot) ring(pen, look, over.model, over.model.spot, token("text"), 2);
  if (over.cursor) ring(pen, look, over.model, over.cursor, token("accent"), 2);
}

function placed({ box, span }: Look): (step: number) => number {
  return (step) => box.gutter + ((step - span.from) / (span.to - span.from)) * (box.width - box.gutter);
}

function wash(pen: CanvasRenderingContext2D, from: number, to: number, height: number): void {
  pen.fillStyle = token("wash");
  pen.fillRect(from, 0, to - from, height);
}

function hair(pen: CanvasRenderingContext2D, x: number, height: number): void {
  pen.fillStyle = dark() ? "#ffffffb0" : "#000000a0";
  pen.fillRect(Math.round(x), 0, 1, height);
}

/** The name of the row under the mouse, whole, over whichever names stand there. */
function nameOf(pen: CanvasRenderingContext2D, { box }: Look, over: Over): void {
  const middle = (over.row + 0.5) * box.row - box.top;
  pen.fillStyle = token("raised");
  pen.fillRect(over.model.branch ? 18 : 8, middle - 9, box.gutter - (over.model.branch ? 26 : 16), 18);
  pen.font = `600 ${FONT}`;
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  pen.fillStyle = token("text");
  pen.fillText(
    shortened(over.model.name(over.row), Math.floor((box.gutter - 22 - (over.model.branch ? 14 : 0)) / LETTER)),
    box.gutter - 11,
    middle,
    box.gutter - 20,
  );
}

/** A frame about one cell, never smaller than can be seen. */
function ring(
  pen: CanvasRenderingContext2D,
  look: Look,
  model: Model,
  point: Point,
  colour: string,
  width: number,
): void {
  const place = placed(look);
  const edges = model.line(point.row)?.edges;
  const end = edges && edges.length > 1 ? edges[nearestBin(edges, point.step) + 1]! : point.step + 1;
  const left = place(point.step);
  const wide = Math.max(6, place(end) - left);
  const high = Math.max(6, look.box.row);
  const y = point.row * look.box.row - look.box.top;
  pen.lineWidth = width + 2;
  pen.strokeStyle = token("ground");
  pen.strokeRect(left - 1, y - (high - look.box.row) / 2 - 1, wide + 2, high + 2);
  pen.lineWidth = width;
  pen.strokeStyle = colour;
  pen.strokeRect(left - 1, y - (high - look.box.row) / 2 - 1, wide + 2, high + 2);
}

function begin(canvas: HTMLCanvasElement): CanvasRenderingContext2D {
  const pen = canvas.getContext("2d")!;
  const ratio = devicePixelRatio || 1;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, canvas.width, canvas.height);
  return pen;
}
