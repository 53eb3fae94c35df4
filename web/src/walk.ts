// Where a key leads from a cell of a heat map.

import { beside } from "./bins.ts";
import { clamp } from "./scales.ts";
import type { Span } from "./view.ts";

export interface Point {
  row: number;
  step: number;
}

export interface Ground {
  cursor: Point | null;
  first: number; // the uppermost row in sight
  page: number; // how many are in sight
  rows: number;
  span: Span;
  edges(row: number): ArrayLike<number> | undefined;
}

/** The cell that a key leads to; null when it leads nowhere. Without a cell to start from it is the first in sight. */
export function walked(event: KeyboardEvent, ground: Ground): Point | null {
  const [rows, cells] = move(event, ground.page);
  const end = event.key === "Home" || event.key === "End";
  if (!rows && !cells && !end) return null;
  const from = ground.cursor ?? { row: ground.first, step: ground.span.from };
  const row = clamp(from.row + (ground.cursor ? rows : 0), 0, ground.rows - 1);
  const start = event.key === "Home" ? ground.span.from : event.key === "End" ? ground.span.to - 1e-6 : from.step;
  return { row, step: beside(ground.edges(row) ?? [], start, ground.cursor ? cells : 0) };
}

/** By how many rows and cells. */
function move(event: KeyboardEvent, page: number): [number, number] {
  const rows = { ArrowUp: -1, ArrowDown: 1, PageUp: -page, PageDown: page }[event.key] ?? 0;
  const cells = { ArrowLeft: -1, ArrowRight: 1 }[event.key] ?? 0;
  return [rows, cells * (event.shiftKey ? 10 : 1)];
}
