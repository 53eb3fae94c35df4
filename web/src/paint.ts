// Cells into pixels: one colour looked up for each pixel column of a row, then the line copied down the row's height.

import { NONFINITE_PACKED } from "./colours.ts";
import type { Scale } from "./scales.ts";

/** One row of cells: values from `start`, one for each bin between `edges`. */
export interface Line {
  values: ArrayLike<number>;
  bad: ArrayLike<number> | null;
  start: number;
  edges: ArrayLike<number>;
}

export interface Area {
  width: number; // device pixels
  height: number;
  from: number; // steps at the left and the right edge
  to: number;
}

/** For each pixel column the bin that lies under its middle, or -1. Edges ascend. */
export function columnsOf(edges: ArrayLike<number>, { width, from, to }: Area): Int32Array {
  const found = new Int32Array(width).fill(-1);
  const bins = edges.length - 1;
  let bin = 0;
  for (let x = 0; x < width; x++) {
    const step = from + ((x + 0.5) / width) * (to - from);
    while (bin < bins && edges[bin + 1]! <= step) bin++;
    if (bin < bins && step >= edges[bin]!) found[x] = bin;
  }
  return found;
}

/** The colour of a cell; 0 (transparent) where nothing was recorded. */
export function colourOf(value: number, bad: number, scale: Scale): number {
  if (bad > 0 || value === Infinity || value === -Infinity) return NONFINITE_PACKED;
  return Number.isNaN(value) ? 0 : scale.colours[Math.round(scale.place(value) * 255)]!;
}

/** Paints rows; `line(row)` gives what is known of it, `top(row)` where it begins in device pixels. */
export function paint(
  image: ImageData,
  area: Area,
  rows: { first: number; last: number },
  top: (row: number) => number,
  line: (row: number) => Line | null,
  scale: Scale,
): void {
  const pixels = new Uint32Array(image.data.buffer);
  const lookups = new Map<ArrayLike<number>, Int32Array>();
  for (let row = rows.first; row < rows.last; row++) {
    const cells = line(row);
    if (!cells) continue;
    let columns = lookups.get(cells.edges);
    if (!columns) lookups.set(cells.edges, (columns = columnsOf(cells.edges, area)));
    const y = Math.max(0, Math.round(top(row)));
    const end = Math.min(area.height, Math.round(top(row + 1)));
    if (y >= end) continue;
    paintLine(pixels, y * area.width, columns, cells, scale);
    for (let below = y + 1; below < end; below++)
      pixels.copyWithin(below * area.width, y * area.width, (y + 1) * area.width);
  }
}

function paintLine(pixels: Uint32Array, start: number, columns: Int32Array, cells: Line, scale: Scale): void {
  let known = -2;
  let colour = 0;
  for (let x = 0; x < columns.length; x++) {
    const bin = columns[x]!;
    if (bin !== known) {
      known = bin;
      const at = cells.start + bin;
      colour = bin < 0 ? 0 : colourOf(cells.values[at]!, cells.bad ? cells.bad[at]! : 0, scale);
    }
    pixels[start + x] = colour;
  }
}
