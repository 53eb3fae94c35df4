// What is read off the overview's heat map: one cell in words, or all of it as a table.

import type { Blocks } from "./blocks.ts";
import { count, number, shape, share } from "./format.ts";
import type { Point } from "./heatmap.ts";
import { nameOf } from "./stats.ts";
import type { Rows } from "./table.ts";
import type { RunInfo } from "./types.ts";
import { labelOf, type Span } from "./view.ts";

const WIDE = 12; // columns of a table that can still be read

export function said(blocks: Blocks, run: RunInfo, point: Point, stat: string): string[] {
  const cell = blocks.cell(point.row, point.step);
  const site = run.sites[cell?.site ?? blocks.site(point.row)];
  const head = [site ? labelOf(site.site, run) : "…", [site?.type, site?.dtype, shape(site?.shape)].filter(Boolean).join(" ")];
  if (!cell) return [...head, `step ${count(Math.floor(point.step))}: no record`].filter(Boolean);
  const several = cell.to - cell.from > 1;
  const steps = several ? `steps ${count(cell.from)}–${count(cell.to - 1)}` : `step ${count(cell.from)}`;
  const text = stat === "zeros" ? share : (value: number) => number(value);
  const spread = cell.low < cell.high ? ` (${text(cell.low)} … ${text(cell.high)})` : "";
  const known = cell.value === Infinity ? "nothing is finite" : `${nameOf(stat)} ${text(cell.value)}${spread}`;
  const value = Number.isNaN(cell.value) && !cell.bad ? "no record" : known;
  return [...head, `${steps}: ${value}`, cell.bad ? "NaN or Inf in it" : ""].filter(Boolean);
}

/** Every row that is here, by a few columns of the span in sight. */
export function table(
  blocks: Blocks,
  run: RunInfo,
  span: Span,
  name: (row: number) => string = (row) => run.sites[blocks.site(row)]?.site ?? "…",
  wide = WIDE,
): Rows {
  const edges = blocks.edges(0);
  const bins = edges
    ? Array.from({ length: edges.length - 1 }, (_, i) => i).filter(
        (i) => edges[i + 1]! > span.from && edges[i]! < span.to,
      )
    : [];
  const every = Math.max(1, bins.length / wide);
  const shown = bins.filter((_, i) => Math.floor(i / every) !== Math.floor((i - 1) / every));
  const steps = shown.map((i) => edges![i]!);
  const rows = Array.from({ length: blocks.total }, (_, row) => {
    const cells = steps.map((step) => blocks.cell(row, step));
    return [
      name(row) || "…",
      ...cells.map((cell) => (cell ? (cell.bad ? "NaN/Inf" : cell.value) : null)),
    ];
  });
  return { head: ["site", ...steps.map((step) => `step ${count(step)}`)], rows };
}
