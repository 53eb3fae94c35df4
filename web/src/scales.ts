// From a value to a place between 0 and 1, and from there to a colour; and the numbers that stand beside an axis.

import { diverging, sequential } from "./colours.ts";

export type Kind = "linear" | "log" | "share";

export interface Scale {
  readonly kind: Kind | "diverging";
  readonly low: number;
  readonly high: number;
  readonly colours: Uint32Array;
  place(value: number): number;
  /** Values for a legend, each with its place. */
  marks(): { value: number; at: number }[];
}

/** The scale for a range. Linear ones that have both signs diverge about zero. */
export function scale(kind: Kind, range: readonly [number, number] | null): Scale {
  const [low, high] = sane(range);
  if (kind === "share") return linear("share", 0, 1, sequential);
  if (kind === "log") return logarithmic(low, high);
  if (low < 0) return centred(Math.max(-low, Math.abs(high)) || 1);
  return linear("linear", low, high, sequential);
}

/** Two sides of zero, each scaled by what is on it: a side without values takes no colours. */
export function twoSided(low: number, high: number): Scale {
  const [below, above] = [Math.min(low, 0), Math.max(high, 0)];
  const place = (value: number) => {
    if (value >= 0) return above > 0 ? 0.5 + clamp(value / above) / 2 : 0.5;
    return below < 0 ? 0.5 - clamp(value / below) / 2 : 0.5;
  };
  const values = [...new Set([below, below / 2, 0, above / 2, above])];
  return { kind: "diverging", low: below, high: above, colours: diverging(), place, marks: () => marked(values, place) };
}

function sane(range: readonly [number, number] | null): [number, number] {
  const [low, high] = range ?? [0, 1];
  if (!Number.isFinite(low) || !Number.isFinite(high)) return [0, 1];
  if (low < high) return [low, high];
  return low === 0 ? [0, 1] : [Math.min(0, low * 2), Math.max(0, low * 2)];
}

function linear(kind: "linear" | "share", low: number, high: number, colours: Uint32Array): Scale {
  const place = (value: number) => clamp((value - low) / (high - low));
  return { kind, low, high, colours, place, marks: () => marked(ticks(low, high, 4), place) };
}

function centred(size: number): Scale {
  const place = (value: number) => clamp((value / size + 1) / 2);
  return {
    kind: "diverging",
    low: -size,
    high: size,
    colours: diverging(),
    place,
    marks: () => marked([-size, 0, size], place),
  };
}

/** Zero and below take the lowest colour; a range that spans less than a tenfold is widened to one. */
function logarithmic(low: number, high: number): Scale {
  const top = Math.log10(high > 0 ? high : 1);
  const bottom = Math.min(Math.log10(low > 0 ? low : 10 ** (top - 6)), top - 1);
  const place = (value: number) => (value > 0 ? clamp((Math.log10(value) - bottom) / (top - bottom)) : 0);
  const whole = decades(bottom, top);
  const values = whole.length > 1 ? whole : [10 ** bottom, 10 ** top];
  return {
    kind: "log",
    low: 10 ** bottom,
    high: 10 ** top,
    colours: sequential,
    place,
    marks: () => marked(values, place),
  };
}

function decades(bottom: number, top: number): number[] {
  const first = Math.ceil(bottom - 1e-9);
  const every = Math.max(1, Math.ceil((top - first) / 5));
  const found: number[] = [];
  for (let power = first; power <= top + 1e-9; power += every) found.push(10 ** power);
  return found;
}

function marked(values: number[], place: (value: number) => number): { value: number; at: number }[] {
  return values.map((value) => ({ value, at: place(value) }));
}

export function clamp(value: number, low = 0, high = 1): number {
  return value < low ? low : value > high ? high : value;
}

/** Round numbers within a range, about as many as wanted. */
export function ticks(low: number, high: number, wanted: number): number[] {
  const span = high - low;
  if (!(span > 0)) return [low];
  const rough = span / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= rough) ?? rough;
  const found: number[] = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++)
    found.push(Number((i * step).toPrecision(12)));
  return found;
}

/** Ticks for steps: whole numbers only. */
export function stepTicks(low: number, high: number, wanted: number): number[] {
  return ticks(low, high, wanted).filter(Number.isInteger);
}
