// The numbers behind a chart, as a table that can be read, copied and spoken. It is made when it is opened.

import { h } from "./dom.ts";
import { count, number } from "./format.ts";
import { csv, download } from "./save.ts";

export interface Rows {
  head: string[];
  rows: (string | number | null)[][];
  /** How many rows there would be; the table says so when it shows fewer. */
  of?: number;
}

export const MOST = 500;

/** A folded table; `make` is called when it is opened, and again by `refresh` while it is open. */
export class Table {
  readonly element: HTMLDetailsElement;
  private readonly body = h("div", { class: "table-body", tabindex: 0 });

  constructor(
    label: string,
    private readonly make: () => Rows,
    private readonly whole: () => Rows = make,
  ) {
    const file = () => download(`${label}.csv`, new Blob([csv(this.whole())], { type: "text/csv" }));
    const save = h("button", { type: "button", class: "small", "aria-label": `Save as CSV: ${label}`, onclick: file }, "CSV");
    const copy = h("button", { type: "button", class: "small", onclick: () => void this.copy(copy) }, "Copy");
    this.element = h("details", { class: "table" }, h("summary", {}, `Table: ${label}`), this.body);
    this.body.before(h("span", { class: "table-tools" }, save, copy));
    this.element.addEventListener("toggle", () => this.refresh());
  }

  refresh(): void {
    if (this.element.open) this.body.replaceChildren(...drawn(this.made()));
  }

  private made(): Rows {
    const made = this.make();
    return { ...made, of: made.of ?? made.rows.length, rows: thinned(made.rows) };
  }

  private async copy(button: HTMLElement): Promise<void> {
    const { head, rows } = this.made();
    const text = [head, ...rows].map((row) => row.map((cell) => cell ?? "").join("\t")).join("\n");
    await navigator.clipboard.writeText(text).then(
      () => (button.textContent = "Copied"),
      () => (button.textContent = "The browser forbids it; select and copy"),
    );
  }
}

/** At most so many, evenly chosen. */
function thinned<T>(rows: T[]): T[] {
  if (rows.length <= MOST) return rows;
  return Array.from({ length: MOST }, (_, i) => rows[Math.floor((i * rows.length) / MOST)]!);
}

function drawn({ head, rows, of = 0 }: Rows): HTMLElement[] {
  const top = h(
    "thead",
    {},
    h(
      "tr",
      {},
      head.map((name) => h("th", { scope: "col" }, name)),
    ),
  );
  const body = h(
    "tbody",
    {},
    rows.map((row) => h("tr", {}, row.map(cell))),
  );
  const note =
    of > rows.length ? [h("p", { class: "quiet" }, `${count(rows.length)} of ${count(of)} rows, evenly chosen`)] : [];
  return [...note, h("table", {}, top, body)];
}

function cell(value: string | number | null): HTMLElement {
  return typeof value === "string" ? h("td", {}, value) : h("td", { class: "number" }, number(value, 6));
}

/** A table that scrolls sideways by itself where the window is narrow. */
export function wide(label: string, table: HTMLElement): HTMLElement {
  return h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": label }, table);
}
