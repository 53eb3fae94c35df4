// A line of a chart, and its numbers in the form that uPlot wants.

import type uPlot from "uplot";
import { token } from "./colours.ts";

export interface Series {
  name: string;
  values: ArrayLike<number>;
  colour?: string;
  width?: number;
  dash?: number[];
  /** Fill down to the series of this name. */
  fillTo?: string;
  fill?: string;
  quiet?: boolean; // drawn, but not read out
  points?: boolean;
  x?: ArrayLike<number>; // where its values stand, if not where the others do
}

export function drawn(one: Series): uPlot.Series {
  const stroke = one.colour ?? token("series");
  const points = one.points
    ? { points: { show: true, size: 5 } }
    : { points: { show: one.points !== false, filter: alone, size: 5, fill: stroke } };
  return {
    label: one.name,
    stroke,
    width: one.width ?? 1.5,
    spanGaps: false,
    ...(one.dash ? { dash: one.dash } : {}),
    ...points,
  };
}

/** Points that no line reaches: their neighbours are missing. */
function alone(plot: uPlot, series: number): number[] {
  const values = plot.data[series]!;
  const there = (i: number) => values[i] !== null && values[i] !== undefined;
  return Array.from(values, (_, i) => i).filter((i) => there(i) && !there(i - 1) && !there(i + 1));
}

/** Lines that stand at places of their own on one axis: a value that a line has not is left out, and breaks nothing. */
export function aligned(
  x: ArrayLike<number>,
  series: readonly Series[],
  values: (values: ArrayLike<number>) => (number | null)[],
): { x: number[]; columns: (number | null | undefined)[][] } {
  if (series.every((one) => !one.x)) return { x: Array.from(x), columns: series.map((one) => values(one.values)) };
  const all = [...new Set([x, ...series.map((one) => one.x ?? [])].flatMap((one) => Array.from(one)))].sort((a, b) => a - b);
  const at = new Map(all.map((place, i) => [place, i]));
  const columns = series.map((one) => {
    const column = new Array<number | null | undefined>(all.length).fill(undefined);
    const own = one.x ?? x;
    values(one.values).forEach((value, i) => (column[at.get(own[i]!)!] = value));
    return column;
  });
  return { x: all, columns };
}

/** uPlot leaves gaps at null, and knows nothing of NaN or infinities. */
export function plain(values: ArrayLike<number>): (number | null)[] {
  return Array.from(values, (value) => (Number.isFinite(value) ? value : null));
}

export function positive(values: ArrayLike<number>): (number | null)[] {
  return Array.from(values, (value) => (Number.isFinite(value) && value > 0 ? value : null));
}

export function padded(_: uPlot, low: number | null, high: number | null): [number, number] {
  if (low === null || high === null) return [0, 1];
  const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  return [low - room, high + room];
}
