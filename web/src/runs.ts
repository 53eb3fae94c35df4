// The list of runs in a folder: state, metrics, findings, tags and notes; filtered, sorted, and chosen for comparison.

import { fill, framed, h } from "./dom.ts";
import { count, date, many, number } from "./format.ts";
import { harvestTable } from "./harvests.ts";
import { NoteEditor } from "./notes.ts";
import { MOST } from "./overlay.ts";
import type { Source } from "./source.ts";
import { sparkline } from "./sparkline.ts";
import { code, empty } from "./states.ts";
import type { Card, RunSummary, Runs } from "./types.ts";
import type { View } from "./view.ts";

const AGAIN = 3000; // milliseconds until a card is asked for again while rules look
const METRICS = 3; // columns
const AT_ONCE = 2;
const ASKED = 200; // of very many runs the first in sight are asked for more

type Key = "run" | "state" | "started" | "steps" | "sites" | "findings" | `metric ${string}`;

export class RunsPage implements View {
  readonly element = h("div", { class: "page runs" });
  private readonly body = h("tbody");
  private readonly head = h("thead");
  private readonly bar = h("span", { class: "chosen", role: "status" });
  private readonly cards = new Map<string, Card>();
  private readonly chosen = new Set<string>();
  private readonly waiting: string[] = [];
  private readonly asked = new Set<string>();
  private readonly editors = new Map<string, NoteEditor>(); // one that is being typed into outlives a redraw
  private readonly redraw = framed(() => this.draw());
  private asking = 0;
  private closed = false;
  private filter = "";
  private order: { key: Key; down: boolean } = { key: "started", down: true };

  constructor(
    private readonly runs: Runs,
    private readonly source: Source,
  ) {
    const { harvests = [] } = runs;
    if (harvests.length) this.element.append(harvestTable(harvests));
    if (!runs.runs.length) {
      if (!harvests.length) this.nothing();
      return;
    }
    const search = h("input", { type: "search", placeholder: "name, tag, note or state", "aria-label": "Filter runs" });
    search.addEventListener("input", () => {
      this.filter = search.value.trim().toLowerCase();
      this.draw();
    });
    const tools = h("div", { class: "tools" }, h("h1", {}, "Runs in ", code(runs.folder)), search, this.bar);
    const table = h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Runs" }, h("table", {}, this.head, this.body));
    this.element.append(tools, table);
    this.draw();
  }

  update(): void {}
  refresh(): void {}

  close(): void {
    this.closed = true;
  }

  private nothing(): void {
    this.element.append(
      empty(
        "No run in this folder",
        code(this.runs.folder),
        "Record one, then reload:",
        code('with tt.watch(model, to="runs/first") as tap: …'),
      ),
    );
  }

  /** Ask for a few cards at a time. */
  private next(): void {
    while (!this.closed && this.asking < AT_ONCE && this.waiting.length) void this.ask(this.waiting.shift()!);
  }

  private async ask(id: string): Promise<void> {
    this.asking++;
    try {
      const card = await this.source.json<Card>("/api/card", { run: id });
      this.cards.set(id, card);
      if (card.running) window.setTimeout(() => (this.waiting.push(id), this.next()), AGAIN);
      if (!this.closed) this.redraw();
    } catch {
      // the row says what is known without it
    } finally {
      this.asking--;
      this.next();
    }
  }

  /** The metrics that most runs have, losses first. */
  private metrics(): string[] {
    const times = new Map<string, number>();
    for (const card of this.cards.values())
      for (const name of Object.keys(card.metrics)) times.set(name, (times.get(name) ?? 0) + 1);
    const loss = (name: string) => (/loss/i.test(name) ? 0 : 1);
    return [...times].sort((a, b) => loss(a[0]) - loss(b[0]) || b[1] - a[1]).slice(0, METRICS).map(([name]) => name);
  }

  private shown(): RunSummary[] {
    const words = this.filter.split(/\s+/).filter(Boolean);
    const text = (run: RunSummary) =>
      [run.id, this.state(run)[1], run.model, run.note, ...(run.tags ?? []), this.cards.get(run.id)?.headline].join(" ").toLowerCase();
    const found = this.runs.runs.filter((run) => words.every((word) => text(run).includes(word)));
    const { key, down } = this.order;
    const sign = down ? -1 : 1;
    return found.sort((a, b) => {
      const [x, y] = [this.value(a, key), this.value(b, key)];
      if (x === null || y === null) return x === y ? 0 : x === null ? 1 : -1; // what is not known comes last
      return (x < y ? -1 : x > y ? 1 : 0) * sign;
    });
  }

  private value(run: RunSummary, key: Key): string | number | null {
    const card = this.cards.get(run.id);
    if (key.startsWith("metric ")) return card?.metrics[key.slice(7)]?.last ?? null;
    if (key === "findings") return card ? (card.counts["error"] ?? 0) * 1000 + (card.counts["warning"] ?? 0) : null;
    if (key === "state") return this.state(run)[1];
    if (key === "started") return run.started ? String(run.started) : null;
    return key === "run" ? run.id : (run[key as "steps" | "sites"] ?? null);
  }

  private draw(): void {
    const held = document.activeElement?.getAttribute("aria-label");
    const metrics = this.metrics();
    const columns: [Key, string][] = [["run", "run"], ["state", "state"], ...metrics.map((name): [Key, string] => [`metric ${name}`, name]), ["findings", "findings"], ["steps", "steps"], ["sites", "sites"], ["started", "started"]];
    fill(this.head, h("tr", {}, h("th", { scope: "col" }, h("span", { class: "unseen" }, "choose")), columns.map(([key, name]) => this.column(key, name)), h("th", { scope: "col" }, "tags and note")));
    const shown = this.shown();
    fill(this.body, shown.map((run) => this.row(run, metrics)));
    this.drawBar();
    for (const { id } of shown.slice(0, ASKED)) {
      if (!this.asked.has(id)) this.waiting.push(id);
      this.asked.add(id);
    }
    this.next();
    if (held) (this.element.querySelector(`[aria-label="${CSS.escape(held)}"]`) as HTMLElement | null)?.focus();
  }

  private column(key: Key, name: string): HTMLElement {
    const on = this.order.key === key;
    const sort = () => {
      this.order = { key, down: on ? !this.order.down : key === "started" || key === "findings" };
      this.draw();
    };
    const arrow = on ? (this.order.down ? " ↓" : " ↑") : "";
    const sorted = on ? (this.order.down ? "descending" : "ascending") : "none";
    return h("th", { scope: "col", "aria-sort": sorted }, h("button", { type: "button", class: "plain", "aria-label": `Sort by ${name}`, onclick: sort }, name + arrow));
  }

  private row(run: RunSummary, metrics: string[]): HTMLElement {
    const card = this.cards.get(run.id);
    const box = h("input", { type: "checkbox", checked: this.chosen.has(run.id), "aria-label": `Choose ${run.id}`, onchange: () => this.choose(run.id) });
    const name = h("a", { href: `#/overview?run=${encodeURIComponent(run.id)}` }, run.id || "this run");
    const [kind, text] = this.state(run);
    const model = run.model ? h("div", { class: "quiet small" }, run.model) : null;
    const numbers = ([["steps", run.steps], ["sites", run.sites]] as const).map(([name, value]) => h("td", { class: "number", "data-label": name }, count(value)));
    return h(
      "tr",
      {},
      h("td", { class: "choose" }, box),
      h("td", { class: "name" }, name, model),
      h("td", { class: "state-of" }, h("span", { class: `badge ${kind}`, title: run.error ?? null }, text)),
      metrics.map((metric) => this.metric(card, metric)),
      h("td", { class: "wrap found" }, this.found(run, card)),
      numbers,
      h("td", { "data-label": "started" }, date(run.started)),
      h("td", { class: "wrap", "data-label": "tags and note" }, this.editor(run).element),
    );
  }

  private editor(run: RunSummary): NoteEditor {
    const known = this.editors.get(run.id) ?? new NoteEditor(run, this.source);
    this.editors.set(run.id, known);
    return known;
  }

  /** Crashed from finished, NaN from fine. */
  private state(run: RunSummary): [string, string] {
    const card = this.cards.get(run.id);
    const bad = card?.nonfinite;
    const nan = bad === null || bad === undefined ? "" : `, NaN from ${count(bad)}`;
    if (run.ended_by) return ["crashed", `ended by ${run.ended_by}${nan}`];
    if (run.state === "crashed" || run.state === "unreadable") return [run.state, run.state + nan];
    return [nan ? "crashed" : run.state, run.state + nan];
  }

  private metric(card: Card | undefined, name: string): HTMLElement {
    const known = card?.metrics[name];
    if (!known) return h("td", {});
    const last = known.last === null ? h("span", { class: "bad" }, "NaN") : number(known.last, 4);
    return h("td", { class: "metric", "data-label": name }, sparkline(known.line, `${name} over steps`), h("span", { class: "value" }, last));
  }

  private found(run: RunSummary, card: Card | undefined): (Node | string)[] {
    if (run.error) return [run.error];
    if (!card) return ["…"];
    const { error = 0, warning = 0 } = card.counts;
    const counts = [error && many(error, "error"), warning && many(warning, "warning")].filter(Boolean).join(", ");
    const said = card.headline ? [h("div", { class: "small" }, card.headline)] : [];
    const none = card.running ? "the rules are reading…" : "nothing found";
    const link = h("a", { href: `#/findings?run=${encodeURIComponent(run.id)}`, class: error ? "error" : warning ? "warning" : "" }, counts);
    return counts ? [link, ...said] : [h("span", { class: "quiet" }, none), ...said];
  }

  private choose(id: string): void {
    if (this.chosen.has(id)) this.chosen.delete(id);
    else this.chosen.add(id);
    this.drawBar();
  }

  private drawBar(): void {
    const [first, ...rest] = [...this.chosen];
    if (first === undefined) return fill(this.bar, h("span", { class: "quiet" }, many(this.shown().length, "run")));
    const overlay = `#/overview?run=${encodeURIComponent(first)}&with=${encodeURIComponent(rest.slice(0, MOST).join("|"))}`;
    const diff = `#/diff?run=${encodeURIComponent(first)}&b=${encodeURIComponent(rest[0] ?? "")}`;
    fill(
      this.bar,
      `${this.chosen.size} chosen `,
      rest.length ? h("a", { href: overlay }, "Overlay in charts") : "choose another to compare",
      rest.length === 1 ? h("a", { href: diff }, "Compare tensor by tensor") : null,
    );
  }
}
