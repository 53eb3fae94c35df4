// Asks live runs for more, where the server was started with --control: its token is in the address.

import { fill, h } from "./dom.ts";

interface Probe {
  number: number;
  sites: string[];
  keep: string[];
  when: string;
}

interface Reply {
  ok: boolean;
  said: string;
  rank?: number;
  state?: string;
  probes?: Probe[];
}

interface Answer {
  live?: boolean;
  answers?: Reply[];
  error?: string;
}

const STYLE = `
.control { position: fixed; right: 12px; bottom: 12px; z-index: 30; max-width: min(340px, calc(100vw - 24px));
  background: var(--raised); color: var(--text); border: 1px solid var(--line);
  border-radius: 8px; padding: 8px 12px; font-size: 13px; box-shadow: 0 2px 12px rgb(0 0 0 / 20%); }
.control summary { cursor: pointer; font-weight: 600; }
.control form { display: flex; flex-wrap: wrap; gap: 6px; margin: 8px 0 0; align-items: end; }
.control label { display: flex; flex-direction: column; gap: 2px; flex: 1 1 auto; }
.control input, .control select { font: inherit; min-width: 0; width: 100%; box-sizing: border-box; }
.control .wide { flex-basis: 100%; }
.control .steps { flex: 0 0 64px; }
.control p { margin: 8px 0 0; overflow-wrap: anywhere; }
.control ul { margin: 8px 0 0; padding: 0; list-style: none; max-height: 30vh; overflow: auto; }
.control li { display: flex; gap: 6px; justify-content: space-between; align-items: baseline; margin-top: 4px;
  overflow-wrap: anywhere; }`;

export class ControlPanel {
  private readonly said = h("p", { role: "status" }, "");
  private readonly sites = h("input", { type: "text", placeholder: "blocks.3.*", required: true });
  private readonly keep = h("select", {}, ...["full", "stats", "histogram", "sample:256", "hash"].map(option));
  private readonly steps = h("input", { type: "number", min: 1, value: 1 });
  private readonly text = h("input", { type: "text", placeholder: "halved the rate" });
  private readonly probes = h("ul", { "aria-label": "Probes", tabindex: 0 });
  readonly element: HTMLDetailsElement;

  constructor(private readonly token: string) {
    const capture = h("form", { onsubmit: (event: SubmitEvent) => this.capture(event) },
      labelled("Sites", this.sites, "wide"), labelled("Keep", this.keep), labelled("Steps", this.steps, "steps"),
      h("button", { type: "submit" }, "Capture"),
      h("button", { type: "button", onclick: () => this.add() }, "Add as probe"));
    const note = h("form", { onsubmit: (event: SubmitEvent) => this.note(event) },
      labelled("Note", this.text), h("button", { type: "submit" }, "Add"));
    const others = h("form", {}, ...["snapshot", "pause", "resume"].map((action) =>
      h("button", { type: "button", onclick: () => void this.act({ action }) }, titled(action))));
    const parts = [capture, note, others, this.probes, this.said];
    this.element = h("details", { class: "control" }, h("summary", {}, "Control"), ...parts);
    this.element.addEventListener("toggle", () => this.element.open && void this.status());
  }

  private capture(event: SubmitEvent): void {
    event.preventDefault();
    void this.act({ action: "capture", ...this.chosen(), steps: Number(this.steps.value) });
  }

  private add(): void {
    if (this.sites.reportValidity()) void this.act({ action: "probe add", ...this.chosen() });
  }

  private chosen() {
    return { sites: this.sites.value.split(/\s+/).filter(Boolean), keep: [this.keep.value] };
  }

  private note(event: SubmitEvent): void {
    event.preventDefault();
    void this.act({ action: "note", text: this.text.value });
  }

  private async status(): Promise<void> {
    const answer = await this.ask(`/api/control?run=${encodeURIComponent(shownRun())}`, {});
    this.show(answer);
    this.list(answer);
  }

  /** The probes of the first rank that answers, each with a button that removes it. */
  private list(answer: Answer): void {
    const probes = answer.answers?.find((reply) => reply.probes)?.probes ?? [];
    const remove = (number: number) => void this.act({ action: "probe remove", probe: number });
    fill(this.probes, ...probes.map(({ number, sites, keep, when }) => h("li", {},
      h("span", { title: `keep ${keep.join(", ")}, ${when}` }, `${number}: ${sites.join(", ")}`),
      h("button", { type: "button", "aria-label": `Remove probe ${number}`, onclick: () => remove(number) }, "Remove"))));
    this.probes.hidden = !probes.length;
  }

  private async act(request: Record<string, unknown>): Promise<void> {
    fill(this.said, "waits for the step to end …");
    const body = JSON.stringify({ run: shownRun(), ...request });
    const answer = await this.ask("/api/control", { method: "POST", body });
    if (!answer.error) await this.status();
    this.show(answer);
  }

  private async ask(path: string, init: RequestInit): Promise<Answer> {
    const headers = { "X-Tensortap-Token": this.token, "Content-Type": "application/json" };
    try {
      return (await (await fetch(path, { ...init, headers })).json()) as Answer;
    } catch {
      return { error: "the server does not answer" };
    }
  }

  private show(answer: Answer): void {
    const replies = answer.answers ?? [];
    const lines = replies.map((reply) => (replies.length > 1 ? `rank ${reply.rank ?? "?"}: ${reply.said}` : reply.said));
    const none = answer.live === false ? "this run is not live, or does not listen" : "";
    fill(this.said, answer.error ?? (none || [...new Set(lines)].join("; ")));
  }
}

function titled(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

function option(value: string): HTMLOptionElement {
  return h("option", { value }, value);
}

function labelled(text: string, input: HTMLElement, kind = ""): HTMLLabelElement {
  return h("label", { class: kind }, text, input);
}

/** The run that the page shows, as its address says; empty where there is only one. */
function shownRun(): string {
  return new URLSearchParams(location.hash.split("?")[1] ?? "").get("run") ?? "";
}

/** Show the panel where the address has a token. */
export function startControl(): void {
  const token = new URLSearchParams(location.search).get("token");
  if (token) document.body.append(h("style", {}, STYLE), h("aside", { "aria-label": "Control" }, new ControlPanel(token).element));
}
