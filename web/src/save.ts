// Charts and tables as files: PNG of what is drawn, CSV of the numbers behind it.

import { token } from "./colours.ts";
import { h } from "./dom.ts";
import type { Rows } from "./table.ts";

const TITLE = 26; // pixels above a picture

export function download(name: string, data: Blob): void {
  const link = h("a", { href: URL.createObjectURL(data), download: name.replace(/[^\w.-]+/g, "-").slice(0, 120) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Text that a spreadsheet would run begins with a quote. */
export function csv({ head, rows }: Rows): string {
  const cell = (value: string | number | null) => {
    if (value === null || (typeof value === "number" && Number.isNaN(value))) return "";
    const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [head, ...rows].map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}

/** Canvases below each other on the page's ground, under a title. */
export function picture(title: string, canvases: readonly HTMLCanvasElement[]): HTMLCanvasElement {
  const ratio = devicePixelRatio || 1;
  const sheet = h("canvas", {});
  sheet.width = Math.max(1, ...canvases.map((one) => one.width));
  sheet.height = Math.round(TITLE * ratio) + canvases.reduce((sum, one) => sum + one.height, 0);
  const pen = sheet.getContext("2d")!;
  pen.fillStyle = token("ground");
  pen.fillRect(0, 0, sheet.width, sheet.height);
  pen.fillStyle = token("text");
  pen.font = `600 ${Math.round(13 * ratio)}px system-ui, sans-serif`;
  pen.textBaseline = "middle";
  pen.fillText(title, 8 * ratio, (TITLE * ratio) / 2, sheet.width - 16 * ratio);
  let top = Math.round(TITLE * ratio);
  for (const one of canvases) {
    pen.drawImage(one, 0, top);
    top += one.height;
  }
  return sheet;
}

/** A button that keeps what is drawn as a PNG. */
export function pngButton(title: string, canvases: () => HTMLCanvasElement[]): HTMLElement {
  const save = () => picture(title, canvases()).toBlob((data) => data && download(`${title}.png`, data), "image/png");
  return h("button", { type: "button", class: "small save", "aria-label": `Save as PNG: ${title}`, onclick: save }, "PNG");
}
