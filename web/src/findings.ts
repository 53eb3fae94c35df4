// What the rules found: a list beside the heat map, and a page of its own with the evidence.

import { token } from "./colours.ts";
import { fill, h } from "./dom.ts";
import { count, many, value } from "./format.ts";
import { Failure } from "./source.ts";
import { failed, loading } from "./states.ts";
import type { Finding, FindingGroup, Findings, RunInfo } from "./types.ts";
import { type Context, labelOf, type View } from "./view.ts";

const AGAIN = 1500; // milliseconds until a page asks again while rules run

/** Findings of a run, asked for until the rules are done. */
export class Found {
  answer: Findings | null = null;
  private worst = new Map<string, Finding["severity"]>();
  private timer = 0;

  constructor(
    private readonly context: Context,
    private readonly changed: (error?: unknown) => void,
  ) {}

  async load(): Promise<void> {
    clearTimeout(this.timer);
    try {
      this.answer = await this.context.source.json<Findings>("/api/findings", { run: this.context.run.id });
      if (this.answer.error) throw new Failure("The rules could not read this run.", this.answer.error);
      if (this.answer.running) this.timer = window.setTimeout(() => void this.load(), AGAIN);
      this.worst = worstBySite(this.answer.groups ?? []);
      this.changed();
    } catch (error) {
      this.changed(error);
    }
  }

  /** The worst that was found at a site. */
  colour(site: string): string {
    const severity = this.worst.get(site);
    return severity ? token(severity) : "";
  }

  /** The worst that was found at a port of a module or below it. */
  colourBelow(module: string, port: string): string {
    if (!this.worst.size) return "";
    const inside = new RegExp(`^${module.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}([./].*)?:${port || "[^:]*"}`);
    const found = ["error", "warning", "info"].find((severity) =>
      [...this.worst].some(([site, worst]) => worst === severity && inside.test(site)),
    );
    return found ? token(found) : "";
  }

  close(): void {
    clearTimeout(this.timer);
  }
}

/** The worst that was found at each place, what follows from it included; the worst come first. */
function worstBySite(groups: FindingGroup[]): Map<string, Finding["severity"]> {
  const found = new Map<string, Finding["severity"]>();
  const visit = (group: FindingGroup) => {
    group.consequences.forEach(visit);
    [group.site, ...group.places].forEach((site) => found.set(site, group.severity));
  };
  [...groups].reverse().forEach(visit);
  return found;
}

export function summary(found: Findings): string {
  const parts = ["error", "warning", "info"]
    .filter((name) => found.counts[name])
    .map((name) => many(found.counts[name]!, name === "info" ? "remark" : name));
  const by = `by ${many(found.rules.length, "rule")}`;
  const some =
    found.steps && found.steps.looked < found.steps.of
      ? `, in ${count(found.steps.looked)} of ${many(found.steps.of, "step")}`
      : "";
  if (!found.running && !found.rules.length) return "No rule has looked yet";
  return found.running ? "The rules are reading…" : `${parts.join(", ") || "Nothing found"} ${by}${some}`;
}

export function when(steps: { first: number; last: number } | null): string {
  if (!steps) return "";
  return steps.first === steps.last ? `step ${count(steps.first)}` : `steps ${count(steps.first)}–${count(steps.last)}`;
}

/** A rule's name in words. */
function words(rule: string): string {
  return rule.replace(/_/g, " ");
}

function place(site: string, context: Context): HTMLElement | string {
  const known = context.run.sites.some((one) => one.site === site);
  const label = labelOf(site, context.run);
  return known ? h("a", { href: context.router.link("site", { site }) }, label) : label;
}

/** One cause: what, where, when, what to change, and what follows from it. */
export function card(group: FindingGroup, context: Context, hover?: (group: FindingGroup | null) => void): HTMLElement {
  const others = group.places.filter((site) => site !== group.site);
  const element = h(
    "article",
    { class: `finding ${group.severity}` },
    h(
      "div",
      { class: "what" },
      h("span", { class: "severity" }, group.severity),
      h("b", {}, words(group.rule)),
      h("span", {}, when(group.steps)),
    ),
    group.site ? h("div", { class: "where" }, place(group.site, context)) : null,
    group.code ? h("div", {}, h("code", {}, group.code)) : null,
    h("p", {}, group.message),
    others.length ? alsoAt(group.place_count - 1, others, context) : null,
    group.advice ? h("p", { class: "quiet" }, group.advice) : null,
    group.consequences.length ? follows(group.consequences, context) : null,
  );
  element.addEventListener("pointerenter", () => hover?.(group));
  element.addEventListener("pointerleave", () => hover?.(null));
  return element;
}

function alsoAt(total: number, others: string[], context: Context): HTMLElement {
  const rest = total - others.length;
  const list = others.map((site) => h("li", {}, place(site, context)));
  return h(
    "details",
    { class: "more" },
    h("summary", {}, `and ${many(total, "other place")}`),
    h("ul", { tabindex: 0 }, list, rest > 0 ? h("li", { class: "quiet" }, `${count(rest)} more`) : null),
  );
}

function follows(groups: FindingGroup[], context: Context): HTMLElement {
  const line = (group: FindingGroup) => {
    const more = group.place_count > 1 ? ` and ${count(group.place_count - 1)} more` : "";
    const where = group.site ? [" in ", place(group.site, context), more] : [];
    return h("li", {}, words(group.rule), ...where, group.steps ? `, ${when(group.steps)}` : "");
  };
  return h(
    "details",
    { class: "more" },
    h("summary", {}, `explains ${many(groups.length, "other finding")}`),
    h("ul", { tabindex: 0 }, groups.map(line)),
  );
}

/** What went wrong in one sentence; nothing where nothing did. */
export function headline(found: Findings): HTMLElement | null {
  if (!found.headline) return null;
  const worst = found.counts["error"] ? "error" : "warning";
  return h("p", { class: `headline ${worst}`, role: "status" }, found.headline);
}

export class FindingsPage implements View {
  readonly element = h("div", { class: "page read" }, loading("what the rules found"));
  private readonly found: Found;

  constructor(private readonly context: Context) {
    this.found = new Found(context, (error) => this.draw(error));
    void this.found.load();
  }

  update(): void {}

  refresh(run: RunInfo): void {
    this.context.run = run;
    void this.found.load();
  }

  close(): void {
    this.found.close();
  }

  private draw(error?: unknown): void {
    const answer = this.found.answer;
    if (error || !answer) return fill(this.element, failed(error));
    const skipped = Object.entries(answer.skipped);
    fill(
      this.element,
      h(
        "section",
        {},
        headline(answer),
        h("h2", {}, summary(answer)),
        h(
          "div",
          { class: "findings" },
          (answer.groups ?? []).map((group) => this.full(group)),
        ),
      ),
      h("section", {}, h("h2", {}, "Rules that looked"), h("p", { class: "quiet" }, answer.rules.join(", ") || "none")),
      skipped.length > 0 && h("section", {}, h("h2", {}, "Rules that had no data"), facts(skipped)),
    );
  }

  private full(group: FindingGroup): HTMLElement {
    const element = card(group, this.context);
    const evidence = Object.entries(group.evidence);
    if (evidence.length)
      element.append(h("details", { class: "table" }, h("summary", {}, "Evidence"), facts(evidence)));
    return element;
  }
}

/** Names and values, one below the other. */
export function facts(pairs: [string, unknown][]): HTMLElement {
  return h(
    "dl",
    { class: "facts" },
    pairs.flatMap(([name, thing]) => [h("dt", {}, name), h("dd", {}, value(thing))]),
  );
}
