// Numbers and names as people read them.

const MINUS = "−";

/** Four significant digits, exponents where they help, and a real minus sign. */
export function number(value: number | null | undefined, digits = 4): string {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : `${MINUS}∞`;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return String(value).replace("-", MINUS);
  const text = size >= 1e5 || size < 1e-3 ? exponent(value, digits) : plain(value, digits);
  return text.replace("-", MINUS);
}

function exponent(value: number, digits: number): string {
  const [head = "", tail = ""] = value.toExponential(digits - 1).split("e");
  return `${trimmed(head)}e${tail.replace("+", "")}`.replace(/-/g, MINUS);
}

function plain(value: number, digits: number): string {
  return Math.abs(value) >= 10 ** digits ? String(Math.round(value)) : trimmed(value.toPrecision(digits));
}

function trimmed(text: string): string {
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

/** Digits in groups of three, apart by a thin space: 1 234 567. */
export function count(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  return String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, "\u2009");
}

export function many(value: number, noun: string): string {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

export function share(value: number | null | undefined): string {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return `${number(value * 100, 3)} %`;
}

export function seconds(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  const [scale, unit] = value >= 1 ? [1, "s"] : value >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  return `${number(value * scale, 3)} ${unit}`;
}

/** Cut in the middle, where names of layers differ least: `model.enc…mlp:output`. */
export function shortened(text: string, most: number): string {
  if (text.length <= most) return text;
  const tail = Math.ceil((most - 1) * 0.6);
  return `${text.slice(0, most - 1 - tail)}…${text.slice(text.length - tail)}`;
}

export function shape(value: string | number[] | null | undefined): string {
  if (value === null || value === undefined || value === "") return "";
  return Array.isArray(value) ? `[${value.join(" × ")}]` : String(value);
}

/** Anything that JSON holds, in a line. */
export function value(thing: unknown): string {
  if (typeof thing === "number") return number(thing, 6);
  if (typeof thing === "string") return thing;
  if (thing === null || thing === undefined) return "–";
  if (Array.isArray(thing)) return thing.map(value).join(", ");
  return JSON.stringify(thing);
}

export function date(when: string | number | null | undefined): string {
  if (when === null || when === undefined || when === "") return "";
  const moment = new Date(typeof when === "number" ? when * 1000 : when);
  return Number.isNaN(moment.getTime()) ? String(when) : moment.toISOString().slice(0, 16).replace("T", " ");
}
