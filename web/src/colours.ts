// Colour ramps. Sequential: navy over grey to yellow, which the colour-blind read as well as anyone. Diverging: blue and
// orange about a neutral middle. What is not finite has a violet of its own, which neither ramp comes near in anyone's
// eyes: a magenta is the blue of the second ramp to deuteranopes. tests/web/test_colours.py reads the numbers here.

export const NONFINITE = "#b400ff";

type Rgb = readonly [number, number, number];

const SEQUENTIAL = [
  "#00204d",
  "#0c3470",
  "#39486b",
  "#575d6d",
  "#707173",
  "#8a8779",
  "#a69d75",
  "#c4b56c",
  "#e4cf5b",
  "#ffea46",
];
const BELOW = ["#053061", "#1f5f9f", "#5b97c4", "#a3c5de"];
const ABOVE = ["#f3c592", "#dd8f42", "#b35806", "#7a3a03"];
const MIDDLE = { light: "#f2f2f0", dark: "#2a2d31" };

function rgb(hex: string): Rgb {
  const value = parseInt(hex.slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

/** Little-endian RGBA, as ImageData holds it. */
export function packed([r, g, b]: Rgb): number {
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

export const NONFINITE_PACKED = packed(rgb(NONFINITE));

function ramp(stops: readonly string[]): Uint32Array {
  const colours = stops.map(rgb);
  return Uint32Array.from({ length: 256 }, (_, i) => {
    const at = (i / 255) * (colours.length - 1);
    const below = Math.min(Math.floor(at), colours.length - 2);
    const mix = (k: 0 | 1 | 2) =>
      Math.round(colours[below]![k] + (colours[below + 1]![k] - colours[below]![k]) * (at - below));
    return packed([mix(0), mix(1), mix(2)]);
  });
}

export const sequential = ramp(SEQUENTIAL);
// What is far from the middle stands out: darker than it on a light ground, lighter on a dark one.
const divergings = {
  light: ramp([...BELOW, MIDDLE.light, ...ABOVE]),
  dark: ramp([...[...BELOW].reverse(), MIDDLE.dark, ...[...ABOVE].reverse()]),
};

export function diverging(): Uint32Array {
  return divergings[dark() ? "dark" : "light"];
}

export function dark(): boolean {
  const chosen = document.documentElement.dataset["theme"];
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

export function css(colour: number): string {
  return `rgb(${colour & 255} ${(colour >> 8) & 255} ${(colour >> 16) & 255})`;
}

/** A colour of the style sheet, for what is drawn on a canvas. */
export function token(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
