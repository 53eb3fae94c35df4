// What the colours mean, in numbers: a bar with marks, the colour of what is not finite, and the look of no record.

import { css, NONFINITE } from "./colours.ts";
import { h } from "./dom.ts";
import { number, share } from "./format.ts";
import type { Scale } from "./scales.ts";

export function legend(scale: Scale, title: string, nonfinite = true, gaps = true): HTMLElement {
  const stops = Array.from(
    { length: 17 },
    (_, i) => `${css(scale.colours[Math.round((i / 16) * 255)]!)} ${(i / 16) * 100}%`,
  );
  const bar = h("div", { class: "legend-bar", style: `background: linear-gradient(to right, ${stops.join(", ")})` });
  const text = scale.kind === "share" ? share : (value: number) => number(value, 3);
  const marks = scale.marks().map(({ value, at }) => h("span", { style: `left: ${at * 100}%` }, text(value)));
  return h(
    "div",
    { class: "legend", role: "img", "aria-label": `${title}: colours from ${text(scale.low)} to ${text(scale.high)}` },
    h("span", { class: "legend-title" }, title, scale.kind === "log" ? h("i", {}, " log") : null),
    h("div", { class: "legend-scale" }, bar, h("div", { class: "legend-marks" }, marks)),
    nonfinite &&
      h("span", { class: "legend-key" }, h("i", { class: "swatch", style: `background: ${NONFINITE}` }), "NaN or Inf"),
    gaps && h("span", { class: "legend-key" }, h("i", { class: "swatch hatched" }), "no record"),
  );
}
