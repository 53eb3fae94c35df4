// The keyboard: what each key does, and the card that says so.

import { h } from "./dom.ts";

const CARD: [string, string][] = [
  ["1 – 6", "overview, site, depth, diff, findings, cost"],
  ["/", "filter sites"],
  ["[  ]", "statistic before, after; on a site: the site before, after"],
  ["← ↑ → ↓", "move the cell (Shift: ten steps)"],
  ["PgUp PgDn Home End", "rows and ends"],
  ["Enter", "open the site under the cell"],
  ["+  −  0", "zoom in, out, all steps"],
  ["o", "open or close the module of the row"],
  ["Space", "depth: play, pause"],
  ["t", "light, dark, as the system"],
  ["Esc", "back"],
  ["?", "this card"],
];

const MOUSE: [string, string][] = [
  ["drag", "zoom into steps"],
  ["double click", "all steps"],
  ["wheel", "zoom; where rows scroll: Ctrl + wheel"],
  ["click", "open the site"],
];

/** Whether a key belongs to what is being typed into. */
export function typing(event: KeyboardEvent): boolean {
  const target = event.target as HTMLElement | null;
  if (target?.tagName === "SELECT") return !"[]/?".includes(event.key);
  return target?.tagName === "INPUT" && (target as HTMLInputElement).type !== "range";
}

export function card(): HTMLDialogElement {
  const rows = (pairs: [string, string][]) =>
    pairs.map(([key, does]) => h("tr", {}, h("th", { scope: "row" }, h("kbd", {}, key)), h("td", {}, does)));
  const close = h("button", { type: "button", class: "small", onclick: () => dialog.close() }, "Close");
  const dialog = h(
    "dialog",
    { class: "card", "aria-label": "Keyboard and mouse" },
    h("h2", {}, "Keyboard"),
    h("table", {}, h("tbody", {}, rows(CARD))),
    h("h2", {}, "Mouse, over a heat map"),
    h("table", {}, h("tbody", {}, rows(MOUSE))),
    close,
  );
  return dialog;
}
