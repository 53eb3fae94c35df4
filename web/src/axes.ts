// How the y axis of a chart is chosen: by most of the values, by all of them, or symmetric-logarithmic.

import type uPlot from "uplot";
import { padded } from "./lines.ts";

export type AxisMode = "robust" | "all" | "symlog";
export const AXES: readonly [AxisMode, string][] = [
  ["robust", "robust"],
  ["all", "full range"],
  ["symlog", "symmetric log"],
];

const FEW = 12; // values below which all count
const FAR = 4; // spreads that an extreme value may be away and still be within the axis

export function axisMode(text: string | undefined): AxisMode {
  return AXES.find(([name]) => name === text)?.[0] ?? "robust";
}

/** The scale of uPlot for the values in sight. */
export function axisScale(mode: AxisMode, values: () => number[]): uPlot.Scale {
  if (mode === "all") return { range: padded };
  if (mode === "symlog") return { distr: 4, asinh: threshold(values()), range: stretched };
  return { range: (plot, low, high) => robust(values(), padded(plot, low, high), low, high) };
}

/** Below it the axis is linear: a tenth of what the values usually are. */
export function threshold(values: number[]): number {
  const sizes = values.map(Math.abs).filter((value) => value > 0).sort((a, b) => a - b);
  return sizes.length ? Math.max(quantile(sizes, 0.5) / 10, 1e-30) : 1;
}

function stretched(_: uPlot, low: number | null, high: number | null): [number, number] {
  if (low === null || high === null) return [0, 1];
  const room = Math.max(Math.abs(low), Math.abs(high)) * 0.3 || 1;
  return [low < 0 ? low * 1.5 : low > 0 ? Math.min(low * 0.5, low) : -room * 1e-3, high > 0 ? high * 1.5 : high + room * 1e-3];
}

/** From the tenth to the 90th hundredth, with room; extremes that are not far away count too. */
function robust(values: number[], all: [number, number], low: number | null, high: number | null): [number, number] {
  if (low === null || high === null || values.length < FEW) return all;
  const sorted = values.sort((a, b) => a - b);
  const [bottom, top] = [quantile(sorted, 0.1), quantile(sorted, 0.9)];
  const spread = top - bottom || Math.abs(top) * 0.05 || 1e-12;
  const from = low >= bottom - FAR * spread ? low : bottom;
  const to = high <= top + FAR * spread ? high : top;
  const room = (to - from || spread) * 0.12;
  return [from - room, to + room];
}

function quantile(sorted: number[], share: number): number {
  return sorted[Math.min(sorted.length - 1, Math.max(0, Math.round(share * (sorted.length - 1))))] ?? 0;
}

/** An exponential mean that leaves gaps where they are; 0 changes nothing, 0.9 is the mean of about ten values. */
export function smoothed(values: ArrayLike<number>, weight: number): ArrayLike<number> {
  if (!(weight > 0)) return values;
  let sum = 0;
  let mass = 0;
  return Float64Array.from(values, (value) => {
    if (!Number.isFinite(value)) return value;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}
