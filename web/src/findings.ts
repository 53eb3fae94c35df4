// What the rules found: a list beside the heat map, and a page of its own with the evidence.

import { token } from "./colours.ts";
import { fill, h } from "./dom.ts";
import { count, many, value } from "./format.ts";
import { Failure } from "./source.ts";
import { failed, loading } from "./states.ts";
import type { Finding, Findings, RunInfo } from "./types.ts";
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
      this.worst = new Map([...this.answer.findings].reverse().map((finding) => [finding.site, finding.severity])); // the worst come first
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

  close(): void {
    clearTimeout(this.timer);
  }
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

export function when(steps: Finding["steps"]): string {
  if (!steps) return "";
  return steps.first === steps.last ? `step ${count(steps.first)}` : `steps ${count(steps.first)}–${count(steps.last)}`;
}

export function card(finding: Finding, context: Context, hover?: (finding: Finding | null) => void): HTMLElement {
  const known = context.run.sites.some((site) => site.site === finding.site);
  const link = known
    ? h("a", { href: context.router.link("site", { site: finding.site }) }, labelOf(finding.site, context.run))
    : finding.site;
  const element = h(
    "article",
    { class: `finding ${finding.severity}` },
    h(
      "div",
      { class: "what" },
      h("span", { class: "severity" }, finding.severity),
      h("span", {}, finding.rule),
      h("span", {}, when(finding.steps)),
    ),
    finding.site ? h("div", { class: "where" }, link) : null,
    h("p", {}, finding.message),
  );
  element.addEventListener("pointerenter", () => hover?.(finding));
  element.addEventListener("pointerleave", () => hover?.(null));
  return element;
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
        h("h2", {}, summary(answer)),
        h(
          "div",
          { class: "findings" },
          answer.findings.map((finding) => this.full(finding)),
        ),
      ),
      h("section", {}, h("h2", {}, "Rules that looked"), h("p", { class: "quiet" }, answer.rules.join(", ") || "none")),
      skipped.length > 0 && h("section", {}, h("h2", {}, "Rules that had no data"), facts(skipped)),
    );
  }

  private full(finding: Finding): HTMLElement {
    const element = card(finding, this.context);
    if (finding.advice) element.append(h("p", { class: "quiet" }, finding.advice));
    const evidence = Object.entries(finding.evidence);
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
