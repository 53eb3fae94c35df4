// A small line of a metric, for a table's cell; a gap and a mark where it was not finite.

import { NONFINITE } from "./colours.ts";

const WIDE = 96;
const HIGH = 22;
const SVG = "http://www.w3.org/2000/svg";

export function sparkline(values: readonly (number | null)[], label: string): SVGSVGElement {
  const svg = made("svg", { width: WIDE, height: HIGH, viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": label, class: "spark" });
  const known = values.filter((value) => value !== null);
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const x = (i: number) => (values.length > 1 ? 2 + (i / (values.length - 1)) * (WIDE - 4) : WIDE / 2);
  const y = (value: number) => (high > low ? HIGH - 3 - ((value - low) / (high - low)) * (HIGH - 6) : HIGH / 2);
  let path = "";
  values.forEach((value, i) => {
    if (value === null) svg.append(made("rect", { x: x(i) - 1.5, y: HIGH - 5, width: 3, height: 5, fill: NONFINITE }));
    else path += `${i && values[i - 1] !== null ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}`;
  });
  svg.append(made("path", { d: path, fill: "none", stroke: "currentColor", "stroke-width": 1.3 }));
  return svg;
}

function made<K extends keyof SVGElementTagNameMap>(tag: K, attributes: Record<string, string | number>): SVGElementTagNameMap[K] {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  return element;
}
